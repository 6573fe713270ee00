"""Layers between two sets of vertices, against PyG's: ``(x, x_target)``, ``size``, two widths."""

import pytest

torch = pytest.importorskip("torch")
conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from torch.nn import Linear  # noqa: E402

from sparsefmt import DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt import nn as ours  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((9, 5), (5, 9), (7, 7))  # sources, targets
OF_SOURCES, OF_TARGETS, OUT, EDGE_DIM, EDGES = 4, 3, 6, 2, 40
PAIR = (OF_SOURCES, OF_TARGETS)
#: Class, channels that it takes (None: a network), and options.
LAYERS = {
    "sage": ("SAGEConv", OF_SOURCES, {}),
    "sage of two widths": ("SAGEConv", PAIR, {}),
    "gin": ("GINConv", None, {"eps": 0.3, "train_eps": True}),
    "gat": ("GATConv", OF_SOURCES, {"heads": 2}),
    "gat of two widths": ("GATConv", PAIR, {"heads": 2, "concat": False}),
    "gat without loops": ("GATConv", PAIR, {"heads": 2, "add_self_loops": False}),
    "gat with edge features": ("GATConv", PAIR, {"heads": 2, "edge_dim": EDGE_DIM}),
    "gatv2": ("GATv2Conv", OF_SOURCES, {"heads": 2}),
    "gatv2 of two widths": ("GATv2Conv", PAIR, {"heads": 2}),
    "gatv2 without loops": ("GATv2Conv", PAIR, {"heads": 2, "add_self_loops": False}),
    "gatv2 with one weight": ("GATv2Conv", OF_SOURCES, {"share_weights": True}),
}


def both_layers(name, device):
    """Ours and PyG's with its state, in float64."""
    kind, channels, options = LAYERS[name]
    made = []
    for library in (ours, conv):
        args = (Linear(OF_SOURCES, OUT),) if channels is None else (channels, OUT)
        made.append(getattr(library, kind)(*args, **options).to(device, torch.float64))
    mine, other = made
    other.load_state_dict(mine.state_dict())
    mine.load_state_dict(other.state_dict())
    return mine, other


def vertices(name, shape, device, *, target=True):
    """Features of both ends."""
    generator = torch.Generator().manual_seed(0)
    widths = (OF_SOURCES, OF_TARGETS if LAYERS[name][1] == PAIR else OF_SOURCES)
    x = [
        torch.randn(n, width, dtype=torch.float64, generator=generator).to(device).requires_grad_()
        for n, width in zip(shape, widths, strict=True)
    ]
    return x[0], x[1] if target else None


def edges(shape, device):
    generator = torch.Generator().manual_seed(1)
    ends = [torch.randint(0, n, (EDGES,), generator=generator) for n in shape]
    return torch.stack(ends).to(device)


def others(name, device):
    """Arguments beside features and graph."""
    if "edge_dim" not in LAYERS[name][2]:
        return {}
    generator = torch.Generator().manual_seed(2)
    attr = torch.randn(EDGES, EDGE_DIM, dtype=torch.float64, generator=generator)
    return {"edge_attr": attr.to(device)}


def gradients(layer, x, *args, **options):
    """The result, and the gradients of features and parameters; None where there is none."""
    y = layer(x, *args, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    given = [one for one in x if one is not None]
    wanted = [*given, *layer.parameters()]
    return [y, *torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)]


def assert_same(mine, other):
    for one, two in zip(mine, other, strict=True):
        one, two = (torch.zeros(()) if each is None else each for each in (one, two))
        torch.testing.assert_close(one, two.to(one.device).expand_as(one))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_between_two_sets_computes_what_pygs_does(device, name, shape):
    if name == "gat with edge features" and shape[1] > shape[0]:
        pytest.skip("PyG itself breaks: its loops' features are of as many vertices as sources")
    mine, other = both_layers(name, device)
    x, given, more = vertices(name, shape, device), edges(shape, device), others(name, device)
    expected = gradients(other, x, given, **more)
    for graph, size in (
        (given, None),
        (given, shape),
        (Graph.from_edge_index(given, num_nodes=shape), None),
        (Graph.from_edge_index(given, num_nodes=shape), shape),
    ):
        assert_same(gradients(mine, x, graph, size=size, **more), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in LAYERS if "gatv2" not in name])
def test_targets_without_features_have_no_part_of_their_own(device, name, shape):
    """Without a size there are as many of them as sources, as in PyG."""
    mine, other = both_layers(name, device)
    x, more = vertices(name, shape, device, target=False), others(name, device)
    sizes = [shape] if shape[1] > shape[0] else [shape, None]
    for size in sizes:
        if "edge_attr" in more and shape[1] > shape[0]:
            continue  # as above
        given = edges(shape, device)
        mine_, theirs = (gradients(one, x, given, size=size, **more) for one in (mine, other))
        assert_same(mine_, theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("gat ")])
def test_attention_between_two_sets_is_pygs(device, name, shape):
    if name == "gat with edge features" and shape[1] > shape[0]:
        pytest.skip("PyG itself breaks")
    mine, other = both_layers(name, device)
    x, given, more = vertices(name, shape, device), edges(shape, device), others(name, device)
    _, (listed, p) = mine(x, given, **more, return_attention_weights=True)
    _, (wanted, expected) = other(x, given, **more, return_attention_weights=True)
    assert torch.equal(listed, wanted)
    torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("kind", ["SAGEConv", "GATConv", "GATv2Conv"])
def test_two_widths_take_one_set_of_vertices_as_pygs_do(device, kind):
    mine, other = (getattr(one, kind)((4, 4), OUT).to(device).double() for one in (ours, conv))
    mine.load_state_dict(other.state_dict())
    x, given = vertices("gin", (7, 7), device)[0], edges((7, 7), device)
    layers = (lambda each: lambda x, *args: each(x[0], *args))(mine), other
    assert_same([layers[0]((x,), given)], [other(x, given)])


@pytest.mark.parametrize("options", [{"k": 2}, {"sample": 2, "training_sample": 2}])
@pytest.mark.parametrize("kind", ["SAGEConv", "GINConv"])
def test_maxk_and_samples_between_one_set_are_those_of_the_layer(device, kind, options):
    """A tuple of other tensors goes another way than one tensor."""
    args = (Linear(OF_SOURCES, OUT),) if kind == "GINConv" else (OF_SOURCES, OUT)
    layer = getattr(ours, kind)(*args, **options).to(device).double().eval()
    x = vertices("gin", (7, 7), device)[0]
    graph = Graph.from_edge_index(edges((7, 7), device), num_nodes=7)
    torch.testing.assert_close(layer((x, x.clone()), graph), layer(x, graph))


def test_autocast_narrows_both_ends(device):
    shape = (9, 5)
    for name in LAYERS:
        layer = both_layers(name, device)[0].float()
        x = [one.detach().float().requires_grad_() for one in vertices(name, shape, device)]
        more = {key: value.float() for key, value in others(name, device).items()}
        with torch.autocast(device, dtype=torch.bfloat16):
            y = layer(tuple(x), edges(shape, device), **more)
        assert y.dtype is torch.bfloat16
        y.float().sum().backward()
        assert all(one.grad.dtype is torch.float32 for one in x)


@pytest.mark.parametrize("name", ["sage", "gin", "gat", "gatv2"])
def test_ends_that_do_not_fit_are_refused(name):
    mine, _ = both_layers(name, "cpu")
    x, given = vertices(name, (9, 5), "cpu"), edges((9, 5), "cpu")
    graph = Graph.from_edge_index(given, num_nodes=(9, 5))
    for call, error, text in (
        (lambda: mine(x[0], graph), ShapeError, "graph has shape .5, 9.: a layer .* x_target"),
        (lambda: mine((*x, x[0]), graph), ShapeError, "x has 3 parts: give"),
        (lambda: mine(x[::-1], graph), ShapeError, r"x\[0\] has shape .5, 4. but .* 9 columns"),
        (lambda: mine((x[0], x[0]), graph), ShapeError, r"x\[1\] has shape .* 5 rows"),
        (lambda: mine((x[0], "x"), graph), DtypeError, r"x\[1\] is a str: give a torch.Tensor"),
        (lambda: mine((None, x[1]), graph), DtypeError, r"x\[0\] is a NoneType"),
        (lambda: mine((x[0].long(), x[1]), graph), DtypeError, r"x\[0\] is torch.int64"),
        (lambda: mine((x[0].to_sparse(), x[1]), graph), UnsupportedError, r"x\[0\] has layout"),
        (lambda: mine((x[0], x[1][:, :3]), graph), ShapeError, r"x\[1\] has 3 features but"),
        (lambda: mine((x[0], x[1].float()), graph), DtypeError, r"x\[1\] is torch.float32 but"),
        (lambda: mine(x, graph, size=(9, 6)), ShapeError, "features of targets have shape .5,"),
        (lambda: mine((x[0], None), graph, size=(9, 6)), ShapeError, "the graph has 5 targets"),
        (lambda: mine(x, given, size=(8, 5)), ShapeError, "features of sources have shape .9, "),
        (lambda: mine(x, graph, size=9), ShapeError, "size is 9: give .n_source, n_target."),
        (lambda: mine(x, graph, size=(9, True)), ShapeError, "size is .9, True.: give"),
        (lambda: mine(x, graph, size=(9, -1)), ShapeError, "counts cannot be negative"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_scores_of_both_ends_need_features_of_targets():
    mine, _ = both_layers("gatv2", "cpu")
    x = vertices("gatv2", (9, 5), "cpu", target=False)
    with pytest.raises(DtypeError, match=r"x\[1\] is None: scores are of both ends"):
        mine(x, edges((9, 5), "cpu"))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ours.SAGEConv((3, 4, 5), 6), ShapeError, r"in_channels is \(3, 4, 5\): give"),
        (lambda: ours.SAGEConv((3, 0), 6), ShapeError, r"in_channels\[1\] is 0: give 1 or more"),
        (lambda: ours.GATConv((3, "a"), 6), DtypeError, r"in_channels\[1\] is 'a': give an"),
        (lambda: ours.GATv2Conv((3.0, 4), 6), DtypeError, r"in_channels\[0\] is 3.0: give an"),
        (lambda: ours.GCNConv((3, 4), 6), DtypeError, r"in_channels is \(3, 4\): give an integer"),
    ],
)
def test_channels_that_are_no_pair_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()
