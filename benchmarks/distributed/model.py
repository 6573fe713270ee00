"""A model of a training step over ranks: what it computes, what it exchanges, what is hidden.

``docs/scaling.md`` has the formulas.  Seconds, bytes and operations a second, without prefixes; a
rank is the busiest one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Sums over ranks in a step: of labelled vertices, and of the gradients of parameters.
SUMS = 2


@dataclass(frozen=True)
class Layer:
    """One layer of a step."""

    width: int  #: features that its aggregation gathers
    flops: float  #: of its maps forward, a vertex; backward has twice as many
    forward: int  #: bytes exchanged for a vertex of a halo
    backward: int  #: likewise of its gradient
    products: int = 2  #: aggregations in a step: 1 where the features that it gathers are constant
    added: float = 0  #: bytes a vertex that a rank reads and writes to add up what one GPU does not


@dataclass(frozen=True)
class Machine:
    """A GPU."""

    gathered: float  #: bytes of features that a product gathers in a second
    flops: float  #: of float32 matrix products
    copied: float  #: bytes read plus written in a second
    rest: float = 0.0  #: seconds a vertex for all else in a step, as measured on one GPU


@dataclass(frozen=True)
class Link:
    """What joins a rank to the others."""

    bandwidth: float  #: bytes out of a rank in a second
    latency: float  #: seconds of an exchange without bytes, between two
    peer: float = 0.0  #: seconds for each further rank

    def seconds(self, size: float, ranks: int) -> float:
        """Return seconds of an exchange of so many bytes out of a rank."""
        return self.latency + self.peer * (ranks - 2) + size / self.bandwidth


@dataclass(frozen=True)
class Share:
    """The rows of a rank."""

    vertices: float
    entries: float
    own: float  #: share of the entries whose source is on the rank
    halo: float  #: vertices that it reads of others, or others of it, whichever are more


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: float  #: without any exchange
    exchange: float  #: all exchanges, one after the other
    exposed: float  #: of the exchanges, what no product hides
    reduce: float  #: the sums over ranks

    @property
    def total(self) -> float:
        """Return seconds of the step."""
        return self.compute + self.exposed + self.reduce

    @property
    def hidden(self) -> float:
        """Return the share of the exchange that a product hides; 1 where there is none."""
        return 1 - self.exposed / self.exchange if self.exchange else 1.0


def expected_halo(vertices: float, entries: float, ranks: int, cut: float | None = None) -> float:
    """Return the vertices that a rank reads of others, if its entries to them fall at random.

    ``h = k (1 - (1 - 1/k)^(c m / P))`` where ``k = n (1 - 1/P)`` are the vertices of others, of
    ``n`` vertices and ``m`` entries of the whole graph on ``P`` ranks.  The share ``c`` of the
    entries is ``cut`` between ranks; by default ``1 - 1/P``, as of a random graph.
    """
    others = vertices * (1 - 1 / ranks)
    if others <= 0:
        return 0.0
    share = 1 - 1 / ranks if cut is None else cut
    return others * -math.expm1(share * entries / ranks * math.log1p(-1 / max(others, 2)))


def even_share(vertices: float, entries: float, ranks: int, cut: float | None = None) -> Share:
    """Return as many vertices and entries for each rank, and the halo that is expected."""
    between = (1 - 1 / ranks if cut is None else cut) if ranks > 1 else 0.0
    halo = expected_halo(vertices, entries, ranks, between)
    return Share(vertices / ranks, entries / ranks, 1 - between, halo)


def step(
    layers: Sequence[Layer],
    share: Share,
    machine: Machine,
    link: Link,
    *,
    ranks: int,
    parameters: float,
    overlap: bool = True,
) -> Times:
    """Predict a training step.

    ``parameters`` are bytes, whose gradients are added up in a ring.  With ``overlap`` products of
    own rows run while others' are on their way.
    """
    compute, exchange, exposed, reduce = machine.rest * share.vertices, 0.0, 0.0, 0.0
    for at, layer in enumerate(layers):
        product = share.entries * layer.width * 4 / machine.gathered
        maps = share.vertices * layer.flops * (3 if at else 2) / machine.flops
        compute += layer.products * product + maps
        if ranks == 1:
            continue
        # Rows are copied once each way, and what was computed of both parts is added up.
        copied = 2 * share.halo * (layer.forward + layer.backward) + share.vertices * layer.added
        compute += copied / machine.copied
        for size in filter(None, (layer.forward, layer.backward)):
            time = link.seconds(share.halo * size, ranks)
            exchange += time
            exposed += max(time - product * share.own, 0.0) if overlap else time
    if ranks > 1:
        ring = 2 * (1 - 1 / ranks) * parameters
        reduce = link.seconds(ring, ranks) + (SUMS - 1) * link.seconds(0, ranks)
    return Times(compute, exchange, exposed, reduce)


def calibrated(layers: Sequence[Layer], share: Share, machine: Machine, seconds: float) -> Machine:
    """Set ``rest`` so that a step on one device, which has that share, takes so long.

    Where its products and maps alone would take longer (MaxK gathers fewer bytes) products are
    taken to be faster.
    """

    def alone(one: Machine) -> float:
        return step(layers, share, one, Link(math.inf, 0.0), ranks=1, parameters=0).total

    bare = replace(machine, rest=0.0)
    known, maps = alone(bare), alone(replace(bare, gathered=math.inf))
    if known > seconds > maps:
        return replace(bare, gathered=bare.gathered * (known - maps) / (seconds - maps))
    return replace(bare, rest=max(seconds - known, 0.0) / max(share.vertices, 1))


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit ``seconds = latency + sizes / bandwidth``, with small errors relative to each time.

    Least squares of the relative errors; latency is not below 0.  Where the times of a busy machine
    do not grow with the size, the bandwidth is the largest one measured.
    """
    import numpy as np

    weights = 1 / np.asarray(seconds)
    columns = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], 1)
    latency, slope = np.linalg.lstsq(columns * weights[:, None], np.ones(len(sizes)), rcond=None)[0]
    each = np.asarray(seconds) / np.asarray(sizes)
    if slope <= 0:
        latency, slope = 0.0, each.min()
    elif latency < 0:
        latency, slope = 0.0, each.mean()
    return Link(1 / float(slope), float(latency))


def replicated(vertices: float, ranks: int) -> tuple[int, float]:
    """Return the best replication of a 1.5-D partition, and the rows that a rank then moves.

    Of ``P / c`` groups each has a block of rows, ``c`` times; a rank multiplies ``1 / c`` of the
    columns, whose ``n / c`` rows it receives, and its group adds up ``n c / P`` rows of results, in
    a ring twice: ``n (1 / c + 2 c / P)``, whatever the graph.
    """
    powers = [1 << bit for bit in range(ranks.bit_length()) if 1 << 2 * bit <= ranks]
    moved = {c: vertices * (1 / c + (2 * c / ranks if c > 1 else 0)) for c in powers}
    best = min(moved, key=lambda c: moved[c])
    return best, moved[best]


def memory(layers: Sequence[Layer], share: Share, *, features: int, entry: float) -> float:
    """Return the bytes of a rank: entries of ``entry`` bytes, constant features, layers and halos.

    Of each layer four arrays of its width live at once: the sum over neighbours, the result, what
    ReLU makes of it, and a gradient.  Of the halo the constant features stay; of the widest layer
    what comes and what goes are there at once.
    """
    widths = sum(layer.width for layer in layers)
    widest = max((max(layer.forward, layer.backward) for layer in layers), default=0)
    own = share.vertices * 4 * (features + 4 * widths)
    return share.entries * entry + own + share.halo * (4 * features + 2 * widest)
