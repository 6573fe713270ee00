"""Every argument of PyG's layers: taken with the same effect, or refused by its name.

A row of ``ROWS`` is a layer.  What PyG's constructor and forward take is read from their
signatures: an argument that no row has fails here.
"""

import copy
import inspect
import itertools
import pickle
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from pyg_argument_cases import (  # noqa: E402
    EDGE_DIM,
    FEAT,
    OUT,
    PASSED,
    PASSED_OF_PAIRS,
    REDUCTIONS,
    REFUSED,
    UPSTREAM,
    N,
    Row,
    edge_features,
    flags,
    nothing,
    weights,
)
from pyg_attention_cases import ATTENTION  # noqa: E402
from pyg_cases import assert_same, both, is_made, make, numbers, outcome, seed  # noqa: E402
from pyg_product_cases import PRODUCTS  # noqa: E402
from torch.nn import Linear, ReLU, Sequential  # noqa: E402

from sparsefmt import Graph, ShapeError, UnsupportedError, nn  # noqa: E402
from sparsefmt.model.maps import read_map  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

#: Arguments of PyG's ``MessagePassing``, which its layers take as keywords.
PASSING = dict(inspect.signature(pyg.MessagePassing.__init__).parameters)
del PASSING["self"]


def network():
    return Sequential(Linear(FEAT, 5), ReLU(), Linear(5, OUT))


def of(kind):
    """Return what makes a layer by its options, one of them ``in_channels``."""
    return lambda library, **options: make(
        library, kind, options.pop("in_channels", FEAT), OUT, **options
    )


ROWS = (
    {
        "GCNConv": Row(
            of("GCNConv"),
            PASSED
            | flags("improved", "cached", "normalize", "bias")
            | {"in_channels": [-1], "add_self_loops": [None, False, True], "aggr": REDUCTIONS},
            ("in_channels", "out_channels"),
            [nothing, weights],
            REFUSED | {"aggr": [*REFUSED["aggr"], (["add", "max"], "has one aggregation")]},
            together=[
                {"improved": True, "aggr": "max"},
                {"add_self_loops": False, "aggr": "mean", "flow": UPSTREAM},
                {"improved": True, "flow": UPSTREAM, "bias": False},
            ],
        ),
        "SAGEConv": Row(
            of("SAGEConv"),
            PASSED_OF_PAIRS
            | flags("normalize", "root_weight", "project", "bias")
            | {
                "in_channels": [-1, (FEAT, FEAT), (-1, -1)],
                "aggr": [
                    *(*REDUCTIONS, ["mean", "max"], ("sum", "min", "mean"), "mul", "softmax"),
                    *(["std", "mean"], pyg.aggr.PowerMeanAggregation(p=2.0)),
                ],
            },
            ("in_channels", "out_channels"),
            [nothing],
            {
                "aggr": [
                    (None, "aggr is None"),
                    ([], r"aggr is \[\]"),
                    ("colour", "'colour', which no"),
                ],
                "node_dim": REFUSED["node_dim"],
            },
            pairs=True,
            together=[
                {"aggr": ["mean", "max"], "project": True, "normalize": True},
                {"in_channels": (FEAT, FEAT), "bias": False},
                {"root_weight": False, "normalize": True, "flow": UPSTREAM},
            ],
        ),
        "GINConv": Row(
            lambda library, **options: library.GINConv(network(), **options),
            PASSED_OF_PAIRS | {"eps": [0.0, 0.3], "train_eps": [False, True], "aggr": REDUCTIONS},
            ("nn",),
            [nothing],
            REFUSED | {"aggr": [*REFUSED["aggr"], (["add", "max"], "has one aggregation")]},
            pairs=True,
            together=[{"train_eps": True, "aggr": "max", "flow": UPSTREAM}],
        ),
        "GINEConv": Row(
            lambda library, **options: library.GINEConv(network(), **options),
            PASSED_OF_PAIRS
            | flags("train_eps")
            | {"eps": [0.0, 0.3], "edge_dim": [None, FEAT, -1], "aggr": ["add", "sum", "mean"]},
            ("nn",),
            [edge_features],
            REFUSED | {"aggr": [*REFUSED["aggr"], ("max", "GINEConv has no kernel")]},
            pairs=True,
            together=[{"train_eps": True, "aggr": "mean", "flow": UPSTREAM, "edge_dim": FEAT}],
        ),
        "SGConv": Row(
            of("SGConv"),
            PASSED
            | flags("cached", "add_self_loops", "bias")
            | {"in_channels": [-1], "K": [0, 1, 3], "aggr": REDUCTIONS},
            ("in_channels", "out_channels"),
            [nothing, weights],
            REFUSED,
            together=[{"K": 2, "flow": UPSTREAM, "add_self_loops": False}],
        ),
        "TAGConv": Row(
            of("TAGConv"),
            PASSED
            | flags("normalize", "bias")
            # PyG's own breaks with -1.
            | {"in_channels": [FEAT], "K": [0, 1, 3], "aggr": REDUCTIONS},
            ("in_channels", "out_channels"),
            [nothing, weights],
            REFUSED,
            together=[{"K": 2, "flow": UPSTREAM, "normalize": False}],
        ),
    }
    | ATTENTION
    | PRODUCTS
)
SINGLE = [
    (name, {argument: value})
    for name, row in ROWS.items()
    for argument, values in row.same.items()
    for value in values
]
TOGETHER = [(name, options) for name, row in ROWS.items() for options in row.together]


def parameters(function):
    """Its parameters behind ``self``, without those that gather others."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = list(inspect.signature(function).parameters.values())[1:]
    return [one for one in found if one.kind not in kinds]


@pytest.mark.parametrize("name", ROWS)
def test_the_table_has_every_argument_of_pygs_layer(name):
    row, theirs = ROWS[name], getattr(pyg, name)
    wanted = {one.name for one in parameters(theirs.__init__)} | set(PASSING)
    assert wanted == {*row.same, *row.needed, *row.refused}
    given = {"x", "edge_index", *({"size"} if row.pairs else ())}
    edges = torch.zeros(2, 1, dtype=torch.long)
    given |= {key for way in row.forward for key in way(edges)}
    given |= {"edge_attr"} if row.of_edges else set()
    assert {one.name for one in parameters(theirs.forward)} == given


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_arguments_have_pygs_places_and_defaults(name, method):
    mine, theirs = (parameters(getattr(getattr(one, name), method)) for one in (nn, pyg))
    positional = [one for one in mine if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(one.name, repr(one.default)) for one in positional] == [
        (one.name, repr(one.default)) for one in theirs
    ]


# Graphs, each with isolated vertices


def directed():
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randint(0, N - 1, (2, 30), generator=generator)
    return torch.stack([source, target])[:, source != target]


def looped():
    """With duplicated edges too; one loop of a vertex at most."""
    edges = directed()
    loops = torch.tensor([[1, 4, 5], [1, 4, 5]])
    return torch.cat([edges[:, :9], loops, edges[:, 9:], edges[:, 3:8]], 1)


def with_repeated_loops():
    edges = looped()
    return torch.cat([edges, torch.tensor([[4, 7, 7, 4], [4, 7, 7, 4]]), edges[:, :2]], 1)


def empty():
    return torch.zeros(2, 0, dtype=torch.long)


def hub():
    """All vertices but one send to the first, which has a loop; the others have no entries."""
    return torch.stack([torch.arange(N - 1), torch.zeros(N - 1, dtype=torch.long)])


GRAPHS = [directed, looped, with_repeated_loops, empty, hub]


def name_of(value):
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return None


def placed(values, device):
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in values.items()}


ON_GPU = [one for one in [*((name, {}) for name in ROWS), *TOGETHER] if "aggr" not in one[1]]
PLACES = [(*one, "cpu") for one in SINGLE + TOGETHER]
PLACES += [pytest.param(*one, "cuda", marks=pytest.mark.gpu) for one in ON_GPU]


@pytest.mark.covering("name", "options", "graph", one_in=3)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("name", "options", "device"), PLACES, ids=name_of)
def test_an_argument_has_pygs_effect(name, options, device, graph):
    row = ROWS[name]
    if row.of_edges and options.get("edge_dim") is not None:
        ways = [lambda edges: edge_features(edges, EDGE_DIM)]
        options = options | {"edge_dim": EDGE_DIM if options["edge_dim"] > 0 else -1}
    else:
        ways = row.forward
    edges, x = graph().to(device), [numbers(N, FEAT, device=device)]
    same = partial(assert_same, close=row.close)
    for way in ways:
        given = placed(way(edges), device)
        repeated = graph is with_repeated_loops and given.get("edge_weight") is not None
        if repeated and device == "cuda":
            continue  # of several loops PyG takes any there
        mine, theirs = both(partial(row.make, **options), device)
        assert repr(mine).startswith(repr(theirs)[:-1].split("(nn=")[0])
        ours, expected = (outcome(one, x, edges, given) for one in (mine, theirs))
        if repeated:
            # Of several loops the last counts, but PyG's gradient is that of each.
            loop = edges[0] == edges[1]
            ours[2][loop] = expected[2][loop] = 0
        same(ours, expected)
        states = mine.state_dict(), theirs.state_dict()
        assert list(states[0]) == list(states[1])
        theirs.load_state_dict(states[0])
        # Again, in evaluation, where the graph and parameters are known, and of a graph.
        again = theirs.eval()(x[0], edge_index=edges, **given)
        same([mine.eval()(x[0], edge_index=edges, **given)], [again])
        if not getattr(mine, "cached", False):
            graph_of_ours = Graph.from_edge_index(edges, num_nodes=N)
            same([mine(x[0], edge_index=graph_of_ours, **given)], [again])
        for layer in (mine, theirs):
            seed(8, device)
            layer.reset_parameters()
        assert_same(*(list(filter(is_made, one.state_dict().values())) for one in (mine, theirs)))


@pytest.mark.parametrize("name", ROWS)
def test_layers_are_decomposed_without_effect(name):
    row, edges = ROWS[name], looped()
    x, given = [numbers(N, FEAT)], row.forward[-1](looped())
    made = [both(partial(row.make, decomposed_layers=count))[0] for count in (1, 3)]
    made[0].decomposed_layers = 2
    assert_same(*(outcome(one, x, edges, given) for one in made))


@pytest.mark.parametrize("graph", GRAPHS)
def test_fa_takes_weights_of_edges_where_it_does_not_normalise(graph):
    edges, x = graph(), [numbers(N, FEAT)]
    given = weights(edges) | {"x_0": numbers(N, FEAT, seed=8)}
    made = both(partial(ROWS["FAConv"].make, normalize=False, dropout=0.4))
    assert_same(*(outcome(one, x, edges, given) for one in made))
    for normalize, more in ((True, given), (False, {"x_0": given["x_0"]})):
        with pytest.raises(ShapeError, match=f"and normalize is {normalize}: the layer computes"):
            ROWS["FAConv"].make(nn, normalize=normalize).double()(*x, edge_index=edges, **more)


def test_cluster_gcn_takes_the_loops_of_a_graph():
    """PyG's needs one loop of each vertex then, and divides by degrees in float32."""
    own = torch.arange(N).expand(2, N)
    edges, options = torch.cat([directed(), own], 1), {"add_self_loops": False, "diag_lambda": 0.5}
    make = partial(ROWS["ClusterGCNConv"].make, **options)
    results = [outcome(one, [numbers(N, FEAT)], edges) for one in both(make)]
    assert_same(*results, 1e-6)


def test_tag_makes_all_its_weights_at_the_first_features():
    layer, x, edges = nn.TAGConv(-1, OUT, K=2).double(), numbers(N, FEAT), looped()
    assert layer(x, edges).shape == (N, OUT)
    assert [tuple(one.weight.shape) for one in layer.lins] == [(OUT, FEAT)] * 3


#: Layers of two ends; the last three take no targets without features.
PAIRS = [
    *(name for name, row in ROWS.items() if row.pairs),
    "GATv2Conv",
    "TransformerConv",
    "LEConv",
]
WIDE = 3  # of targets, where a layer tells them from sources


def options_of_pairs(name, sizes, device):
    """Options beside features of two ends; PyG adds rows of the wrong end where they flow up."""
    row, pair = ROWS[name], {"in_channels": (FEAT, WIDE)}
    singles = [{key: value} for key, values in row.same.items() for value in values]
    given = [{}, *row.together]
    if "in_channels" in row.same:
        given.append(pair)
    if device == "cpu" and sizes == (9, 5):
        alone = {"in_channels", "share_weights"}
        given += [one if alone & {*one} or pair not in given else one | pair for one in singles]
    of_edges = [one for one in given if not row.of_edges or "edge_dim" not in one]
    of_edges = [one for one in of_edges if one.get("combine_root") != "self_loop"]
    return [one for one in of_edges if "flow" not in one and "decomposed_layers" not in one]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("sizes", [(9, 5), (5, 9), (7, 7)])
def test_features_of_two_ends_have_pygs_effect(device, name, sizes):
    row = ROWS[name]
    generator = torch.Generator().manual_seed(2)
    ends = torch.stack([torch.randint(0, n, (25,), generator=generator) for n in sizes])
    edges, graph = ends.to(device), Graph.from_edge_index(ends, num_nodes=sizes).to(device)
    for options, way in itertools.product(options_of_pairs(name, sizes, device), row.forward):
        reduced = "fill_value" in row.same and isinstance(options.get("fill_value", ""), str)
        if reduced and sizes[1] > sizes[0] and options.get("add_self_loops", True) and way(ends):
            continue  # PyG breaks: its loops have features of as many vertices as sources
        wide = WIDE if options.get("in_channels") == (FEAT, WIDE) else FEAT
        pairs = zip(sizes, (FEAT, wide), strict=True)
        x = [numbers(n, k, seed=n, device=device) for n, k in pairs]
        beside = placed(way(ends), device)
        mine, theirs = both(partial(row.make, **options), device)
        expected = outcome(theirs, x, edges, beside)
        for given in (edges, graph):
            for more in ({}, {"size": sizes}) if row.pairs else ({},):
                assert_same(outcome(mine, x, given, beside | more), expected)
        if row.pairs:
            for size in (sizes,) if sizes[1] > sizes[0] else (sizes, None):
                alone = beside | {"size": size}
                call = (x[0], None), edges
                assert_same([mine(*call, **alone)], [theirs(*call, **alone)])


STATIC = [one for one in [*((name, {}) for name in ROWS), *TOGETHER] if ROWS[one[0]].static]


@pytest.mark.parametrize(("name", "options"), STATIC, ids=name_of)
def test_features_of_one_graph_have_pygs_effect(name, options):
    row, edges = ROWS[name], looped()
    if row.of_edges and "edge_dim" in options:
        pytest.skip("PyG's layer takes none")
    x = numbers(3, N, FEAT)
    for way in row.forward:
        mine, theirs = both(partial(row.make, **options))
        results = [outcome(one, [x], edges, way(edges)) for one in (mine, theirs)]
        assert_same(*results, row.close)


@pytest.mark.parametrize("name", ROWS)
def test_what_only_pygs_can_is_refused_by_name(name):
    row = ROWS[name]
    for argument, values in row.refused.items():
        for value, text in values:
            with pytest.raises(UnsupportedError, match=text):
                row.make(nn, **{argument: value})
    for library in (nn, pyg):
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            row.make(library, colour=1)
    layer = row.make(nn)
    for step in ("propagate", "message", "register_propagate_forward_pre_hook", "jittable"):
        with pytest.raises(UnsupportedError, match=f"{name}.{step}: "):
            getattr(layer, step)(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"Mine defines message\(\)"):
        type("Mine", (type(layer),), {"message": lambda self, x_j: x_j})
    if row.pairs:
        graph = Graph.from_edge_index(directed(), num_nodes=N)
        x, given = numbers(N, FEAT).float(), row.forward[0](directed())
        given = {key: value.float() for key, value in given.items()}
        with pytest.raises(UnsupportedError, match="flow is 'target_to_source' beside features"):
            row.make(nn, flow=UPSTREAM)((x, x.clone()), graph, **given)


# Layers that are made at their first features

LAZY = {
    "gcn": lambda library, width: library.GCNConv(width, OUT),
    "sage": lambda library, width: library.SAGEConv(width, OUT),
    "sage of pairs": lambda library, width: library.SAGEConv((width, width), OUT),
    "sage of one width": lambda library, width: library.SAGEConv((width, FEAT), OUT),
    "sg": lambda library, width: library.SGConv(width, OUT),
    "gine": lambda library, width: library.GINEConv(Linear(FEAT, OUT), edge_dim=width),
}


def called(layer):
    x, edges = numbers(N, FEAT), directed()
    beside = [edge_features(edges)["edge_attr"]] if hasattr(layer, "nn") else []
    kind = next(iter(layer.parameters())).dtype
    seed(2)
    return layer(x.to(kind), edges, *(one.to(kind) for one in beside))


def lazy(name):
    return [one.float() for one in both(lambda library: LAZY[name](library, -1))]


def assert_drawn_alike(mine, theirs):
    torch.testing.assert_close(called(mine), called(theirs))
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


def waiting(layer):
    return [name for name, one in layer.named_parameters() if not is_made(one)]


@pytest.mark.parametrize("name", LAZY)
def test_the_first_features_draw_what_pygs_draws(name):
    mine, theirs = lazy(name)
    assert repr(mine) == repr(theirs)
    assert waiting(mine) == waiting(theirs) != []
    for layer in (mine, theirs):
        seed(4)  # for what is not lazy
        layer.reset_parameters()
        layer.reset_parameters()
    assert_drawn_alike(mine, theirs)
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("name", LAZY)
def test_a_map_is_torchs_own_from_then_on(name):
    mine, _ = lazy(name)
    called(mine)
    maps = [one for part, one in mine.named_modules() if part.startswith("lin")]
    assert maps
    assert all(read_map(one) and one.in_features == FEAT for one in maps)
    assert all("draw" not in vars(one) and not one._forward_pre_hooks for one in maps)
    assert pickle.loads(pickle.dumps(mine)).state_dict().keys() == mine.state_dict().keys()


@pytest.mark.parametrize("name", LAZY)
def test_a_copy_and_another_dtype_are_made_at_their_own_first_features(name):
    mine, theirs = lazy(name)
    copied = [copy.deepcopy(one).double() for one in (mine, theirs)]
    assert_drawn_alike(*copied)
    assert {one.dtype for one in copied[0].parameters()} == {torch.float64}
    assert waiting(mine)
    with torch.inference_mode():
        called(mine)
    assert_drawn_alike(mine, theirs)
    called(mine).sum().backward()
    assert not any(one.is_inference() or one.grad is None for one in mine.parameters())


@pytest.mark.parametrize("name", LAZY)
def test_states_load_both_ways_before_and_after(name):
    mine, theirs = lazy(name)
    states = [{**one.state_dict()} for one in (mine, theirs)]
    assert list(states[0]) == list(states[1])
    mine.load_state_dict(states[1])
    theirs.load_state_dict(states[0])
    assert waiting(mine) == waiting(theirs) != []
    called(theirs)
    mine.load_state_dict(theirs.state_dict())
    assert not waiting(mine)
    assert_drawn_alike(mine, theirs)
    fresh = lazy(name)[1]
    fresh.load_state_dict(mine.state_dict())
    assert_drawn_alike(mine, fresh)


def test_other_features_than_the_first_are_refused():
    mine, _ = lazy("gcn")
    called(mine)
    with pytest.raises(ShapeError, match="x has 7 features but the layer takes 4"):
        mine(torch.randn(N, 7), directed())
