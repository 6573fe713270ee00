"""Options that no layer can have: refused when it is made, by the name of the argument."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from pyg_cases import make  # noqa: E402
from torch.nn import Linear, ReLU  # noqa: E402

from sparsefmt import DtypeError, ShapeError, UnsupportedError, nn  # noqa: E402

WIDTH, OUT, HUGE = 6, 8, 10**5000
ATTENTION = [
    ({"heads": 0}, ShapeError, "heads is 0: give 1 or more"),
    ({"heads": "2"}, DtypeError, "heads is '2': give an integer"),
    ({"dropout": None}, DtypeError, "dropout is None: give a number"),
    ({"dropout": 1.0}, ShapeError, "dropout is 1.0: give a share"),
    ({"dropout": 1}, ShapeError, "dropout is 1: give a share"),
    ({"dropout": -0.1}, ShapeError, "dropout is -0.1: give a share"),
    ({"dropout": float("nan")}, ShapeError, "dropout is nan: give"),
    ({"dropout": float("inf")}, ShapeError, "dropout is inf: give"),
    ({"dropout": -HUGE}, ShapeError, "dropout is beyond the range of a float"),
    ({"negative_slope": float("nan")}, ShapeError, "negative_slope is nan: give"),
    ({"negative_slope": float("inf")}, ShapeError, "negative_slope is inf: give"),
    ({"negative_slope": "a"}, DtypeError, "negative_slope is 'a'"),
    ({"negative_slope": 10**400}, ShapeError, "negative_slope is beyond the range of a float"),
    ({"fill_value": None}, DtypeError, "None: give one of 'mean', .* a number, or a t"),
    ({"fill_value": True}, DtypeError, "fill_value is True: give one of 'mean'"),
    ({"fill_value": float("inf")}, ShapeError, "fill_value is inf: give a finite"),
    ({"edge_dim": 0}, ShapeError, "edge_dim is 0: give 1 or more, or -1"),
]
OPTIONS = [
    *((kind, *case) for kind in ("GATConv", "GATv2Conv") for case in ATTENTION),
    ("TransformerConv", {"heads": 0}, ShapeError, "heads is 0: give 1 or more"),
    ("GCNConv", {"flow": "up"}, ShapeError, "flow is 'up': give"),
    ("GCNConv", {"k": 2, "aggr": "max"}, UnsupportedError, "'max' beside k"),
    ("GCNConv", {"foo": 1}, TypeError, "GCNConv got an unexpected .* 'foo'"),
    ("SAGEConv", {"aggr": ["mean", "max"], "k": 2}, UnsupportedError, "beside k or a"),
    ("SAGEConv", {"aggr": 3}, DtypeError, "aggr is 3: give one of 'sum', .* a list"),
    ("SAGEConv", {"aggr": Linear(2, 2)}, DtypeError, r"aggr is Linear\(.* a module"),
    ("SAGEConv", {"aggr": ["max", 3]}, DtypeError, r"aggr is \['max', 3\]: give"),
    ("SAGEConv", {"aggr": pyg.aggr.SumAggregation}, DtypeError, "a module of"),
    ("SAGEConv", {"aggr_kwargs": 3}, DtypeError, "aggr_kwargs is 3: give a dict"),
    ("SAGEConv", {"aggr": "lstm", "aggr_kwargs": 3}, DtypeError, "aggr_kwargs is 3: give a dict"),
    (
        *("SAGEConv", {"aggr": "softmax", "aggr_kwargs": {"zz": 1}}, UnsupportedError),
        "aggr_kwargs is {'zz': 1}, which PyG's aggregation 'softmax' does not take: .*zz",
    ),
    ("GINConv", {"sample": 2, "aggr": "mean"}, UnsupportedError, "'mean' beside"),
    ("GINEConv", {"edge_dim": 0}, ShapeError, "edge_dim is 0: give 1 or"),
    ("SGConv", {"K": -1}, ShapeError, "K is -1: give 0 or more"),
    ("TAGConv", {"K": 1.0}, DtypeError, "K is 1.0: give an integer"),
    ("RGCNConv", {"num_bases": 2, "num_blocks": 2}, ShapeError, "num_bases is 2 and num_blocks is"),
    ("RGCNConv", {"num_blocks": 4}, ShapeError, "num_blocks is 4 but weights are 6 by 8"),
    ("RGCNConv", {"num_relations": 0}, ShapeError, "num_relations is 0"),
    ("RGCNConv", {"aggr": "lstm"}, UnsupportedError, "aggr is 'lstm'"),
    ("RGCNConv", {"node_dim": 1}, UnsupportedError, "node_dim is 1"),
    ("FastRGCNConv", {"aggr": "max"}, UnsupportedError, "aggr is 'max'"),
    ("APPNP", {"K": -1}, ShapeError, "K is -1: give 0 or more"),
    ("APPNP", {"alpha": "a"}, DtypeError, "alpha is 'a': give a number"),
    ("APPNP", {"dropout": 1.0}, ShapeError, "dropout is 1.0: give a share"),
    ("SSGConv", {"alpha": float("nan")}, ShapeError, "alpha is nan: give a finite"),
    ("GCN2Conv", {"theta": 0.5}, DtypeError, "layer is None: give an integer"),
    ("GCN2Conv", {"layer": 2}, DtypeError, "theta is None: give a number"),
    ("MixHopConv", {"powers": []}, DtypeError, r"powers is \[\]: give a list"),
    ("MixHopConv", {"powers": [1, -1]}, ShapeError, "powers is -1: give 0 or more"),
    ("ChebConv", {"K": 0}, ShapeError, "K is 0: give 1 or more"),
    ("ARMAConv", {"num_stacks": 0}, ShapeError, "num_stacks is 0: give 1 or more"),
    ("ClusterGCNConv", {"diag_lambda": None}, DtypeError, "diag_lambda is None: give a number"),
    ("ResGatedGraphConv", {"act": None}, DtypeError, "act is None: give a function"),
    ("ResGatedGraphConv", {"edge_dim": 0}, ShapeError, "edge_dim is 0: give 1 or more"),
    ("PNAConv", {"towers": 3}, ShapeError, "towers is 3 but widths are 6 and 8"),
    ("PNAConv", {"scalers": "linear"}, DtypeError, "scalers is 'linear': give a list"),
    ("PNAConv", {"deg": None}, ShapeError, "deg is None: give a histogram"),
    ("PNAConv", {"aggr": "sum"}, UnsupportedError, "aggr is given beside aggregators"),
    ("GCNConv", {"k": 2, "maxk_on": "x"}, UnsupportedError, "maxk_on is 'x': give 'input' or"),
    ("GINConv", {"k": 2, "maxk_on": "mapped"}, UnsupportedError, "'mapped': give 'input'"),
    ("SAGEConv", {"k": 2, "dropout": 1.0}, ShapeError, "dropout is 1.0: give a share"),
    ("SAGEConv", {"dropout": 0.5}, UnsupportedError, "dropout is 0.5 and k is None"),
]
CHANNELS = [
    (lambda: nn.GATConv(-2, OUT), ShapeError, "in_channels is -2: give 1 or more, or -1"),
    (lambda: nn.GATv2Conv(-2, OUT), ShapeError, "in_channels is -2: give 1 or more, or -1"),
    (lambda: nn.GCNConv(-2, OUT), ShapeError, "in_channels is -2: give 1 or more, or -1"),
    (lambda: nn.GCNConv(WIDTH, -1), ShapeError, "out_channels is -1: give 1 or more"),
    (lambda: nn.GCNConv((3, 4), 6), DtypeError, r"in_channels is \(3, 4\): give an integer"),
    (lambda: nn.SAGEConv((3, 4, 5), 6), ShapeError, r"in_channels is \(3, 4, 5\): give"),
    (lambda: nn.SAGEConv((3, 0), 6), ShapeError, r"in_channels\[1\] is 0: give 1 or more"),
    (lambda: nn.SAGEConv(-1, OUT, project=True), ShapeError, "in_channels is -1 and project"),
    (lambda: nn.GATConv((3, "a"), 6), DtypeError, r"in_channels\[1\] is 'a': give an"),
    (lambda: nn.GATv2Conv((3.0, 4), 6), DtypeError, r"in_channels\[0\] is 3.0: give an"),
    (lambda: nn.RGCNConv(-1, 6, 2), ShapeError, "in_channels of sources is -1"),
    (lambda: nn.ARMAConv(-1, OUT), ShapeError, "in_channels is -1: give 1 or more"),
    (lambda: nn.ResGatedGraphConv(-1, OUT, edge_dim=2), ShapeError, "in_channels is -1 beside"),
    (lambda: nn.EdgeConv(3), DtypeError, "nn is 3: give a module"),
    (lambda: nn.GINEConv(3), DtypeError, "nn is 3: give a module"),
    (lambda: nn.GINEConv(ReLU(), edge_dim=2), ShapeError, "nn begins with a ReLU"),
]


@pytest.mark.parametrize(("kind", "options", "error", "says"), OPTIONS)
def test_options_that_cannot_be_are_refused(kind, options, error, says):
    with pytest.raises(error, match=says):
        make(nn, kind, WIDTH, OUT, **options)


@pytest.mark.parametrize(("make", "error", "says"), CHANNELS)
def test_channels_and_networks_that_cannot_be_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv", "GINConv", "MaxK"])
def test_k_is_checked_as_soon_as_it_is_given(kind):
    bad = [(0, ShapeError, "k is 0"), (-1, ShapeError, "k is -1")]
    bad += [(True, DtypeError, "k is True: give an integer"), (2.0, DtypeError, "k is a float")]
    if kind in ("GCNConv", "SAGEConv"):
        bad.append((WIDTH + 1, ShapeError, f"k is {WIDTH + 1} but a row has {WIDTH} features"))
    if kind == "MaxK":
        bad.append((None, DtypeError, "k is a NoneType"))

    def of(k):
        return nn.MaxK(k) if kind == "MaxK" else make(nn, kind, WIDTH, OUT, k=k)

    for k, error, text in bad:
        with pytest.raises(error, match=text):
            of(k)
    assert type(of(np.int64(2)).k) is int
    assert "k=2" in repr(of(2))


@pytest.mark.parametrize("key", ["sample", "training_sample"])
@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv", "GINConv"])
def test_samples_are_checked_as_soon_as_they_are_given(kind, key):
    for width, error, text in (
        (0, ShapeError, f"{key} is 0: give the most entries of a row, 1 or more"),
        (-3, ShapeError, f"{key} is -3"),
        (True, DtypeError, f"{key} is True: give an integer"),
        (2.0, DtypeError, f"{key} is 2.0: give an integer"),
        ("all", DtypeError, f"{key} is 'all': give an integer"),
    ):
        with pytest.raises(error, match=text):
            make(nn, kind, WIDTH, OUT, **{key: width})
    beside = pytest.raises(UnsupportedError, match=f"{key} is 3 and k is 2: .* use one of them")
    with beside:
        make(nn, kind, WIDTH, OUT, k=2, **{key: 3})
    layer = make(nn, kind, WIDTH, OUT, k=2).train(key == "training_sample")
    setattr(layer, key, 3)
    with beside:
        layer(torch.ones(3, WIDTH), torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(UnsupportedError, match="strategy is 'first': use \"bucket\""):
        make(nn, kind, WIDTH, OUT, strategy="first")
    assert type(getattr(make(nn, kind, WIDTH, OUT, **{key: np.int64(3)}), key)) is int


X, EDGES = torch.zeros(4, WIDTH), torch.tensor([[0, 1, 2], [1, 2, 3]])
CALLS = {
    "weights that are too many": (nn.SimpleConv("var"), (X, EDGES, torch.ones(5)), "give .3,"),
    "two ends": (nn.GatedGraphConv(OUT, 2), ((X, X), EDGES), "x is a tuple but the layer"),
    "two ends in a list": (nn.ClusterGCNConv(WIDTH, OUT), ([X, X], EDGES), "x is a list but"),
    "another first layer": (nn.GCN2Conv(WIDTH, 0.1), (X, X[:2], EDGES), "x_0 is .2, 6. but x"),
    "no first layer": (nn.FAConv(WIDTH), (X, None, EDGES), "x_0 is NoneType but x"),
    "an eigenvalue each without a batch": (
        *(nn.ChebConv(WIDTH, OUT, 3), (X, EDGES, None, None, torch.ones(3)), "give batch"),
    ),
}


@pytest.mark.parametrize(("layer", "arguments", "text"), CALLS.values(), ids=CALLS)
def test_arguments_that_pyg_refuses_unclearly_or_not_are_refused(layer, arguments, text):
    with pytest.raises(ShapeError, match=text):
        layer(*arguments)


def test_chebyshev_filters_divide_by_negative_degrees_as_pygs():
    x, weight = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([2.0, -1.0, 1.5]).double()
    theirs, ours = (one.ChebConv(WIDTH, OUT, 3, "rw").double() for one in (pyg, nn))
    ours.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours(x, EDGES, weight), theirs(x, EDGES, weight), atol=1e-12)


def test_a_network_may_be_a_plain_function():
    expected = pyg.EdgeConv(lambda h: h)(X + 1, EDGES)
    assert torch.equal(nn.EdgeConv(lambda h: h)(X + 1, EDGES), expected)
