"""Layers over a sample of each row, in evaluation and in training."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import entries, naive_spmm  # noqa: E402
from laws.calls import shares  # noqa: E402
from test_nn import F_IN, F_OUT, LAYERS, N, assert_same, features, gradients  # noqa: E402
from torch.nn import Linear  # noqa: E402

from sparsefmt import CSR, Graph  # noqa: E402
from sparsefmt.nn import GINConv, SAGEConv  # noqa: E402

STRATEGIES = ("bucket", "fastrand", "random")

pytestmark = pytest.mark.usefixtures("one_thread")


def long_graph(device="cpu", *, weighted=False, loops=True, dtype=np.float64):
    """Of the vertices that ``features`` are for; 12 entries a row in the mean, an empty row."""
    rng = np.random.default_rng(5)
    row = np.sort(rng.choice([0, 2, 3, 4, 5, 6, 7, 8], 12 * N))
    col = rng.integers(0, N, len(row))
    col[row == col] = (col[row == col] + 1) % N
    if loops:
        at = np.searchsorted(row, [0, 4])
        row, col = np.insert(row, at, [0, 4]), np.insert(col, at, [0, 4])
    indptr = np.searchsorted(row, np.arange(N + 1)).astype(np.int32)
    data = rng.random(len(row)).astype(dtype) if weighted else None
    return Graph(CSR(indptr, col.astype(np.int32), data, shape=(N, N))).to(device)


def doubles(name, device="cpu", **options):
    """A layer in float64, without kinks."""
    layer = LAYERS[name](**options)
    if name == "gin":
        layer.nn = Linear(F_IN, F_OUT)
    return layer.to(device, torch.float64)


def expected(layer, x, graph, w, share):
    """What a layer computes of entries with these shares, in dense float64 products."""
    x = x.detach().cpu().double()
    a = torch.ones(graph.nnz, dtype=torch.float64) if w is None else w.detach().cpu()
    own = {name: one.detach().cpu() for name, one in layer.state_dict().items()}
    if isinstance(layer, SAGEConv):
        mean = naive_spmm(graph, x, a * share)
        return mean @ own["lin_l.weight"].T + own["lin_l.bias"] + x @ own["lin_r.weight"].T
    if isinstance(layer, GINConv):
        y = naive_spmm(graph, x, a * share) + (1 + own["eps"]) * x
        return y @ own["nn.weight"].T + own["nn.bias"]
    rows, cols = entries(graph)
    missing = torch.ones(N, dtype=torch.float64)
    missing[rows[rows == cols]] = 0
    degree = missing + torch.zeros_like(missing).index_add(0, rows, a)
    r, h = degree.rsqrt(), x @ own["lin.weight"].T
    return naive_spmm(graph, h, a * share, r, r) + (missing / degree)[:, None] * h + own["bias"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_with_the_sample_and_the_normalisation_of_all(device, name, strategy):
    x = features(device, dtype=torch.float64)
    for loops, weighted, given, training in itertools.product((False, True), repeat=4):
        graph = long_graph(device, weighted=weighted, loops=loops)
        own = torch.from_dlpack(graph.csr.data).clone() if weighted else None
        w = torch.rand(graph.nnz, dtype=torch.float64, device=device) if given else None
        factors = {"mean": True} if name == "sage" else {"rescale": True}
        width = {"training_sample": 5} if training else {"sample": 5}
        layer = doubles(name, device, **width, strategy=strategy).train(training)
        torch.manual_seed(3)
        seed = int(torch.randint(2**63 - 1, (1,), device=device))
        torch.manual_seed(3)
        y = layer(x, graph, edge_weight=w)
        exact = expected(
            *(layer, x, graph, own if w is None else w),
            shares(graph, 5, "random" if training else strategy, seed, **factors),
        )
        torch.testing.assert_close(y.detach().cpu(), exact)


@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_of_everything_is_the_layer_without(device, name):
    x = features(device, dtype=torch.float64)
    for loops, weighted, training in itertools.product((False, True), repeat=3):
        graph = long_graph(device, weighted=weighted, loops=loops)
        plain = doubles(name, device)
        layer = doubles(name, device, sample=2**40, training_sample=10**30).train(training)
        layer.load_state_dict(plain.state_dict())
        assert_same(gradients(layer, x, graph), gradients(plain, x, graph))
        w = torch.rand(graph.nnz, dtype=torch.float64, device=device, requires_grad=True)
        y, z = layer(x, graph, edge_weight=w), plain(x, graph, edge_weight=w)
        assert_same(
            [y, *torch.autograd.grad(y.sum(), (x, w))], [z, *torch.autograd.grad(z.sum(), (x, w))]
        )


@pytest.mark.parametrize("name", LAYERS)
def test_training_draws_and_evaluation_does_not(device, name):
    graph, x = long_graph(device), features(device)
    plain = LAYERS[name]().to(device)
    both = LAYERS[name](sample=3, training_sample=4).to(device)
    inference, training = (
        LAYERS[name](**{key: 3}).to(device) for key in ("sample", "training_sample")
    )
    for layer in (both, inference, training):
        layer.load_state_dict(plain.state_dict())
    whole = plain(x, graph)
    for layer in (both, training):
        first, second = layer(x, graph), layer(x, graph)
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        drawn = layer(x, graph)
        torch.manual_seed(3)
        assert torch.equal(drawn, layer(x, graph))
    assert torch.equal(inference(x, graph), whole)  # trains on all entries
    for layer in (both, inference, training):
        layer.eval()
    assert torch.equal(training(x, graph), whole)
    assert torch.equal(both(x, graph), inference(x, graph))
    assert not torch.equal(both(x, graph), whole)


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_dict_and_a_repr_know_what_is_weights_and_what_is_not(name):
    plain, layer = LAYERS[name](), LAYERS[name](sample=64, training_sample=8, strategy="bucket")
    assert [*layer.state_dict()] == [*plain.state_dict()]
    layer.load_state_dict(plain.state_dict())
    assert repr(layer).endswith(", sample=64, training_sample=8, strategy='bucket')")
    assert repr(LAYERS[name](training_sample=8)).endswith(", training_sample=8)")
    assert repr(layer).startswith(repr(plain)[:-1].split("(nn=")[0])
    assert "sample" not in repr(plain)
