"""Plans of expressions: price trees, leave out the beaten ones, choose, and explain."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import TypeAlias

from .._caches import cache, lru_cache
from ..errors import DtypeError, ShapeError
from .expression import Expression
from .forest import forest
from .locality import Locality
from .pricing import Constants, work_of
from .pruning import ORDERS, Sizes, Verdict, judged
from .rules import Primitive, Tree, steps, text_of

#: Predictions that lie within this factor of the best are worth measuring, as far as they differ:
#: of 84 cells on an H100 none was decided otherwise by a clock than by the model.
CLOSE = 1.25
#: A composition is faster than another if it takes less than this of its time.
TELLING = 0.97
#: Predicted seconds of a run below which a clock does not decide: two runs on the host tell less of
#: it than predictions do, and take longer than is won.  Of 178 cells on an H100 none below was
#: decided worse without.
SHORT = 2e-3

#: Seconds by kind of primitive, and those of what runs once.
_Prices: TypeAlias = tuple[Mapping[str, float], float]
_Seconds: TypeAlias = Callable[[Primitive, Locality | None], float]


@dataclass(frozen=True)
class Candidate:
    """A tree, its verdict, and its seconds in each run of the layer."""

    verdict: Verdict
    parts: Mapping[str, float]  #: predicted seconds of each kind of primitive
    once: float  #: seconds of the steps whose leaves are all constant, which run once
    measured: float | None = None

    @property
    def predicted(self) -> float:
        """Return the predicted seconds of a run."""
        return sum(self.parts.values())

    def seconds_of(self, column: str) -> float | None:
        """Return the "predicted", "once" or "measured" seconds, or those of a kind of primitive."""
        if column in ("predicted", "once", "measured"):
            seconds: float | None = getattr(self, column)
            return seconds
        return self.parts.get(column, 0.0)

    @property
    def tree(self) -> Tree:
        """Return the composition."""
        return self.verdict.tree

    @property
    def promoted(self) -> bool:
        """Return True if some order of the widths leaves it unbeaten."""
        return self.verdict.promoted


@dataclass(frozen=True)
class Plan:
    """The compositions of an expression for one graph, widths and device, and the one to run."""

    expression: Expression
    sizes: Sizes
    training: bool
    candidates: tuple[Candidate, ...]
    price: Callable[[Tree, Locality | None], _Prices] = field(compare=False, repr=False)
    own: Tree | None = None  #: what the layer computes without a plan
    runs: int | None = None  #: how often it runs; what runs once is free without

    def seconds(self, locality: Locality | None) -> float:
        """Predict the seconds of the chosen tree for a graph of these sizes and that locality."""
        parts, _ = self.price(self.chosen.tree, locality)
        return sum(parts.values())

    @property
    def promoted(self) -> tuple[Candidate, ...]:
        """Return the unbeaten candidates: by prediction, then by the seconds of the first run."""
        left = [candidate for candidate in self.candidates if candidate.promoted]
        return tuple(sorted(left, key=lambda candidate: (candidate.predicted, candidate.once)))

    @property
    def chosen(self) -> Candidate:
        """Return the fastest measured; if nothing was measured, the first that is ``close``.

        Each run has its share of what runs once, as predicted.  What runs without a plan stays
        where another is faster by less than clocks tell apart.
        """
        share = 1 / self.runs if self.runs else 0.0
        timed = {
            c.tree: c.measured + c.once * share for c in self.candidates if c.measured is not None
        }
        if not timed:
            return self.close[0]
        best = min(timed, key=lambda tree: timed[tree])
        if self.own in timed and timed[best] > TELLING * timed[self.own]:
            best = self.own
        return next(c for c in self.candidates if c.tree == best)

    @property
    def close(self) -> tuple[Candidate, ...]:
        """Return the candidates whose predictions are too close to the best for a model to decide.

        The layer's own composition comes first if its prediction is close to the best: it has code
        of its own, which no price knows.  Otherwise only predictions that differ by more than
        clocks tell are worth their time: two that are alike take the same.  Of ``SHORT`` runs no
        time is worth it, and the first alone is left.
        """
        best, *rest = self.promoted
        near = [c for c in rest if c.predicted <= CLOSE * best.predicted]
        of_layer = next((c for c in (best, *near) if c.tree == self.own), None)
        close = [best, *(c for c in near if of_layer or TELLING * c.predicted > best.predicted)]
        close.sort(key=lambda c: c is not of_layer)
        return tuple(close[:1] if best.predicted < SHORT else close)

    def with_measured(self, seconds: Mapping[Tree, float]) -> "Plan":
        """Add measured seconds of trees; return a new plan."""
        candidates = (replace(c, measured=seconds.get(c.tree, c.measured)) for c in self.candidates)
        return replace(self, candidates=tuple(candidates))

    def explain(self) -> str:
        """Write every tree with its costs; who beat it, or which was chosen."""
        names = {c.tree: f"#{number}" for number, c in enumerate(self.candidates, 1)}
        sizes = ", ".join(f"{name} = {size:,}" for name, size in self.sizes.items())
        lines = [
            f"{self.expression}   with {sizes}; {'training' if self.training else 'inference'}",
            f"{len(self.candidates)} trees, {len(self.promoted)} promoted",
        ]
        width = max(len(text_of(tree)) for tree in names)
        shared = any("exchange" in candidate.parts for candidate in self.candidates)
        columns = ["predicted", *(["exchange"] if shared else []), "once", "measured"]
        heads = "  ".join(f"{column:>12}" for column in columns)
        lines.append(f"{'':4}  {'composition':<{width}}  {heads}")
        for candidate, name in zip(self.candidates, names.values(), strict=True):
            fate = "CHOSEN" if candidate is self.chosen else _fate(candidate, names)
            fate += ", the layer as it is" if candidate.tree == self.own else ""
            times = map(candidate.seconds_of, columns)
            costs = "  ".join(f"{'-':>12}" if t is None else f"{t * 1e3:9.3f} ms" for t in times)
            lines.append(f"{name:>4}  {text_of(candidate.tree):<{width}}  {costs}  {fate}")
        return "\n".join(lines)


def plan(
    expression: Expression,
    sizes: Sizes,
    constants: Constants,
    *,
    itemsize: int = 4,
    training: bool = False,
    runs: int | None = None,
    rounded: bool = False,
    travelling: int | None = None,
    orders: tuple[Sizes, ...] = ORDERS,
    own: Callable[[Tree], bool] = lambda tree: False,
) -> Plan:
    """Build the trees of an expression, leave out the beaten ones, and price the rest.

    Parameters
    ----------
    expression : Expression
    sizes : dict
        The number behind each name of a size.  Where processes share the graph, those of the
        busiest one: of its rows, entries, rows that it receives, and as "own" of the entries whose
        source it has.
    constants : Constants
        Of the device, from ``calibration.constants_of``.
    itemsize : int
        Bytes of a feature.
    training : bool
        Whether the gradients that leaves ask for are priced too.
    runs : int, optional
        How often the layer will run: what runs once is shared among them, or free by default.
    rounded : bool
        Whether products on a GPU may round float32 features to bfloat16 (``spmm``'s "bf16").
    travelling : int, optional
        Bytes of a feature between processes that share out the rows of the graph, as
        ``expression.over_processes`` says; by default ``itemsize``.
    orders : tuple of dict
        Orders of the widths under which a tree may win; ``(sizes,)`` prunes for these widths alone.
    own : function, optional
        Tells which tree the layer computes without a plan, by code of its own.

    Raises
    ------
    DtypeError
        If an argument is not of its kind.
    ShapeError
        If a size is missing or negative, or ``itemsize`` or ``runs`` out of its range.
    """
    sizes = _checked(expression, sizes, constants, itemsize, runs)
    ranked = []  # the rank of each size among all, which is all that pruning compares
    for order in orders:
        places = {size: place for place, size in enumerate(sorted(set(order.values())))}
        ranked.append(tuple((name, places[size]) for name, size in order.items()))
    verdicts = _verdicts(expression, tuple(ranked), training)
    work = partial(work_of, sizes=sizes, constants=constants, itemsize=itemsize, rounded=rounded)
    work = partial(work, travelling=travelling)
    own_share = sizes.get("own", 0) / max(sizes.get("nnz", 0), 1)
    seconds = cache(lambda p, locality: constants.predict(work(p, locality=locality), p.kind))
    price = partial(_prices, seconds, training, runs, own_share)
    priced = [Candidate(verdict, *price(verdict.tree, None)) for verdict in verdicts]
    own_tree = next((c.tree for c in priced if own(c.tree)), None)
    return Plan(expression, sizes, training, tuple(priced), price, own_tree, runs)


@lru_cache(maxsize=256)
def _verdicts(
    expression: Expression, ranked: tuple[tuple[tuple[str, int], ...], ...], training: bool
) -> tuple[Verdict, ...]:
    return judged(forest(expression), [dict(sizes) for sizes in ranked], training=training)


class _Sizes(dict[str, int]):
    """Sizes by name, with an error for a name that is missing."""

    def __missing__(self, name: str) -> int:
        raise ShapeError(
            f"sizes has no {name!r} but {', '.join(self) or 'nothing'}: give the number behind "
            "each name of a size in the expression."
        )


def _checked(
    expression: object, sizes: object, constants: object, itemsize: object, runs: object
) -> Sizes:
    """Check the arguments of a plan, and return the sizes."""
    if not isinstance(expression, Expression):
        raise DtypeError(
            f"expression is a {type(expression).__name__}: give one of sparsefmt.plan.models, "
            "or what product() and total() make of leaves."
        )
    if not isinstance(constants, Constants):
        raise DtypeError(
            f"constants is a {type(constants).__name__}: give calibration.constants_of(device)."
        )
    if not isinstance(sizes, Mapping):
        raise DtypeError(f"sizes is a {type(sizes).__name__}: give a dict of numbers by name.")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
            raise ShapeError(f"sizes[{name!r}] is {size!r}: give an integer, 0 or more.")
    if itemsize not in (2, 4, 8):
        raise ShapeError(f"itemsize is {itemsize!r}: give the 2, 4 or 8 bytes of a feature.")
    if runs is not None and (isinstance(runs, bool) or not isinstance(runs, Integral) or runs < 1):
        raise ShapeError(f"runs is {runs!r}: give an integer, 1 or more, or None.")
    return _Sizes(sizes)


def _prices(
    seconds_of: _Seconds,
    training: bool,
    runs: int | None,
    own_share: float,
    tree: Tree,
    locality: Locality | None,
) -> _Prices:
    """Compute seconds by kind of primitive, and those of the first run, shared among all runs."""
    parts: dict[str, float] = {}
    priced = [
        (step.constant, primitive.kind, seconds_of(primitive, locality))
        for step in steps(tree)
        for primitive in step.primitives(training)
    ]
    for exchange in (e for step in steps(tree) for e in step.exchanges(training)):
        product, primitive = exchange.overlapped, exchange.primitive
        hidden = own_share * seconds_of(product, locality) if product else 0.0
        exposed = max(0.0, seconds_of(primitive, locality) - hidden)
        priced.append((exchange.first_only, primitive.kind, exposed))
    total = 0.0
    for first_only, kind, seconds in priced:
        if first_only:
            total += seconds
            seconds = seconds / runs if runs else 0.0
        parts[kind] = parts.get(kind, 0.0) + seconds
    return parts, total


def _fate(candidate: Candidate, names: Mapping[Tree, str]) -> str:
    if candidate.promoted:
        return "promoted"
    beaters = dict.fromkeys(names[tree] for tree in candidate.verdict.beaten_by if tree)
    return f"beaten by {' or '.join(beaters)}"
