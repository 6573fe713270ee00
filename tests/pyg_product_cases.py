"""Arguments of PyG's layers of products: rows of the table of ``test_pyg_arguments``."""

import torch
from pyg_argument_cases import (
    FEAT,
    OUT,
    PASSED,
    PASSED_OF_PAIRS,
    REDUCTIONS,
    REFUSED,
    UPSTREAM,
    N,
    Row,
    flags,
    nothing,
    weights,
)
from pyg_cases import numbers
from torch.nn import ELU, Linear, ReLU, Sequential, Tanh

#: Of the layers that take all four reductions, in products with a weight for each edge.
REDUCED = PASSED | {"aggr": REDUCTIONS}
NORMALISED = flags("cached", "add_self_loops", "normalize")


def first(edges):
    return {"x_0": numbers(N, FEAT, seed=8)}


def of_eigenvalues(edges):
    """The largest eigenvalues of two graphs, which share edges here."""
    return {
        "batch": torch.arange(N, device=edges.device) // 5,
        "lambda_max": torch.tensor([1.5, 2.5], dtype=torch.float64, device=edges.device),
    }


def of(kind, *positional):
    """Return what makes a layer by its options, one of them ``in_channels``."""

    def make(library, **options):
        widths = (options.pop("in_channels", FEAT), OUT) if positional[:1] == ("wide",) else ()
        rest = positional[1:] if widths else positional
        return getattr(library, kind)(*widths, *rest, **options)

    return make


def of_fa(library, **options):
    return library.FAConv(options.pop("channels", FEAT), **options)


def of_pna(library, **options):
    """With a histogram of degrees, and all reductions and scalers by default."""
    options = {
        "aggregators": ["sum", "mean", "min", "max", "var", "std"],
        "scalers": ["identity", "amplification", "attenuation", "linear", "inverse_linear"],
        "deg": torch.tensor([2, 3, 1, 4]),
        **options,
    }
    return library.PNAConv(FEAT, OUT, **options)


PRODUCTS: dict[str, Row] = {
    "APPNP": Row(
        of("APPNP", 3, 0.2),
        REDUCED | NORMALISED | {"dropout": [0.0]},
        ("K", "alpha"),
        [nothing, weights],
        REFUSED,
        together=[
            {"dropout": 0.4, "aggr": "mean"},
            {"dropout": 0.4, "add_self_loops": False, "flow": UPSTREAM},
            {"flow": UPSTREAM, "add_self_loops": False},
        ],
    ),
    "SSGConv": Row(
        of("SSGConv", "wide", 0.3),
        REDUCED | flags("cached", "add_self_loops", "bias") | {"in_channels": [-1], "K": [1, 3]},
        ("in_channels", "out_channels", "alpha"),
        [nothing, weights],
        REFUSED,
        together=[{"K": 2, "flow": UPSTREAM, "add_self_loops": False}],
    ),
    "LGConv": Row(
        of("LGConv"),
        REDUCED | flags("normalize"),
        (),
        [nothing, weights],
        REFUSED,
        together=[{"normalize": False, "flow": UPSTREAM}],
    ),
    "GCN2Conv": Row(
        lambda library, **options: library.GCN2Conv(FEAT, 0.3, 0.5, 2, **options),
        # PyG's own has no gradient of a maximum.
        REDUCED | NORMALISED | flags("shared_weights") | {"aggr": ["add", "sum", "mean"]},
        ("channels", "alpha", "theta", "layer"),
        [first, lambda edges: weights(edges) | first(edges)],
        REFUSED,
        static=False,  # of which PyG's takes no ``x_0``
        together=[{"shared_weights": False, "flow": UPSTREAM, "normalize": False}],
    ),
    "MixHopConv": Row(
        of("MixHopConv", "wide"),
        REDUCED
        | flags("add_self_loops", "bias")
        | {"in_channels": [FEAT], "powers": [None, [0], [3, 1], [2, 2]]},
        ("in_channels", "out_channels"),
        [nothing, weights],
        REFUSED,
        together=[{"powers": [2, 0], "flow": UPSTREAM, "add_self_loops": False}],
    ),
    "GraphConv": Row(
        of("GraphConv", "wide"),
        PASSED_OF_PAIRS
        | flags("bias")
        | {"aggr": REDUCTIONS, "in_channels": [-1, (FEAT, FEAT), (-1, -1)]},
        ("in_channels", "out_channels"),
        [nothing, weights],
        REFUSED,
        pairs=True,
        together=[{"aggr": "mean", "bias": False, "flow": UPSTREAM}],
    ),
    "SimpleConv": Row(
        of("SimpleConv"),
        PASSED_OF_PAIRS
        | {
            "aggr": [*REDUCTIONS, ["mean", "max"], "mul", ["std", "sum"]],
            "combine_root": [None, "sum", "cat", "self_loop"],
        },
        (),
        [nothing, weights],
        {
            "aggr": [(None, "aggr is None"), ("colour", "'colour', which no")],
            "combine_root": [("mean", "combine_root is 'mean': give 'sum'")],
            "node_dim": REFUSED["node_dim"],
        },
        pairs=True,
        static=False,  # of which PyG's takes the first axis for the vertices to add loops to
        together=[
            {"aggr": "max", "combine_root": "cat", "flow": UPSTREAM},
            {"aggr": ["mean", "max"], "combine_root": "self_loop"},
        ],
    ),
    "LEConv": Row(
        of("LEConv", "wide"),
        PASSED_OF_PAIRS
        | flags("bias")
        | {"aggr": ["add", "sum", "mean"], "in_channels": [-1, (FEAT, FEAT), (-1, -1)]},
        ("in_channels", "out_channels"),
        [nothing, weights],
        REFUSED | {"aggr": [*REFUSED["aggr"], ("max", "LEConv has no kernel")]},
        together=[{"bias": False, "flow": UPSTREAM}],
    ),
    "GatedGraphConv": Row(
        of("GatedGraphConv", OUT, 2),
        PASSED | flags("bias") | {"aggr": REDUCTIONS},
        ("out_channels", "num_layers"),
        [nothing, weights],
        REFUSED,
        static=False,
        together=[{"bias": False, "aggr": "max", "flow": UPSTREAM}],
    ),
    "ChebConv": Row(
        lambda library, **options: library.ChebConv(
            options.pop("in_channels", FEAT), OUT, **{"K": 3} | options
        ),
        PASSED
        | flags("bias")
        | {
            "in_channels": [FEAT],  # PyG's own breaks with -1
            "K": [1, 2, 4],
            "normalization": [None, "sym", "rw"],
            "aggr": ["add", "sum"],
        },
        ("out_channels",),
        [nothing, weights, of_eigenvalues, lambda edges: weights(edges) | of_eigenvalues(edges)],
        REFUSED
        | {
            "aggr": [*REFUSED["aggr"], ("max", "ChebConv has no kernel")],
            "normalization": [("row", "normalization is 'row': give 'sym', 'rw'")],
        },
        together=[
            {"normalization": "rw", "flow": UPSTREAM},
            {"normalization": None, "flow": UPSTREAM, "bias": False},
        ],
    ),
    "ARMAConv": Row(
        of("ARMAConv", "wide"),
        REDUCED
        | flags("shared_weights", "bias")
        | {
            "in_channels": [FEAT],
            "num_stacks": [3],
            "num_layers": [3],
            "act": [None, ELU()],
            "dropout": [0.5],
        },
        ("in_channels", "out_channels"),
        [nothing, weights],
        REFUSED,
        together=[
            {"num_stacks": 2, "num_layers": 3, "shared_weights": True, "dropout": 0.5},
            {"num_stacks": 2, "num_layers": 3, "bias": False, "flow": UPSTREAM},
        ],
    ),
    "ClusterGCNConv": Row(
        of("ClusterGCNConv", "wide"),
        PASSED
        | flags("bias")
        | {"aggr": ["add", "sum"]}
        | {"in_channels": [FEAT, -1], "diag_lambda": [0.0, 0.7], "add_self_loops": [True]},
        ("in_channels", "out_channels"),
        [nothing],
        REFUSED | {"aggr": [*REFUSED["aggr"], ("max", "ClusterGCNConv has no kernel")]},
        close=1e-6,  # PyG's divides by degrees in float32
        together=[{"diag_lambda": 0.5, "flow": UPSTREAM, "bias": False}],
    ),
    "FAConv": Row(
        of_fa,
        REDUCED
        | flags("cached", "add_self_loops")
        | {"normalize": [True], "channels": [-1], "eps": [0.0, 0.4], "dropout": [0.5]}
        | {"decomposed_layers": [1]},  # PyG's own breaks with more
        (),
        [
            lambda edges: first(edges) | {"edge_weight": None},
            lambda edges: first(edges) | {"return_attention_weights": True},
        ],
        REFUSED,
        static=False,
        together=[
            {"add_self_loops": False, "flow": UPSTREAM},
            {"add_self_loops": True, "flow": UPSTREAM, "dropout": 0.3},
        ],
    ),
    "ResGatedGraphConv": Row(
        of("ResGatedGraphConv", "wide"),
        PASSED_OF_PAIRS
        | flags("root_weight", "bias")
        | {
            "in_channels": [-1, (FEAT, FEAT), (-1, -1)],
            "act": [Tanh()],
            "edge_dim": [None, FEAT],
            "aggr": REDUCTIONS,
        },
        ("in_channels", "out_channels"),
        [nothing],
        REFUSED,
        of_edges=True,
        together=[
            {"edge_dim": FEAT, "aggr": "max", "flow": UPSTREAM},
            {"act": Tanh(), "root_weight": False, "aggr": "mean", "flow": UPSTREAM},
        ],
    ),
    "EdgeConv": Row(
        lambda library, **options: library.EdgeConv(
            Sequential(Linear(2 * FEAT, 5), ReLU(), Linear(5, OUT)), **options
        ),
        PASSED_OF_PAIRS | {"aggr": REDUCTIONS},
        ("nn",),
        [nothing],
        REFUSED,
        together=[{"aggr": "mean", "flow": UPSTREAM}],
    ),
    "PNAConv": Row(
        of_pna,
        {name: value for name, value in PASSED.items() if name != "node_dim"}
        | flags("divide_input", "train_norm")
        | {
            "decomposed_layers": [1],  # PyG's own breaks with more
            "aggregators": [["sum"], ["mean", "min", "var"]],
            "scalers": [["identity"], ["attenuation", "inverse_linear"]],
            "edge_dim": [None, FEAT],
            "towers": [2],
            "pre_layers": [2],
            "post_layers": [3],
            "act": ["leaky_relu", Tanh()],
            "act_kwargs": [{"inplace": False}],
        },
        ("in_channels", "out_channels", "deg", "aggr"),
        [nothing],
        {
            "node_dim": [(1, "node_dim is 1: .* along axis 0")],
            "aggr_kwargs": REFUSED["aggr_kwargs"],
            "aggregators": [(["median"], "aggregators has 'median': give some of sum")],
            "scalers": [(["root"], "scalers has 'root': give some of identity")],
            "act": [("colour", "act is 'colour': give a module")],
        },
        static=False,
        of_edges=True,
        together=[
            {"towers": 2, "divide_input": True, "edge_dim": FEAT, "flow": UPSTREAM},
            {"pre_layers": 3, "act": "elu", "act_kwargs": {"alpha": 0.5}, "train_norm": True},
        ],
    ),
}
