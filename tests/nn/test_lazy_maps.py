"""Layers that are made at their first features, against PyG's."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

import pyg_cases  # noqa: E402
from torch.nn import Linear, UninitializedParameter  # noqa: E402

from sparsefmt import ShapeError, nn  # noqa: E402
from sparsefmt.model.maps import read_map  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, FEAT, OUT = 6, 5, 4
LAYERS = {
    "gcn": lambda library, width: library.GCNConv(width, OUT),
    "sage": lambda library, width: library.SAGEConv(width, OUT),
    "sage of pairs": lambda library, width: library.SAGEConv((width, width), OUT),
    "sage of one width": lambda library, width: library.SAGEConv((width, FEAT), OUT),
    "sg": lambda library, width: library.SGConv(width, OUT),
    "gine": lambda library, width: library.GINEConv(Linear(FEAT, OUT), edge_dim=width),
}
EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 3, 4]])


def call(layer):
    x = torch.randn(N, FEAT, generator=torch.Generator().manual_seed(0))
    beside = (x[:5],) if isinstance(layer, nn.GINEConv | pyg.GINEConv) else ()
    kind = next(iter(layer.parameters()))
    x, *beside = (one.to(kind.dtype) for one in (x, *beside))
    torch.manual_seed(2)
    return layer(x, EDGES, *beside)


def both(name):
    return [one.float() for one in pyg_cases.both(lambda library: LAYERS[name](library, -1))]


def assert_same(mine, theirs):
    torch.testing.assert_close(call(mine), call(theirs))
    for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)


def uninitialised(layer):
    return [
        name for name, one in layer.named_parameters() if isinstance(one, UninitializedParameter)
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_the_first_features_draw_what_pygs_draws(name):
    mine, theirs = both(name)
    assert repr(mine) == repr(theirs)
    assert uninitialised(mine) == uninitialised(theirs) != []
    for layer in (mine, theirs):
        torch.manual_seed(4)  # for what is not lazy
        layer.reset_parameters()
        layer.reset_parameters()
    assert_same(mine, theirs)
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("name", LAYERS)
def test_a_map_is_torchs_own_from_then_on(name):
    mine, _ = both(name)
    call(mine)
    maps = [one for part, one in mine.named_modules() if part.startswith("lin")]
    assert maps
    assert all(read_map(one) and one.in_features == FEAT for one in maps)
    assert all("draw" not in vars(one) and not one._forward_pre_hooks for one in maps)
    assert pickle.loads(pickle.dumps(mine)).state_dict().keys() == mine.state_dict().keys()


@pytest.mark.parametrize("name", LAYERS)
def test_a_copy_and_another_dtype_are_made_at_their_own_first_features(name):
    mine, theirs = both(name)
    copied = [copy.deepcopy(one).double() for one in (mine, theirs)]
    assert_same(*copied)
    assert {one.dtype for one in copied[0].parameters()} == {torch.float64}
    assert uninitialised(mine)
    with torch.inference_mode():
        call(mine)
    assert_same(mine, theirs)
    call(mine).sum().backward()
    assert not any(one.is_inference() or one.grad is None for one in mine.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_states_load_both_ways_before_and_after(name):
    mine, theirs = both(name)
    states = [{**one.state_dict()} for one in (mine, theirs)]
    assert list(states[0]) == list(states[1])
    mine.load_state_dict(states[1])
    theirs.load_state_dict(states[0])
    assert uninitialised(mine) == uninitialised(theirs) != []
    call(theirs)
    mine.load_state_dict(theirs.state_dict())
    assert not uninitialised(mine)
    assert_same(mine, theirs)
    fresh = both(name)[1]
    fresh.load_state_dict(mine.state_dict())
    assert_same(mine, fresh)


def test_other_features_than_the_first_are_refused():
    mine, _ = both("gcn")
    call(mine)
    with pytest.raises(ShapeError, match="x has 7 features but the layer takes 5"):
        mine(torch.randn(N, 7), EDGES)
