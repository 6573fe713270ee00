"""One row for each operation: its arguments, results, kernels and price.

``call`` picks a kernel from the row, ``explain`` says why, the torch layer makes a library op of
it, ``jit.compile_all`` compiles its kernels, and the planner prices by it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any, Literal, NamedTuple

from ..._caches import cache

#: The modules below ``ops`` that hold rows.
MODULES = (
    *("matmul.api", "matmul.aggregation", "edges.api", "attention.rows", "cbsr.api"),
    *("sampling.api", "gcn.api", "messages.api"),
)
FORMATS = ("coo", "csr", "csc", "sgt", "cbsr")

_operations: dict[str, "Op"] = {}


@dataclass(frozen=True)
class Kernel:
    """One way to run an operation.

    ``run(A, *arguments, out=..., **options)`` runs it.  On a GPU the arguments are arrays of any
    library with a ``Memory``, and ``A`` may be the ``Structure`` of a CSR; on the CPU they are
    NumPy arrays.  ``refuses``, called with the same, gives the reasons why not, none if it can.
    """

    name: str
    run: Callable[..., Any]
    formats: tuple[str, ...] = FORMATS  #: of ``A``
    place: Literal["gpu", "cpu", "any"] = "any"
    refuses: Callable[..., list[str]] | None = None
    deterministic: bool = True
    note: str = ""
    again: bool = False  #: whether it calls its row again, for the kernel that is explained


class Price(NamedTuple):
    """What an operation must do at least."""

    bytes: int  #: read and written, of caches that hold nothing
    flops: int


@dataclass(frozen=True)
class Arg:
    """An argument of an operation, as torch's schema names it and as ``bind`` checks it."""

    name: str
    #: What it has a row or a value for: each row, column, stored entry, vertex of a square matrix,
    #: or head.  None: nothing to check.
    rows: Literal["rows", "cols", "entries", "vertices", "heads"] | None = None
    axes: tuple[int, ...] = (1,)  #: numbers of axes that it may have
    like: str = ""  #: an earlier argument, whose dtype it must have
    #: What it must have alike beside the dtype: the shape behind its rows, the heads, or neither.
    alike: Literal["shape", "heads", "dtype"] = "shape"
    optional: bool = False  #: whether it may be None
    stored: bool = False  #: whether None stands for the values that the matrix stores
    kind: str = "Tensor"  #: in a schema
    default: str = ""  #: in a schema, of an argument that may be left out
    words: tuple[str, ...] = ()  #: those that a string may be
    also: tuple[str, ...] = ()  #: its other names, in public functions
    score: bool = False  #: whether it has a score for each head, or for one head without an axis
    balanced: bool = False  #: whether public functions take a CBSR for it
    #: ``test(name, value)`` checks a value that is no array; it returns it, or another one.
    test: Callable[[str, Any], Any] | None = None
    # What follows from that, for ``bind``
    check: str = field(default="", init=False)  #: which check, a method of ``bind.Arrays``
    #: Part of the shape of ``like`` that its own shape behind the rows must equal, if any.
    trailing: slice | None = field(default=None, init=False)
    quick: tuple[int, ...] = field(default=(), init=False)  #: axes that pass the quick look
    widens: bool = field(default=False, init=False)  #: whether it may be float32 beside 2 bytes
    is_copied: bool = field(default=False, init=False)  #: ``check`` may copy it: no quick look
    axis: int | None = field(default=None, init=False)  #: of the matrix: a row for each of it

    def __post_init__(self) -> None:
        """Choose the check of ``bind``, and what its quick look compares."""
        check = _CHECKS.get(self.kind, "") if self.test is None else ""
        if self.rows is not None:
            check = "features" if self.axes != (1,) else "factor"
            check = "entries" if self.rows == "entries" else check
            check = "vectors" if self.rows == "heads" else "scores" if self.score else check
            check = "balanced" if self.balanced else check
        self.__dict__.update(check=check, widens=check in ("factor", "scores", "vectors"))
        self.__dict__.update(is_copied=check in ("factor", "vectors"), axis=_AXES.get(self.rows))
        axes = (1,) if self.alike == "dtype" else self.axes
        self.__dict__["quick"] = () if self.balanced else axes
        if self.like and check != "factor":
            self.__dict__["trailing"] = _TRAILING.get(self.alike)

    @property
    def schema(self) -> str:
        """Return its part of a schema of torch."""
        default = f"={self.default}" if self.default else ""
        return f"{self.kind}{'?' * self.optional} {self.name}{default}"


#: Stands for the first array of a call, whose dtype factors have.
FIRST = "*"
_CHECKS = {"str": "word", "precision": "precision", "out": "out"}
_AXES: dict[str | None, int] = {"rows": 0, "vertices": 0, "cols": 1}
_TRAILING = {"shape": slice(1, None), "heads": slice(1, -1)}
#: Arguments of public functions that no schema has.
PRECISION, OUT = (Arg(name, optional=True, kind=name) for name in ("precision", "out"))
SCALES = (
    Arg("row_scale", "rows", like=FIRST, optional=True, also=("scale",)),
    Arg("col_scale", "cols", like=FIRST, optional=True),
)


@dataclass(frozen=True)
class Op:
    """An operation: what its callers, torch and the planner need to know of it.

    ``results(S, *arguments)`` gives, of each result, its shape and the dtype: an argument that has
    it, or its name.  ``price`` takes the same.  Both look at sizes and dtypes alone, so that arrays
    without memory will do, and ``S`` may be ``Sizes``.
    """

    name: str
    arguments: tuple[Arg, ...]  #: without those of the structure
    results: Callable[..., tuple[tuple[tuple[int, ...], Any], ...]]
    kernels: tuple[Kernel, ...]
    #: Names of kernels that the torch layer registers, chosen before the others, in this order.
    slots: tuple[str, ...] = field(default=(), kw_only=True)
    price: Callable[..., Price] | None = None
    returns: int = 1  #: how many results
    options: tuple[Arg, ...] = ()  #: arguments of public functions that no schema has
    entries: tuple[str, ...] = ()  #: arguments with a value, or a row of them, for each entry
    entry_results: tuple[int, ...] = ()  #: places of the results that have one
    #: Arguments that autocast narrows ("*" for all); the others become float32.  None: not cast.
    narrowed: tuple[str, ...] | None = None
    #: How many structures come first: that of the graph, and its transpose with the permutation.
    structures: Literal[0, 1, 2] = 1
    #: Whether kernels on a GPU take, beside a ``Structure``, its ``indptr`` as an array.
    takes_indptr: bool = False
    functions: tuple[str, ...] = ()  #: public functions that choose among the kernels
    library: bool = True  #: whether torch has a library op of it
    candidates: dict[tuple[str, bool], tuple[Kernel, ...]] = field(init=False, repr=False)
    names: tuple[str, ...] = field(init=False, repr=False)  #: of the arguments behind structures
    named: dict[str, Arg] = field(init=False, repr=False)  #: arguments by all their names
    #: ``sizes`` of its first ``call.Launcher``: what prepared launches depend on.  None if it has
    #: no launcher: nothing is prepared on a GPU, and each call chooses a kernel anew.
    sizes: Callable[..., Any] | None = field(init=False, repr=False)
    #: ``structure`` of that launcher; its other launchers have the same.
    structure: Callable[..., Any] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Look up arguments by name, sort the kernels, and announce the operation."""
        args = *self.arguments, *self.options, OUT
        named = {name: arg for arg in args for name in (arg.name, *arg.also)}
        launchers = (kernel.run for kernel in self.kernels if hasattr(kernel.run, "sizes"))
        launcher: Any = next(launchers, None)
        sizes, structure = getattr(launcher, "sizes", None), getattr(launcher, "structure", None)
        self.__dict__.update(named=named, sizes=sizes, structure=structure)
        self.__dict__["names"] = tuple(arg.name for arg in self.arguments)
        self.fill_slots(())
        _operations[self.name] = self

    def fill_slots(self, kernels: tuple[Kernel, ...]) -> None:
        """Register the kernels of the slots, and sort all by format and place."""
        if kernels and tuple(kernel.name for kernel in kernels) != self.slots:
            raise ValueError(f"the slots of {self.name} are {self.slots}")
        kernels = (*kernels, *self.kernels)
        candidates = {
            (format, gpu): tuple(
                kernel
                for kernel in kernels
                if format in kernel.formats and kernel.place in ("any", "gpu" if gpu else "cpu")
            )
            for format, gpu in product(FORMATS, (True, False))
        }
        self.__dict__.update(kernels=kernels, candidates=candidates)

    @property
    def title(self) -> str:
        """Return its first public function, or its name."""
        return self.functions[0] if self.functions else self.name


def deferred(module: str, name: str) -> Callable[..., Any]:
    """Return a function whose module is imported at the first call: numba takes long."""

    @cache
    def function() -> Callable[..., Any]:
        result: Callable[..., Any] = getattr(import_module(module), name)
        return result

    def call(*args: Any, **options: Any) -> Any:
        return function()(*args, **options)

    return call


def csr_kernels(launcher: Callable[..., Any], name: str, twin: str) -> tuple[Kernel, Kernel]:
    """Make the kernels of a CSR: ``name`` by the launcher on a GPU, and its twin on the CPU.

    They serve operations without a matrix too.  The twin's function has the launcher's name, and
    is in ``cpu.py`` for ``cuda.py``, in ``cpu_x.py`` for ``cuda_x.py``.
    """
    package, _, module = launcher.__module__.rpartition(".")
    loop = deferred(f"{package}.{module.replace('cuda', 'cpu')}", launcher.__name__)
    return Kernel(name, launcher, ("csr",), "gpu"), Kernel(twin, loop, ("csr",), "cpu")


def unchecked(schema: str) -> tuple[Arg, ...]:
    """Read arguments that nothing checks, those of kernels alone, from a schema of torch."""
    pairs = (part.split() for part in schema.split(", "))
    return tuple(Arg(name, kind=kind.rstrip("?"), optional="?" in kind) for kind, name in pairs)


def find(name: str) -> Op:
    """Return the operation of that name, whose module has been imported."""
    return _operations[name]


def functions() -> dict[str, Callable[..., Any]]:
    """Return every public function that chooses among kernels."""
    package = import_module("sparsefmt.ops")
    names = sorted({name for op in operations() for name in op.functions})
    return {name: getattr(package, name) for name in names}


def operations() -> Iterator[Op]:
    """Yield every operation of every room."""
    for module in MODULES:
        import_module(f"sparsefmt.ops.{module}")
    yield from _operations.values()
