"""Pickles of this version load in later ones, as what they were: one of each public class.

``pickles.txt`` holds them as this version wrote them.  For a new class alone: this file, run as a
script, prints the line of each name that it is given.
"""

import base64
import dataclasses
import pickle
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsefmt  # noqa: E402
from sparsefmt import COO, Graph, nn, ops, plan  # noqa: E402
from sparsefmt.distributed import Part  # noqa: E402

LINES = Path(__file__).with_name("pickles.txt").read_text().splitlines()
WRITTEN = dict(line.split() for line in LINES)
LAYERS = "AGNNConv FastRGCNConv GATConv GATv2Conv GCNConv GINConv GINEConv MaxK RGCNConv SAGEConv"
LAYERS = f"{LAYERS} SGConv TAGConv TransformerConv planned APPNP ARMAConv ChebConv ClusterGCNConv"
LAYERS = f"{LAYERS} EdgeConv FAConv GatedGraphConv GCN2Conv GraphConv LEConv LGConv MixHopConv"
LAYERS = f"{LAYERS} PNAConv ResGatedGraphConv SimpleConv SSGConv".split()
#: Arguments of layers that take others than two widths.
SIZES = {
    **{"AGNNConv": (), "MaxK": (1,), "RGCNConv": (2, 2, 2), "FastRGCNConv": (2, 2, 2)},
    **{"APPNP": (2, 0.2), "ChebConv": (2, 2, 2), "FAConv": (2,), "GCN2Conv": (2, 0.2)},
    **{"LGConv": (), "SimpleConv": (), "SSGConv": (2, 2, 0.2)},
    "PNAConv": (2, 2, ["mean", "std"], ["linear"], torch.ones(3)),
}
OTHERS = "COO CSR CSC SGT CBSR Graph weighted transposed Order Stats Transpose Costs Constants Part"
ROW, COL = np.array([4, 0, 2, 0, 4, 5]), np.array([1, 3, 2, 0, 1, 5])
EDGES, X = torch.tensor(np.stack([COL, ROW])), torch.linspace(-1, 1, 12).view(6, 2)


def layer(name):
    """Make a layer whose parameters are no random numbers."""
    networks = {"GINConv": 2, "GINEConv": 2, "EdgeConv": 4}
    sizes = SIZES.get(name, (2, 2))
    if name in networks:
        sizes = (torch.nn.Linear(networks[name], 2),)
    made = getattr(nn, "GCNConv" if name == "planned" else name)(*sizes)
    for parameter in made.parameters():
        parameter.data = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    if name == "planned":
        sparsefmt.optimize(made, other("Graph"), x=X)
    return made.eval()


def other(name):
    """Make an object that is no layer."""
    A = COO(ROW, COL, np.arange(6, dtype=np.float32), shape=(6, 6))
    makers = {
        "CBSR": lambda: ops.maxk(X.numpy(), 1),
        "Graph": lambda: Graph(A.with_data(None)),
        "weighted": lambda: Graph(A),
        "transposed": lambda: Graph(A).transposed,
        "Order": lambda: sparsefmt.degree_order(A),
        "Stats": lambda: sparsefmt.summarize(A),
        "Transpose": lambda: ops.transpose(A),
        "Costs": lambda: ops.Costs(slab=3),
        "Constants": lambda: plan.Constants("cpu", 1 << 20, {"other": (1.0, 2.0)}),
        "Part": lambda: Part(0, (0, 3, 6), EDGES.numpy(), None, X.numpy(), None, {"val": ROW > 2}),
    }
    return makers[name]() if name in makers else A.asformat(name.lower())


def facts(value):
    """Return what is equal of equal objects."""
    if isinstance(value, torch.nn.Module):
        return repr(value), {name: t.tolist() for name, t in value.state_dict().items()}
    if isinstance(value, Graph):
        return value.csr, value.structure
    if type(value).__name__ == "Transpose":
        return value.csr, value.perm.tolist()
    if isinstance(value, sparsefmt.Stats):
        return str(value)
    if isinstance(value, dict):
        return {key: facts(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, sparsefmt.Format):
        return {f.name: facts(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def output(layer):
    """Compute a layer."""
    kind = type(layer).__name__
    inputs = () if kind == "MaxK" else (EDGES,)
    inputs = (X, EDGES) if kind in ("FAConv", "GCN2Conv") else inputs
    inputs += {"GINEConv": (X,), "RGCNConv": (ROW % 2,), "FastRGCNConv": (ROW % 2,)}.get(kind, ())
    return layer(X, *(torch.as_tensor(one) for one in inputs))


@pytest.mark.parametrize("name", [*OTHERS.split(), *LAYERS])
def test_an_old_pickle_is_what_it_was(name):
    made = (layer if name in LAYERS else other)(name)
    found = pickle.loads(zlib.decompress(base64.b85decode(WRITTEN[name])))
    assert type(found) is type(made)
    assert facts(found) == facts(made)
    if name in LAYERS:
        torch.testing.assert_close(output(found), output(made))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = pickle.dumps((layer if name in LAYERS else other)(name), protocol=4)
        print(name, base64.b85encode(zlib.compress(text, 9)).decode())
