"""Matrix expressions of a layer: typed leaves, products, sums and applied functions.

Sizes have names ("n", "in", "out"), so that one expression serves every graph and every width.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import ShapeError

#: An unweighted sparse matrix holds 1 at each stored entry, a weighted one a value.
Kind: TypeAlias = Literal["dense", "unweighted", "weighted", "diagonal"]


class Between:
    """A mixin whose rows are those of the first of ``_ends()``, and columns those of the second."""

    if TYPE_CHECKING:

        def _ends(self) -> tuple[Any, Any]: ...

    @property
    def rows(self) -> str:
        """Return the name of the number of rows."""
        name: str = self._ends()[0].rows
        return name

    @property
    def cols(self) -> str:
        """Return the name of the number of columns."""
        name: str = self._ends()[1].cols
        return name


@dataclass(frozen=True)
class Leaf:
    """A matrix that the layer takes."""

    name: str
    kind: Kind
    rows: str  #: name of the number of rows
    cols: str
    constant: bool = False  #: equal at every step, so that what is made of constants alone is too
    grad: bool = False  #: whether training asks for its gradient
    entries: str = ""  #: name of the number of stored entries, of a sparse matrix
    halo: str = ""  #: name of the number of rows that a product with it receives of other processes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Broadcast(Between):
    """A matrix whose rows, or columns, are multiplied by the entries of a vector."""

    vector: Leaf  #: as a diagonal
    matrix: "Expression"
    axis: Literal["rows", "cols"] = "rows"

    def _ends(self) -> tuple[Any, Any]:
        return self.matrix, self.matrix


@dataclass(frozen=True)
class Product(Between):
    """A chain of matrices, multiplied in any association."""

    factors: tuple["Expression", ...]

    def _ends(self) -> tuple[Any, Any]:
        return self.factors[0], self.factors[-1]

    def __str__(self) -> str:
        parts = (f"({part})" if isinstance(part, Sum) else str(part) for part in self.factors)
        return "·".join(parts)


@dataclass(frozen=True)
class Sum(Between):
    """A sum of dense matrices of one shape."""

    terms: tuple["Expression", ...]

    def _ends(self) -> tuple[Any, Any]:
        return self.terms[0], self.terms[0]

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


@dataclass(frozen=True)
class Apply:
    """The result of a function that no rule opens, such as the attention of a GAT."""

    function: str
    arguments: tuple["Expression", ...]
    kind: Kind
    rows: str
    cols: str
    size: tuple[str, ...]  #: names of what its cost depends on
    entries: str = ""
    halo: str = ""

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True)
class Hop(Between):
    """A product with dense features that every hop of a layer repeats, by one composition."""

    factors: tuple[Leaf, ...]

    def _ends(self) -> tuple[Any, Any]:
        return self.factors[0], self.factors[-1]

    def __str__(self) -> str:
        return f"({'·'.join(map(str, self.factors))})"


Expression: TypeAlias = Leaf | Broadcast | Product | Sum | Apply | Hop


def product(*factors: Expression) -> Expression:
    """Build the product of expressions; a product among them becomes part of the chain.

    Raises
    ------
    ShapeError
        If two neighbours do not fit.
    """
    flat: list[Expression] = []
    for factor in factors:
        flat += factor.factors if isinstance(factor, Product) else (factor,)
    for left, right in pairwise(flat):
        if left.cols != right.rows:
            raise ShapeError(
                f"{left} has {left.cols} columns and {right} has {right.rows} rows: a product "
                "needs as many of both."
            )
    return flat[0] if len(flat) == 1 else Product(tuple(flat))


def total(*terms: Expression) -> Expression:
    """Build the sum of expressions; a sum among them becomes part of the sum.

    Raises
    ------
    ShapeError
        If two terms differ in shape.
    """
    flat: list[Expression] = []
    for term in terms:
        flat += term.terms if isinstance(term, Sum) else (term,)
    for term in flat[1:]:
        if (term.rows, term.cols) != (flat[0].rows, flat[0].cols):
            raise ShapeError(
                f"{flat[0]} is {flat[0].rows} x {flat[0].cols} and {term} is {term.rows} x "
                f"{term.cols}: terms of a sum need one shape."
            )
    return flat[0] if len(flat) == 1 else Sum(tuple(flat))


def simplified(expression: Expression) -> Expression:
    """Write broadcasts as products with diagonals, and join nested products to one chain."""
    match expression:
        case Broadcast(vector, matrix, axis):
            inner = simplified(matrix)
            return product(vector, inner) if axis == "rows" else product(inner, vector)
        case Product(factors):
            return product(*map(simplified, factors))
        case Sum(terms):
            return total(*map(simplified, terms))
        case Apply():
            return replace(expression, arguments=tuple(map(simplified, expression.arguments)))
    return expression


def factored(expression: Expression) -> Expression:
    """Factor a sparse matrix out of the terms of a sum that begin with it: Horner's scheme.

    ``H·V + A·H·W + A·A·H·U`` becomes ``H·V + A·(H·W + A·H·U)``: two products with A, not three.
    """
    if not isinstance(expression, Sum):
        return expression
    groups: dict[Expression, list[Expression]] = {}
    for term in expression.terms:
        sparse = isinstance(term, Product) and not _is_dense(term.factors[0])
        first, *rest = term.factors if isinstance(term, Product) and sparse else (term,)
        groups.setdefault(first, []).append(product(*rest) if rest else term)
    factored_terms = []
    for first, terms in groups.items():
        if len(terms) > 1 and not _is_dense(first):
            factored_terms.append(product(first, factored(total(*terms))))
        else:
            factored_terms += terms if _is_dense(first) else [product(first, *terms)]
    return total(*factored_terms)


def over_processes(expression: Expression, halo: str = "halo") -> Expression:
    """Mark sparse matrices as shared by processes, which exchange rows of features.

    ``halo`` names the number of rows that one of them receives.
    """
    recurse = partial(over_processes, halo=halo)
    match expression:
        case Leaf(entries=entries):
            return replace(expression, halo=halo) if entries else expression
        case Broadcast(matrix=matrix):
            return replace(expression, matrix=recurse(matrix))
        case Product(parts):
            return Product(tuple(map(recurse, parts)))
        case Sum(parts):
            return Sum(tuple(map(recurse, parts)))
        case Hop(factors):
            return Hop(tuple(replace(f, halo=halo) if f.entries else f for f in factors))
        case Apply(arguments=parts):
            return replace(expression, arguments=tuple(map(recurse, parts)), halo=halo)


def hops(expression: Expression) -> tuple[Hop, ...]:
    """Return the distinct hops of an expression."""
    match expression:
        case Hop():
            return (expression,)
        case Product(parts) | Sum(parts) | Apply(arguments=parts):
            return tuple(dict.fromkeys(hop for part in parts for hop in hops(part)))
    return ()


def _is_dense(expression: Expression) -> bool:
    if isinstance(expression, Leaf | Apply):
        return expression.kind == "dense"
    return not isinstance(expression, Hop)
