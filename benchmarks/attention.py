"""Attention and aggregation with their gradients: GAT, GATv2, dot products, GAS and GAR.

Sections of ``fuse``:

- ``aggregate``: the gradients of features and edge values in one pass against cuSPARSE's best SpMM
  with the transpose and its SDDMM (on the CPU torch.sparse and PyG);
- ``attention``: forward and backward of each kind beside a product of width 128 and PyG;
- ``memory``: its peak beside PyG's, and that nothing of the size of the edges is allocated;
- ``launches``: kernels of one layer.

Results are checked in float64 at sampled vertices.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsefmt import CSR, Graph, autograd, nn

from . import _baselines, _graphs, _harness, _oracle, matmul
from ._harness import MIB, Call
from ._oracle import SCORES, SIDES, SLOPE
from ._table import Benchmark, Limit, Row, Section, some_of

KINDS = tuple(SIDES)
SPMM_FEAT = 128  #: of the product that attention is held against
#: Most milliseconds of forward and backward in float32 on an H200: (kind, graph, heads, feat).
MOST_MS = {
    ("gat", "arxiv", 4, 32): 2.4,
    ("gat", "arxiv", 1, 128): 2.0,
    ("gat", "reddit", 4, 32): 45.0,
    ("gat", "reddit", 1, 128): 32.0,
    ("gat", "reddit", 1, 16): 13.0,
    ("gatv2", "arxiv", 4, 32): 3.0,
    ("gatv2", "reddit", 4, 32): 70.0,
    ("gatv2", "reddit", 1, 128): 50.0,
    ("dot", "arxiv", 4, 32): 3.0,
    ("dot", "reddit", 4, 32): 60.0,
    ("dot", "reddit", 1, 128): 50.0,
}
#: Least gain of 2-byte features over float32 on reddit.
HALF, HALF_GAIN = "bfloat16", 1.5
CPU_OVER_PYG = 4.0
#: Most memory: of PyG's where that runs, in GiB elsewhere.
SHARES, GIB = {"arxiv": 1 / 12}, {"reddit": 0.6, "products": 5.0}
#: What both allocators round sizes up to.
UNIT = 512
#: Names of kernels that multiply dense matrices, and of what is no kernel.
GEMM = re.compile(r"gemm|gemv|cutlass|xmma|splitk|nvjet|dot_kernel|cublas", re.IGNORECASE)
COPIES = ("Memcpy", "Memset")
MOST_KERNELS = {"GAT": 8}  #: of a layer, products of dense matrices apart


class Attention:
    """One attention over a graph, with the gradient of its result.

    Features are normal; scores are sums of a normal number of each end, or dot products with about
    the same spread.  Those of ``gat`` are in float32 beside 2-byte features.
    """

    def __init__(
        self, kind: str, graph: Graph, heads: int, feat: int, dtype: str = "float32"
    ) -> None:
        self.kind, self.graph, self.dtype = kind, graph, dtype
        like, n, m = graph.csr.indptr, graph.n_rows, graph.n_cols
        wide = (heads, feat)
        kinds: dict[str, dict[str, tuple[int, ...]]] = {
            "gat": {"h": (m, *wide), "el": (m, heads), "er": (n, heads)},
            "gatv2": {"left": (m, *wide), "right": (n, *wide), "att": wide},
            "dot": {"queries": (n, *wide), "keys": (m, *wide), "values": (m, *wide)},
        }
        self.inputs: dict[str, Tensor] = {}
        for seed, (name, shape) in enumerate(kinds[kind].items()):
            numbers = _baselines.tensor(_graphs.normal(like, shape, seed=seed))
            numbers *= feat**-0.5 if name == "att" else 1
            stored = "float32" if name in ("el", "er") else dtype
            self.inputs[name] = numbers.to(getattr(torch, stored)).requires_grad_()
        grad = _baselines.tensor(_graphs.normal(like, (n, *wide), seed=9))
        self.grad = grad.to(getattr(torch, dtype))

    def forward(self) -> Tensor:
        """Return (n_rows, heads, feat) by this library."""
        x = self.inputs.values()
        if self.kind == "dot":
            return autograd.dot_aggregate(self.graph, *x)
        run = autograd.gat_aggregate if self.kind == "gat" else autograd.gatv2_aggregate
        return run(self.graph, *x, negative_slope=SLOPE)

    def forward_only(self) -> Tensor:
        """Return the same where no gradient will be asked for."""
        with torch.no_grad():
            return self.forward()

    def both(self, forward: Call | None = None) -> tuple[Tensor, ...]:
        """Return the result and the gradients of all inputs, ours or by another ``forward``."""
        inputs = [*self.inputs.values()]
        return _harness.with_gradients(forward or self.forward, inputs, self.grad)

    def checked(self) -> Row:
        """Return the largest error in float64 at sampled vertices, and what is wrong."""
        results = dict(zip(("out", *self.inputs), self.both(), strict=True))
        ends = _baselines.ends_of(self.graph.csr)
        exact = _oracle.Attention(self.kind, ends, self.inputs, self.grad)
        error, reason = exact.complaint(results)
        return {"error": error} | _oracle.refused(reason)

    def pyg(self) -> Call:
        """Return forward and backward as PyG's layers do it; ``Missing`` if it cannot run."""

        def make() -> Call:
            if self.grad.is_cuda:  # fails here, out of memory, where PyG would after long
                shape = (self.graph.nnz, *self.grad.shape[1:])
                room = [self.grad.new_empty(shape) for _ in range(3)]
                del room
                _harness.free()
            ends = _baselines.ends_of(self.graph.csr)
            return lambda: self.both(lambda: pyg_attention(self.kind, ends, self.inputs))

        try:
            return _baselines.guarded(make)
        finally:
            _harness.free()


def pyg_attention(kind: str, ends: tuple[Tensor, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """Gather, run ``torch_geometric.utils.softmax``, multiply and scatter."""
    from torch_geometric.utils import scatter, softmax

    rows, cols = ends
    n, values = len(inputs[SIDES[kind][0][0]]), inputs[SIDES[kind][1][-1]]
    p = softmax(SCORES[kind](inputs, rows, cols), rows, num_nodes=n)
    result: Tensor = scatter(values[cols] * p[..., None], rows, 0, n, "sum")
    return result


def prepared(A: CSR) -> Graph:
    """Return the graph, with its transpose."""
    graph = Graph(A)
    autograd.prepare(graph)
    return graph


def attention(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, kind and shape; float32 first, which 2-byte features are held against."""
    for name, A in _graphs.loaded(options, ("arxiv", "reddit"), cpu=("flickr",)):
        graph = prepared(A)
        X = _graphs.uniform(graph.csr.indptr, (graph.n_cols, SPMM_FEAT))
        _, product = _baselines.best_spmm(_graphs.weighted(graph.csr), X)
        dtypes = ("float32", HALF) if name == "reddit" else ("float32",)
        for kind in options.kinds or KINDS:
            for heads, feat in _shapes(kind, name, cuda=options.cuda):
                wide_ms = None
                for dtype in options.dtypes or dtypes:
                    row: Row = {"case": f"{kind} {name} {heads}x{feat} {dtype}", "kind": kind}
                    row |= {"graph": name, "heads": heads, "feat": feat, "dtype": dtype}
                    row |= _cell(Attention(kind, graph, heads, feat, dtype), product, options)
                    if dtype == "float32":
                        wide_ms = row.get("ms")
                    elif wide_ms and "ms" in row:
                        row["over_f32"] = wide_ms / row["ms"]
                    yield row
        del graph, product


def _shapes(kind: str, graph: str, *, cuda: bool) -> list[tuple[int, int]]:
    """Return heads and features: those with a limit, or of all graphs elsewhere."""
    if not cuda:
        return [(4, 32)]
    here = [key[2:] for key in MOST_MS if key[:2] == (kind, graph)]
    return here or [*dict.fromkeys(key[2:] for key in MOST_MS if key[0] == kind)]


def _cell(ours: Attention, product: Call, options: argparse.Namespace) -> Row:
    """Time ours in turn with the product, and with PyG where that runs."""
    row = ours.checked()
    if "wrong" in row:
        return row
    calls: dict[str, Call] = {"ms": ours.both, "forward_ms": ours.forward_only}
    calls["spmm_ms"] = product
    if ours.dtype == "float32":
        row |= _baselines.add(calls, "pyg_ms", ours.pyg)
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    if options.cuda:
        row["kernels_ms"] = sum(us for _, us in on_device(ours.both)) / 1e3
    return row | {"spmms": row["ms"] / row["spmm_ms"]}


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph; results and gradients count, the graph and the inputs do not."""
    heads, feat = 4, 32
    for name, A in _graphs.loaded(options, ("arxiv", "reddit", "products")):
        graph = prepared(A)
        for kind in options.kinds or KINDS:
            ours = Attention(kind, graph, heads, feat)
            row: Row = {"case": f"{kind} {name}", "graph": name} | ours.checked()
            features = max(tensor.nbytes for tensor in (ours.grad, *ours.inputs.values()))
            sizes = _harness.allocated_sizes(ours.both)
            row["edge_sized"] = len(edge_sized(sizes, graph.nnz, heads, but=features))
            # An allocator may round up to two MiB.
            row["largest"] = max(sizes, default=0) / (features + 2 * MIB)
            _harness.free()
            row["peak_gib"] = sum(_harness.peak_bytes(ours.both)) / MIB / 1024
            try:
                row["pyg_gib"] = sum(_harness.peak_bytes(ours.pyg())) / MIB / 1024
                row["share"] = row["peak_gib"] / row["pyg_gib"]
            except _baselines.Missing as reason:
                row["skipped"] = f"PyG: {reason}"
            yield row


def edge_sized(sizes: Iterable[int], entries: int, heads: int, *, but: int = 0) -> list[int]:
    """Return the sizes of 1, 2, 4 or 8 bytes an entry, or an entry and head; ``but`` features."""

    def rounded(size: int) -> int:
        return -(-size // UNIT) * UNIT

    edges = {rounded(entries * each * width) for each in (1, heads) for width in (1, 2, 4, 8)}
    return [size for size in sizes if rounded(size) in edges - {rounded(but)}]


# Kernels

CHANNELS = 128
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GAT": lambda: nn.GATConv(CHANNELS, 32, heads=4),
    "GCN": lambda: nn.GCNConv(CHANNELS, CHANNELS),
}


def launches(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each layer: the gradients of features and parameters from that of the result."""
    for name, A in _graphs.loaded(options, ("arxiv",)):
        graph = prepared(A)
        for model, make in LAYERS.items():
            like = graph.csr.indptr
            x, grad = (
                _baselines.tensor(_graphs.normal(like, (graph.n_rows, CHANNELS), seed=seed))
                for seed in (1, 2)
            )
            torch.manual_seed(0)
            layer = make().to(x.device)
            inputs = [x.requires_grad_(), *layer.parameters()]

            def step(layer: Any = layer, inputs: Any = inputs, grad: Any = grad) -> Any:
                return torch.autograd.grad(layer(inputs[0], graph), inputs, grad)  # noqa: B023

            error = max(float(torch.isnan(one).sum()) for one in step())
            events = on_device(step)
            row: Row = {"case": f"{model} {name}", "model": model} | _oracle.judged(error, 0)
            row |= counted(one for one, _ in events)
            row["gpu_ms"] = sum(us for _, us in events) / 1e3
            yield row | {"launched": [[name, us] for name, us in events]}


def on_device(function: Call) -> list[tuple[str, float]]:
    """Return name and microseconds of everything that the GPU does in a call, after one.

    Torch's profiler sees kernels that CuPy launched too.
    """
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    on_gpu = [event for event in seen.events() if event.device_type.name == "CUDA"]
    return [(event.name, event.time_range.elapsed_us()) for event in on_gpu]


def counted(names: Iterable[str]) -> dict[str, int]:
    """Count kernels, products of dense matrices, and copies and fills."""
    counts = {"kernels": 0, "gemms": 0, "copies": 0}
    for name in names:
        copies = name.startswith(COPIES)
        counts["copies" if copies else "gemms" if GEMM.search(name) else "kernels"] += 1
    return counts


def _most_ms(row: Row) -> float | None:
    key = (row["kind"], row["graph"], row["heads"], row["feat"])
    return MOST_MS.get(key) if row["dtype"] == "float32" else None


SECTIONS = {
    "aggregate": matmul.AGGREGATE,
    "attention": Section(
        attention,
        (
            Limit("ms", "each", most=_most_ms),
            Limit("spmms", "each"),
            Limit("over_pyg", by=("kind",), least=CPU_OVER_PYG, on=("cpu",)),
            Limit("over_f32", by=("kind", "graph", "dtype"), least=HALF_GAIN),
            Limit("over_f32", "mean", by=("kind", "graph", "dtype")),
        ),
    ),
    "memory": Section(
        memory,
        (
            Limit("peak_gib", "each", most=lambda row: GIB.get(row["graph"])),
            Limit("share", "each", most=lambda row: SHARES.get(row["graph"])),
            Limit("edge_sized", "each", most=0),
            Limit("largest", "each", most=1.0),
        ),
        only="cuda",
    ),
    "launches": Section(
        launches,
        (
            Limit("kernels", "each", most=lambda row: MOST_KERNELS.get(row["model"])),
            Limit("gemms", "each", high=True),
        ),
        only="cuda",
    ),
}
EXTRA = {"kinds": some_of(KINDS), "dtypes": some_of(_oracle.LIMITS)}
BENCHMARKS = {"fuse": Benchmark("fuse", __doc__, SECTIONS, EXTRA)}
