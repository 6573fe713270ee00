"""Which kernels an operation has, which one a call runs, and why not the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._arrays import allocating, as_array, on_device_of
from ..base import Format
from ..errors import UnsupportedError


@dataclass(frozen=True)
class Kernel:
    """One way to run an operation.

    ``supports(*args)`` gives the reasons against running these arguments, none if it can;
    ``run(*args, out)`` does it.
    """

    op: str
    name: str
    supports: Callable[..., list[str]]
    run: Callable[..., None]
    deterministic: bool = True
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: the kernel that would run, and the reasons against each other one."""

    op: str
    chosen: Kernel | None
    rejected: tuple[tuple[Kernel, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.op} runs {_describe(self.chosen) if self.chosen else 'nothing'}"]
        lines += [f"  not {kernel.name}: {reasons}" for kernel, reasons in self.rejected]
        return "\n".join(lines)


_kernels: dict[str, list[Kernel]] = {}


def register(*kernels: Kernel) -> None:
    """Add kernels to their operations; the first that supports a call runs it."""
    for kernel in kernels:
        _kernels.setdefault(kernel.op, []).append(kernel)


def explain(op: str, *args: Any) -> Explanation:
    """Which kernel ``op`` would run for these arguments, and why not the others.

    Parameters
    ----------
    op : str
        Name of an operation, such as ``"spmm"``.
    *args
        The operation's positional arguments: ``explain("spmm", A, X)``.

    Raises
    ------
    UnsupportedError
        If there is no such operation.
    """
    from . import matmul  # noqa: F401  # operations register when they are imported

    if op not in _kernels:
        raise UnsupportedError(f"op is {op!r}: use one of {', '.join(sorted(_kernels))}.")
    args = tuple(a if isinstance(a, Format) else as_array("argument", a) for a in args)
    chosen: Kernel | None = None
    rejected: list[tuple[Kernel, str]] = []
    for kernel in _kernels[op]:
        reasons = kernel.supports(*args)
        if reasons or chosen:
            rejected.append((kernel, "; ".join(reasons) or "comes later in the order of choice"))
        else:
            chosen = kernel
    return Explanation(op, chosen, tuple(rejected))


def run(op: str, *args: Any, out: Any) -> Any:
    """Run the first kernel that supports the arguments, into ``out``."""
    for kernel in _kernels[op]:
        if not kernel.supports(*args):
            with on_device_of(out), allocating(f"{op} by {kernel.name}"):
                kernel.run(*args, out)
            return out
    raise UnsupportedError(f"no kernel can run this {op}.\n{explain(op, *args)}")


def _describe(kernel: Kernel) -> str:
    facts = ["deterministic" if kernel.deterministic else "atomics: not deterministic"]
    return f"{kernel.name} ({', '.join(facts + [kernel.note] * bool(kernel.note))})"
