"""Calls whose results ``digests`` digests, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import sparsefmt
from sparsefmt import autograd as ag
from sparsefmt import nn, ops

from .digest_inputs import ALL, Leaves, Setting

DROP = {"dropout": 0.4, "seed": 7}
LOOPS = {**DROP, "self_loops": True}


def mlp(s: Leaves) -> Any:
    """Build the network inside GIN, from a seed."""
    import torch

    torch.manual_seed(5)
    return torch.nn.Linear(s.feat, 16)


def with_weights(layer: Any, s: Leaves) -> tuple[Any, Any]:
    """Run attention for its result and the weights of entries."""
    y, (_, weights) = layer(s("x"), s.graph, s("attr"), return_attention_weights=True)
    return y, weights


def again(s: Leaves, y: Any, name: str) -> Any:
    """Return the gradient of a square sum, to be differentiated again."""
    import torch

    return torch.autograd.grad(y.square().sum(), s(name), create_graph=True)[0]


def attend(op: str, inputs: str, grad: str = "", **options: Any) -> Callable[[Setting], Any]:
    """Return a call of an attention operation, or its gradient; "edges" names scores."""

    def call(s: Setting) -> Any:
        named = {"edge_scores": s("eh")} if options.get("edges") else {}
        named |= {name: value for name, value in options.items() if name not in ("edges", "sorted")}
        given = [None if name == "-" else s(name) for name in [*inputs.split(), *grad.split()]]
        A = s.csr.sorted_indices() if options.get("sorted") else s.csr
        return getattr(ops, op)(A, *given, **named)

    return call


def attentions() -> dict[str, Callable[[Setting], Any]]:
    """Return the calls of the three attention operations and their gradients."""
    every = {"edges": True, **LOOPS}
    table = {
        "gat": {
            "plain": ("xh el er", {}),
            "edges": ("xh el er", {"edges": True}),
            "dropout": ("xh el er", {**DROP, "negative_slope": 0.1}),
            "all-loops": ("xh el er", every),
            "one": ("x el1 er1", {}),
        },
        "gatv2": {
            "plain": ("xh yh att", {}),
            "edges-dropout": ("xh yh att", {"edges": True, **DROP}),
            "all-loops": ("xh yh att", every),
            "sorted": ("xh yh att", {"sorted": True}),
        },
        "dot_attention": {
            "plain": ("yh xh", {}),
            "values-dropout": ("yh xh vh", {"edges": True, "scale": 0.3, **DROP}),
            "all-loops": ("yh xh vh", every),
            "sorted": ("yh xh vh", {"sorted": True}),
        },
    }
    found = {}
    for op, variants in table.items():
        for name, (inputs, options) in variants.items():
            found[f"{op}/{name}"] = attend(op, inputs, **options)
            full = f"{inputs} -" if inputs == "yh xh" else inputs
            grad = "g" if inputs == "x el1 er1" else "gh"
            found[f"{op}_backward/{name}"] = attend(f"{op}_backward", full, grad, **options)
    return found


def sampled(**options: Any) -> Callable[[Setting], Any]:
    """Return a call of the sampled product, at eight entries a row."""
    return lambda s: ops.spmm_sampled(s.csr, s("x"), **{"width": 8, **options})


#: Results for each width of features.
WIDE: dict[str, Callable[[Setting], Any]] = {
    "spmm/sum": lambda s: ops.spmm(s.csr, s("x")),
    "spmm/mean": lambda s: ops.spmm(s.csr, s("x"), reduce="mean"),
    "spmm/max": lambda s: ops.spmm(s.csr, s("x"), reduce="max"),
    "spmm/min": lambda s: ops.spmm(s.csr, s("x"), reduce="min"),
    "spmm/unweighted": lambda s: ops.spmm(s.csr.with_data(None), s("x")),
    "spmm/scaled": lambda s: ops.spmm(s.csr, s("x"), **s.factors),
    "spmm/scaled-mean": lambda s: ops.spmm(s.csr, s("x"), reduce="mean", **s.factors),
    "spmm/scaled-max": lambda s: ops.spmm(s.csr, s("x"), reduce="max", **s.factors),
    "spmm/csc": lambda s: ops.spmm(s.csc, s("x")),
    "spmm/coo-max": lambda s: ops.spmm(s.coo, s("x"), reduce="max"),
    "spmm/coo-atomic": lambda s: ops.spmm(s.coo, s("x")),
    "spmm/strided": lambda s: ops.spmm(s.csr, s("wide")[:, : s.feat]),
    "spmm/operator": lambda s: s.csr @ s("x"),
    "spmm/transposed": lambda s: s.csr.T @ s("y"),
    "spmm/sgt": lambda s: ops.spmm(s.sgt, s("x")),
    "spmm/sgt-max": lambda s: ops.spmm(s.sgt, s("x"), reduce="max"),
    "spmm/sgt-all": lambda s: ops.spmm(s.coo.tosgt((64, 16)), s("x"), costs=ALL),
    "spmm/sgt-all-mean": lambda s: ops.spmm(s.sgt, s("x"), reduce="mean", costs=ALL),
    "spmm/sgt-tf32": lambda s: ops.spmm(s.sgt, s("x"), precision="tf32", costs=ALL),
    "spmm/sgt-tf32-measured": lambda s: ops.spmm(s.sgt, s("x"), precision="tf32"),
    "spmm/sgt-tf32-scaled": lambda s: ops.spmm(
        s.coo.tosgt((64, 16)), s("x"), precision="tf32", costs=ALL, **s.factors
    ),
    "spmm_arg/max": lambda s: ops.spmm_arg(s.csr, s("x")),
    "spmm_arg/scaled-min": lambda s: ops.spmm_arg(s.csr, s("x"), reduce="min", **s.factors),
    "spmm_arg_backward/plain": lambda s: ops.spmm_arg_backward(
        s.csr, s("x"), ops.spmm_arg(s.csr, s("x"))[1], s("g")
    ),
    "spmm_arg_backward/scaled": lambda s: ops.spmm_arg_backward(
        s.csr, s("x"), ops.spmm_arg(s.csr, s("x"), **s.factors)[1], s("g"), **s.factors
    ),
    "sddmm/plain": lambda s: ops.sddmm(s.csr, s("y"), s("x")),
    "sddmm/heads": lambda s: ops.sddmm(s.csr, s("yh"), s("xh")),
    "sddmm/coo": lambda s: ops.sddmm(s.coo, s("y"), s("x")),
    "sddmm/sgt": lambda s: ops.sddmm(s.sgt, s("y"), s("x")),
    "sddmm/sgt-all": lambda s: ops.sddmm(s.coo.tosgt((64, 16)), s("y"), s("x"), costs=ALL),
    "sddmm/sgt-tf32": lambda s: ops.sddmm(s.sgt, s("y"), s("x"), precision="tf32", costs=ALL),
    "sddmm/sgt-tf32-heads": lambda s: ops.sddmm(
        s.coo.tosgt((32, 16)), s("yh"), s("xh"), precision="tf32", costs=ALL
    ),
    "sddmm/cbsr": lambda s: ops.sddmm(s.csr, s("g"), s.S),
    "maxk/quarter": lambda s: s.S,
    "spgemm/sum": lambda s: ops.spgemm(s.csr, s.S),
    "spgemm/scaled-mean": lambda s: ops.spgemm(s.csr, s.S, reduce="mean", **s.factors),
    "sspmm/sum": lambda s: ops.sspmm(s.csr, s("g"), s.S, deterministic=True),
    "sspmm/scaled-mean": lambda s: ops.sspmm(
        s.csr, s("g"), s.S, reduce="mean", deterministic=True, **s.factors
    ),
    "sspmm/atomic": lambda s: ops.sspmm(s.csr, s("g"), s.S),
    "spmm_sampled/bucket": sampled(),
    "spmm_sampled/fastrand": sampled(strategy="fastrand"),
    "spmm_sampled/random": sampled(strategy="random", seed=5),
    "spmm_sampled/mean": sampled(strategy="fastrand", mean=True),
    "spmm_sampled/rescale": sampled(strategy="random", seed=6, rescale=True),
    "spmm_sampled/wide": sampled(width=600),
    "spmm_sampled/scaled": lambda s: ops.spmm_sampled(s.csr, s("x"), 8, mean=True, **s.factors),
    "aggregate/gar": lambda s: ops.aggregate(s.csr, s("x"), method="gar"),
    "aggregate/coo-gar": lambda s: ops.aggregate(s.coo, s("x"), method="gar"),
    "aggregate/auto": lambda s: ops.aggregate(s.csr, s("x")),
    "aggregate/atomic": lambda s: ops.aggregate(s.coo, s("x"), method="gas"),
    "aggregate_backward/plain": lambda s: ops.aggregate_backward(s.csr, s("x"), s("g")),
    "aggregate_backward/coo": lambda s: ops.aggregate_backward(s.coo, s("x"), s("g")),
    "aggregate_backward/given": lambda s: ops.aggregate_backward(
        s.csr, s("x"), s("g"), **s.transpose()
    ),
    "aggregate_backward/own-loops": lambda s: ops.aggregate_backward(
        s.csr.with_data(None), s("x"), s("g"), self_weight=s("own")
    ),
    **attentions(),
}


def convert(source: str, target: str) -> Callable[[Setting], Any]:
    """Convert between two formats, with the permutation."""

    def call(s: Setting) -> Any:
        wanted, _, tile = target.partition(" ")
        options = {"tile": tuple(map(int, tile.split("x")))} if tile else {}
        given = ops.maxk(s("er"), 1) if source == "cbsr" else getattr(s, source)
        return given.asformat_with_perm(wanted, **options)

    return call


def softmax(heads: str) -> dict[str, Callable[[Setting], Any]]:
    """Return calls of the softmax of edges and its gradient, of so many heads."""
    return {
        f"edge_softmax/{heads}": lambda s: ops.edge_softmax(s.csr, s(heads)),
        f"edge_softmax_backward/{heads}": lambda s: ops.edge_softmax_backward(
            s.csr, ops.edge_softmax(s.csr, s(heads)), s(f"dp{heads[1:]}")
        ),
    }


#: Results without features, once for each graph and dtype.
FLAT: dict[str, Callable[[Setting], Any]] = {
    **softmax("e"),
    **softmax("eh"),
    **softmax("e8"),
    "gat_attention/plain": attend("gat_attention", "el er"),
    "gat_attention/edges": attend("gat_attention", "el er", edges=True),
    "gat_attention/loops": attend("gat_attention", "el er", edges=True, self_loops=True),
    "gcn_norm/csr-loops": lambda s: ops.gcn_norm(s.csr),
    "gcn_norm/plain-loops": lambda s: ops.gcn_norm(s.csr, self_loops=False),
    "gcn_norm/unweighted-coo-loops": lambda s: ops.gcn_norm(s.coo.with_data(None)),
    "gcn_norm/coo-loops-atomic": lambda s: ops.gcn_norm(s.coo),
    "gcn_norm_backward/loops-atomic": lambda s: ops.gcn_norm_backward(s.csr, s("with_loops")),
    "scale/row": lambda s: ops.scale(s.csr, s("r")),
    "scale/both": lambda s: ops.scale(s.csr, s("r"), s("c")),
    "scale/coo-col": lambda s: ops.scale(s.coo, col=s("c")),
    "scale/sgt": lambda s: ops.scale(s.sgt, s("r"), s("c")),
    "scale/csc-unweighted": lambda s: ops.scale(s.csc.with_data(None), s("r"), s("c")),
    **{
        f"sample/{way}": partial(
            lambda s, way: ops.sample_with_perm(s.csr, 8, strategy=way, seed=3), way=way
        )
        for way in ("bucket", "fastrand", "random")
    },
    "sampling_rate/eight": lambda s: ops.sampling_rate(s.csr, 8),
    **{
        f"convert/{source}-{target.replace(' ', '-')}": convert(source, target)
        for source in ("coo", "csr", "csc", "sgt", "cbsr")
        for target in ("coo", "csr", "csc", "sgt 16x8", "sgt 64x16")
    },
    "convert/dense": lambda s: s.csr[:50].toarray_with_perm(),
    "convert/from_dense": lambda s: sparsefmt.from_dense(s("el")),
    "convert/sorted": lambda s: (s.csr.sorted_indices(), s.csc.sorted_indices()),
    "convert/take": lambda s: (s.csr[3:40], s.csr[:, 5:50], s.coo[::7], s.csc[::-1]),
    "convert/astype": lambda s: s.csr.astype("float64", index_dtype="int64"),
    "convert/transposed": lambda s: (s.coo.T, s.csr.T, s.csc.T),
    "graph/formats": lambda s: (s.graph.coo, s.graph.csr, s.graph.csc, s.graph.sgt((32, 8))),
    "graph/transposed": lambda s: (s.graph.transposed.csr, s.graph.transposed.csc),
    "graph/perms": lambda s: (
        *(s.graph.csr_perm, s.graph.csc_perm),
        *(s.graph.transposed.csr_perm, s.graph.transposed.csc_perm),
    ),
    "graph/degrees": lambda s: (s.graph.in_degree, s.graph.out_degree),
    "graph/edges": lambda s: s.graph.with_data(s("e")).csc,
    "graph/stats": lambda s: str(s.graph.stats),
    "order/degree": lambda s: sparsefmt.degree_order(s.csr),
    "order/rcm-loops": lambda s: sparsefmt.rcm_order(s.csr),
    "order/community-loops": lambda s: sparsefmt.community_order(s.csr),
    "order/apply-loops": lambda s: sparsefmt.degree_order(s.csr).apply_with_perm(s.csr),
}

#: Functions with gradients, for each width.
DIFFERENTIABLE: dict[str, Callable[[Leaves], Any]] = {
    "spmm/sum": lambda s: ag.spmm(s.graph, *s("x", "e")),
    "spmm/own-values": lambda s: ag.spmm(s.graph, s("x")),
    "spmm/mean": lambda s: ag.spmm(s.graph, *s("x", "e"), reduce="mean"),
    "spmm/max": lambda s: ag.spmm(s.graph, *s("x", "e"), reduce="max"),
    "spmm/scaled": lambda s: ag.spmm(s.graph, *s("x", "e"), **s.factors),
    "spmm/scaled-mean": lambda s: ag.spmm(s.graph, *s("x", "e"), reduce="mean", **s.factors),
    "spmm/scaled-min": lambda s: ag.spmm(s.graph, *s("x", "e"), reduce="min", **s.factors),
    "spmm/transposed": lambda s: ag.spmm(s.graph.transposed, s("y"), s("e")),
    "spmm/twice": lambda s: again(s, ag.spmm(s.graph, *s("x", "e")), "x"),
    "spmm/twice-edges": lambda s: again(s, ag.spmm(s.graph, *s("x", "e")), "e"),
    "spmm/autocast": lambda s: ag.spmm(s.graph, *s("x", "e")),
    "spmm/tiles": lambda s: ag.spmm(s.tiled(), *s("x", "e")),
    "spmm/tiles-tf32": lambda s: ag.spmm(s.tiled(), *s("x", "e"), reduce="mean"),
    "sddmm/plain": lambda s: ag.sddmm(s.graph, *s("y", "x")),
    "sddmm/heads": lambda s: ag.sddmm(s.graph, *s("yh", "xh")),
    "sddmm/twice": lambda s: again(s, ag.sddmm(s.graph, *s("y", "x")), "x"),
    "sddmm/tiles-tf32": lambda s: ag.sddmm(s.tiled(), *s("y", "x")),
    "maxk/quarter": lambda s: ag.maxk(s("x"), s.k),
    "maxk_aggregate/sum": lambda s: ag.maxk_aggregate(s.graph, s("x"), s.k, s("e")),
    "maxk_aggregate/scaled-mean": lambda s: ag.maxk_aggregate(
        s.graph, s("x"), s.k, s("e"), reduce="mean", **s.factors
    ),
    "maxk_aggregate/twice": lambda s: again(
        s, ag.maxk_aggregate(s.graph, s("x"), s.k, s("e")), "x"
    ),
    "sampled_aggregate/bucket": lambda s: ag.sampled_aggregate(s.graph, s("x"), 8, s("e")),
    "sampled_aggregate/fastrand": lambda s: ag.sampled_aggregate(
        s.graph, s("x"), 8, s("e"), strategy="fastrand", mean=True
    ),
    "sampled_aggregate/random": lambda s: ag.sampled_aggregate(
        s.graph, s("x"), 8, s("e"), strategy="random", seed=5, rescale=True, **s.factors
    ),
    "gat_aggregate/plain": lambda s: ag.gat_aggregate(s.graph, *s("xh", "el", "er")),
    "gat_aggregate/all-loops": lambda s: ag.gat_aggregate(
        s.graph, *s("xh", "el", "er", "eh"), **LOOPS
    ),
    "gatv2_aggregate/plain": lambda s: ag.gatv2_aggregate(s.graph, *s("xh", "yh", "att")),
    "gatv2_aggregate/all-loops": lambda s: ag.gatv2_aggregate(
        s.graph, *s("xh", "yh", "att", "eh"), **LOOPS
    ),
    "dot_aggregate/plain": lambda s: ag.dot_aggregate(s.graph, *s("yh", "xh")),
    "dot_aggregate/all-loops": lambda s: ag.dot_aggregate(
        s.graph, *s("yh", "xh", "vh", "eh"), **LOOPS
    ),
}
#: Functions with gradients but without features.
DIFFERENTIABLE_FLAT: dict[str, Callable[[Leaves], Any]] = {
    "edge_softmax/one": lambda s: ag.edge_softmax(s.graph, s("e")),
    "edge_softmax/heads": lambda s: ag.edge_softmax(s.graph, s("eh")),
    "edge_softmax/twice": lambda s: again(s, ag.edge_softmax(s.graph, s("eh")), "eh"),
    "gcn_norm/values-loops": lambda s: ag.gcn_norm(s.graph, s("e").detach()),
    "gcn_norm/own-loops": lambda s: ag.gcn_norm(s.graph, self_loops=False),
    "gcn_norm/loops-atomic": lambda s: ag.gcn_norm(s.graph, s("e")),
}

#: Layers; all want a square graph.
LAYERS: dict[str, Callable[[Leaves], Any]] = {
    "MaxK/plain": lambda s: s.layer(nn.MaxK, s.k)(s("x")),
    "GCNConv/plain": lambda s: s.layer(nn.GCNConv, s.feat, 16)(s("x"), s.graph),
    "GCNConv/edges": lambda s: s.layer(nn.GCNConv, s.feat, 16)(s("x"), s.graph, s("e")),
    "GCNConv/kept": lambda s: s.layer(nn.GCNConv, s.feat, 16, k=4)(s("x"), s.graph),
    "GCNConv/training": lambda s: s.layer(nn.GCNConv, s.feat, 16, training_sample=8)(
        s("x"), s.graph, s("e")
    ),
    "GCNConv/sample": lambda s: s.layer(nn.GCNConv, s.feat, 16, sample=8).eval()(s("x"), s.graph),
    "SAGEConv/plain": lambda s: s.layer(nn.SAGEConv, s.feat, 16)(s("x"), s.graph),
    "SAGEConv/kept": lambda s: s.layer(nn.SAGEConv, s.feat, 16, k=4)(
        s("x"), s.graph, edge_weight=s("e")
    ),
    "SAGEConv/training": lambda s: s.layer(nn.SAGEConv, s.feat, 16, training_sample=8)(
        s("x"), s.graph
    ),
    "SAGEConv/sample": lambda s: s.layer(
        nn.SAGEConv, s.feat, 16, sample=8, strategy="bucket"
    ).eval()(s("x"), s.graph),
    "GINConv/plain": lambda s: s.layer(nn.GINConv, mlp(s), train_eps=True)(s("x"), s.graph),
    "GINConv/kept": lambda s: s.layer(nn.GINConv, mlp(s), 0.1, k=s.k)(
        s("x"), s.graph, edge_weight=s("e")
    ),
    "GINConv/training": lambda s: s.layer(nn.GINConv, mlp(s), training_sample=8)(s("x"), s.graph),
    "GATConv/plain": lambda s: s.layer(nn.GATConv, s.feat, 8, heads=4)(s("x"), s.graph),
    "GATConv/dropout": lambda s: s.layer(
        nn.GATConv, s.feat, 16, heads=2, dropout=0.5, concat=False, add_self_loops=False
    )(s("x"), s.graph),
    "GATConv/attr": lambda s: with_weights(s.layer(nn.GATConv, s.feat, 8, heads=2, edge_dim=3), s),
    "GATv2Conv/plain": lambda s: s.layer(nn.GATv2Conv, s.feat, 8, heads=4)(s("x"), s.graph),
    "GATv2Conv/dropout": lambda s: s.layer(
        nn.GATv2Conv, s.feat, 16, heads=2, dropout=0.5, concat=False, share_weights=True
    )(s("x"), s.graph),
    "AGNNConv/plain": lambda s: s.layer(nn.AGNNConv)(s("x"), s.graph),
    "AGNNConv/stored": lambda s: s.layer(nn.AGNNConv, add_self_loops=False)(s("x"), s.graph),
    "AGNNConv/tiles-tf32": lambda s: s.layer(nn.AGNNConv)(s("x"), s.tiled()),
}

#: First part of a key -> calls by features, and without.
TABLES: dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]] = {
    "ops": (WIDE, FLAT),
    "autograd": (DIFFERENTIABLE, DIFFERENTIABLE_FLAT),
    "nn": (LAYERS, {}),
}
#: What other dtypes than float32 with int32 indices compute too.
CORE = {
    *("ops/spmm/sum", "ops/spmm/max", "ops/spmm/scaled", "ops/spmm/sgt-all", "ops/spmm_arg/max"),
    *("ops/spmm_arg_backward/plain", "ops/sddmm/plain", "ops/sddmm/sgt-all", "ops/sddmm/cbsr"),
    *("ops/maxk/quarter", "ops/spgemm/sum", "ops/sspmm/sum", "ops/aggregate_backward/given"),
    *("ops/spmm_sampled/fastrand", "ops/gat/all-loops", "ops/gat_backward/all-loops"),
    *("ops/gatv2/all-loops", "ops/gatv2_backward/all-loops", "ops/dot_attention/all-loops"),
    *("ops/dot_attention_backward/all-loops", "ops/edge_softmax/eh", "ops/edge_softmax/e"),
    *("ops/edge_softmax_backward/eh", "ops/gcn_norm/csr-loops", "ops/scale/both"),
    *("ops/sample/random", "ops/convert/coo-csr", "ops/convert/csr-csc", "ops/graph/perms"),
    *("ops/convert/coo-sgt-64x16", "autograd/spmm/sum", "autograd/spmm/tiles"),
    *("autograd/maxk_aggregate/sum", "autograd/sampled_aggregate/random"),
    *("autograd/gat_aggregate/all-loops", "autograd/dot_aggregate/all-loops"),
}
#: What is computed on the large graph, where kernels go through columns or entries in parts.
LARGE = {
    *("ops/spmm/sum", "ops/spmm/scaled-mean", "ops/sddmm/plain", "ops/aggregate_backward/given"),
    *("ops/aggregate_backward/plain", "ops/gat/all-loops", "ops/gat_backward/all-loops"),
    *("ops/gatv2/sorted", "ops/gatv2_backward/sorted", "ops/dot_attention/sorted"),
    *("ops/dot_attention_backward/sorted", "ops/spmm_sampled/random", "ops/convert/coo-csr"),
    *("ops/convert/csr-csc", "ops/convert/csr-sgt-64x16", "ops/sspmm/sum", "ops/spgemm/sum"),
    *("ops/spmm/sgt-tf32-scaled", "ops/spmm/sgt-tf32-measured", "ops/sddmm/sgt-tf32"),
    "ops/order/community-loops",
}


def applies(name: str, s: Setting) -> bool:
    """Return True if a call is made in a setting, by what the words in its name ask for."""
    if s.graph_name == "large" and name not in LARGE:
        return False
    if (s.dtype, s.index) != ("float32", "int32") and name not in CORE:
        return False
    if s.graph_name == "powerlaw" and s.feat in (1, 128) and name not in CORE:
        return False
    part, _, variant = name.split("/")
    if s.sizes["rows"] != s.sizes["cols"] and ("loops" in variant or part == "nn"):
        return False
    if part != "ops" and s.feat not in (0, 64) and s.graph_name != "powerlaw":
        return False
    if part == "nn" and s.feat != 64:
        return False
    return s.device == "cpu" or "atomic" not in variant


def calls(s: Setting) -> dict[str, Callable[..., Any]]:
    """Return what is computed in a setting: by features, or without where it has none."""
    found = {}
    for part, tables in TABLES.items():
        table = tables[0 if s.feat else 1]
        found |= {f"{part}/{name}": call for name, call in table.items()}
    return {name: call for name, call in found.items() if applies(name, s)}
