"""Peak memory of attention's forward and backward, and the size of each allocation."""

import argparse
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from .. import _baselines, _harness, _memory
from .._harness import Target
from .._memory import MIB
from .cases import KINDS, Attention, graphs_of, prepared

GRAPHS = ("arxiv", "reddit", "products")
HEADS, FEAT = 4, 32
#: Where PyG runs: our peak over its.
SHARES = {"arxiv": 1 / 12}
#: Most GiB.
LIMITS = {"reddit": 0.6, "products": 5.0}
#: What both allocators round sizes up to.
UNIT = 512
COLUMNS = {
    "case": "<16",
    "peak_mib": "9.1f",
    "pyg_mib": "9.1f",
    "share": "7.4f",
    "features_mib": "12.1f",
    "largest_mib": "11.1f",
    "edge_sized": "10d",
    "error": "8.1e",
    "skipped": "<40",
}


def memory(options: argparse.Namespace) -> bool:
    """Every graph; results and gradients count, the graph and the inputs do not."""
    _harness.print_head(f"peak of attention {HEADS}x{FEAT}, forward and backward, float32", COLUMNS)
    rows = []
    for name, source in graphs_of(options, GRAPHS, ()):
        graph = prepared(source, options)
        for kind in options.kinds or KINDS:
            row = {"case": f"{kind} {name}", "kind": kind, "graph": name}
            rows.append(row | _row_of(Attention(kind, graph, HEADS, FEAT)))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
        del graph
    return _harness.keep("fuse", "memory", rows, judge, cuda=True, folder=options.out)


def _row_of(ours: Attention) -> dict[str, Any]:
    """Checked first, which compiles too."""
    row = ours.checked()
    if "wrong" in row:
        return row
    tensors = (ours.grad, *ours.inputs.values())
    features = max(tensor.numel() * tensor.element_size() for tensor in tensors)
    sizes = allocations(ours.both)
    row["edge_sized"] = len(edge_sized(sizes, ours.A.nnz, HEADS, but=features))
    row |= {"features_mib": features / MIB, "largest_mib": max(sizes, default=0) / MIB}
    _harness.free()
    row["peak_mib"] = sum(_memory.torch_peak_bytes(ours.both)) / MIB
    try:
        theirs = ours.pyg()
    except _baselines.Missing as reason:
        return row | {"skipped": f"PyG: {reason}"}
    row["pyg_mib"] = sum(_memory.torch_peak_bytes(theirs)) / MIB
    return row | {"share": row["peak_mib"] / row["pyg_mib"]}


def allocations(function: Callable[[], Any]) -> list[int]:
    """Bytes of every allocation during a call, by torch's allocator on a GPU and CuPy's pool."""
    import cupy
    import torch

    sizes: list[int] = []

    class Sizes(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "sizes"

        def malloc_postprocess(self, **facts: Any) -> None:
            sizes.append(int(facts["size"]))

    record = torch.cuda.memory._record_memory_history
    record(max_entries=100_000, context=None)
    try:
        with Sizes():
            function()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        record(enabled=None)
    found = [event["size"] for event in chain(*traces) if event["action"] == "alloc"]
    return sizes + found


def edge_sized(sizes: Iterable[int], entries: int, heads: int, *, but: int = 0) -> list[int]:
    """Those as large as 1, 2, 4 or 8 bytes an entry, or an entry and head; ``but`` features."""
    edges = {_rounded(entries * each * width) for each in (1, heads) for width in (1, 2, 4, 8)}
    return [size for size in sizes if _rounded(size) in edges - {_rounded(but)}]


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The peaks; no allocation of the edges' size, and none larger than the features."""
    found = []
    for row in rows:
        name, gib, most = row["case"], row["peak_mib"] / 1024, LIMITS.get(row["graph"])
        found.append(Target(f"{name} peak, GiB", gib, most, at_least=False))
        if "share" in row:
            limit, text = SHARES.get(row["graph"]), f"{name} peak over PyG's"
            found.append(Target(text, row["share"], limit, at_least=False))
        count = row["edge_sized"]
        found.append(Target(f"{name} allocations of the edges' size", count, 0, at_least=False))
        over = row["largest_mib"] / row["features_mib"]
        text = f"{name} largest allocation over that of the features"
        # An allocator may round up to two MiB.
        limit = 1 + 2 / row["features_mib"]
        found.append(Target(text, over, limit, at_least=False))
    return found
