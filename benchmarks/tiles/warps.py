"""SpMM with all entries in tiles by the warps of a block, over graphs of ever fuller windows.

A block takes a window of rows and a slice of the features; how many warps it has follows from both.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import Costs
from sparsefmt.ops.tiles import cuda as tiles_cuda
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _graphs, _harness
from .._harness import Target
from ..matmul.table import Operands, geomean_and_worst
from .cases import STORAGE, Tiled, sources, without_values

GENERATED = ("pubmed", "com-amazon", "flickr", "amazon0505", "arxiv", "yelp", "artist", "ddi")
REAL = ("dd", "musae_facebook", "amazon_computers", "fb_oklahoma97")
WIDTHS = (64,)
DTYPES = ("tf32", "float16")
#: All entries go to matrix units, whatever it costs.
EVERYTHING = Costs(slab=0, window=0, row=0, again=1e9, piece=0, launch=0, gain=0)


@dataclass(frozen=True)
class Shape:
    """Of a block: rows of its window, and features of its slice."""

    height: int
    width: int

    @property
    def warps(self) -> int:
        """That the block has."""
        return tiles_cuda.team(self.height, self.width)[0]

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


#: Every shape that the kernel is made for.
SHAPES = tuple(
    Shape(height, width) for height, widths in tiles_cuda.SLICES.items() for width in widths
)
COLUMNS = {
    "case": "<27",
    "entries_16": "10.1f",
    "entries_64": "10.1f",
    **{str(shape): "8.4f" for shape in SHAPES},
    "fastest": "<7",
    "warps": "5d",
    "over_fastest": "12.2f",
    "error": "8.1e",
}


@contextmanager
def sliced(width: int) -> Iterator[None]:
    """Blocks take so many features; neither here nor behind it a launch goes by an older plan."""
    with mock.patch.object(tiles_cuda, "slice_of", return_value=width):
        tiles_cuda.launch_shape.cache_clear()
        try:
            yield
        finally:
            tiles_cuda.launch_shape.cache_clear()


@dataclass(frozen=True)
class Shaped:
    """A product by blocks of one shape."""

    shape: Shape
    product: Tiled

    @classmethod
    def of(cls, shape: Shape, operands: Operands, dtype: str) -> "Shaped":
        """All entries of ``operands.A``, which has no values."""
        structure = operands.A.tosgt((shape.height, MMA_TILE[1]))
        return cls(shape, Tiled.of(structure, operands, dtype, costs=EVERYTHING))

    def __call__(self) -> Array:
        """The product, with blocks of this shape."""
        with sliced(self.shape.width):
            return self.product()

    def checked(self) -> dict[str, Any]:
        """As ``Tiled``; it is wrong too if matrix units leave any entry."""
        with sliced(self.shape.width):
            found = self.product.checked()
        if found["share"] < 1:
            found.setdefault("wrong", f"only {found['share']:.3f} of the entries are in tiles")
        if "wrong" in found:
            found["wrong"] = f"{self.shape}: {found['wrong']}"
        return found


def default(feat: int) -> Shape:
    """What ``tosgt(MMA_TILE)`` and the launch choose."""
    return Shape(MMA_TILE[0], tiles_cuda.slice_of(MMA_TILE[0], feat))


def warps(options: argparse.Namespace) -> bool:
    """Every graph, width and dtype, without values: all shapes in turn."""
    told = ", ".join(f"{shape} {shape.warps}" for shape in SHAPES)
    _harness.print_head(f"spmm by warps of a block (rows x features: {told})", COLUMNS)
    rows = []
    graphs = {name: _graphs.load(source) for name, source in sources(options, GENERATED, REAL)}
    for name in sorted(graphs, key=lambda name: _entries(graphs[name], 16)):
        means = {f"entries_{height}": _entries(graphs[name], height) for height in (16, 64)}
        for feat in options.widths or WIDTHS:
            for dtype in options.dtypes or DTYPES:
                case = {"case": f"{name} {feat} {dtype}", "graph": name}
                row = case | {"feat": feat, "dtype": dtype} | means
                rows.append(row | _cell(graphs[name], feat, dtype, quick=options.quick))
                _harness.print_row(rows[-1], COLUMNS)
        _harness.free()
    return _harness.keep("tcgnn", "warps", rows, judge, cuda=True, folder=options.out)


def _entries(graph: CSR, height: int) -> float:
    """Mean entries of a window of so many rows."""
    return graph.nnz / max(-(-graph.n_rows // height), 1)


def _cell(graph: CSR, feat: int, dtype: str, *, quick: bool) -> dict[str, Any]:
    """The time of each shape, and what the one that is chosen gives over the fastest."""
    operands = without_values(Operands.of(graph, feat, STORAGE[dtype]))
    products = [Shaped.of(shape, operands, dtype) for shape in SHAPES]
    row: dict[str, Any] = {"error": 0.0}
    for product in products:
        found = product.checked()
        if "wrong" in found:
            return found
        row["error"] = max(row["error"], found["error"])
    times, row["runs"] = _harness.paced([*products], cuda=True, quick=quick)
    return row | _fastest(dict(zip(SHAPES, times, strict=True)), default(feat))


def _fastest(times: dict[Shape, float], chosen: Shape) -> dict[str, Any]:
    """1 over the fastest: the choice is best."""
    fastest = min(times, key=lambda shape: times[shape])
    found: dict[str, Any] = {str(shape): ms for shape, ms in times.items()}
    found |= {"ms": times[chosen], "chosen": str(chosen)}
    found |= {"fastest": str(fastest), "warps": fastest.warps}
    return found | {"over_fastest": times[fastest] / times[chosen]}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """What the choice gives over the fastest of each case, by dtype, to know."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        held = [row for row in rows if row["dtype"] == dtype]
        name = f"{dtype} MMA_TILE and its slice over the fastest shape"
        found += geomean_and_worst(name, held, "over_fastest", None, None)
    return found
