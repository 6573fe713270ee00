"""Which neighbours of a chain one primitive multiplies: rules as data.

SENSEi (arXiv 2306.15155), section 4.1; and, beside its rules, the product that takes the diagonals
of a normalised graph along in one kernel.
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
    """One call of a kernel, with the names of its sizes."""

    kind: str
    size: tuple[str, ...]
    #: What an entry gathers beside a row of features: the "factor" of its column, its "value".
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.size)})"


class Exchange(NamedTuple):
    """Rows of features, or of their gradients, that processes send each other for a product."""

    primitive: Primitive
    once: bool  #: whether it happens at the first run alone
    beside: Primitive | None  #: the product of which a process computes its own part meanwhile


@dataclass(frozen=True, eq=False)
class Rule:
    """Operands that one primitive takes, and what it gives."""

    kind: str  #: of the primitive
    #: Role and kind of each: "sparse" is weighted or not, "given" sparse and not yet scaled.
    operands: tuple[tuple[str, str], ...]
    result: Kind
    size: Measure
    #: Primitive that computes the gradient of an operand, by its role.
    gradients: dict[str, tuple[str, Measure]]

    def accepts(self, operands: Sequence["Tree"]) -> bool:
        """Tell whether the operands are what the rule takes."""
        return len(operands) == len(self.operands) and all(
            _is(kind, tree) for (_, kind), tree in zip(self.operands, operands, strict=True)
        )


@dataclass(frozen=True)
class Step(Between):
    """A rule at work on operands, which are leaves or steps themselves."""

    rule: Rule
    operands: tuple["Tree", ...]

    @property
    def kind(self) -> Kind:
        """Kind of the result."""
        return self.rule.result

    def _ends(self) -> tuple[Any, Any]:
        return self.operands[0], self.operands[-1]

    @cached_property
    def constant(self) -> bool:
        """Whether all leaves below are constant."""
        return all(tree.constant for tree in self.operands)

    @cached_property
    def grad(self) -> bool:
        """Whether training asks for the gradient of a leaf below."""
        return any(tree.grad for tree in self.operands)

    @property
    def entries(self) -> str:
        """Name of the number of stored entries of the result, if it is sparse."""
        return next((tree.entries for tree in self.operands if tree.entries), "")

    @property
    def halo(self) -> str:
        """Name of the number of rows received for a product with the result, if it is sparse."""
        return next((tree.halo for tree in self.operands if tree.halo), "")

    def by_role(self) -> dict[str, "Tree"]:
        """Operands by their roles."""
        roles = (role for role, _ in self.rule.operands)
        return dict(zip(roles, self.operands, strict=True))

    def primitives(self, training: bool) -> Iterator[Primitive]:
        """Give what the step calls: forward, and in training one for each gradient asked for."""
        operands = self.by_role()
        factor = "factor" if self.rule.kind == "spmm_scaled" else ""
        yield Primitive(self.rule.kind, self.rule.size(**operands), factor * ("col" in operands))
        for role, tree in operands.items():
            if training and tree.grad and role in self.rule.gradients:
                kind, size = self.rule.gradients[role]
                # A transposed product has the rows' factors at its columns, and values elsewhere.
                beside = factor * ("row" in operands) if kind == "spmm_scaled" else ""
                stored = kind == "spmm_weighted" and not isinstance(operands["A"], Applied)
                beside = "value" if stored else beside
                yield Primitive(kind, size(**operands), beside)

    def exchanges(self, training: bool) -> Iterator[Exchange]:
        """Give what processes exchange for the step: features, and in training their gradients.

        Attention is not computed until all has come.
        """
        operands = self.by_role()
        A, X = operands.get("A"), operands.get("X")
        if A is None or X is None or not A.halo:
            return
        size, apart = (A.halo, X.cols), isinstance(A, Applied)
        product = Primitive(self.rule.kind, self.rule.size(**operands))
        there = Primitive("exchange", size)
        # What training gets without a gradient are features that stay: their rows are remembered.
        stays = X.constant or (training and isinstance(X, Leaf) and not X.grad)
        yield Exchange(there, stays, None if apart else product)
        if training and X.grad:
            yield Exchange(there, False, None if apart else product)

    def __str__(self) -> str:
        if self.rule.kind == "add":
            return "(" + " + ".join(map(str, self.operands)) + ")"
        return "(" + "·".join(map(str, self.operands)) + ")"


@dataclass(frozen=True)
class Applied(Step):
    """A function at work: its result has a shape of its own."""

    source: Apply

    def _ends(self) -> tuple[Any, Any]:
        return self.source, self.source

    @property
    def entries(self) -> str:
        """Name of the number of stored entries of the result, if it is sparse."""
        return self.source.entries

    def primitives(self, training: bool) -> Iterator[Primitive]:
        """Give the function, and in training one kernel for the gradients of all its arguments."""
        yield Primitive(self.rule.kind, self.source.size)
        if training and self.grad:
            yield Primitive(f"{self.rule.kind}_backward", self.source.size)

    @property
    def halo(self) -> str:
        """Name of the number of rows received for a product with the result, if it is sparse."""
        return self.source.halo

    def exchanges(self, training: bool) -> Iterator[Exchange]:
        """Give the exchange of the sources' scores, and in training of their gradients."""
        if self.halo:
            there = Primitive("exchange", (self.halo, self.source.size[-1]))
            yield Exchange(there, self.constant, None)
            if training and self.grad:
                yield Exchange(there, False, None)

    def __str__(self) -> str:
        return f"{self.rule.kind}({', '.join(map(bare, self.operands))})"


Tree: TypeAlias = Leaf | Step


def bare(tree: Tree) -> str:
    """Write a tree without the parentheses around the whole."""
    text = str(tree)
    return text[1:-1] if text.startswith("(") else text


def steps(*trees: Tree) -> tuple[Step, ...]:
    """Give the distinct steps of trees, each after those that it needs."""
    found: dict[Step, None] = {}

    def visit(tree: Tree) -> None:
        if isinstance(tree, Step) and tree not in found:
            for operand in tree.operands:
                visit(operand)
            found[tree] = None

    for tree in trees:
        visit(tree)
    return tuple(found)


def _is(kind: str, tree: Tree) -> bool:
    if kind not in ("sparse", "given"):
        return tree.kind == kind
    scaled = isinstance(tree, Step) and tree.rule.kind == "scale_entries"
    return tree.kind in ("unweighted", "weighted") and not (scaled and kind == "given")


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


_ROW, _COL, _GIVEN = ("row", "diagonal"), ("col", "diagonal"), ("A", "given")
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
    _scaling(_ROW, _GIVEN, _COL),
    _scaling(_ROW, _GIVEN),
    _scaling(_GIVEN, _COL),
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
    """Give the rule that adds so many matrices."""
    roles = [f"term{i}" for i in range(terms)]

    def size(term0: Tree, **_: Tree) -> tuple[str, ...]:
        return term0.rows, term0.cols, str(terms)

    return Rule("add", tuple((role, "dense") for role in roles), "dense", size, {})


@cache
def application(function: str, arguments: int, result: Kind) -> Rule:
    """Give the rule of a function of so many matrices; what it costs its ``Apply`` says."""
    operands = tuple((f"argument{i}", "dense") for i in range(arguments))
    return Rule(function, operands, result, lambda **_: (), {})
