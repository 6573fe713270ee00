"""What the table of PyG's arguments is made of: a row, and what several layers share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyg_cases import numbers
from torch_geometric.nn import aggr

N, FEAT, OUT, EDGE_DIM = 9, 4, 6, 3
UPSTREAM = "target_to_source"


@dataclass
class Row:
    """What a layer takes: for each argument values with which it is PyG's, and those refused."""

    #: Of a library and of options.
    make: Callable[..., Any]
    #: Values by names, of the constructor.
    same: dict[str, list[Any]]
    #: Arguments that each layer of the table is given.
    needed: tuple[str, ...]
    #: Arguments of forward behind ``x`` and ``edge_index``, in one or several ways, by edges.
    forward: list[Callable[[Any], dict[str, Any]]]
    #: Values with what their refusal says.
    refused: dict[str, list[tuple[Any, str]]] = field(default_factory=dict)
    #: Whether it takes features of two ends, and of one graph (batch, n, feat).
    pairs: bool = False
    static: bool = True
    #: Whether ``edge_dim`` is another way to call it, with features of edges.
    of_edges: bool = False
    #: How near results are to PyG's in float64.
    close: float = 1e-10
    #: Options that are given together, beside those of ``same`` in turn.
    together: list[dict[str, Any]] = field(default_factory=list)


def edge_features(edges, width=FEAT):
    return {"edge_attr": numbers(edges.shape[1], width, seed=4)}


def nothing(edges):
    return {}


def weights(edges):
    return {"edge_weight": numbers(edges.shape[1], seed=3).abs() + 0.1}


def flags(*names: str) -> dict[str, list[Any]]:
    """Both values of options that are true or false."""
    return {name: [False, True] for name in names}


REDUCTIONS = ["add", "sum", "mean", "max", "min", aggr.MeanAggregation()]
PASSED: dict[str, list[Any]] = {
    "aggr_kwargs": [None, {}],
    "flow": ["source_to_target", UPSTREAM],
    "node_dim": [-2],
    "decomposed_layers": [1, 2],
}
#: PyG's own breaks where it takes features of two ends.
PASSED_OF_PAIRS = PASSED | {"decomposed_layers": [1]}
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "aggr": [
        ("lstm", "aggr is 'lstm': .* has no kernel for it; give one of 'sum'"),
        ("mul", "aggr is 'mul': .* has no kernel"),
        (None, "aggr is None"),
    ],
    "aggr_kwargs": [({"t": 1}, "aggr_kwargs is {'t': 1}: .* leave it out")],
    "node_dim": [(0, "node_dim is 0: .* along axis -2"), (1, r"give x.movedim\(1, -2\)")],
}
