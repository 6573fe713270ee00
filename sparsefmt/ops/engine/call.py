"""The one path from a row of the table to its kernels: choose, prepare, launch.

``call`` takes a row of the table and arguments that have been checked.  On a GPU ``Memory.case``
lists what launches depend on: dtypes, widths, strides and alignment of the arrays, the options, and
what their library allows.  The first call of a case asks ``refuses`` of each kernel, and the first
kernel that accepts prepares its launches; later calls look them up, allocate and launch.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from itertools import count, zip_longest
from math import prod
from operator import is_not, itemgetter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from ...errors import OutOfMemoryError, UnsupportedError
from ...formats.arrays import Array, allocating, namespace, on_device_of, out_of_memory
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ...formats.sgt import SGT
from . import table
from .jit import ITEMSIZE, filling
from .memory import Memory, memories, memory_of
from .structure import VALUES, Structure, all_tiles, has_tiles, rows_alone, structure_of, transposed
from .table import Kernel, Op
from .transpose import in_csr_order, in_own_order


class Question(Protocol):
    """A question of ``explain`` or ``explaining``, which kernels calls choose."""

    def runs(self, row: Op, A: Any, *args: Any, **options: Any) -> bool:
        """Note which kernel the call chooses; return True if the call is also to run."""


#: The question that each call of an ``Op`` in this context answers first, None if there is none.
question: ContextVar[Question | None] = ContextVar("question", default=None)


class Result(NamedTuple):
    """A result of a case, of shape (n, *shape), where ``rows`` names the field of S that is n.

    If ``rows`` is "" it has the shape itself.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: str = "n_rows"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The launches of a case and its results.

    A launch is a function and the names of what it takes: arguments of the launcher, the ``VALUES``
    of the structure (see ``Chunks``), results ``"out"`` and ``"out_1"``, and ``"workspace"`` and
    ``"workspace_end"``, if ``workspace`` asks for bytes; of a transpose ``"t_indptr"`` to
    ``"t_cut"``, and ``"perm"``.  A number stands for itself, ``(name, bytes)`` for an address so
    far behind that one, and ``""``, as any name that the case does not have, for a null pointer.
    Only kernels of one result take an ``out`` of the caller's.
    """

    launches: tuple[tuple[Callable[..., None], Any], ...]  #: names; ``_prepare`` makes a getter
    results: tuple[Result, ...]
    workspace: tuple[int, int] = (0, 0)  #: bytes before ``workspace_end``, and in all
    finish: Callable[[list[Any]], Any] = tuple  #: makes what a call returns of the results
    lasts: bool = True  #: whether later calls of the case may launch the same
    constants: tuple[float, ...] = ()  #: numbers among the names, which ``_prepare`` collects
    parts: tuple[tuple[int, int], ...] = ()  #: of ``(name, bytes)``: the place of a name, and bytes


def zeroed(S: Structure, results: Sequence[Result]) -> Prepared:
    """Prepare to fill results with zeros."""
    names = "out", *(f"out_{number}" for number in range(1, len(results)))
    counts = ((getattr(S, rows) if rows else 1) * prod(shape) for shape, _, rows in results)
    sized = zip(names, counts, results, strict=True)
    launches = ((filling(n * ITEMSIZE[of.dtype]), (name,)) for name, n, of in sized if n)
    return Prepared(tuple(launches), tuple(results))


_ON_GPU = ("csr", True)  # as every ``Structure``
#: Cases whose launches are kept for a row and structure; when there are more, all go at once.
MAX_CASES = 256


def _all_sizes(_: Structure) -> None:
    """Return None for ``sizes``: launches depend on all numbers of a structure."""


class Launcher:
    """A kernel on a GPU whose launches are prepared at the first call of a case.

    ``prepare(S, m, *arguments, out=..., **options)`` returns the ``Prepared`` launches, which later
    calls of the case repeat with their own addresses; or, where launches alone will not do, a
    function ``(A, *arguments, out=..., **options)`` that these calls run instead.  So it may depend
    on what ``Memory.case`` lists, and on no address.  If ``sizes(S)`` is None, as by default, it
    may depend on all numbers in ``S``: launches are of this structure alone.  Else graphs built
    from edges share them, if they have the same ``sizes(S)`` and memory laid out alike
    (``Structure.shared``): it may depend on these, and on no other number of rows or entries.

    ``in_place`` names arguments whose rows may lie at any distance.  If it is given, arrays come
    as kernels read them: these contiguous by rows, scales in float32 at least, others contiguous;
    what is not so is copied at each call.  ``names`` are those of what ``prepare`` takes as
    ``*arguments``, behind its own.  ``structure(A, *arguments, **options)`` replaces
    ``structure_of(A)``.  With two ``structures`` the transpose and its permutation come before the
    arguments, and are made if a call has None for them.
    """

    def __init__(
        self,
        prepare: Callable[..., Any],
        sizes: Callable[[Structure], Hashable] = _all_sizes,
        structures: int = 1,
        *,
        in_place: tuple[str, ...] | None = None,
        names: tuple[str, ...] = (),
        structure: Callable[..., Structure] | None = None,
    ) -> None:
        self.prepare, self.sizes, self.structures = prepare, sizes, structures
        self.in_place, self.structure = in_place, structure
        self.__module__, self.__name__ = prepare.__module__, prepare.__name__
        self.name = self.title = f"{prepare.__module__}.{prepare.__qualname__}"
        self.candidates = {_ON_GPU: (Kernel(self.name, self),)}
        parameters = [*inspect.signature(prepare).parameters][structures + 1 :]
        self.arguments = (
            *(parameters[: parameters.index("arguments")] if names else parameters),
            *names,
        )

    def __call__(self, A: CSR | Structure | None, *args: Any, **options: Any) -> Any:
        """Run the kernel, whatever its row would choose."""
        return call(self, A, *args, **options)

    def read(self, m: Memory, names: Iterable[str], values: Iterable[Any]) -> list[Any]:
        """Return arguments as kernels read them: themselves, or copies."""
        readers = dict.fromkeys(self.in_place or (), m.rows_in_place)
        readers |= dict.fromkeys(_SCALES, m.factors)
        return [
            readers.get(name, m.contiguous)(value)
            if hasattr(value, "dtype") and name != "out" and not isinstance(value, CSR)
            else value
            for name, value in zip(names, values, strict=True)
        ]


def launcher(**options: Any) -> Callable[[Callable[..., Any]], Launcher]:
    """Make a ``Launcher`` with these options of a function that prepares launches."""
    return lambda prepare: Launcher(prepare, **options)


def with_options(name: str, prepare: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the function of that name that prepares launches with these options."""
    result: Any = update_wrapper(partial(prepare, **options), prepare)
    result.__name__ = result.__qualname__ = name
    return cast(Callable[..., Any], result)


#: Arguments that kernels take in float32 at least.
_SCALES = "row_scale", "col_scale", "own_scale", "el", "er", "edges", "loop_edges", "att"
#: Names of the values of a transpose that a launch may take beside those of the structure.
_OF_TRANSPOSE = ("t_indptr", "t_indices", "t_start", "t_slot", "t_cut", "perm")
_NOTHING: tuple[Any, ...] = None, None, None, ()


def call(row: Op | Launcher, A: Any, *args: Any, **options: Any) -> Any:
    """Run the first kernel of a row that does not refuse these arguments.

    Parameters
    ----------
    row : Op or Launcher
    A : Format, Structure or None
        None for an operation without a matrix.
    *args, **options
        The row's arguments, then what kernels take beside them, such as ``out``.

    Returns
    -------
    array or tuple of arrays
        ``out`` if the kernel returns nothing.
    """
    S, prepared, T, of_transpose, kind = *_NOTHING, type(A)
    if row.sizes is not None and (
        kind is Structure
        or (isinstance(A, CSR) and type(A.indices) is not np.ndarray)
        or (A is None and type(args[0]) is not np.ndarray)
    ):
        inputs = args if row.structures < 2 else args[2:]  # behind a transpose and its order
        x = inputs[0]
        if row.structure is not None:  # before ``structure_of``, which builds chunks
            S = row.structure(A, *args, **options)
        else:
            S = A if kind is Structure else rows_alone(x.shape[0]) if A is None else structure_of(A)
        m = memories.get(type(x)) or memory_of(x)
        elsewhere, case, addresses, stream = m.case((*inputs, *options.values()), options)
        if elsewhere:
            with m.on_device(x):
                return call(row, A, *args, **options)
        cases = S.cases.get(row.name) or S.cases_of(row.name, row.sizes)
    asked = question.get()
    if asked is not None and type(row) is Op and not asked.runs(row, A, *args, **options):
        return options.get("out")
    if S is not None:
        if row.structures == 2:
            args, case, T, of_transpose = _transpose_first(row, m, A, args, case)
        prepared = cases.get(case)
    if prepared is None or all_tiles:
        # Tiles may have been built or dropped since: where A has some a row chooses at each call.
        anew = bool(all_tiles) and S is not None and type(row) is Op and has_tiles(S)
        if prepared is None or anew:
            for kernel in row.candidates[_ON_GPU if kind is Structure else place_of(A, args)]:
                if kernel.refuses is None or not kernel.refuses(A, *args, **options):
                    break
            else:
                raise _refusal(row, A, args, options)
            # A Launcher chosen anew is called as a row of its own, whose launches are kept.
            if S is None or anew or type(kernel.run) is not Launcher:
                try:
                    out = kernel.run(A, *args, **options)
                    return options.get("out") if out is None else out
                except OutOfMemoryError:
                    raise
                except MemoryError as error:
                    raise out_of_memory(f"{row.title} by {kernel.name}", error) from error
            prepared = _prepare(kernel.run, S, T, m, inputs, options)
            _keep(cases, case, prepared)
    if type(prepared) is not Prepared:
        return prepared(A, *args, **options)
    values, results = [*S.values, *of_transpose], []
    for shape, dtype, rows in prepared.results:
        results.append(m.allocate((getattr(S, rows), *shape) if rows else shape, dtype, x))
        values.append(m.address(results[-1]))
    if prepared.workspace[1]:
        workspace = m.allocate(prepared.workspace[1:], "uint8", x)
        values += (begin := m.address(workspace)), begin + prepared.workspace[0]
    values += *addresses, *prepared.constants
    for place, further in prepared.parts:
        values.append(values[place] + further)
    for launch, in_order in prepared.launches:
        launch(stream, *in_order(values))
    return prepared.finish(results) if results else options.get("out")


def _keep(cases: dict[Any, Any], case: tuple[Any, ...], prepared: Any) -> None:
    """Keep what was prepared for a case, if later calls may launch the same."""
    if getattr(prepared, "lasts", True):
        if len(cases) >= MAX_CASES:
            cases.clear()  # for all structures that share it
        cases[case] = prepared


def _refusal(row: Any, A: Any, args: tuple[Any, ...], options: dict[str, Any]) -> UnsupportedError:
    """Return the error of a call that every kernel refuses."""
    from .explain import explain_choice

    explanation = explain_choice(row, A, args, options)
    return UnsupportedError(f"no kernel can run this {row.title}.\n{explanation}")


def _transpose_first(
    row: Op | Launcher, m: Memory, A: CSR, args: tuple[Any, ...], case: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Structure, tuple[int, ...]]:
    """Return arguments and case with a transpose, its structure and its ``_OF_TRANSPOSE`` values.

    The transpose is made if it is None among the arguments; the case tells how its work is cut.
    """
    T, perm = sides = args[:2] if args[0] is not None else transposed(A)
    T = T if type(T) is Structure else (row.structure or structure_of)(T)
    values = T.indptr, T.indices, T.start, T.slot, T.cut, T.perm or m.pointer(perm)
    return (*sides, *args[2:]), (*case, T.blocks, T.n_cuts), T, values


def place_of(A: Any, args: tuple[Any, ...]) -> tuple[str, bool]:
    """Return the format of a matrix, and True if it is on a GPU.

    Features alone, without a matrix, go as those of a CSR.
    """
    if A is None:
        return "csr", type(args[0]) is not np.ndarray
    return A.format, type(A) is Structure or type(A.__dict__[A._array_fields[0]]) is not np.ndarray


def _prepare(
    launcher: Launcher, S: Structure, T: Structure | None, m: Memory, args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Prepare the launches of a case, with places in ``call``'s values: every, constants, parts."""
    names = *launcher.arguments[: len(args)], *options
    arrays = *args, *options.values()
    if launcher.in_place is not None:
        copies = launcher.read(m, names, arrays)
        if any(map(is_not, copies, arrays)):
            return partial(_copy_first, launcher)
    sides, of_sides = ((), VALUES) if T is None else ((T,), VALUES + _OF_TRANSPOSE)
    prepared = launcher.prepare(S, m, *sides, *args, **options)
    if type(prepared) is not Prepared:
        return prepared
    results = () if options.get("out") is not None else prepared.results
    of_workspace = ("workspace", "workspace_end") if prepared.workspace[1] else ()
    of_results = ("out", *(f"out_{number}" for number in range(1, len(results))))[: len(results)]
    every = *of_sides, *of_results, *of_workspace, *names
    # The name of a new result stands for it, not for the ``out`` among the options.
    places: dict[str, int] = {name: place for place, name in reversed([*enumerate(every)])}
    flat = [arg for _, of_launch in prepared.launches for arg in of_launch]
    constants = tuple(arg for arg in flat if not isinstance(arg, str | tuple))
    parts = tuple((places.get(arg[0], 0), arg[1]) for arg in flat if isinstance(arg, tuple))
    constant, part = count(len(every)), count(len(every) + len(constants))

    def place(arg: str | tuple[str, int] | float) -> int:
        if isinstance(arg, str):
            return places.get(arg, 0)
        return next(part) if isinstance(arg, tuple) else next(constant)

    launches = []
    for launch, of_launch in prepared.launches:
        at = [*map(place, of_launch)]
        # One place of a slice, so that it is a tuple too
        in_order = itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1))
        launches.append((launch, in_order))
    of_case: dict[str, Any] = {"launches": tuple(launches), "results": results, "parts": parts}
    if prepared.finish is tuple and len(results) == 1:
        of_case["finish"] = itemgetter(0)
    return replace(prepared, constants=constants, **of_case)


def _copy_first(launcher: Launcher, A: Any, *args: Any, **options: Any) -> Any:
    """Run a launcher with copies of those arrays that its kernel cannot read, another case."""
    sides, args = ((), args) if launcher.structures < 2 else (args[:2], args[2:])
    names = *launcher.arguments[: len(args)], *options
    copies = launcher.read(memory_of(args[0]), names, (*args, *options.values()))
    copied_options = dict(zip(options, copies[len(args) :], strict=True))
    return call(launcher, A, *sides, *copies[: len(args)], **copied_options)


# Matrices in other formats than CSR


def convert_to_csr(op: str) -> Kernel:
    """Make the last kernel of an operation on CSR, which converts other formats at each call."""

    def run_on_csr(A: Format, *args: Any, **options: Any) -> Any:
        row, (B, perm) = table.find(op), _csr_of(A)
        names = row.names[: len(args)]
        if "values" in options:
            options["values"] = B.data
        elif "values" in names and args[at := names.index("values")] is A.data:
            args = (*args[:at], B.data, *args[at + 1 :])
        if perm is None:
            return call(row, B, *args, **options)
        return _run_in_own_order(row, B, perm, args, options)

    note = "converts to CSR at each call, an SGT once: keep A.tocsr(), or a Graph"
    against = ["A is CSR already"]
    return Kernel(
        f"{op}_through_csr", run_on_csr,
        refuses=lambda A, *_, **__: against if A.format == "csr" else [], note=note,
    )  # fmt: skip


def _csr_of(A: Format) -> tuple[CSR, Array | None]:
    """Return a matrix as CSR, and the permutation of its entries, or None; an SGT keeps its CSR."""
    if isinstance(A, SGT):
        return A._structure().with_data(A.data), None
    return numbered_csr(A)


def _run_in_own_order(
    op: Op, B: CSR, perm: Array, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run on ``B``, whose e-th entry is ``perm[e]`` for the caller; move values there and back."""
    names = (None,) * 2 * (op.structures == 2) + op.names
    args_of_csr = (
        in_csr_order(value, perm) if name in op.entries else value
        for name, value in zip_longest(names[: len(args)], args)
    )
    out = options.get("out")
    if out is not None and op.entry_results:
        with on_device_of(out), allocating(f"{out.nbytes} bytes of values in CSR order"):
            options["out"] = namespace(out).empty_like(out)
    result = call(op, B, *args_of_csr, **options)
    if op.returns == 1:
        return in_own_order(result, perm, out) if op.entry_results else result
    results = list(result)
    for place in op.entry_results:
        if results[place] is not None and len(results[place]) == B.nnz:
            results[place] = in_own_order(results[place], perm)
    return tuple(results)
