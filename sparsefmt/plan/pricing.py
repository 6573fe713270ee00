"""Costs of primitives: bytes and flops of their operations, and their seconds on a device.

The prediction adds what a call, bytes and flops cost: constants of the device that ``sparsefmt
calibrate`` fits, for each kind of primitive.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from .._caches import cache
from ..errors import FileFormatError
from ..ops.engine.structure import Sizes as Structure
from ..ops.engine.table import Price, operations
from ..ops.matmul.cuda import against_rounding
from .locality import Locality
from .pruning import Sizes
from .rules import Primitive


class Work(NamedTuple):
    """The parts of a primitive's work, each of which costs a constant of the device."""

    calls: float
    rows: float
    entries: float
    cached: float  #: bytes read and written in order, as far as they fit into the cache
    streamed: float  #: those beyond the cache
    near: float  #: bytes gathered by an index that the last cache answers, and no inner one
    far: float  #: bytes gathered beyond it
    flops: float


#: Seconds of an exchange, and of each byte that a process receives: of two GPUs of a node, as
#: docs/scaling.md fits them, and of processes on one machine by gloo, assumed.  A plan adds them to
#: the seconds of other primitives; layers without one have no constants of a device, and compare
#: rows by ``ROWS_OF_EXCHANGE`` of ``distributed/graph.py``.
NVLINK, GLOO = (1.7e-5, 3.2e-12), (2e-4, 1e-9)


class _Array(NamedTuple):
    """An array's shape and the bytes of an element, on which a price depends."""

    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Constants:
    """Seconds for each part of ``Work``, by kind of primitive; "other" for those not named."""

    device: str
    cache: int  #: bytes of the last cache
    seconds: Mapping[str, tuple[float, ...]]
    #: Bytes of a row of features that a kernel gathers at a time; 0 for all of it.
    slice: int = 0
    inner: int = 0  #: bytes of gathered rows that fit into a core's cache

    @property
    def gathered(self) -> float:
        """Return the bytes of gathered rows that fit into the last cache.

        That of a GPU has two halves, which both keep what all multiprocessors gather: products of
        32 graphs on an H100 of 50 MB go as if it had half.
        """
        return self.cache / 2 if self.slice else self.cache

    def predict(self, work: Work, kind: str) -> float:
        """Compute the seconds of a primitive; those of an exchange are assumed, not measured."""
        call, byte = NVLINK if self.slice else GLOO
        link = Work(call, 0, 0, 0, byte, 0, 0, 0)
        seconds = self.seconds.get(kind, link if kind == "exchange" else self.seconds["other"])
        return sum(part * second for part, second in zip(work, seconds, strict=True))

    def save(self, path: Path) -> None:
        """Write the constants as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Constants":
        """Read constants that ``save`` wrote.

        Raises
        ------
        FileFormatError
            If the file holds something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            seconds = {kind: tuple(map(float, row)) for kind, row in values["seconds"].items()}
            complete = {len(row) for row in seconds.values()} == {len(Work._fields)}
            if complete and "other" in seconds:
                sizes = {name: int(values[name]) for name in ("cache", "slice", "inner")}
                return cls(values["device"], seconds=seconds, **sizes)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise FileFormatError(
            f"{path} holds no constants of a device: write them anew with 'sparsefmt calibrate'."
        )


def work_of(
    primitive: Primitive,
    sizes: Sizes,
    constants: Constants,
    itemsize: int = 4,
    *,
    rounded: bool = False,
    travelling: int | None = None,
    locality: Locality | None = None,
) -> Work:
    """Count the bytes and flops of a primitive; its operation's row prices what gathers.

    ``travelling`` are the bytes of a feature between processes, by default its ``itemsize``.
    ``rounded`` says that products may round float32 features to bfloat16 before they gather them.
    ``locality`` tells how far gathers reach; without it they are taken to be at random.

    Raises
    ------
    KeyError
        If a size has no number.
    """
    kind, names, extra = primitive
    size = [int(name) if name.isdigit() else sizes[name] for name in names]
    if kind == "exchange":
        rows, width = size
        return Work(1, 0, 0, 0, rows * width * (travelling or itemsize), 0, 0, 0)
    if kind in _GATHERING:
        work = _gathering(kind, size, constants, itemsize, rounded, locality)
        more = EXTRA_READS[extra] * size[0] if constants.slice else 0
        return work._replace(entries=work.entries + more)
    if kind == "gemm":
        n, inner, m = size
        elements, flops = n * inner + inner * m + n * m, 2 * n * inner * m
    elif kind == "scale_entries":  # an index, a value and two factors, and the new value
        elements, flops = 5 * size[0], 2 * size[0]
    elif kind == "scale_diagonal":
        elements, flops = 3 * size[0], size[0]
    else:  # reads one matrix or more, writes one
        n, m, *terms = size
        reads = terms[0] if terms else 1
        elements, flops = (reads + 1) * n * m, reads * n * m
    cached, streamed = _split(elements * itemsize, elements * itemsize, constants)
    entries = size[0] if kind == "scale_entries" else 0
    return Work(1, 0 if entries else size[0], entries, cached, streamed, 0, 0, flops)


def _split(count: float, footprint: float, constants: Constants) -> tuple[float, float]:
    """Split bytes into those that the cache answers and the rest."""
    inside = count * min(1.0, constants.cache / max(footprint, 1))
    return inside, count - inside


#: Entries that a GPU reads in the time of what an entry gathers besides its row of features: 32
#: bytes for a factor, from the L2, or for a value, from memory (reddit, products and mycielskian17,
#: 32 and 256 features, H100: 0.9 to 2, and 4 to 9).
EXTRA_READS = {"": 0, "factor": 2, "value": 5}

#: Kinds that gather rows of features, and the operation that they call.
_GATHERING = {
    "spmm_unweighted": "spmm",
    "spmm_weighted": "spmm",
    "spmm_scaled": "spmm",
    "sddmm": "sddmm",
    "attention": "gat",
    "attention_backward": "gat",
}


def _gathering(
    kind: str,
    size: Sequence[int],
    constants: Constants,
    itemsize: int,
    rounded: bool,
    locality: Locality | None,
) -> Work:
    nnz, rows, feat = size
    X, values = _Array((rows, feat), itemsize), _Array((nnz,), itemsize)
    weighted = kind != "spmm_unweighted"
    price = _price(kind, Structure(rows, rows, nnz, "int32"), X, values if weighted else None)
    in_order, calls = price.bytes - nnz * feat * itemsize, 1
    narrows = rounded and _GATHERING[kind] == "spmm" and itemsize == 4
    if narrows and not against_rounding(nnz, rows, feat):
        itemsize, in_order, calls = 2, in_order + rows * feat * 6, 2  # reads 4 bytes, writes 2
    row = max(1, min(feat * itemsize, constants.slice or feat * itemsize))
    reached = max(0.0, 1 - constants.gathered / max(row * rows, 1)), 1.0
    if locality is not None:
        reached = locality.misses(constants.gathered / row), locality.misses(constants.inner / row)
    far, near = (share * nnz * feat * itemsize for share in reached)
    cached, streamed = _split(in_order, in_order, constants)
    return Work(calls, rows, nnz, cached, streamed, near - far, far, price.flops)


def _price(kind: str, S: Structure, X: _Array, values: _Array | None) -> Price:
    """Compute the price of an operation that gathers, from its row."""
    name = _GATHERING[kind]
    if name == "gat":  # a score of each head
        return _price_of(name)(S, _Array((*X.shape, 1), X.itemsize))
    return _price_of(name)(S, X, X if name == "sddmm" else values)


@cache
def _price_of(name: str) -> Callable[..., Price]:
    """Return the function that prices the operation of that name."""
    return next(op.price for op in operations() if op.name == name and op.price)
