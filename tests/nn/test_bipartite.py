"""Layers between two sets of vertices: what goes another way than one set, and what is refused.

Their results are PyG's in ``test_pyg_arguments`` and ``test_pyg_attention``.
"""

import pytest

torch = pytest.importorskip("torch")
conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from torch.nn import Linear  # noqa: E402

from sparsefmt import DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt import nn as ours  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, OF_TARGETS, OUT, EDGES = 4, 3, 6, 40
LAYERS = {
    "sage": lambda: ours.SAGEConv(WIDTH, OUT),
    "sage of two widths": lambda: ours.SAGEConv((WIDTH, OF_TARGETS), OUT),
    "gin": lambda: ours.GINConv(Linear(WIDTH, OUT), train_eps=True),
    "gat": lambda: ours.GATConv(WIDTH, OUT, heads=2),
    "gat of two widths": lambda: ours.GATConv((WIDTH, OF_TARGETS), OUT, heads=2, concat=False),
    "gatv2": lambda: ours.GATv2Conv(WIDTH, OUT, heads=2),
    "gatv2 of two widths": lambda: ours.GATv2Conv((WIDTH, OF_TARGETS), OUT),
    "gatv2 with one weight": lambda: ours.GATv2Conv(WIDTH, OUT, share_weights=True),
}


def vertices(name, shape, device, *, dtype=torch.float64):
    """Features of both ends."""
    generator = torch.Generator().manual_seed(0)
    widths = (WIDTH, OF_TARGETS if "two widths" in name else WIDTH)
    made = [torch.randn(*one, generator=generator) for one in zip(shape, widths, strict=True)]
    return tuple(one.to(device, dtype).requires_grad_() for one in made)


def edges(shape, device):
    generator = torch.Generator().manual_seed(1)
    ends = [torch.randint(0, n, (EDGES,), generator=generator) for n in shape]
    return torch.stack(ends).to(device)


@pytest.mark.parametrize("options", [{"k": 2}, {"sample": 2, "training_sample": 2}])
@pytest.mark.parametrize("kind", ["SAGEConv", "GINConv"])
def test_maxk_and_samples_between_one_set_are_those_of_the_layer(device, kind, options):
    """A tuple of other tensors goes another way than one tensor."""
    args = (Linear(WIDTH, OUT),) if kind == "GINConv" else (WIDTH, OUT)
    layer = getattr(ours, kind)(*args, **options).to(device).double().eval()
    x = vertices("gin", (7, 7), device)[0]
    graph = Graph.from_edge_index(edges((7, 7), device), num_nodes=7)
    torch.testing.assert_close(layer((x, x.clone()), graph), layer(x, graph))


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_narrows_both_ends(device, name):
    x = vertices(name, (9, 5), device, dtype=torch.float32)
    layer = LAYERS[name]().to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, edges((9, 5), device))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(one.grad.dtype is torch.float32 for one in x)


@pytest.mark.parametrize("name", ["sage", "gin", "gat", "gatv2"])
def test_ends_that_do_not_fit_are_refused(name):
    mine = LAYERS[name]().double()
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
    if name == "gatv2":
        with pytest.raises(DtypeError, match=r"x\[1\] is None: scores are of both ends"):
            mine((x[0], None), given)
