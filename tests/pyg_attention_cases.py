"""Arguments of PyG's attention layers: rows of the table of ``test_pyg_arguments``."""

from typing import Any

import torch
from pyg_argument_cases import (
    EDGE_DIM,
    FEAT,
    OUT,
    PASSED_OF_PAIRS,
    REFUSED,
    UPSTREAM,
    Row,
    edge_features,
    nothing,
)

#: Of attention, whose axis of vertices PyG gives itself.
REFUSED_OF_HEADS = REFUSED | {"node_dim": [(1, r"node_dim is 1: .* along axis 0")]}


def features_and_weights(edges):
    return edge_features(edges, EDGE_DIM) | {"return_attention_weights": True}


def with_edges(name):
    """A layer of attention with edge features."""

    def make(library, **options):
        channels = options.pop("in_channels", FEAT)
        return getattr(library, name)(channels, OUT, **{"edge_dim": EDGE_DIM} | options)

    return make


#: Beside the defaults, which each other option is tried with.
HEADS: dict[str, list[Any]] = {
    "in_channels": [-1, (FEAT, FEAT), (-1, -1), (FEAT, -1)],
    "heads": [2],
    "concat": [False],
    "dropout": [0.0],
    "edge_dim": [-1],
    "bias": [False],
    "aggr": ["sum"],
    "aggr_kwargs": [{}],
    "flow": [UPSTREAM],
    "decomposed_layers": [1],  # PyG's own breaks with more
}
LOOPED = HEADS | {
    "negative_slope": [0.7],
    "add_self_loops": [False],
    "fill_value": ["add", "min", "max", "mul", 0.5, torch.tensor([0.5, -1.0, 2.0])],
    "residual": [True],
}
OF_LOOPED = [
    {"heads": 2, "concat": False, "residual": True, "flow": UPSTREAM},
    {"add_self_loops": False, "bias": False, "heads": 2, "in_channels": (FEAT, FEAT)},
    {"fill_value": "max", "heads": 2, "flow": UPSTREAM, "residual": True},
]


ATTENTION = {
    "GATConv": Row(
        with_edges("GATConv"),
        LOOPED,
        ("in_channels", "out_channels"),
        [nothing, features_and_weights],
        REFUSED_OF_HEADS | {"fill_value": [("median", "fill_value is 'median': give one of")]},
        pairs=True,
        static=False,
        together=OF_LOOPED,
    ),
    "GATv2Conv": Row(
        with_edges("GATv2Conv"),
        LOOPED | {"share_weights": [True]},
        ("in_channels", "out_channels"),
        [nothing, features_and_weights],
        REFUSED_OF_HEADS | {"fill_value": [("median", "fill_value is 'median': give one of")]},
        static=False,
        together=[*OF_LOOPED, {"share_weights": True, "heads": 2, "flow": UPSTREAM}],
    ),
    "TransformerConv": Row(
        with_edges("TransformerConv"),
        HEADS | {"beta": [True], "root_weight": [False]},
        ("in_channels", "out_channels"),
        [features_and_weights],
        REFUSED_OF_HEADS,
        static=False,
        together=[
            {"beta": True, "heads": 2, "concat": False, "flow": UPSTREAM},
            {"root_weight": False, "beta": True, "heads": 2, "bias": False},
        ],
    ),
    "AGNNConv": Row(
        lambda library, **options: library.AGNNConv(**options),
        PASSED_OF_PAIRS
        | {"requires_grad": [False, True], "add_self_loops": [False], "aggr": ["sum"]},
        (),
        [nothing],
        REFUSED,
        static=False,
        together=[{"add_self_loops": False, "requires_grad": False, "flow": UPSTREAM}],
    ),
}
