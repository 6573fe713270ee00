"""Graphs, arrays and tensors that ``digests`` computes on, from numpy's seeds alone."""

import contextlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import sparsefmt
from sparsefmt import autograd as ag
from sparsefmt import ops

with contextlib.suppress(ImportError):
    import ml_dtypes  # noqa: F401  # gives NumPy its bfloat16

#: Graph -> shape, and how numpy draws its rows and columns; "large" is for a GPU alone.
GRAPHS: dict[str, tuple[tuple[int, int], Callable[[Any], tuple[Any, Any]]]] = {
    "powerlaw": (
        (3000, 3000),
        lambda rng: (
            np.concatenate([np.full(4500, 17), np.minimum(rng.zipf(1.7, 9000) - 1, 2999)]),
            np.minimum(rng.zipf(1.3, 13500) - 1, rng.integers(0, 3000, 13500)),
        ),
    ),
    "rect": (
        (700, 1100),
        lambda rng: (rng.integers(0, 230, 6000) * 3, rng.integers(0, 1100, 6000)),
    ),
    "banded": (
        (1000, 1000),
        lambda _: (
            np.repeat(np.arange(1000), 5),
            (np.arange(5000) // 5 + np.arange(5000) % 5) % 1000,
        ),
    ),
    "star": (
        (600, 600),
        lambda _: (
            np.r_[np.zeros(600, int), np.arange(600)],
            np.r_[np.arange(600), np.zeros(600, int)],
        ),
    ),
    "empty": ((60, 60), lambda _: (np.zeros(0, int), np.zeros(0, int))),
    "large": (
        (60_000, 60_000),
        lambda rng: (
            np.sort(rng.integers(0, 60_000, 4_500_000)),
            rng.integers(0, 60_000, 4_500_000),
        ),
    ),
}
#: What each graph but the power law is computed in, and that one: dtypes and feature widths.
PLAIN = {("float32", "int32"): (33, 64)}
RICH = {
    ("float32", "int32"): (1, 33, 64, 128),
    **{(dtype, "int32"): (64,) for dtype in ("float64", "float16", "bfloat16")},
    ("float32", "int64"): (64,),
}
#: Name of an input -> its shape, in sizes of the setting.
SHAPES = {
    **{"x": "cols feat", "y": "rows feat", "g": "rows feat", "wide": "cols wide"},
    **{"r": "rows", "c": "cols", "el1": "cols", "er1": "rows", "own": "rows"},
    **{"xh": "cols heads feat", "vh": "cols heads feat", "yh": "rows heads feat"},
    **{"gh": "rows heads feat", "el": "cols heads", "er": "rows heads", "att": "heads feat"},
    **{"e": "nnz", "eh": "nnz heads", "e8": "nnz eight", "dp": "nnz", "dph": "nnz heads"},
    **{"dp8": "nnz eight", "with_loops": "more", "attr": "nnz three"},
}
#: Everything on matrix units, whether it pays or not.
ALL = ops.Costs(slab=0, window=0, piece=0, launch=0, again=1e9, gain=0)
FACTORS = {"row_scale": "r", "col_scale": "c"}


@cache
def seeded(name: str, shape: tuple[int, ...]) -> Any:
    """Draw the float64 values of an input from its name and shape."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *shape])
    return rng.uniform(-0.5 if name == "values" else -1, 1, shape)


@cache
def matrix(device: str, graph: str, dtype: str, index: str, kind: str) -> Any:
    """Build a graph in one format, entries of the COO in no order."""
    if kind == "graph":
        return sparsefmt.Graph(matrix(device, graph, dtype, index, "csr"))
    if kind != "coo":
        return matrix(device, graph, dtype, index, "coo").asformat(kind)
    shape, draw = GRAPHS[graph]
    rng = np.random.default_rng(len(graph))
    row, col = draw(rng)
    order = np.arange(len(row)) if graph == "large" else rng.permutation(len(row))
    data = seeded("values", row.shape).astype(np.dtype(dtype))
    row, col = (np.asarray(part, index)[order] for part in (row, col))
    return sparsefmt.COO(row, col, data, shape=shape).to(device)


class Setting:
    """One graph in one dtype and width of features; calling it gives an input by its name."""

    def __init__(self, device: str, graph: str, dtype: str, index: str, feat: int) -> None:
        self.device, self.graph_name, self.dtype, self.index = device, graph, dtype, index
        self.feat, self.k = feat, max(1, feat // 4)
        (rows, cols), nnz = GRAPHS[graph][0], self.coo.nnz
        self.sizes = {"rows": rows, "cols": cols, "nnz": nnz, "feat": feat, "wide": feat + 3}
        self.sizes |= {"heads": 2, "eight": 8, "three": 3, "more": nnz + rows}

    def __getattr__(self, kind: str) -> Any:
        """Return the matrix as "coo", "csr", "csc", "sgt" or "graph"."""
        if kind not in ("coo", "csr", "csc", "sgt", "graph"):
            raise AttributeError(kind)
        return matrix(self.device, self.graph_name, self.dtype, self.index, kind)

    def values(self, name: str) -> Any:
        """Compute an input on the CPU, in float64."""
        return seeded(name, tuple(self.sizes[size] for size in SHAPES[name].split()))

    def __call__(self, *names: str) -> Any:
        """Return inputs on the device as arrays, one alone as itself."""
        found = [self._array(self.values(name).astype(np.dtype(self.dtype))) for name in names]
        return found if len(found) > 1 else found[0]

    def _array(self, values: Any) -> Any:
        if self.device == "cpu":
            return values
        import cupy

        return cupy.asarray(values)

    @property
    def factors(self) -> dict[str, Any]:
        """Return both scales, as options."""
        return {option: self(name) for option, name in FACTORS.items()}

    @property
    def S(self) -> Any:
        """Return the features with a quarter of them kept."""
        return ops.maxk(self("x"), self.k)

    def transpose(self) -> dict[str, Any]:
        """Return the transpose of the CSR, as an option."""
        return {"transposed": ops.transpose(self.csr)}


class Leaves(Setting):
    """A setting whose inputs are tensors that want gradients; each is remembered."""

    def __init__(self, setting: Setting) -> None:
        self.__dict__.update(setting.__dict__)
        self.leaves: dict[str, Any] = {}

    def __call__(self, *names: str) -> Any:
        """Return inputs as leaves on the device, one alone as itself."""
        import torch

        options = {"dtype": getattr(torch, self.dtype), "device": self.device}
        for name in names:
            if name not in self.leaves:
                made = torch.tensor(self.values(name), **options)
                self.leaves[name] = made.requires_grad_()
        found = [self.leaves[name] for name in names]
        return found if len(found) > 1 else found[0]

    def layer(self, cls: Any, *args: Any, **options: Any) -> Any:
        """Build a layer whose parameters follow from a seed, and remember them."""
        import torch

        torch.manual_seed(7)
        made = cls(*args, **options).to(self.device, getattr(torch, self.dtype))
        self.leaves |= {f"param.{name}": one for name, one in made.named_parameters()}
        torch.manual_seed(11)
        return made

    def tiled(self, costs: Any = ALL) -> Any:
        """Return a graph of its own that goes by tiles."""
        graph = sparsefmt.Graph(self.csr)
        ag.prepare(graph, tile=(64, 16), costs=costs)
        return graph
