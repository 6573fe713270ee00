"""Which kernels an operation has, which one a call runs, and why not the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._arrays import Array, allocating, as_array, is_cupy, on_device_of
from ..base import Format
from ..errors import UnsupportedError


@dataclass(frozen=True)
class Kernel:
    """One way to run an operation.

    ``supports(*args, **options)`` gives the reasons against running these arguments, none if it
    can; ``run(*args, **options)`` does it.  ``out`` is among the options, save in ``explain``.
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


def explain(op: str, *args: Any, **options: Any) -> Explanation:
    """Which kernel ``op`` would run for these arguments, and why not the others.

    Parameters
    ----------
    op : str
        Name of an operation, such as ``"spmm"``.
    *args, **options
        The operation's arguments: ``explain("spmm", A, X, reduce="max")``.

    Raises
    ------
    UnsupportedError
        If there is no such operation.
    """
    # Operations register when they are imported.
    from . import attention, extrema, matmul, sampled_product  # noqa: F401

    if op not in _kernels:
        raise UnsupportedError(f"op is {op!r}: use one of {', '.join(sorted(_kernels))}.")
    args = tuple(_argument(value) for value in args)
    options = {name: _argument(value) for name, value in options.items()}
    chosen: Kernel | None = None
    rejected: list[tuple[Kernel, str]] = []
    for kernel in _kernels[op]:
        reasons = kernel.supports(*args, **options)
        if reasons or chosen:
            rejected.append((kernel, "; ".join(reasons) or "comes later in the order of choice"))
        else:
            chosen = kernel
    return Explanation(op, chosen, tuple(rejected))


def run(op: str, *args: Any, out: Any, **options: Any) -> Any:
    """Run the first kernel that supports the arguments, into ``out``."""
    for kernel in _kernels[op]:
        if not kernel.supports(*args, out=out, **options):
            with on_device_of(out), allocating(f"{op} by {kernel.name}"):
                kernel.run(*args, out=out, **options)
            return out
    raise UnsupportedError(f"no kernel can run this {op}.\n{explain(op, *args, **options)}")


# What kernels ask of their arguments


def all_of(*conditions: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The reasons of every condition together."""

    def reasons(*args: Any, **options: Any) -> list[str]:
        return [one for condition in conditions for one in condition(*args, **options)]

    return reasons


def on_gpu(A: Format, *_: Any, **__: Any) -> list[str]:
    """The arrays are on a GPU."""
    return [] if is_cupy(A._indices) else ["the arrays are on the CPU"]


def on_cpu(A: Format, *_: Any, **__: Any) -> list[str]:
    """The arrays are on the CPU."""
    return ["the arrays are on a GPU"] if is_cupy(A._indices) else []


def is_format(format: str) -> Callable[..., list[str]]:
    """The matrix has this format."""
    return lambda A, *_, **__: [] if A.format == format else [f"A is {A.format.upper()}"]


def through_csr(op: str, *conditions: Callable[..., list[str]]) -> Kernel:
    """The last way of an operation on CSR: for the other formats."""

    def not_csr(A: Format, *_: Any, **__: Any) -> list[str]:
        return ["A is CSR already"] if A.format == "csr" else []

    def convert_and_run(A: Format, *args: Any, out: Any, **options: Any) -> None:
        run(op, A.tocsr(), *args, out=out, **options)

    note = "converts to CSR at each call: keep A.tocsr(), or a Graph"
    supports = all_of(not_csr, *conditions)
    return Kernel(op, f"{op}_through_csr", supports, convert_and_run, note=note)


# What launchers hand to kernels


def pointer(a: Array | None) -> int:
    """Where a CuPy array begins on its device; 0 for none."""
    return 0 if a is None else int(a.data.ptr)


def row_stride(X: Array) -> int:
    """Values from one row to the next."""
    if X.flags.c_contiguous:
        return int(np.prod(X.shape[1:]))
    return int(X.strides[0] // X.itemsize)


def _argument(value: Any) -> Any:
    return (
        value if value is None or isinstance(value, Format | str) else as_array("argument", value)
    )


def _describe(kernel: Kernel) -> str:
    facts = ["deterministic" if kernel.deterministic else "atomics: not deterministic"]
    return f"{kernel.name} ({', '.join(facts + [kernel.note] * bool(kernel.note))})"
