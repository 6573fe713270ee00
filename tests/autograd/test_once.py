"""A graph built of CUDA tensors: the same as by formats bit by bit, no wait, wrong ids reported."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import results, side_of  # noqa: E402
from laws.calls import CALLS, graph_of  # noqa: E402
from op_cases import run_apart  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from sparsefmt import DtypeError, Graph, IndexRangeError, ShapeError, autograd, nn  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
from sparsefmt.autograd.gcn import unit_scales  # noqa: E402
from sparsefmt.autograd.tensors import reports  # noqa: E402
from sparsefmt.autograd.tensors.order import own_values  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors  # noqa: E402
from sparsefmt.interop.pyg import from_edge_index  # noqa: E402
from sparsefmt.nn import _loops  # noqa: E402
from sparsefmt.ops.engine import build  # noqa: E402

gpu = pytest.mark.gpu
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]
INDEX = (torch.int32, torch.int64)
SHAPES = {
    "one": lambda rng: (rng.integers(0, 1, (2, 1)), (1, 1)),
    "few": lambda rng: (rng.integers(0, 7, (2, 40)), (7, 9)),
    "bipartite": lambda rng: (rng.integers(0, [[50], [300]], (2, 900)), (50, 300)),
    "wide": lambda rng: (rng.integers(0, [[70_000], [300]], (2, 2000)), (70_000, 300)),
    "isolated": lambda rng: (rng.integers(0, 20, (2, 3000)), (4000, 4000)),
    "sorted": lambda rng: (np.sort(rng.integers(0, 500, (2, 4000)), axis=1), (500, 500)),
    "hub": lambda rng: (hub(rng, 20_000, 60_000), (20_000, 20_000)),
    "hubs": lambda rng: (hub(rng, 300, 400_000), (300, 300)),
    "many": lambda rng: (rng.integers(0, 60_000, (2, 700_000)), (60_000, 60_000)),
}


def hub(rng, n, edges):
    """Half of the edges lead to, and a third from, a few vertices; duplicates among them."""
    found = rng.integers(0, n, (2, edges))
    found[1, : edges // 2] = rng.integers(0, 3, edges // 2) + n // 3
    found[0, edges // 3 : 2 * edges // 3] = n - 1
    return found[:, rng.permutation(edges)]


def edges_of(kind, dtype=torch.int64, seed=0):
    found, shape = SHAPES[kind](np.random.default_rng(seed))
    return torch.from_numpy(found).to("cuda", dtype), shape


def by_formats(edge_index, weight=None, *, num_nodes):
    """The graph as it is built of a COO."""
    return Graph(from_edge_index(edge_index, weight, num_nodes=num_nodes))


@pytest.fixture(params=["small", "large"])
def way(request, monkeypatch):
    """Both ways to build: in one launch, and around torch's sort."""
    if request.param == "large":
        monkeypatch.setattr(build, "SMALL_EDGES", 0)


def poison():
    """Fill what torch hands out next with what is no index."""
    for size in (1 << 14, 1 << 18, 1 << 22, 1 << 24):
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0x7B)


@gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("kind", SHAPES)
def test_sides_are_those_of_the_formats(way, kind, dtype, backward):
    edge_index, sizes = edges_of(kind, dtype)
    poison()
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    other = by_formats(edge_index, num_nodes=sizes)
    for name in ("shape", "nnz", "device", "index_dtype"):
        assert getattr(graph, name) == getattr(other, name)
    assert not graph.weighted
    with torch.set_grad_enabled(backward):  # columns on demand, or with the rows
        side_of(graph, False)
    assert (graph._slots.torch[0]._columns is not None) == backward
    for transposed in (False, True):
        mine = side_of(graph, transposed)
        assert mine.arrays is not None
        theirs = side_of(other, transposed)
        for name in ("indptr", "indices", *["perm"] * transposed):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
        assert all(map(torch.equal, mine.plan, theirs.plan))
        assert [part.dtype for part in mine.plan] == [part.dtype for part in theirs.plan]
        assert torch.equal(mine.inverse_degree(torch.float32), theirs.inverse_degree(torch.float32))
    mine, theirs = graph_tensors(graph).order, graph_tensors(other).order
    assert (mine is None) == (theirs is None)
    assert mine is None or torch.equal(mine, theirs)
    S = side_of(graph, False).structure
    T = side_of(other, False).structure
    assert (S.blocks, S.n_cuts, S.n_long, S.longest) == (T.blocks, T.n_cuts, T.n_long, T.longest)


@gpu
@pytest.mark.parametrize(("kind", "shares"), [("sorted", False), ("hubs", True)])
def test_products_add_up_shared_rows_only_where_a_build_has_found_some(way, kind, shares):
    edge_index, sizes = edges_of(kind)
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    x = torch.rand(sizes[0], 8, device="cuda")
    with torch.no_grad():
        first = autograd.spmm(graph, x)  # for as many as there can be
        torch.cuda.synchronize()
        S = side_of(graph, False).structure
        again = autograd.spmm(graph, x)
    assert S.report is not None  # its exact sizes were not taken over
    assert (S.n_cuts > 0) == shares
    assert torch.equal(first, again)


@gpu
@pytest.mark.parametrize("kind", SHAPES)
def test_formats_of_it_share_its_memory(way, kind):
    edge_index, sizes = edges_of(kind)
    weight = torch.rand(edge_index.shape[1], device="cuda")
    graph = Graph.from_edge_index(edge_index, weight, num_nodes=sizes)
    other = by_formats(edge_index, weight, num_nodes=sizes)
    x = torch.rand(sizes[0], 8, device="cuda", requires_grad=True)
    autograd.spmm(graph, x).sum().backward()
    for name in ("csr", "csc", "coo", "structure"):
        assert getattr(graph, name) == getattr(other, name)
    for name in ("csr_perm", "csc_perm", "in_degree", "out_degree"):
        assert (getattr(graph, name) == getattr(other, name)).all()
    rows = side_of(graph, False)
    assert graph.csr.indices.data.ptr == rows.indices.data_ptr()
    assert graph.transposed.csr == other.transposed.csr


MODULES = {
    "sage": lambda: nn.SAGEConv(32, 48),
    "gcn": lambda: nn.GCNConv(32, 48),
    "gat": lambda: nn.GATConv(32, 16, heads=3),
    "gin": lambda: nn.GINConv(torch.nn.Linear(32, 16)),
    "gatv2": lambda: nn.GATv2Conv(32, 16, heads=2),
}


@gpu
@pytest.mark.parametrize("kind", ["isolated", "sorted", "hub", "hubs", "many"])
@pytest.mark.parametrize("name", MODULES)
def test_layers_give_the_same_bits(name, kind):
    torch.manual_seed(0)
    edge_index, sizes = edges_of(kind)
    module = MODULES[name]().to("cuda")
    x = torch.randn(sizes[0], 32, device="cuda", requires_grad=True)
    expected = results(module, x, by_formats(edge_index, num_nodes=sizes))
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    for _ in range(3):  # while it is built, and after
        poison()
        assert all(map(torch.equal, results(module, x, graph), expected))
        torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("name", MODULES)
def test_graphs_of_about_one_size_share_a_build_and_no_result(name):
    torch.manual_seed(0)
    module, rng = MODULES[name]().to("cuda"), np.random.default_rng(0)
    prepared = []
    for n, edges in ((1000, 8000), (1024, 8192), (965, 7690), (1001, 7999)):
        edge_index = torch.from_numpy(hub(rng, n, edges)).to("cuda")
        x = torch.randn(n, 32, device="cuda", requires_grad=True)
        expected = results(module, x, by_formats(edge_index, num_nodes=n))
        graph = Graph.from_edge_index(edge_index, num_nodes=n)
        for _ in range(2):  # while it is built, and after
            poison()
            assert all(map(torch.equal, results(module, x, graph), expected))
            torch.cuda.synchronize()
        del graph  # the next lies there
        prepared.append(build.small.cache_info().misses)
    assert len(set(prepared)) == 1


@gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("call", [call for call in CALLS if call.graph], ids=str)
def test_functions_give_the_same_bits(call):
    """But for what adds up by atomics, and by cuBLAS, which asks for an environment."""
    if call.atomics or "relational" in call.name:
        return
    edge_index, sizes = edges_of("hub")
    other = by_formats(edge_index, num_nodes=sizes)
    args = call.arguments(other, dtype=torch.float32, device="cuda", feat=24)
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    assert all(map(torch.equal, call.step(graph, args), call.step(other, args)))


@gpu
def test_nothing_waits_for_the_gpu(way):
    module = nn.SAGEConv(32, 32).to("cuda")
    attention = nn.GATConv(32, 32).to("cuda")
    x = torch.randn(20_000, 32, device="cuda", requires_grad=True)
    for late in (False, True):  # the first compiles
        edge_index, sizes = edges_of("hub", seed=int(late))
        if late:
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
            end = torch.cuda.Event()
            end.record()
        for layer in (module, attention):
            results(layer, x, Graph.from_edge_index(edge_index, num_nodes=sizes))
    assert not end.query()
    torch.cuda.synchronize()


@gpu
def test_another_stream_waits_for_what_one_builds(way):
    edge_index, sizes = edges_of("many")
    x, weight = torch.randn(sizes[0], 16, device="cuda"), torch.rand(edge_index.shape[1]).cuda()
    other = by_formats(edge_index, weight, num_nodes=sizes)
    calls = {
        "rows": lambda g: autograd.spmm(g, x, reduce="mean"),
        "values": lambda g: own_values(g),
        "kept": lambda g: graph_tensors(g).cached("one", lambda: torch.full_like(x, 7.0)),
    }
    for call in calls.values():
        expected = call(other)
        graph = Graph.from_edge_index(edge_index, weight, num_nodes=sizes)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        side_of(graph, True)
        call(graph)
        with torch.cuda.stream(torch.cuda.Stream()):
            found = call(graph).clone()
            torch.cuda.current_stream().synchronize()
        assert torch.equal(found, expected)


@gpu
def test_memory_stays_until_every_stream_has_read_it():
    edge_index, sizes = edges_of("many")
    x = torch.rand(sizes[0], 64, device="cuda")
    expected = autograd.spmm(by_formats(edge_index, num_nodes=sizes), x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
        graph_tensors(graph)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    found = autograd.spmm(graph, x)
    del graph
    with torch.cuda.stream(side):  # would get the same memory
        trash = [torch.full((4 * edge_index.shape[1],), -1, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    del trash


@gpu
def test_a_build_that_fails_is_not_waited_for(monkeypatch):
    edge_index, sizes = edges_of("many")
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise torch.OutOfMemoryError("no memory")

        patch.setattr(build, "small", fail)
        patch.setattr(build, "keys", fail)
        with pytest.raises(torch.OutOfMemoryError):
            graph_tensors(graph)
    assert not reports._open
    x = torch.rand(sizes[0], 8, device="cuda")
    again = Graph.from_edge_index(edge_index, num_nodes=sizes)
    expected = autograd.spmm(by_formats(edge_index, num_nodes=sizes), x)
    assert torch.equal(autograd.spmm(again, x), expected)
    assert torch.equal(autograd.spmm(graph, x), expected)


WRONG = {
    "highest": (1, 9, 2**63 - 1),
    "least": (0, 2, -(2**63)),
    "negative": (0, 5, -1),
    "too large": (1, 77, 500),
    "far": (1, 0, 2**40),
    "lowest": (0, 3, -(2**60)),
}


@gpu
@pytest.mark.parametrize("case", WRONG)
def test_wrong_ids_are_reported_and_touch_nothing(way, case):
    side, place, value = WRONG[case]
    edge_index = torch.randint(0, 500, (2, 4000), device="cuda")
    edge_index[side, place] = value
    text = f"edge_index.{side}..*{value} but there are 500"
    with pytest.raises(IndexRangeError, match=text) as old:
        by_formats(edge_index, num_nodes=500)
    x = torch.rand(500, 8, device="cuda", requires_grad=True)
    fixed = edge_index.clone()
    fixed[side, place] = 0
    graph = Graph.from_edge_index(edge_index, num_nodes=500)
    autograd.spmm(Graph.from_edge_index(fixed, num_nodes=500), x)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the GPU has not come so far when the host is done
    y = autograd.spmm(graph, x)
    torch.cuda.synchronize()
    assert torch.equal(y, autograd.spmm(by_formats(fixed, num_nodes=500), x))
    for _ in range(2):
        with pytest.raises(IndexRangeError) as new:
            autograd.spmm(graph, x)
        assert str(new.value).startswith(str(old.value))
    for ask in ("csr", "csc", "structure", "in_degree"):
        with pytest.raises(IndexRangeError):
            getattr(graph, ask)
    with pytest.raises(IndexRangeError):
        prepare(graph)


@gpu
def test_a_wrong_id_of_a_graph_that_is_gone_is_reported_by_the_next():
    edge_index = torch.randint(0, 500, (2, 4000), device="cuda")
    edge_index[1, 7] = 500
    x = torch.rand(500, 8, device="cuda")
    autograd.spmm(Graph.from_edge_index(edge_index.clamp(max=499), num_nodes=500), x)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # the GPU has not come so far when the host is done
    autograd.spmm(Graph.from_edge_index(edge_index, num_nodes=500), x)
    gc.collect()
    torch.cuda.synchronize()
    good = Graph.from_edge_index(edge_index.clamp(max=499), num_nodes=500)
    with pytest.raises(IndexRangeError, match=r"edge_index\[1, 7\].*500 target"):
        autograd.spmm(good, x)
    autograd.spmm(good, x)  # told once
    assert not reports._open or all(report.findings is None for report in reports._open)


@gpu
def test_sizes_are_found_where_they_are_not_given():
    edge_index, _ = edges_of("many")
    assert Graph.from_edge_index(edge_index).shape == by_formats(edge_index, num_nodes=None).shape
    with pytest.raises(ShapeError):
        Graph.from_edge_index(edge_index, num_nodes="many")
    with pytest.raises(IndexRangeError, match="is -"):  # waited for, so checked
        Graph.from_edge_index(edge_index - 3)
    with pytest.raises(IndexRangeError):
        Graph.from_edge_index(edge_index, num_nodes=0)
    empty = Graph.from_edge_index(edge_index[:, :0], num_nodes=5)
    assert autograd.spmm(empty, torch.rand(5, 3, device="cuda")).abs().sum() == 0
    assert Graph.from_edge_index(edge_index[:, :0], num_nodes=0).shape == (0, 0)


@gpu
def test_an_edge_index_need_not_be_contiguous():
    edge_index, sizes = edges_of("hub")
    turned = edge_index.t().contiguous().t()
    x = torch.rand(sizes[0], 8, device="cuda")
    graph = Graph.from_edge_index(turned, num_nodes=sizes)
    other = by_formats(edge_index, num_nodes=sizes)
    assert torch.equal(autograd.spmm(graph, x), autograd.spmm(other, x))
    assert graph.structure == other.structure


@gpu
@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_compiled_layers_take_it(name):
    edge_index, sizes = edges_of("hub")
    module = MODULES[name]().to("cuda")
    x = torch.randn(sizes[0], 32, device="cuda", requires_grad=True)
    graph = Graph.from_edge_index(edge_index, num_nodes=sizes)
    expected = results(module, x, by_formats(edge_index, num_nodes=sizes))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(results(compiled, x, graph), expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()  # composed of other functions


#: Functions whose features tell the sizes of both ends; graphs of others are square.
OF_BOTH_ENDS = {"sddmm", "gat_aggregate", "gatv2_aggregate", "dot_aggregate", "edge_combine"}


@pytest.mark.parametrize("call", [call for call in CALLS if call.graph], ids=str)
def test_functions_take_an_edge_index_with_the_sizes_of_their_features(device, call):
    rows = 5 if call.name.split()[0] in OF_BOTH_ENDS else 7
    graph = graph_of(call, rows, 7, 30, device=device)
    coo, args = graph.to("cpu").structure, call.arguments(graph, device=device)
    edge_index = torch.from_numpy(np.stack([coo.col, coo.row]).astype(np.int64)).to(device)
    if "copy_edge" in call.name:  # whose messages have no features of vertices to tell sizes
        x = torch.zeros(7, 3, dtype=torch.float64, device=device)
        call = replace(call, options=call.options | {"x": x})
    assert torch.equal(call.run(edge_index, args), call.run(graph, args))


def test_a_graph_is_remembered_until_its_tensor_is_gone(device):
    edge_index, x = torch.randint(0, 9, (2, 40), device=device), torch.rand(9, 3, device=device)
    graph = autograd.as_graph(edge_index, x)
    assert autograd.as_graph(edge_index, torch.rand(10, 3, device=device)) is not graph
    held, tensor = weakref.ref(autograd.as_graph(edge_index, x)), weakref.ref(edge_index)
    del graph, edge_index
    gc.collect()
    assert held() is None
    assert tensor() is None


#: Assigning to ``data`` counts no version.
CHANGES = {
    "values": lambda e: e[0, 0].copy_((e[0, 0] + 1) % 9),
    "strides": lambda e: setattr(e, "data", e.data.as_strided((2, 40), (1, 2))),
    "dtype": lambda e: setattr(e, "data", e.data.view(torch.int32)[:, ::2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed_is_another_graph(device, change):
    edge_index, x = torch.randint(0, 9, (2, 40), device=device), torch.rand(9, 3, device=device)
    graph = autograd.as_graph(edge_index, x)
    CHANGES[change](edge_index)
    assert autograd.as_graph(edge_index, x) is not graph
    fresh = Graph.from_edge_index(edge_index.clone(), num_nodes=9)
    assert torch.equal(autograd.spmm(edge_index, x), autograd.spmm(fresh, x))


def test_bad_features_beside_a_remembered_edge_index_are_refused_as_at_first(device):
    edge_index, x = torch.randint(0, 3, (2, 9), device=device), torch.rand(3, 4, device=device)
    layer = nn.SAGEConv(4, 2).to(device)
    for _ in range(2):
        with pytest.raises(DtypeError, match="is a list"):
            layer((x, [1, 2, 3]), edge_index)
        with pytest.raises(DtypeError, match="is a list"):
            autograd.sddmm(edge_index, [1, 2, 3], x)
        layer(x, edge_index)


@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv", "GATConv"])
def test_a_graph_that_was_first_used_in_inference_mode_can_be_trained(device, kind):
    edge_index = torch.randint(0, 50, (2, 300), device=device)
    layer, x = getattr(nn, kind)(8, 4).to(device), torch.randn(50, 8, device=device)
    graph = Graph.from_edge_index(edge_index, num_nodes=50)
    with torch.inference_mode():
        expected = layer(x, graph)
    layer(x, graph).sum().backward()
    assert torch.equal(layer(x, graph), expected)


def test_a_layer_runs_without_torchs_compiler():
    code = (
        "import sys, torch; from sparsefmt import nn; edges = torch.zeros(2, 1, dtype=torch.int64);"
        "nn.SAGEConv(2, 2)(torch.rand(3, 2), edges); print('torch._dynamo' in sys.modules)"
    )
    assert run_apart(code).stdout.strip() == "False"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_trace_no_memory_of_graphs():
    """What a tracer reads of it would be guarded, and traced again for each new graph."""
    torch._dynamo.reset()
    layer, x = nn.SAGEConv(4, 3), torch.randn(10, 4)
    kept = [torch.randint(0, 10, (2, 30)) for _ in range(4)]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter)
    counts = []
    for edges in (kept[0], kept[0], *kept[1:]):
        assert torch.equal(compiled(x, edges), layer(x, edges))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]
    assert counts[2] == counts[4]
    # A layer that makes a graph with loops goes over a break, behind which the tracer begins anew.
    layer, graph = nn.GCNConv(4, 3, aggr="max"), Graph.from_edge_index(kept[0], num_nodes=10)
    assert torch.equal(torch.compile(layer, backend="eager")(x, graph), layer(x, graph))
    torch._dynamo.reset()


def test_what_is_no_edge_index_is_refused(device):
    x, e = torch.rand(9, 3, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    for wrong in (x, e.short(), e.t(), e[0]):
        shape = ", ".join(map(str, wrong.shape))
        with pytest.raises(DtypeError, match=f"of {wrong.dtype} and shape .{shape}.*edge_index"):
            autograd.spmm(wrong, x)
    for wrong, text in (([[0, 1], [1, 0]], r"torch\.as_tensor"), (None, "graph is a")):
        with pytest.raises(DtypeError, match=text):
            autograd.spmm(wrong, x)
    wrong = torch.full((2, 3), 9, device=device)
    with pytest.raises(IndexRangeError, match="9 source vertices"):
        _ = autograd.as_graph(wrong, x).structure
    with torch.inference_mode():
        edge_index = torch.zeros(2, 3, dtype=torch.int64, device=device)
        autograd.spmm(edge_index, x)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["one", "isolated", "hub"])
def test_scales_of_gcn_are_those_of_products(kind, dtype):
    edge_index, sizes = edges_of(kind)
    graph = by_formats(edge_index, num_nodes=sizes)
    expected = torch.stack(_loops._symmetric(graph_tensors(graph), None, 1.0, False)).to(dtype)
    assert torch.equal(unit_scales(graph, dtype), expected)


def test_the_remembered_graph_serves_what_asks_for_no_sizes(device):
    e, x = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device), torch.ones(5, 3, device=device)
    graph = autograd.as_graph(e, x)
    assert autograd.as_graph(e, None) is graph
    autograd.edge_softmax(e, torch.ones(3, device=device))
    structure, values = autograd.gcn_norm(e)
    assert autograd.spmm(structure, x, values).shape == (5, 3)
    autograd.prepare(e)
    assert autograd.as_graph(e, x) is graph
    e.data = torch.tensor([[0, 1], [1, 0]], device=device)
    assert autograd.as_graph(e, x).nnz == 2


@gpu
def test_weights_keep_their_places_where_the_build_reports_between_both_passes():
    ends = torch.arange(3000, device="cuda") % 300
    edge_index = torch.stack([ends, ends.sort().values])  # in CSR order
    x = torch.randn(300, 8, device="cuda", dtype=torch.float64)
    for _ in range(2):  # the first compiles
        weight = torch.ones(3000, device="cuda", dtype=torch.float64, requires_grad=True)
        torch.cuda._sleep(200_000_000)  # the GPU has not come so far when the host multiplies
        y = autograd.spmm(Graph.from_edge_index(edge_index, num_nodes=300), x, weight)
        torch.cuda.synchronize()
        y.sum().backward()
        torch.testing.assert_close(weight.grad, x.index_select(0, ends).sum(1))
