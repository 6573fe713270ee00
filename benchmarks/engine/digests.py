"""Digest every result of the public API, bit by bit, to compare two versions of the library.

``python -m benchmarks digests --device cuda --twice -o before.json`` writes them, ``--compare
before.json`` beside it says what differs.  The calls are those of tests/laws, with conversions,
orders, tiles and layers beside them.  Results that add up by atomics are left out on a GPU.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Linear, Module

import sparsefmt
from sparsefmt import CSR, SparseFmtError, nn, ops
from sparsefmt import autograd as ag

from .. import _baselines, _graphs, _harness
from .._table import ROOT, some_of

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
#: What is computed on the large graph, where kernels go through columns or entries in parts.
LARGE = (
    *("ops/spmm sum", "ops/sddmm", "ops/aggregate_backward", "ops/spgemm", "ops/sspmm"),
    *("ops/gat", "ops/gatv2", "ops/dot_attention", "ops/spmm_sampled random", "more/convert"),
    *("more/spmm tiles", "more/order community"),
)
#: Everything on matrix units, whether it pays or not.
ALL = ops.Costs(slab=0, window=0, piece=0, launch=0, again=1e9, gain=0)


@cache
def matrix(device: str, graph: str, dtype: str, index: str) -> CSR:
    """Build a graph of numpy's seeds, as a CSR with values."""
    shape, draw = GRAPHS[graph]
    rng = np.random.default_rng(len(graph))
    row, col = (np.asarray(part, index) for part in draw(rng))
    data = rng.uniform(-0.5, 1, row.shape).astype(_graphs.dtype(dtype))
    return sparsefmt.COO(row, col, data, shape=shape).to(device).tocsr()


@dataclasses.dataclass(frozen=True)
class Setting:
    """One graph in one dtype and width of features."""

    device: str
    graph: str
    dtype: str
    index: str
    feat: int

    @property
    def csr(self) -> CSR:
        """Return the matrix."""
        return matrix(self.device, self.graph, self.dtype, self.index)

    @property
    def is_square(self) -> bool:
        """Return True if it has as many rows as columns."""
        return self.csr.n_rows == self.csr.n_cols

    def array(self, *shape: int) -> Any:
        """Draw an array on the device."""
        values = np.random.default_rng([7, *shape]).uniform(-1, 1, shape)
        return self.moved(values.astype(_graphs.dtype(self.dtype)))

    def moved(self, value: Any) -> Any:
        """Return an array, or a matrix, of the host on the device."""
        if self.device == "cpu":
            return value
        return value.to("cuda") if hasattr(value, "to") else import_module("cupy").asarray(value)

    def tensor(self, *shape: int) -> Any:
        """Draw a tensor that wants a gradient."""
        return _baselines.tensor(self.array(*shape)).clone().requires_grad_()

    def tiled(self) -> Any:
        """Return a graph of its own that goes by tiles."""
        graph = sparsefmt.Graph(self.csr)
        ag.prepare(graph, tile=(64, 16), costs=ALL)
        return graph


Compute = Callable[[Setting], Any]


def of_arrays(s: Setting, case: Any) -> Any:
    """Run a case of an operation on arrays."""
    A = s.csr if case.weighted else s.csr.with_data(None)
    args = case.arguments(A, _graphs.dtype(s.dtype), feat=s.feat)
    moved = {name: s.moved(value) for name, value in args.items()}
    return case.run(A.asformat(case.format), moved)


def of_tensors(s: Setting, call: Any, *, tiles: bool = False, again: bool = False) -> Any:
    """Run a function with gradients: its result and these, or the gradients of these."""
    graph = s.tiled() if tiles else sparsefmt.Graph(s.csr.with_data(None))
    more = {"dtype": getattr(torch, s.dtype), "device": s.device, "feat": s.feat}
    args = call.arguments(graph, **more)
    torch.set_float32_matmul_precision("high" if tiles else "highest")
    if not again:
        return call.step(graph, args)
    first, wanted = call.run(graph, args).square().sum(), call.wanted(args)
    grads = torch.autograd.grad(first, wanted, create_graph=True)
    loss = sum(one.square().sum() for one in grads)
    return torch.autograd.grad(loss, wanted, materialize_grads=True)


def of_layer(s: Setting, name: str) -> Any:
    """Run a layer from a seed: its results, and gradients of features and parameters."""
    torch.manual_seed(7)
    layer = LAYERS[name](s.feat).to(s.device, getattr(torch, s.dtype))
    layer.train("eval" not in name)
    torch.manual_seed(11)
    torch.set_float32_matmul_precision("high" if "tiles" in name else "highest")
    x, graph, more = s.tensor(s.csr.n_rows, s.feat), sparsefmt.Graph(s.csr), {}
    if "edges" in name:
        more["edge_weight"] = s.tensor(s.csr.nnz)
    if "attr" in name:
        more["edge_attr"] = s.tensor(s.csr.nnz, 3)
    y = layer(x, s.tiled() if "tiles" in name else graph, **more)
    wanted = [x, *more.values(), *layer.parameters()]
    return y, *torch.autograd.grad(
        y, wanted, _baselines.tensor(s.array(*y.shape)), materialize_grads=True
    )


#: Layers by features, on a square graph; words in a name say what else they get.
LAYERS: dict[str, Callable[[int], Module]] = {
    "GCNConv": lambda feat: nn.GCNConv(feat, 16),
    "GCNConv edges": lambda feat: nn.GCNConv(feat, 16),
    "GCNConv kept": lambda feat: nn.GCNConv(feat, 16, k=4),
    "GCNConv training edges": lambda feat: nn.GCNConv(feat, 16, training_sample=8),
    "GCNConv eval": lambda feat: nn.GCNConv(feat, 16, sample=8),
    "SAGEConv": lambda feat: nn.SAGEConv(feat, 16),
    "SAGEConv kept edges": lambda feat: nn.SAGEConv(feat, 16, k=4),
    "SAGEConv training": lambda feat: nn.SAGEConv(feat, 16, training_sample=8),
    "SAGEConv eval": lambda feat: nn.SAGEConv(feat, 16, sample=8, strategy="bucket"),
    "GINConv": lambda feat: nn.GINConv(Linear(feat, 16), train_eps=True),
    "GINConv kept edges": lambda feat: nn.GINConv(Linear(feat, 16), 0.1, k=feat // 4),
    "GINConv training": lambda feat: nn.GINConv(Linear(feat, 16), training_sample=8),
    "GATConv": lambda feat: nn.GATConv(feat, 8, heads=4),
    "GATConv dropout": lambda feat: nn.GATConv(
        feat, 16, heads=2, dropout=0.5, concat=False, add_self_loops=False
    ),
    "GATConv attr": lambda feat: nn.GATConv(feat, 8, heads=2, edge_dim=3),
    "GATv2Conv": lambda feat: nn.GATv2Conv(feat, 8, heads=4),
    "GATv2Conv dropout": lambda feat: nn.GATv2Conv(
        feat, 16, heads=2, dropout=0.5, concat=False, share_weights=True
    ),
    "AGNNConv": lambda feat: nn.AGNNConv(),
    "AGNNConv stored": lambda feat: nn.AGNNConv(add_self_loops=False),
    "AGNNConv tiles": lambda feat: nn.AGNNConv(),
}


def by_tiles(s: Setting, op: str, **options: Any) -> Any:
    """Run a product by tiles on matrix units."""
    more = {"costs": ALL} | options
    A, x = s.csr.tosgt((64, 16)), s.array(s.csr.n_cols, s.feat)
    if op == "spmm":
        return ops.spmm(A, x, **more)
    return ops.sddmm(A, s.array(s.csr.n_rows, s.feat), x, **more)


#: Calls without a case of their own.
MORE: dict[str, Compute] = {
    "spmm tiles": lambda s: by_tiles(s, "spmm"),
    "spmm tiles mean": lambda s: by_tiles(s, "spmm", reduce="mean"),
    "spmm tiles tf32": lambda s: by_tiles(s, "spmm", precision="tf32"),
    "spmm tiles tf32 measured": lambda s: by_tiles(s, "spmm", precision="tf32", costs=None),
    "sddmm tiles": lambda s: by_tiles(s, "sddmm"),
    "sddmm tiles tf32": lambda s: by_tiles(s, "sddmm", precision="tf32"),
    "scale": lambda s: ops.scale(s.csr, s.array(s.csr.n_rows), s.array(s.csr.n_cols)),
    **{
        f"sample {name}": partial(
            lambda s, name: ops.sample(s.csr, 8, strategy=name, seed=3), name=name
        )
        for name in ("bucket", "fastrand", "random")
    },
    **{
        f"convert to {to}": partial(lambda s, to: s.csr.tocoo()[::-1].asformat_with_perm(to), to=to)
        for to in ("csr", "csc", "sgt")
    },
    "convert tiles": lambda s: s.csr.tosgt((64, 16)),
    "convert dense": lambda s: s.csr[:50].toarray_with_perm(),
    "convert taken": lambda s: (s.csr[3:40], s.csr[:, 5:50], s.csr.tocoo()[::7]),
    "convert transposed": lambda s: (s.csr.T, s.csr.T.tocsr(), s.csr.sorted_indices()),
    "graph": lambda s: [
        *(sparsefmt.Graph(s.csr).coo, sparsefmt.Graph(s.csr).csc, sparsefmt.Graph(s.csr).csc_perm),
        *(sparsefmt.Graph(s.csr).transposed.csr, sparsefmt.Graph(s.csr).in_degree),
    ],
    "order degree": lambda s: sparsefmt.degree_order(s.csr),
    "order rcm": lambda s: sparsefmt.rcm_order(s.csr),
    "order community": lambda s: sparsefmt.community_order(s.csr),
}


def calls(s: Setting) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is computed in a setting, by name."""
    sys.path[:0] = [str(ROOT / "tests")] * (str(ROOT / "tests") not in sys.path)
    plain = (s.dtype, s.index) == ("float32", "int32")
    for case in import_module("laws.cases").CASES:
        if not (case.square and not s.is_square) and (s.device == "cpu" or not case.atomics):
            yield f"ops/{case}", partial(of_arrays, s, case)
    for call in import_module("laws.calls").CALLS:
        if not (call.square and not s.is_square) and (s.device == "cpu" or not call.atomics):
            yield f"autograd/{call}", partial(of_tensors, s, call)
            if call.twice and plain and s.feat == 33:
                yield f"autograd/{call} twice", partial(of_tensors, s, call, again=True)
            if call.function in (ag.spmm, ag.sddmm):
                yield f"autograd/{call} tiles", partial(of_tensors, s, call, tiles=True)
    for name in LAYERS if s.is_square and s.feat == 64 else ():
        yield f"nn/{name}", partial(of_layer, s, name)
    for name, compute in MORE.items():
        if s.is_square or not name.startswith("order"):
            yield f"more/{name}", partial(compute, s)


def settings(device: str, graphs: list[str]) -> Iterator[Setting]:
    """Yield the graphs, dtypes and widths."""
    for graph in graphs:
        for (dtype, index), widths in (RICH if graph == "powerlaw" else PLAIN).items():
            for feat in (128,) if graph == "large" else widths:
                if device != "cpu" or graph != "large":
                    yield Setting(device, graph, dtype, index, feat)


def digest(value: Any) -> str:
    """Return the digest of a result: dtypes, shapes and bytes of all arrays in it."""
    found = hashlib.sha256()
    for piece in pieces(value):
        found.update(piece)
    return found.hexdigest()


def pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes of a result and of what it is made of."""
    if dataclasses.is_dataclass(value):
        yield type(value).__name__.encode()
        for field in dataclasses.fields(value):
            yield field.name.encode()
            yield from pieces(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        yield str(len(value)).encode()
        for one in value:
            yield from pieces(one)
    elif hasattr(value, "detach"):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        raw = value.detach().resolve_conj().cpu().contiguous().flatten()
        if raw.numel():  # torch views no expanded tensor without values
            yield raw.view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield f"{value.dtype} {value.shape}".encode()
        yield (value.get() if hasattr(value, "get") else np.asarray(value)).tobytes()
    else:
        yield f"{type(value).__name__} {value!r}".encode()


def digests(device: str, graphs: list[str], only: list[str]) -> dict[str, str]:
    """Compute everything that begins with one of the prefixes; a refusal is a result too."""
    found: dict[str, str] = {}
    matrix.cache_clear()
    for s in settings(device, graphs):
        prefixes = tuple(only) or ("",)
        for name, compute in calls(s):
            if not name.startswith(prefixes) or (s.graph == "large" and not name.startswith(LARGE)):
                continue
            results: Any
            try:
                results = compute()
            except SparseFmtError as refusal:
                results = f"{type(refusal).__name__}: {refusal}"
            results = results if isinstance(results, tuple | list) else [results]
            path = f"{name}/{s.graph}/{s.dtype}/{s.index}/{s.feat}"
            found |= {f"{path}/{place}": digest(one) for place, one in enumerate(results)}
    return found


def compare(found: dict[str, Any], before: dict[str, Any]) -> int:
    """Print what differs from digests made before; 1 if anything does, or is missing."""
    shaky = {*found["meta"]["unrepeatable"], *before["meta"]["unrepeatable"]}
    new, old = (
        {key: one for key, one in made["digests"].items() if key not in shaky}
        for made in (found, before)
    )
    only, graphs = tuple(found["meta"]["only"]) or ("",), found["meta"]["graphs"]
    old = {k: v for k, v in old.items() if k.startswith(only) and k.split("/")[2] in graphs}
    differ = [k for k in old if k in new and old[k] != new[k]]
    missing = [k for k in old if k not in new]
    for title, keys in (("differs", differ), ("missing", missing)):
        for one in keys:
            print(f"{title}: {one}")
    agree = len(old) - len(differ) - len(missing)
    print(f"{agree} of {len(old)} agree, {len(differ)} differ, {len(missing)} are missing,")
    print(f"{len(new.keys() - old.keys())} are new, {len(shaky)} are not repeatable")
    return 1 if differ or missing else 0


def main(argv: list[str]) -> int:
    """Compute, write and compare digests."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks digests", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("-o", "--out", type=Path, help="file of the JSON")
    parser.add_argument("--compare", type=Path, help="file of digests made before")
    parser.add_argument("--twice", action="store_true", help="leave out what does not repeat")
    parser.add_argument("--only", action="append", default=[], help="prefix of keys: ops/spmm")
    parser.add_argument("--graphs", type=some_of(GRAPHS), help=f"some of {','.join(GRAPHS)}")
    options = parser.parse_args(argv)
    sparsefmt.formats.arrays.parse_device(options.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    asked = options.device, [*(options.graphs or GRAPHS)], options.only
    start = time.monotonic()
    found = digests(*asked)
    again = digests(*asked) if options.twice else found
    shaky = sorted(k for k in found | again if found.get(k) != again.get(k))
    kept = {k: found[k] for k in sorted(found) if k not in shaky}
    meta = _harness.machine(cuda=options.device == "cuda") | {"unrepeatable": shaky}
    meta |= {"graphs": asked[1], "only": options.only}
    made = {"meta": meta | {"seconds": round(time.monotonic() - start, 1)}, "digests": kept}
    print(f"{len(kept)} digests, {len(shaky)} not repeatable, in {made['meta']['seconds']} s")
    if options.out:
        options.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    return compare(made, json.loads(options.compare.read_text())) if options.compare else 0


BENCHMARKS = {"digests": main}
