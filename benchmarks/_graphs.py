"""The graphs: generated on the device at the papers' sizes, or read from files."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import sparsefmt
from sparsefmt import COO, CSR, generate, reorder
from sparsefmt.formats.arrays import Array, is_cupy


@dataclass(frozen=True)
class Recipe:
    """Arguments of ``generate.power_law``: Chung-Lu with planted communities, ids shuffled."""

    nodes: int
    edges: int
    exponent: float
    inside: float  #: share of edges inside a community
    community: int  #: its size


PAPERS = {
    "reddit": Recipe(232_965, 114_615_892, 2.3, 0.6, 4000),
    "proteins": Recipe(132_534, 79_122_504, 2.8, 0.8, 2000),
    "products": Recipe(2_449_029, 123_718_280, 2.4, 0.7, 3000),
    "ppa": Recipe(576_289, 42_463_862, 2.4, 0.6, 3000),
    "arxiv": Recipe(169_343, 2_332_486, 2.3, 0.6, 2000),
    "ddi": Recipe(4_267, 2_135_822, 2.8, 0.3, 1000),
    "flickr": Recipe(89_250, 989_006, 2.2, 0.5, 1000),
    "yelp": Recipe(716_847, 13_954_819, 2.3, 0.6, 2000),
    "amazon0505": Recipe(410_236, 4_878_874, 2.9, 0.9, 200),
    "artist": Recipe(50_515, 1_638_396, 2.3, 0.5, 500),
    "com-amazon": Recipe(334_863, 1_851_744, 2.9, 0.9, 100),
    "pubmed": Recipe(19_717, 88_648, 2.6, 0.6, 300),
}
RECIPES = PAPERS | {
    # Not of a paper: what the CPU is measured on, and what its tests take.
    "cpu": Recipe(200_000, 5_000_000, 2.3, 0.6, 4000),
    "short": Recipe(200_000, 600_000, 2.3, 0.6, 4000),
    "small": Recipe(2_000, 30_000, 2.3, 0.6, 200),
    # 2.5 times products: more than one GPU trains on.
    "large": Recipe(6_122_572, 309_295_700, 2.4, 0.7, 3000),
    # Of SENSEi's tables, as are the roads, and the very dense "mycielskianK".
    "coauthors": Recipe(299_067, 1_955_352, 3.0, 0.9, 50),
}
#: Vertices on each side of a road network, of about the size of OpenStreetMap's.
ROADS = {"belgium": 1_200, "asia": 3_450}
MYCIELSKIAN = "mycielskian"
#: Features of the data sets, as published; of those without any as of TC-GNN's.
FEATURES = {
    **{"reddit": 602, "proteins": 8, "products": 100, "ppa": 58, "arxiv": 128, "ddi": 128},
    **{"flickr": 500, "yelp": 300, "artist": 100, "citeseer": 3703, "cora": 1433, "pubmed": 500},
    **{"proteins_full": 29, "dd": 89, "amazon_computers": 767, "musae_facebook": 4714},
}
OTHER_FEATURES = 96
#: What the targets of SpMM and SDDMM are stated for.
TABLE = ("ddi", "arxiv", "flickr", "amazon0505", "com-amazon", "reddit", "products")


def chosen(
    options: argparse.Namespace,
    generated: tuple[str, ...],
    *,
    cpu: tuple[str, ...] = ("cpu",),
    real: tuple[str, ...] = (),
) -> Iterator[tuple[str, str]]:
    """Yield names of graphs with what ``load`` takes: those asked for, else these.

    ``real`` ones come from files of ``--data``; without it they are skipped with a line.  With
    ``--quick`` there is one small graph: the first file, where only files are measured and it is
    there, else a generated one.
    """
    names = (*real, *(generated if options.cuda else cpu))
    if options.quick and not options.graphs:
        is_there = real and not generated and (options.data / f"{real[0]}.npz").exists()
        names = real[:1] if is_there else ("small",)
    for name in options.graphs or names:
        path = options.data / f"{name}.npz"
        if name in real and not path.exists():
            print(f"  {name} skipped: there is no {path}", flush=True)
        elif name in real or (not known(name) and not Path(name).exists() and path.exists()):
            yield name, str(path)
        else:
            yield Path(name).stem, name


def loaded(
    options: argparse.Namespace, generated: tuple[str, ...], **more: tuple[str, ...]
) -> Iterator[tuple[str, CSR]]:
    """Yield names and graphs on the device of the options, as ``chosen`` does."""
    for name, source in chosen(options, generated, **more):
        yield name, load(source, device=options.device)


def known(name: str) -> bool:
    """Return True if a graph of that name is generated."""
    return name in RECIPES or name in ROADS or name.startswith(MYCIELSKIAN)


@cache
def load(name: str, *, device: str = "cuda", by_degree: bool = False, shuffle: bool = True) -> CSR:
    """Return an unweighted graph with ascending columns in every row, kept for the next call.

    Parameters
    ----------
    name : str
        Of ``RECIPES``, or the path of a file that ``sparsefmt.read`` takes.
    device : "cpu" or "cuda"
    by_degree : bool
        Ids in order of descending degree instead of as generated (shuffled) or stored.
    shuffle : bool
        If not, the communities of a generated graph are ranges of ids.
    """
    recipe = RECIPES.get(name)
    if name in ROADS:
        graph = roads(ROADS[name]).to(device).tocsr()
    elif name.startswith(MYCIELSKIAN):
        graph = mycielskian(int(name.removeprefix(MYCIELSKIAN))).to(device).tocsr()
    elif recipe is None:
        if not Path(name).exists():
            raise SystemExit(f"{name} is neither a file nor one of {', '.join(RECIPES)}")
        graph = sparsefmt.read(name).to(device).tocsr().with_data(None)
    else:
        graph = generate.power_law(
            recipe.nodes,
            recipe.edges,
            exponent=recipe.exponent,
            inside=recipe.inside,
            community=recipe.community,
            seed=0,
            device=device,
            shuffle=shuffle,
        ).tocsr()
    if by_degree:
        graph = reorder.degree_order(graph).apply(graph)
    return graph.sorted_indices()


def roads(side: int, *, seed: int = 0) -> COO:
    """Build a grid of crossings, of whose roads 3 in 10 are missing, and diagonals, 1 in 20."""
    rng = np.random.default_rng(seed)
    at = np.arange(side * side, dtype=np.int32).reshape(side, side)
    pairs = (
        (at[:, :-1], at[:, 1:], 0.7),
        (at[:-1], at[1:], 0.7),
        (at[:-1, :-1], at[1:, 1:], 0.05),
    )
    kept = []
    for start, end, share in pairs:
        there = rng.random(start.shape) < share
        kept.append(np.stack([start[there], end[there]]))
    return _both_ways(np.concatenate(kept, axis=1), side * side)


def mycielskian(k: int) -> COO:
    """Build the graph of chromatic number ``k`` without triangles: Mycielski (1955)."""
    edges, n = np.array([[0], [1]], np.int32), 2
    for _ in range(k - 2):
        u, v = edges
        copies, apex = np.arange(n, 2 * n, dtype=np.int32), np.full(n, 2 * n, np.int32)
        rows = np.concatenate([u, u, u + n, copies])
        cols = np.concatenate([v, v + n, v, apex])
        edges, n = np.stack([rows, cols]), 2 * n + 1
    return _both_ways(edges, n)


def _both_ways(edges: np.ndarray, n: int) -> COO:
    row, col = np.concatenate([edges, edges[::-1]], axis=1)
    return COO(np.ascontiguousarray(row), np.ascontiguousarray(col), shape=(n, n))


def dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name; bfloat16 comes from ``ml_dtypes``."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


_SPLITMIX = """
    unsigned long long z = (i + 1 + ((unsigned long long)seed << 44)) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
"""


@cache
def _element_wise(output: str, body: str, name: str) -> Any:
    """Build a kernel of the place's number alone, without memory beyond its output."""
    import cupy

    return cupy.ElementwiseKernel("int64 limit, int64 seed", output, _SPLITMIX + body, name)


def uniform(like: Array, shape: tuple[int, ...], name: str = "float32", *, seed: int = 0) -> Array:
    """Draw numbers uniform in [0, 1), of the dtype of that name, on the device of ``like``."""
    if not is_cupy(like):
        return np.random.default_rng(seed).random(shape, dtype=np.float32).astype(dtype(name))
    import cupy

    body = "y = (float)(z >> 40) * 5.9604644775390625e-8f;"  # 24 bits: all below 1
    kernel = _element_wise("float32 y", body, "benchmark_uniform")
    return kernel(1, seed, cupy.empty(shape, np.float32)).astype(dtype(name), copy=False)


def normal(like: Array, shape: tuple[int, ...], name: str = "float32", *, seed: int = 0) -> Array:
    """Draw normally distributed numbers, in the same way."""
    if not is_cupy(like):
        numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        return numbers.astype(dtype(name))
    import cupy

    body = """
        float u = ((z >> 40) + 1) * 5.9604644775390625e-8f;  // above 0
        float v = (z & 0xFFFFFF) * 5.9604644775390625e-8f;
        y = sqrtf(-2 * logf(u)) * cospif(2 * v);
    """
    kernel = _element_wise("float32 y", body, "benchmark_normal")
    return kernel(1, seed, cupy.empty(shape, np.float32)).astype(dtype(name), copy=False)


def weighted(graph: CSR, name: str = "float32") -> CSR:
    """Return the graph with values uniform in [0, 1)."""
    return graph.with_data(uniform(graph.indptr, (graph.nnz,), name, seed=1))
