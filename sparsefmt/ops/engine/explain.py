"""Which kernels an operation has, which one a call runs, and why not the others."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from typing import Any

import numpy as np

from ...errors import DtypeError, OutOfMemoryError, UnsupportedError
from ...formats.arrays import Array, allocating, namespace, on_device_of, out_of_memory
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ...graph.graph import Graph
from . import table
from .order import in_csr_order, in_own_order
from .structure import Structure
from .table import Op


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: the kernel that would run, and the reasons against each other one."""

    op: str
    chosen: Any
    rejected: tuple[tuple[Any, str], ...]
    remark: str = ""  #: what else decided, if anything

    def __str__(self) -> str:
        lines = [f"{self.op} runs {_describe(self.chosen) if self.chosen else 'nothing'}"]
        lines += [f"  {self.remark}"] * bool(self.remark)
        lines += [f"  not {kernel.name}: {reasons}" for kernel, reasons in self.rejected]
        return "\n".join(lines)


#: The names of the functions of graphs and tensors, and the package that has each of them.
_of_graphs: dict[str, str] = {}
#: While ``explain`` calls an operation: where ``run`` puts its choice instead of running it.
_asked: ContextVar["_Asked | None"] = ContextVar("asked", default=None)
question = _asked.get  #: None where nobody asks


class _Asked(list[Explanation]):
    """The explanations of one question."""

    runs = False  #: whether what is explained is also to run


def explain(op: str, *args: Any, **options: Any) -> Explanation:
    """Which kernel ``op`` would run for these arguments, and why not the others.

    The operation checks its arguments, converts them where it must and allocates its result, but
    runs no kernel: what it would refuse is refused here.  With a ``Graph`` and tensors it is the
    function of that name of ``sparsefmt.autograd``, which does run.

    Parameters
    ----------
    op : str
        Name of an operation that chooses among kernels, such as ``"spmm"``; ``spmm_arg`` and
        ``aggregate`` choose among those of ``spmm``.
    *args, **options
        The operation's arguments: ``explain("spmm", A, X, reduce="max")``, or those of the function
        of ``sparsefmt.autograd``: ``explain("gat_aggregate", graph, h, el, er)``.

    Returns
    -------
    Explanation
        ``str()`` says it in words; ``chosen`` is the kernel, or None where nothing is to be done,
        and ``rejected`` has the other kernels with the reasons against them.

    Raises
    ------
    UnsupportedError
        If there is no such operation, or it has no kernels to choose from.
    DtypeError
        If the arguments are not those that the operation takes.
    SparseFmtError
        As the operation.
    """
    given = (*args, *options.values())
    of_graphs = any(isinstance(one, Graph) for one in given)
    of_graphs = of_graphs and any(hasattr(one, "requires_grad") for one in given)
    function = _function_of_graphs(op) if of_graphs else _operation(op)
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise DtypeError(f"{op} cannot be called so ({error}): it takes {takes}.") from error
    with _asking(runs=of_graphs) as found:
        function(*args, **options)
    if not found:
        raise UnsupportedError(f"{op} chose no kernel for these arguments: it has one way to run.")
    return found[-1]


def explaining() -> AbstractContextManager[list[Explanation]]:
    """Explain what operations of this thread choose while they run."""
    return _asking(runs=True)


@contextmanager
def _asking(*, runs: bool) -> Iterator[list[Explanation]]:
    found = _Asked()
    found.runs = runs
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def explain_functions(package: str, names: Iterable[str]) -> None:
    """Let ``explain`` find these functions of graphs and tensors, which it imports when asked."""
    _of_graphs.update(dict.fromkeys(names, package))


def _function_of_graphs(op: object) -> Callable[..., Any]:
    """Find a function of graphs and tensors that chooses among kernels."""
    if not _of_graphs:
        raise UnsupportedError(
            "no function of graphs and tensors is known yet: import sparsefmt.autograd first."
        )
    if not (isinstance(op, str) and op in _of_graphs):
        raise _unknown(op, _of_graphs)
    found: Callable[..., Any] = getattr(import_module(_of_graphs[op]), op)
    return found


def _operation(op: object) -> Callable[..., Any]:
    """Find an operation on arrays that chooses among kernels."""
    operations = table.functions()
    if not (isinstance(op, str) and op in operations):
        raise _unknown(op, operations)
    return operations[op]


def _unknown(op: object, known: Iterable[str]) -> UnsupportedError:
    names = ", ".join(known)
    return UnsupportedError(f"op is {op!r}: use one of {names}, which choose among kernels.")


def run(op: Op, A: Any, *args: Any, **options: Any) -> Any:
    """Run the first kernel of the operation that takes these arguments; its result."""
    asked = _asked.get()
    if asked is not None:
        asked.append(_explained(op, A, *args, **options))
        if not asked.runs:
            return options.get("out")
    place = _ON_GPU if type(A) is Structure else _place_of(A, args)
    for kernel in op.candidates[place]:
        if kernel.refuses is None or not kernel.refuses(A, *args, **options):
            try:
                found = kernel.run(A, *args, **options)
                return options.get("out") if found is None else found
            except OutOfMemoryError:
                raise
            except MemoryError as error:
                raise out_of_memory(f"{op.title} by {kernel.name}", error) from error
    explained = _explained(op, A, *args, **options)
    raise UnsupportedError(f"no kernel can run this {op.title}.\n{explained}")


_ON_GPU = ("csr", True)  # as every ``Structure``


def _place_of(A: Any, args: tuple[Any, ...]) -> tuple[str, bool]:
    """Format of a matrix and whether it is on a GPU.

    Features alone, without a matrix, go as those of a CSR.
    """
    if A is None:
        return "csr", type(args[0]) is not np.ndarray
    return A.format, type(A) is Structure or type(A._indices) is not np.ndarray


def _explained(op: Op, A: Any, *args: Any, **options: Any) -> Explanation:
    format, on_gpu = _place_of(A, args)
    chosen: Any = None
    rejected: list[tuple[Any, str]] = []
    for kernel in op.kernels:
        reasons = []
        if kernel.place not in ("any", "gpu" if on_gpu else "cpu"):
            reasons.append(f"the arrays are on {'a GPU' if on_gpu else 'the CPU'}")
        if format not in kernel.formats:
            reasons.append(f"A is {format.upper()}")
        if kernel.refuses is not None and not (reasons and format not in kernel.formats):
            reasons += kernel.refuses(A, *args, **options)
        if reasons or chosen:
            rejected.append((kernel, "; ".join(reasons) or "comes later in the order of choice"))
        else:
            chosen = kernel
    return Explanation(op.title, chosen, tuple(rejected))


def convert_to_csr(op: str) -> table.Kernel:
    """The last kernel of an operation on CSR, which converts other formats."""

    def run_on_csr(A: Format, *args: Any, **options: Any) -> Any:
        B, perm = numbered_csr(A)
        if "values" in options:
            options["values"] = B.data
        if perm is None:
            return run(table.find(op), B, *args, **options)
        return _in_own_order(table.find(op), B, perm, args, options)

    note = "converts to CSR at each call: keep A.tocsr(), or a Graph"
    return table.Kernel(f"{op}_through_csr", run_on_csr, refuses=_is_csr, note=note)


def _in_own_order(
    op: Op, B: CSR, perm: Array, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run on ``B`` what has its values in another order; ``perm`` are the numbers there."""
    names = (None,) * 2 * (op.structures == 2) + op.names
    given = (
        in_csr_order(value, perm) if name in op.entries else value
        for name, value in zip_longest(names[: len(args)], args)
    )
    out = options.get("out")
    if out is not None and op.entry_results:
        with on_device_of(out), allocating(f"{out.nbytes} bytes of values in CSR order"):
            options["out"] = namespace(out).empty_like(out)
    found = run(op, B, *given, **options)
    if found is None or _asked.get() is not None:
        return out  # ``explain`` runs nothing
    if op.returns == 1:
        return in_own_order(found, perm, out) if op.entry_results else found
    results = list(found)
    for place in op.entry_results:
        if results[place] is not None and len(results[place]) == B.nnz:
            results[place] = in_own_order(results[place], perm)
    return tuple(results)


def _is_csr(A: Any, *_: Any, **__: Any) -> list[str]:
    return ["A is CSR already"] if A.format == "csr" else []


def remark(text: Callable[[], str]) -> None:
    """What ``explain`` is to add to the kernel that an operation has chosen last; else not made."""
    asked = _asked.get()
    if asked:
        asked[-1] = replace(asked[-1], remark=text())


def _describe(kernel: table.Kernel) -> str:
    facts = ["deterministic" if kernel.deterministic else "atomics: not deterministic"]
    return f"{kernel.name} ({', '.join(facts + [kernel.note] * bool(kernel.note))})"
