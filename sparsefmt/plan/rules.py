"""Rules as data: which neighbours of a chain a primitive multiplies.

SENSEi (arXiv 2306.15155), section 4.1, and the product that takes the diagonals of a normalised
graph along in one kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from .._caches import cache
from .expression import Apply, Between, Kind, Leaf

#: Sizes of a primitive, of the operands in their roles.
Measure: TypeAlias = Callable[..., tuple[str, ...]]


class Primitive(NamedTuple):
    """A call of a kernel, with the names of its sizes."""

    kind: str
    size: tuple[str, ...]
    #: What an entry gathers besides a row of features: the "factor" of its column, its "value".
    extra: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.size)})"


class Exchange(NamedTuple):
    """Rows of features, or of their gradients, that processes send each other for a product."""

    primitive: Primitive
    first_only: bool  #: True if only the first run needs it
    overlapped: Primitive | None  #: the product of which a process computes its own part meanwhile


@dataclass(frozen=True, eq=False)
class Rule:
    """A primitive with the kinds of its operands and of its result."""

    kind: str  #: of the primitive
    #: Role and kind of each: "sparse" is weighted or not, "unscaled" sparse and not yet scaled.
    operands: tuple[tuple[str, str], ...]
    result: Kind
    size: Measure
    #: Primitive that computes the gradient of an operand, by its role.
    gradients: dict[str, tuple[str, Measure]]

    def accepts(self, operands: Sequence["Tree"]) -> bool:
        """Return True if the rule takes these operands."""
        return len(operands) == len(self.operands) and all(
            _is(kind, tree) for (_, kind), tree in zip(self.operands, operands, strict=True)
        )


@dataclass(frozen=True)
class Step(Between):
    """A rule applied to operands, which are leaves or steps themselves."""

    rule: Rule
    operands: tuple["Tree", ...]

    @property
    def kind(self) -> Kind:
        """Return the kind of the result."""
        return self.rule.result

    def _ends(self) -> tuple[Any, Any]:
        return self.operands[0], self.operands[-1]

    @cached_property
    def constant(self) -> bool:
        """Return True if all leaves below are constant."""
        return all(tree.constant for tree in self.operands)

    @cached_property
    def grad(self) -> bool:
        """Return True if training asks for the gradient of a leaf below."""
        return any(tree.grad for tree in self.operands)

    @property
    def entries(self) -> str:
        """Return the name of the number of stored entries of the result, if it is sparse."""
        return next((tree.entries for tree in self.operands if tree.entries), "")

    @property
    def halo(self) -> str:
        """Return the name of the number of halo rows that products with the result get, or ""."""
        return next((tree.halo for tree in self.operands if tree.halo), "")

    def by_role(self) -> dict[str, "Tree"]:
        """Return the operands by their roles."""
        roles = (role for role, _ in self.rule.operands)
        return dict(zip(roles, self.operands, strict=True))

    def primitives(self, training: bool) -> Iterator[Primitive]:
        """Yield the calls of the step: forward, and in training one for each gradient asked for."""
        operands = self.by_role()
        factor = "factor" if self.rule.kind == "spmm_scaled" else ""
        yield Primitive(self.rule.kind, self.rule.size(**operands), factor * ("col" in operands))
        for role, tree in operands.items():
            if training and tree.grad and role in self.rule.gradients:
                kind, size = self.rule.gradients[role]
                # A transposed product has the rows' factors at its columns, and values elsewhere.
                extra = factor * ("row" in operands) if kind == "spmm_scaled" else ""
                stored = kind == "spmm_weighted" and not isinstance(operands["A"], Applied)
                extra = "value" if stored else extra
                yield Primitive(kind, size(**operands), extra)

    def exchanges(self, training: bool) -> Iterator[Exchange]:
        """Yield the exchanges of processes for the step: of features, in training of gradients.

        Attention waits for all rows.
        """
        operands = self.by_role()
        A, X = operands.get("A"), operands.get("X")
        if A is None or X is None or not A.halo:
            return
        size, is_attention = (A.halo, X.cols), isinstance(A, Applied)
        product = Primitive(self.rule.kind, self.rule.size(**operands))
        exchange = Primitive("exchange", size)
        # What training gets without a gradient are features that stay: their rows are remembered.
        stays = X.constant or (training and isinstance(X, Leaf) and not X.grad)
        yield Exchange(exchange, stays, None if is_attention else product)
        if training and X.grad:
            yield Exchange(exchange, False, None if is_attention else product)

    def __str__(self) -> str:
        if self.rule.kind == "add":
            return "(" + " + ".join(map(str, self.operands)) + ")"
        return "(" + "·".join(map(str, self.operands)) + ")"


@dataclass(frozen=True)
class Applied(Step):
    """A function applied to trees: its result has a shape of its own."""

    source: Apply

    def _ends(self) -> tuple[Any, Any]:
        return self.source, self.source

    @property
    def entries(self) -> str:
        """Return the name of the number of stored entries of the result, if it is sparse."""
        return self.source.entries

    def primitives(self, training: bool) -> Iterator[Primitive]:
        """Yield the function, and in training one kernel for the gradients of all its arguments."""
        yield Primitive(self.rule.kind, self.source.size)
        if training and self.grad:
            yield Primitive(f"{self.rule.kind}_backward", self.source.size)

    @property
    def halo(self) -> str:
        """Return the name of the number of halo rows that products with the result get, or ""."""
        return self.source.halo

    def exchanges(self, training: bool) -> Iterator[Exchange]:
        """Yield the exchange of the sources' scores, and in training of their gradients."""
        if self.halo:
            exchange = Primitive("exchange", (self.halo, self.source.size[-1]))
            yield Exchange(exchange, self.constant, None)
            if training and self.grad:
                yield Exchange(exchange, False, None)

    def __str__(self) -> str:
        return f"{self.rule.kind}({', '.join(map(text_of, self.operands))})"


Tree: TypeAlias = Leaf | Step


def text_of(tree: Tree) -> str:
    """Write a tree without its outer parentheses."""
    text = str(tree)
    return text[1:-1] if text.startswith("(") else text


def steps(*trees: Tree) -> tuple[Step, ...]:
    """Return the distinct steps of trees, each after those that it needs."""
    distinct: dict[Step, None] = {}

    def visit(tree: Tree) -> None:
        if isinstance(tree, Step) and tree not in distinct:
            for operand in tree.operands:
                visit(operand)
            distinct[tree] = None

    for tree in trees:
        visit(tree)
    return tuple(distinct)


def _is(kind: str, tree: Tree) -> bool:
    if kind not in ("sparse", "unscaled"):
        return tree.kind == kind
    scaled = isinstance(tree, Step) and tree.rule.kind == "scale_entries"
    return tree.kind in ("unweighted", "weighted") and not (scaled and kind == "unscaled")


def _entries(*, A: Tree, **_: Tree) -> tuple[str, ...]:
    return (A.entries,)


def _gathered(*, A: Tree, X: Tree, **_: Tree) -> tuple[str, ...]:
    return A.entries, A.rows, X.cols


def _features(*, X: Tree, **_: Tree) -> tuple[str, ...]:
    return X.rows, X.cols


def _scaling(*operands: tuple[str, str]) -> Rule:
    # (D·A)·D and D·(A·D) are D·A·D: what is scaled already is not scaled again.
    gradients = dict.fromkeys(("row", "A", "col"), ("scale_entries", _entries))
    return Rule("scale_entries", operands, "weighted", _entries, gradients)


def _fused(*operands: tuple[str, str]) -> Rule:
    gradients = {
        "X": ("spmm_scaled", _gathered),
        "A": ("sddmm", _gathered),
        "row": ("sddmm", _gathered),
        "col": ("sddmm", _gathered),
    }
    return Rule("spmm_scaled", operands, "dense", _gathered, gradients)


def _product(kind: Kind) -> Rule:
    gradients = {"X": (f"spmm_{kind}", _gathered), "A": ("sddmm", _gathered)}
    return Rule(f"spmm_{kind}", (("A", kind), ("X", "dense")), "dense", _gathered, gradients)


_ROW, _COL, _UNSCALED = ("row", "diagonal"), ("col", "diagonal"), ("A", "unscaled")
_ANY, _X = ("A", "sparse"), ("X", "dense")

GEMM = Rule(
    "gemm",
    (("left", "dense"), ("right", "dense")),
    "dense",
    lambda left, right: (left.rows, left.cols, right.cols),
    {
        "left": ("gemm", lambda left, right: (left.rows, right.cols, left.cols)),
        "right": ("gemm", lambda left, right: (left.cols, left.rows, right.cols)),
    },
)
_BROADCAST = {"X": ("broadcast", _features), "row": ("row_dots", _features)}
#: SENSEi's rules: its ternary scaling, and the two binary ones, are one kind of primitive.
PAPER = (
    GEMM,
    _product("unweighted"),
    _product("weighted"),
    Rule("broadcast", (_ROW, _X), "dense", _features, _BROADCAST),
    Rule(
        "broadcast_cols",
        (_X, _COL),
        "dense",
        _features,
        {"X": ("broadcast_cols", _features), "col": ("column_dots", _features)},
    ),
    _scaling(_ROW, _UNSCALED, _COL),
    _scaling(_ROW, _UNSCALED),
    _scaling(_UNSCALED, _COL),
    Rule(
        "scale_diagonal",
        (_ROW, _COL),
        "diagonal",
        lambda row, col: (row.rows,),
        dict.fromkeys(("row", "col"), ("scale_diagonal", lambda row, col: (row.rows,))),
    ),
)
#: And the products that take diagonals along: one kind, whichever of them are there.
FUSED = (*PAPER, _fused(_ROW, _ANY, _X), _fused(_ANY, _COL, _X), _fused(_ROW, _ANY, _COL, _X))


@cache
def addition(terms: int) -> Rule:
    """Build the rule that adds ``terms`` matrices."""
    roles = [f"term{i}" for i in range(terms)]

    def size(term0: Tree, **_: Tree) -> tuple[str, ...]:
        return term0.rows, term0.cols, str(terms)

    return Rule("add", tuple((role, "dense") for role in roles), "dense", size, {})


@cache
def application(function: str, arguments: int, result: Kind) -> Rule:
    """Build the rule of a function of ``arguments`` matrices; its ``Apply`` has the cost."""
    operands = tuple((f"argument{i}", "dense") for i in range(arguments))
    return Rule(function, operands, result, lambda **_: (), {})
