"""Explanations of calls: the kernel that an operation chooses, and why it refuses the others."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ...errors import DtypeError, UnsupportedError
from ...graph.graph import Graph
from . import table
from .call import place_of, question
from .table import Op


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call would run, and the reasons against each other one."""

    op: str
    chosen: Any
    rejected: tuple[tuple[Any, str], ...]
    remark: str = ""  #: what else decided, if anything

    def __str__(self) -> str:
        facts = "nothing"
        if kernel := self.chosen:
            order = "deterministic" if kernel.deterministic else "atomics: not deterministic"
            facts = f"{kernel.name} ({', '.join([order] + [kernel.note] * bool(kernel.note))})"
        lines = [f"{self.op} runs {facts}"]
        lines += [f"  {self.remark}"] * bool(self.remark)
        lines += [f"  not {kernel.name}: {reasons}" for kernel, reasons in self.rejected]
        return "\n".join(lines)


#: The names of the functions of graphs and tensors, and the package that has each of them.
_of_graphs: dict[str, str] = {}


class _Explanations(list[Explanation]):
    """The explanations of one question."""

    also_runs = False  #: True if what is explained is also to run

    def runs(self, row: Op, A: Any, *args: Any, **options: Any) -> bool:
        """Explain a call; return True if it is also to run."""
        explanation = explain_choice(row, A, args, options)
        if not (self.also_runs and getattr(explanation.chosen, "again", False)):
            self.append(explanation)
        return self.also_runs


def explain(op: str, *args: Any, **options: Any) -> Explanation:
    """Return the kernel that ``op`` would run for these arguments, and why not the others.

    The operation checks its arguments and converts them where it must, but runs no kernel: what it
    would refuse is refused here.  With a ``Graph`` and tensors it is the function of that name of
    ``sparsefmt.autograd``, which does run.

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
    values = (*args, *options.values())
    of_graphs = any(isinstance(value, Graph) for value in values)
    of_graphs = of_graphs and any(hasattr(value, "requires_grad") for value in values)
    function = _function_of_graphs(op) if of_graphs else _known(op, table.functions())
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise DtypeError(f"{op} cannot be called so ({error}): it takes {takes}.") from error
    with _asking(also_runs=of_graphs) as explanations:
        function(*args, **options)
    if not explanations:
        raise UnsupportedError(f"{op} chose no kernel for these arguments: it has one way to run.")
    return explanations[-1]


def explaining() -> AbstractContextManager[list[Explanation]]:
    """Explain what operations of this thread choose while they run."""
    return _asking(also_runs=True)


@contextmanager
def _asking(*, also_runs: bool) -> Iterator[list[Explanation]]:
    explanations = _Explanations()
    explanations.also_runs = also_runs
    token = question.set(explanations)
    try:
        yield explanations
    finally:
        question.reset(token)


def explain_functions(package: str, names: Iterable[str]) -> None:
    """Register functions of graphs and tensors, whose package ``explain`` imports when asked."""
    _of_graphs.update(dict.fromkeys(names, package))


def _function_of_graphs(op: object) -> Callable[..., Any]:
    """Return a function of graphs and tensors that chooses among kernels."""
    if not _of_graphs:
        raise UnsupportedError(
            "no function of graphs and tensors is known yet: import sparsefmt.autograd first."
        )
    function: Callable[..., Any] = getattr(import_module(_known(op, _of_graphs)), str(op))
    return function


def _known(op: object, known: Mapping[str, Any]) -> Any:
    """Look an operation up by its name."""
    if not (isinstance(op, str) and op in known):
        names = ", ".join(known)
        raise UnsupportedError(f"op is {op!r}: use one of {names}, which choose among kernels.")
    return known[op]


def explain_choice(op: Op, A: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Explanation:
    """Ask every kernel of an operation for its reasons against a call."""
    format, on_gpu = place_of(A, args)
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


def remark(text: Callable[[], str]) -> None:
    """Add to the explanation of the last call, if there is one; else the text is not made."""
    explanations: Any = question.get()
    if explanations:
        explanations[-1] = replace(explanations[-1], remark=text())
