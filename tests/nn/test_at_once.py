"""Layers that run as one node read what torch keeps; what a user puts in its place counts as ever.

Results and gradients are those of PyG's layers, to which the same is done.
"""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from pyg_cases import assert_same, both, numbers  # noqa: E402
from torch.func import functional_call  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sparsefmt import Graph, nn  # noqa: E402
from sparsefmt.errors import UnsupportedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, FEAT = 9, 6
ADJACENT = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3
ADJACENT.fill_diagonal_(False)[-1] = False  # the last vertex has no neighbours
EDGES = ADJACENT.t().nonzero().t()
GRAPH = Graph.from_edge_index(EDGES, num_nodes=N)


def network(width):
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(FEAT, width), torch.nn.ReLU(), linear(width, 3, bias=False))


LAYERS = {
    "gcn": lambda lib: lib.GCNConv(FEAT, 5),
    "sage": lambda lib: lib.SAGEConv(FEAT, 5),
    "sage of maps": lambda lib: lib.SAGEConv(FEAT, 2),
    "gin": lambda lib: lib.GINConv(network(5), 0.25),
    "gin of maps": lambda lib: lib.GINConv(network(2), 0.25),
    "gat": lambda lib: lib.GATConv(FEAT, 4, heads=2),
}
PARAMETERS = {
    "gcn": ["lin.weight", "bias"],
    "sage": ["lin_l.weight", "lin_l.bias", "lin_r.weight"],
    "gin": ["nn.0.weight", "nn.0.bias"],
    "gat": ["lin.weight", "att_src", "att_dst", "bias"],
}
MAPS = {"gcn": "lin", "sage": "lin_l", "gin": "nn.0", "gat": "lin"}
EVERY = [(name, one) for name in LAYERS for one in PARAMETERS[name.split()[0]]]
each_layer = pytest.mark.parametrize("name", LAYERS)
each_parameter = pytest.mark.parametrize(("name", "parameter"), EVERY)


def pair(name):
    """Make our layer and PyG's with the same random parameters."""
    layers = both(LAYERS[name])
    with torch.no_grad():
        for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
            other.copy_(one.copy_(torch.randn_like(one) / 2))
    return layers


def of(module, path):
    *parts, name = path.split(".")
    for one in parts:
        module = getattr(module, one)
    return module, name


def check(layers, call=lambda layer, x: layer(x, EDGES), beside=((), ())):
    """Compare results, and gradients of features, of tensors beside them and of parameters."""
    steps = []
    for layer, more in zip(layers, beside, strict=True):
        x = numbers(N, FEAT, seed=2).requires_grad_()
        y = call(layer, x)
        wanted = [one for one in (x, *more, *layer.parameters()) if one.requires_grad]
        loss = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum()
        steps.append([y, *torch.autograd.grad(loss, wanted, materialize_grads=True)])
    assert_same(*steps)


def as_attribute(module, name, value):
    delattr(module, name)
    setattr(module, name, value)


def as_buffer(module, name, value):
    delattr(module, name)
    module.register_buffer(name, value.detach())


def in_the_dict(module, name, value):
    module.__dict__[name] = value


@pytest.mark.parametrize("place", [as_attribute, as_buffer, in_the_dict])
@each_parameter
def test_a_tensor_in_the_place_of_a_parameter_counts(name, parameter, place):
    layers, values = pair(name), []
    for one in layers:
        module, leaf = of(one, parameter)
        values.append(getattr(module, leaf).detach().mul(2).requires_grad_().clone())
        place(module, leaf, values[-1])
    check(layers, beside=[[value] for value in values])


@pytest.mark.parametrize("left_behind", [False, True])
@each_parameter
def test_functional_call_counts_with_what_a_transform_has_left_behind(name, parameter, left_behind):
    layers, values = pair(name), []
    for one in layers:
        value = one.get_parameter(parameter).detach().mul(2).requires_grad_(not left_behind)
        values.append(value.clone())
    given, left = dict(zip(layers, values, strict=True)), []
    if left_behind:
        torch.func.grad(lambda t: left.append(t) or t.sum())(values[0])
        given[layers[0]] = left[0]
    check(
        layers,
        lambda layer, x: functional_call(layer, {parameter: given[layer]}, (x, EDGES)),
        [[value] for value in values],
    )


@each_parameter
def test_a_parametrization_counts(name, parameter):
    layers = pair(name)
    for one in layers:
        parametrize.register_parametrization(*of(one, parameter), torch.nn.Tanh())
    with parametrize.cached():
        check(layers)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", ["gcn", "gin", "gat"])
def test_hooks_of_a_map_are_called(name, kind):
    layers, seen = pair(name), []
    module, _ = of(layers[0], MAPS[name] + ".weight")
    getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(1))
    check(layers)
    assert seen


def in_the_dict_alone(conv, name, module):
    delattr(conv, name)
    conv.__dict__[name] = module


def of_a_class(conv, name, module):
    conv.__class__ = type("Other", (type(conv),), {name: property(lambda self: module)})


@pytest.mark.parametrize("place", [in_the_dict, in_the_dict_alone, of_a_class])
@each_layer
def test_a_module_in_the_place_of_another_counts(name, place):
    layers, beside = pair(name), []
    part = MAPS[name.split()[0]].split(".")[0]
    for one in layers:
        other = copy.deepcopy(getattr(one, part))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        place(one, part, other)
        beside.append([*other.parameters()])
    check(layers, beside=beside)


class Doubling:
    reset_parameters = staticmethod(lambda: None)

    def __call__(self, x):
        return 2 * x


def test_parts_that_are_no_modules_or_parameters_count():
    def doubling(lib):
        return lib.GINConv(Doubling()).double()

    def in_the_dict_of_one(name, value, *options):
        layers = [lib.GINConv(torch.nn.Identity(), *options).double() for lib in (nn, pyg)]
        for one in layers:
            one.__dict__[name] = value
        return layers

    check([doubling(lib) for lib in (nn, pyg)])
    check(in_the_dict_of_one("nn", Doubling()))
    check(in_the_dict_of_one("eps", torch.full((1,), 2.0).double(), 0.5))
    conv, x = pair("gat")[0], numbers(N, FEAT)
    expected = conv(x, EDGES) + 3
    conv.res = lambda x: torch.full((N, 1), 3.0).double()
    torch.testing.assert_close(conv(x, EDGES), expected)


@pytest.mark.parametrize("how", ["assigned", "registered", "attribute"])
@each_layer
def test_a_bias_may_go(name, how):
    layers = pair(name)
    for one in layers:
        bias = next(p for p in PARAMETERS[name.split()[0]] if p.endswith("bias"))
        module, leaf = of(one, bias)
        if how != "assigned":
            delattr(module, leaf)
        if how == "registered":
            module.register_parameter(leaf, None)
        else:
            setattr(module, leaf, None)
    check(layers)


@each_layer
def test_copies_and_checkpoints_compute_the_same(name):
    ours, theirs = pair(name)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        check((again, theirs))
    check((ours, theirs), lambda layer, x: checkpoint(layer, x, EDGES, use_reentrant=False))


@each_layer
def test_features_that_a_transform_has_left_behind_are_their_values(name):
    (conv, _), x, left = pair(name), numbers(N, FEAT), []
    torch.func.functionalize(lambda t: left.append(t * 1) or t)(x)
    torch.func.grad(lambda t: left.append(t * 1) or t.sum())(x)
    for one in left:
        torch.testing.assert_close(conv(one, EDGES).detach().clone(), conv(x, EDGES).detach())


@each_layer
def test_transforms_are_refused(name):
    (conv, _), x = pair(name), numbers(N, FEAT)
    for transform, given in ((torch.func.grad, x), (torch.vmap, x[None])):
        with pytest.raises(UnsupportedError, match=r"transforms of torch\.func"):
            transform(lambda x: conv(x, GRAPH).sum())(given)
