"""Layers that run as one node read what torch keeps; what a user puts in its place counts as ever.

Results and gradients are those of the formula on dense matrices in float64, and of PyG's layers.
"""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from torch.func import functional_call  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sparsefmt import Graph, nn  # noqa: E402
from sparsefmt.errors import UnsupportedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, FEAT, HEADS = 9, 6, 2
A = (torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3).double()
A.fill_diagonal_(0)[-1] = 0  # the last vertex has no neighbours
EDGES = A.t().nonzero().t().flip(1)
GRAPH = Graph.from_edge_index(EDGES, num_nodes=N)


def plus(y, p, name):
    return y + p[name] if p.get(name) is not None else y


def gcn(x, p):
    both = A + torch.eye(N).double()
    d = both.sum(1).rsqrt()
    return plus(d[:, None] * both * d @ (x @ p["lin.weight"].T), p, "bias")


def sage(x, p):
    means = A @ x / A.sum(1, keepdim=True).clamp(min=1)
    return plus(means @ p["lin_l.weight"].T + x @ p["lin_r.weight"].T, p, "lin_l.bias")


def gin(x, p):
    sums = (1 + p["eps"]) * x + A @ x
    return plus(sums @ p["nn.0.weight"].T, p, "nn.0.bias").relu() @ p["nn.2.weight"].T


def gat(x, p):
    h = (x @ p["lin.weight"].T).view(N, HEADS, -1)
    source, target = ((h * p[name]).sum(-1) for name in ("att_src", "att_dst"))
    scores = torch.nn.functional.leaky_relu(target[:, None] + source, 0.2)
    without = (A + torch.eye(N) == 0)[:, :, None]
    weights = scores.masked_fill(without, -torch.inf).softmax(1)
    return plus(torch.einsum("ijh,jhf->ihf", weights, h).flatten(1), p, "bias")


def network(width):
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(FEAT, width), torch.nn.ReLU(), linear(width, 3, bias=False))


LAYERS = {
    "gcn": (gcn, lambda lib: lib.GCNConv(FEAT, 5)),
    "sage": (sage, lambda lib: lib.SAGEConv(FEAT, 5)),
    "sage of maps": (sage, lambda lib: lib.SAGEConv(FEAT, 2)),
    "gin": (gin, lambda lib: lib.GINConv(network(5), 0.25)),
    "gin of maps": (gin, lambda lib: lib.GINConv(network(2), 0.25)),
    "gat": (gat, lambda lib: lib.GATConv(FEAT, 4, heads=HEADS)),
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


def layer(name, lib=nn):
    torch.manual_seed(1)
    made = LAYERS[name][1](lib).double()
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, dtype=one.dtype) / 2)
    return made


def features():
    return torch.randn(N, FEAT, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def tensors(module):
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def of(module, path):
    *parts, name = path.split(".")
    for one in parts:
        module = getattr(module, one)
    return module, name


def gradients(y, given):
    return torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum(), given)


def check(name, call, given):
    """Compare a call with the formula: the result and the gradients of all that is given."""
    x = features().requires_grad_()
    apart = {key: value.detach().clone().requires_grad_() for key, value in given.items()}
    like = x.detach().clone().requires_grad_()
    y, expected = call(x), LAYERS[name][0](like, apart)
    torch.testing.assert_close(y, expected)
    wanted = [key for key, value in given.items() if value.requires_grad]
    found = gradients(y, [x, *(given[key] for key in wanted)])
    torch.testing.assert_close(found, gradients(expected, [like, *(apart[key] for key in wanted)]))


@pytest.mark.parametrize("graph", [EDGES, GRAPH, A.to_sparse()], ids=["edges", "graph", "adj_t"])
@each_layer
def test_a_layer_computes_its_formula_and_what_pygs_layer_computes(name, graph):
    conv, theirs = layer(name), layer(name, pyg)
    theirs.load_state_dict(conv.state_dict())
    check(name, lambda x: conv(x, graph), tensors(conv))
    check(name, lambda x: theirs(x, EDGES), tensors(theirs))


def as_attribute(module, name, value):
    delattr(module, name)
    setattr(module, name, value)


def as_buffer(module, name, value):
    delattr(module, name)
    module.register_buffer(name, value.detach())


def before_the_parameter(module, name, value):
    module.__dict__[name] = value


@pytest.mark.parametrize("place", [as_attribute, as_buffer, before_the_parameter])
@each_parameter
def test_a_tensor_in_the_place_of_a_parameter_counts(name, parameter, place):
    conv = layer(name)
    module, leaf = of(conv, parameter)
    value = getattr(module, leaf).detach().mul(2).requires_grad_().clone()
    place(module, leaf, value)
    given = tensors(conv) | ({parameter: value} if place is not as_buffer else {})
    check(name, lambda x: conv(x, EDGES), given)


@pytest.mark.parametrize("left_behind", [False, True])
@each_parameter
def test_functional_call_counts_with_what_a_transform_has_left_behind(name, parameter, left_behind):
    conv, left = layer(name), []
    value = tensors(conv)[parameter].detach().mul(2).requires_grad_(not left_behind).clone()
    given = tensors(conv) | {parameter: value}
    if left_behind:
        torch.func.grad(lambda t: left.append(t) or t.sum())(value)
        value = left[0]
    check(name, lambda x: functional_call(conv, {parameter: value}, (x, EDGES)), given)


@each_parameter
def test_a_parametrization_counts(name, parameter):
    conv = layer(name)
    given, (module, leaf) = tensors(conv), of(conv, parameter)
    parametrize.register_parametrization(module, leaf, torch.nn.Tanh())
    with parametrize.cached():
        check(name, lambda x: conv(x, EDGES), given | {parameter: getattr(module, leaf)})


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", ["gcn", "gin", "gat"])
def test_hooks_of_a_map_are_called(name, kind):
    conv, seen = layer(name), []
    module, _ = of(conv, MAPS[name] + ".weight")
    getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(1))
    check(name, lambda x: conv(x, EDGES), tensors(conv))
    assert seen


def in_the_dict(conv, name, module):
    conv.__dict__[name] = module


def in_the_dict_alone(conv, name, module):
    delattr(conv, name)
    conv.__dict__[name] = module


def of_a_class(conv, name, module):
    conv.__class__ = type("Other", (type(conv),), {name: property(lambda self: module)})


@pytest.mark.parametrize("place", [in_the_dict, in_the_dict_alone, of_a_class])
@each_layer
def test_a_module_in_the_place_of_another_counts(name, place):
    conv = layer(name)
    part = MAPS[name.split()[0]].split(".")[0]
    other = copy.deepcopy(getattr(conv, part))
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(2)
    given = tensors(conv) | {f"{part}.{key}": one for key, one in other.named_parameters()}
    place(conv, part, other)
    check(name, lambda x: conv(x, EDGES), given)


class Doubling:
    reset_parameters = staticmethod(lambda: None)

    def __call__(self, x):
        return 2 * x


def test_parts_that_are_no_modules_or_parameters_count():
    x = features()
    expected = 2 * (x + A @ x)
    torch.testing.assert_close(nn.GINConv(Doubling()).double()(x, EDGES), expected)
    conv = nn.GINConv(torch.nn.Identity()).double()
    conv.__dict__["nn"] = Doubling()
    torch.testing.assert_close(conv(x, EDGES), expected)
    conv = nn.GINConv(torch.nn.Identity(), 0.5).double()
    conv.__dict__["eps"] = torch.full((1,), 2.0).double()
    torch.testing.assert_close(conv(x, EDGES), 3 * x + A @ x)
    conv = layer("gat")
    expected = conv(x, EDGES) + 3
    conv.res = lambda x: torch.full((N, 1), 3.0).double()
    torch.testing.assert_close(conv(x, EDGES), expected)


@pytest.mark.parametrize("how", ["assigned", "registered", "attribute"])
@each_layer
def test_a_bias_may_go(name, how):
    conv = layer(name)
    module, leaf = of(conv, next(p for p in PARAMETERS[name.split()[0]] if p.endswith("bias")))
    if how != "assigned":
        delattr(module, leaf)
    if how == "registered":
        module.register_parameter(leaf, None)
    else:
        setattr(module, leaf, None)
    check(name, lambda x: conv(x, EDGES), tensors(conv))


@each_layer
def test_copies_and_checkpoints_compute_the_same(name):
    conv = layer(name)
    for again in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        check(name, lambda x: again(x, EDGES), tensors(again))  # noqa: B023  # called at once
    check(name, lambda x: checkpoint(conv, x, EDGES, use_reentrant=False), tensors(conv))


@each_layer
def test_features_that_a_transform_has_left_behind_are_their_values(name):
    conv, x, left = layer(name), features(), []
    torch.func.functionalize(lambda t: left.append(t * 1) or t)(x)
    torch.func.grad(lambda t: left.append(t * 1) or t.sum())(x)
    for one in left:
        torch.testing.assert_close(conv(one, EDGES).detach().clone(), conv(x, EDGES).detach())


@each_layer
def test_transforms_are_refused(name):
    conv, x = layer(name), features()
    for transform, given in ((torch.func.grad, x), (torch.vmap, x[None])):
        with pytest.raises(UnsupportedError, match=r"transforms of torch\.func"):
            transform(lambda x: conv(x, GRAPH).sum())(given)
