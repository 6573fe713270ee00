"""GCN, SAGE and GIN: MaxK, samples, kept factors, networks of users, dtypes, pickles."""

import gc
import itertools
import warnings
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import entries, naive_spmm, results  # noqa: E402
from laws.calls import assert_same, shares  # noqa: E402
from op_cases import note_calls  # noqa: E402
from torch.nn import Linear, ReLU, Sequential  # noqa: E402

from sparsefmt import CSR, DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import aggregate_with_own, cbsr, maxk, spmm  # noqa: E402
from sparsefmt.nn import GATConv, GATv2Conv, GCNConv, GINConv, MaxK, SAGEConv  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, F_IN, F_OUT = 9, 6, 8


def mlp():
    return Sequential(Linear(F_IN, 7), ReLU(), Linear(7, F_OUT))


LAYERS = {
    "gcn": lambda **options: GCNConv(F_IN, F_OUT, **options),
    "sage": lambda **options: SAGEConv(F_IN, F_OUT, **options),
    "gin": lambda **options: GINConv(mlp(), eps=0.25, **options),
}


def square_graph(device="cpu", *, weighted=False):
    """Directed, with empty rows; with loops, one of each vertex at most, at some of them."""
    rng = np.random.default_rng(3)
    dense = rng.random((N, N)) * (rng.random((N, N)) < 0.4) * (np.arange(N) % 4 != 1)[:, None]
    np.fill_diagonal(dense, (np.arange(N) % 3 == 0) * 0.7)
    row, col = np.nonzero(dense)
    indptr = np.searchsorted(row, np.arange(N + 1)).astype(np.int32)
    data = dense[row, col].astype(np.float32) if weighted else None
    return Graph(CSR(indptr, col.astype(np.int32), data, shape=(N, N))).to(device)


def features(device, *, dtype=torch.float32, grad=True):
    x = torch.randn(N, F_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_(grad)


@pytest.mark.parametrize("maxk_on", ["input", "mapped"])
@pytest.mark.parametrize("bias", [True, False])
def test_k_is_the_non_linearity_of_what_is_aggregated(device, bias, maxk_on):
    """Of the layer's input, for all of its parts, or of what the neighbours' weights make of it."""
    graph, x = square_graph(device, weighted=True), features(device, dtype=torch.float64)
    graph = graph.with_data(graph.csr.data.astype(np.float64))

    def chosen(lin):
        return lin(maxk(x, 3)) if maxk_on == "input" else maxk(lin(x), 3)

    options = {"k": 3, "bias": bias, "maxk_on": maxk_on}
    gcn = GCNConv(F_IN, F_OUT, **options).to(device, torch.float64)
    A = torch.from_numpy(graph.to("cpu").csr.toarray()).to(device)
    A = A + torch.diag((A.diagonal() == 0).double())
    r = A.sum(1).rsqrt()
    expected = (r[:, None] * A * r) @ chosen(gcn.lin)
    torch.testing.assert_close(gcn(x, graph), expected + gcn.bias if bias else expected)
    graph = square_graph(device)
    sage = SAGEConv(F_IN, F_OUT, **options).to(device, torch.float64)
    h = spmm(graph, chosen(lambda x: x @ sage.lin_l.weight.T), reduce="mean")
    h = h + sage.lin_r(maxk(x, 3) if maxk_on == "input" else x)
    torch.testing.assert_close(sage(x, graph), h + sage.lin_l.bias if bias else h)
    names = [name for layer in (gcn, sage) for name, _ in layer.named_parameters()]
    assert bias == any("bias" in name for name in names)


def test_k_of_an_input_is_that_of_both_ends(device):
    x, graph = features(device, dtype=torch.float64), square_graph(device)
    gin = GINConv(mlp(), eps=0.25, k=2).to(device, torch.float64)
    plain = GINConv(gin.nn, eps=0.25).to(device, torch.float64)
    torch.testing.assert_close(gin(x, graph), plain(MaxK(2)(x), graph))
    both = SAGEConv((F_IN, F_IN), F_OUT, k=2).to(device, torch.float64)
    without = SAGEConv((F_IN, F_IN), F_OUT).to(device, torch.float64)
    without.load_state_dict(both.state_dict())
    ends = x, x.flip(1)
    torch.testing.assert_close(both(ends, graph), without(tuple(map(MaxK(2), ends)), graph))


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_dropout_is_of_the_features_that_k_keeps(device, name, monkeypatch):
    """Each part of the layer loses the same ones, in training alone."""
    graph, x = square_graph(device), features(device, dtype=torch.float64)
    layer = LAYERS[name](k=4, dropout=0.25).to(device, torch.float64)
    plain = LAYERS[name]().to(device, torch.float64)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x, graph), plain(maxk(x, 4), graph))
    columns, data = cbsr.choose_features(x, 4)
    stays = torch.arange(data.numel(), device=device).reshape(data.shape) % 3 > 0
    dropped = cbsr.to_dense(columns, data * stays / 0.75, F_IN)
    monkeypatch.setattr(cbsr, "drop", lambda data, share: data * stays / (1 - share))
    torch.testing.assert_close(layer.train()(x, graph), plain(dropped, graph))


def test_a_hub_of_half_weights_is_counted_whole(device):
    """100 001 is infinite in float16; so is what a sum of ones in float16 stops at."""
    n = 100_000
    indptr = np.r_[0, np.full(n, n)].astype(np.int32)
    graph = Graph(CSR(indptr, np.arange(n, dtype=np.int32), shape=(n, n))).to(device)
    w = torch.ones(n, dtype=torch.half, device=device)
    layer = GCNConv(1, 1, bias=False).to(device, torch.half)
    with torch.no_grad():
        layer.lin.weight.fill_(1)
        y = layer(torch.ones(n, 1, dtype=torch.half, device=device), graph, w)
    expected = (n - 1) / n**0.5 + 1 / n  # its own loop is stored
    assert float(y[0]) == pytest.approx(expected, rel=2e-3)


def test_factors_are_kept_with_the_graph_and_go_with_it():
    graph, x = square_graph(weighted=True), features("cpu")
    layer = GCNConv(F_IN, F_OUT)
    with torch.inference_mode():
        layer(x, graph)
    results(layer, x, graph)  # tensors born in inference mode could not take part
    parts = graph._slots.torch[0]._cache.parts
    assert sorted(map(str, parts)) == [
        "('gcn', torch.float32)",
        "('ones and added loops', torch.float32, 1.0, False)",
        "earlier loops",
        "loops missing",
        "loops of rows",
    ]
    before = dict(parts)
    layer(x, graph)
    layer(x, graph, edge_weight=torch.ones(graph.nnz))  # not kept: they are the caller's
    assert all(parts[key] is value for key, value in before.items())
    kept = weakref.ref(parts["loops missing"])
    del graph, parts, before
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: GINConv(None), DtypeError, "nn is None: give a module"),
        (lambda: GINConv("mlp"), DtypeError, "nn is 'mlp': give a module"),
        (lambda: GINConv(mlp(), eps="a"), DtypeError, "eps is 'a': give a number"),
        (lambda: GINConv(mlp(), eps=None), DtypeError, "eps is None: give a number"),
        (lambda: GINConv(mlp(), eps=float("nan")), ShapeError, "eps is nan: give a finite"),
        (lambda: GINConv(mlp(), eps=10**400), ShapeError, "eps is beyond the range of a float: g"),
        (lambda: GINConv(mlp(), eps=-(10**5000)), ShapeError, "eps is beyond the range of a float"),
        (lambda: GINConv(Linear), DtypeError, r"nn is the class Linear: give .* Linear\(\.\.\.\)"),
        (lambda: GINConv(Linear(5, 3)), ShapeError, "x has 6 features but nn takes 5: give"),
        (lambda: GINConv(mlp().double()), DtypeError, "x is torch.float32 but the layer's weights"),
        (lambda: GINConv(mlp().to("meta")), DeviceError, "weights are on meta: move one"),
    ],
)
def test_a_network_that_does_not_fit_is_named(make, error, text):
    with pytest.raises(error, match=text):
        make()(features("cpu"), square_graph())


class Called(torch.nn.Module):
    """A network of the user's own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("nn", "error", "text"),
    [
        (Sequential(ReLU(), Linear(7, 4)), ShapeError, "mat1 and mat2 shapes cannot be multiplied"),
        (torch.nn.BatchNorm1d(7), ShapeError, "running_mean should contain 6 elements not 7"),
        (torch.nn.LayerNorm(7), ShapeError, r"Given normalized_shape=\[7\]"),
        (torch.nn.Conv2d(3, 3, 1), ShapeError, "Expected 3D"),
        (torch.nn.PReLU(7), ShapeError, "channel size"),
        (torch.nn.Unflatten(1, (4, 4)), ShapeError, "Provided sizes"),
        (Called(lambda x: x.view(7, -1)), ShapeError, "is invalid for input of size"),
        (Called(lambda x: x + x.new_ones(7)), ShapeError, "must match the size of tensor b"),
        (Called(lambda x: torch.cat([x, x[1:]], 1)), ShapeError, "Sizes of tensors must match"),
        (Called(lambda x: torch.bmm(x, x)), ShapeError, "must be a 3D tensor"),
        (Called(lambda x: torch.einsum("ij,jk", x, x.new_ones(7, 7))), ShapeError, "subscript j"),
        (Sequential(ReLU(), Linear(F_IN, 4).double()), DtypeError, "got Float and Double"),
        (Sequential(ReLU(), Linear(F_IN, 4).half()), DtypeError, "got Float and Half"),
        (torch.nn.LayerNorm(F_IN).double(), DtypeError, "mixed dtype"),
        (torch.nn.Conv1d(N, 3, 1).double(), DtypeError, "should be the same"),
        (torch.nn.Embedding(5, 5), DtypeError, "one of the following scalar types"),
        (Called(lambda x: x & x), UnsupportedError, "not implemented for 'Float'"),
        (Sequential(ReLU(), Linear(F_IN, 4, device="meta")), DeviceError, "on device meta"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else None,
)
def test_torchs_refusal_of_features_names_the_network(nn, error, text):
    graph, x = square_graph(), features("cpu")
    says = rf"nn cannot take features of shape \(9, 6\) and dtype torch\.float32 on cpu: .*{text}"
    for options in ({}, {"k": 3}, {"sample": 2, "training_sample": 2}):
        with pytest.raises(error, match=says) as found:
            GINConv(nn, **options)(x, graph)
        assert isinstance(found.value.__cause__, RuntimeError)


def test_pygs_networks_that_do_not_fit_are_named():
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    for nn in (pyg.MLP([7, 4]), pyg.Linear(7, 4), pyg.BatchNorm(7)):
        with pytest.raises(ShapeError, match=r"nn (cannot take features of shape|takes 7)"):
            GINConv(nn)(features("cpu"), square_graph())


class OwnError(RuntimeError):
    """The user's."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Sizes of tensors: shape (3, 4)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: a tensor of size 9"),
        RuntimeError("CUDA error: device-side assert triggered, in a kernel of 3 dimensions"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling cublasGemmEx: dtype"),
        RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM: tensors of shape"),
        RuntimeError("no model in the cache of 3 elements"),
        RuntimeError("a queue of size 3 in 2 channels cannot broadcast to its workers in 2D"),
        NotImplementedError("the second stage"),
        OwnError("shape of things to come"),
        DeviceError("x is on another device, dtype and shape"),
        ValueError("shape"),
        KeyError("dtype"),
    ],
    ids=repr,
)
def test_other_errors_of_the_network_pass_as_they_are(error):
    def fail(x):
        raise error

    with pytest.raises(type(error)) as found:
        GINConv(Called(fail))(features("cpu"), square_graph())
    assert found.value is error


@pytest.mark.parametrize("train_eps", [False, True])
def test_eps_may_become_a_number(device, train_eps):
    graph, x = square_graph(device), features(device)
    layer = GINConv(mlp(), 0.5, train_eps).to(device)
    expected = layer(x, graph)
    del layer.eps
    layer.eps = 0.5
    assert torch.equal(layer(x, graph), expected)


@pytest.mark.parametrize("options", [{}, {"k": 3}, {"sample": 2, "training_sample": 2}], ids=str)
@pytest.mark.parametrize("train_eps", [False, True])
def test_eps_changes_no_dtype(options, train_eps):
    """Neither that of the result, nor one that the network's weights have not."""
    graph, options = square_graph(), {"train_eps": train_eps, **options}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = features("cpu", dtype=dtype)
        assert GINConv(torch.nn.Identity(), **options)(x, graph).dtype is dtype
        assert GINConv(mlp().to(dtype), **options)(x, graph).dtype is dtype
        for other in {torch.float16, torch.float32, torch.float64} - {dtype}:
            says = f"x is {dtype} but the layer's weights are {other}: give both in one dtype"
            with pytest.raises(DtypeError, match=says):
                GINConv(mlp().to(other), **options)(x, graph)


@pytest.mark.parametrize("name", [*LAYERS, "gin behind relu", "gat", "gatv2"])
def test_autocast_leaves_float64_to_be_refused(device, name):
    """Beside other weights, or as weights beside other features."""
    make = LAYERS | {
        "gin behind relu": lambda: GINConv(Sequential(ReLU(), mlp())),
        "gat": lambda: GATConv(F_IN, F_OUT),
        "gatv2": lambda: GATv2Conv(F_IN, F_OUT),
    }
    graph, x, layer = square_graph(device), features(device), make[name]().to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert layer(x, graph).dtype is torch.bfloat16
        given = (x.double(), torch.float32), (x, torch.float64), (x.half(), torch.float64)
        for one, other in given:
            layer.to(other)
            says = f"x is {one.dtype} but the layer's weights are {other}: give both in one dtype"
            with pytest.raises(DtypeError, match="nn cannot" if "relu" in name else says):
                layer(one, graph)
        assert layer(x.double(), graph).dtype is torch.float64


@pytest.mark.parametrize("sample", [None, 2])
def test_gin_sums_in_autocasts_dtype(device, sample):
    """Also beside features in the other dtype of 16 bits, with which torch promotes nothing."""
    graph, layer = square_graph(device), GINConv(torch.nn.Identity(), sample=sample).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        for given in (torch.float16, torch.bfloat16, torch.float32):
            x = features(device).to(given)
            with torch.autocast(device, dtype=dtype):
                y = layer(x, graph)
                own = torch.ones(1, dtype=given, device=device)
                assert aggregate_with_own(graph, x.to(dtype), own).dtype in (dtype, given)
                assert aggregate_with_own(graph, x, own.to(dtype)).dtype is dtype
            assert y.dtype is dtype
            torch.testing.assert_close(y, layer(x.to(dtype), graph))


@pytest.mark.parametrize("name", ["gcn", "gin"])
def test_the_choice_is_made_once(device, name, monkeypatch):
    """Under autocast 1 and 1 + 2**-12 are equal: both terms then take the first."""
    calls = note_calls(monkeypatch, cbsr, "MAXK")
    graph = Graph.from_edge_index(torch.tensor([[1], [0]]), num_nodes=2).to(device)
    x = torch.tensor([[1, 1 + 2**-12], [1, 1 + 2**-12]], device=device, requires_grad=True)
    layer = GCNConv(2, 2, k=1) if name == "gcn" else GINConv(torch.nn.Identity(), k=1)
    layer = layer.to(device)
    if name == "gcn":
        torch.nn.init.eye_(layer.lin.weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, graph)
    assert [x.dtype for x, _ in calls] == [torch.bfloat16]
    assert y.dtype is torch.bfloat16
    assert y[:, 0].all()
    assert not y[:, 1].any()
    y.float().sum().backward()
    assert not x.grad[:, 1].any()


@pytest.mark.parametrize("train_eps", [False, True])
def test_gin_with_k_saves_what_it_keeps_only(train_eps):
    graph, k = square_graph(), 2
    x, shapes = features("cpu"), []
    layer = GINConv(torch.nn.Identity(), train_eps=train_eps, k=k)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: shapes.append(tuple(saved.shape)) or saved, lambda saved: saved
    ):
        layer(x, graph)
    assert (N, k) in shapes
    assert (N, F_IN) not in shapes


@pytest.mark.parametrize("train_eps", [False, True])
def test_gin_is_reset_with_a_network_that_cannot_be_reset_itself(train_eps):
    """What can is reset as PyG's in ``test_pyg_arguments``."""
    layer = GINConv(torch.nn.ModuleDict({"inner": mlp()}), eps=0.25, train_eps=train_eps)
    before = layer.nn["inner"][0].weight.detach().clone()
    with torch.no_grad():
        layer.eps.fill_(3)
    layer.reset_parameters()
    assert layer.eps.item() == 0.25
    assert not torch.equal(layer.nn["inner"][0].weight, before)


@pytest.mark.parametrize("make", [SAGEConv, lambda *widths: GINConv(Linear(*widths))])
def test_forward_mode_goes_by_the_weights_of_maps_behind_a_sum(make):
    """Also where features become so few that gradients would be those of mapped features."""
    layer, graph, x = make(F_IN, 1), square_graph("cpu"), features("cpu", grad=False)
    name, weight = next(iter(layer.named_parameters()))

    def run(weight):
        return torch.func.functional_call(layer, {name: weight}, (x, graph))

    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(weight, weight))).tangent
    expected = torch.autograd.functional.jvp(run, weight.detach(), weight.detach())[1]
    torch.testing.assert_close(tangent, expected)


def test_tracers_of_torch_that_take_no_operation_of_ours_say_so():
    """As the page on training says."""
    graph, x = square_graph(), features("cpu")
    layer = GCNConv(F_IN, F_OUT, k=2)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.functional.jacobian(lambda x: layer(x, graph), x, vectorize=True)
    torch.autograd.functional.jacobian(lambda x: layer(x, graph), x)
    with warnings.catch_warnings(action="ignore"), pytest.raises(torch.jit.TracingCheckError):
        torch.jit.trace(lambda x: spmm(graph, x), x)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_layer_over_a_graph_is_exported(name):
    """Without a strict trace torch runs the layer's code on tensors that hold no values."""
    graph, x = square_graph("cpu"), features("cpu", grad=False)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GATConv(F_IN, F_OUT) if name == "gat" else GCNConv(F_IN, F_OUT)

        def forward(self, x):
            return self.layer(x, graph)

    model = Model()
    exported = torch.export.export(model, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), model(x))


# A sample of each row, in evaluation and in training

STRATEGIES = ("bucket", "fastrand", "random")


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
        share = shares(graph, 5, "random" if training else strategy, seed, **factors)
        exact = expected(layer, x, graph, own if w is None else w, share)
        torch.testing.assert_close(y.detach().cpu(), exact)


@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_of_everything_is_the_layer_without(device, name):
    x = features(device, dtype=torch.float64)
    for loops, weighted, training in itertools.product((False, True), repeat=3):
        graph = long_graph(device, weighted=weighted, loops=loops)
        plain = doubles(name, device)
        layer = doubles(name, device, sample=2**40, training_sample=10**30).train(training)
        layer.load_state_dict(plain.state_dict())
        assert_same(results(layer, x, graph), results(plain, x, graph))
        w = torch.rand(graph.nnz, dtype=torch.float64, device=device, requires_grad=True)
        y, z = (one(x, graph, edge_weight=w) for one in (layer, plain))
        assert_same(*([one, *torch.autograd.grad(one.sum(), (x, w))] for one in (y, z)))


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
    assert torch.equal(training.eval()(x, graph), whole)
    assert torch.equal(both.eval()(x, graph), inference.eval()(x, graph))
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
