"""The benchmarks' own checks, figures and files, on small graphs without a GPU."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is of torch")

from benchmarks import _graphs, _harness, _oracle, _table, cbsr  # noqa: E402
from benchmarks._table import Limit, Section  # noqa: E402
from sparsefmt import CBSR  # noqa: E402
from sparsefmt.ops import edge_softmax, maxk, sddmm, spmm  # noqa: E402

MACHINE = {"commit": "0123456789ab", "cpu": "x86_64"}


@pytest.fixture
def small():
    graph = _graphs.weighted(_graphs.load("small", device="cpu"))
    return graph, _graphs.uniform(graph.indptr, (graph.n_cols, 9))


@pytest.fixture
def clean_commit(monkeypatch):
    monkeypatch.setattr(_harness, "machine", lambda *, cuda: dict(MACHINE))


X = _table.Benchmark("x", None, dict.fromkeys(("table", "other", "s"), Section(iter)))


def ratios(rows):
    return [*Limit("ratio", "mean", least=1.5).targets(rows, "cuda")]


def test_a_target_is_reached_from_its_side():
    assert _table.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(_table.geomean([]))
    cases = [(2.0, True, True), (1.0, True, False), (2.0, False, False), (math.nan, True, False)]
    for value, at_least, ok in cases:
        target = _table.Target("ratio", value, 1.5, at_least)
        assert target.ok is ok
        assert str(target).endswith("ok" if ok else "MISSED")
    assert _table.Target("ratio", 0.1).ok  # without a limit


def test_medians_run_the_functions_in_turn():
    order = []
    functions = [partial(order.append, name) for name in "ab"]
    assert len(_harness.medians(functions, cuda=False, runs=2, warmups=1)) == 2
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(("host", "spin"), [(0.01, 0.2), (0.14, 0.42), (1000.0, 5.0)])
def test_the_gpu_spins_until_the_host_has_launched(monkeypatch, host, spin):
    spins = []
    monkeypatch.setattr(_harness, "_host_ms", lambda function: host)
    monkeypatch.setattr(_harness, "wait", lambda *, cuda: None)
    monkeypatch.setattr(_harness, "_cuda_ms", lambda function, spin: spins.append(spin) or 1.0)
    assert _harness.medians([lambda: None], cuda=True, runs=2, warmups=1) == [1.0]
    assert spins == [pytest.approx(spin)] * 2


@pytest.mark.parametrize(("seconds", "runs"), [(0.0, 60), (0.001, 20), (0.03, 10)])
def test_long_cases_take_fewer_runs_and_short_ones_more(monkeypatch, seconds, runs):
    monkeypatch.setattr(_harness, "_host_ms", lambda function: seconds * 1e3)
    assert _harness.paced([lambda: None], cuda=False)[1] == runs


def test_columns_line_up_under_their_names(capsys):
    head = _table.print_row({"case": "a", "ms": 2.0, "algorithm": "ALG", "runs": 3})
    assert _table.print_row({"case": "b", "ms": 3.0, "runs": 4}, head) == head
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["case", "ms", "runs"],
        ["a", "2", "3"],
        ["b", "3", "4"],
    ]
    assert len({len(line) for line in lines}) == 1


ROWS = [
    {"case": "a", "kind": "x", "ratio": 2.0, "error": 1e-7},
    {"case": "b", "kind": "x", "ratio": 8.0},
    {"case": "c", "kind": "y", "ratio": 1.0, "error": 1e-3},
]


EACH = [("a", 2.0, None, True), ("b", 8.0, 9.0, False), ("c", 1.0, None, True)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (Limit("ratio", least=1.5), [("ratio, worst (c)", 1.0, 1.5, False)]),
        (Limit("error", most=1e-5), [("error, worst (c)", 1e-3, 1e-5, False)]),
        (Limit("ratio", high=True), [("ratio, worst (b)", 8.0, None, True)]),
        (
            Limit("ratio", "mean", least=2.0, by=("kind",)),
            [("x ratio, geomean of 2", 4.0, 2.0, True), ("y ratio, geomean of 1", 1.0, 2.0, False)],
        ),
        (
            Limit("ratio", "each", least=lambda row: {"b": 9.0}.get(row["case"])),
            [(f"{case} ratio", *rest) for case, *rest in EACH],
        ),
        (Limit("ratio", least=1.5, where=lambda row: row["kind"] == "z"), []),
        (Limit("ratio", "median"), [("ratio, median", 2.0, None, True)]),
        (Limit("ratio", "share"), [("ratio, share", 11 / 3, None, True)]),
        (Limit("nothing"), []),
    ],
)
def test_limits_judge_rows_by_groups(limit, expected):
    found = [(one.name, one.value, one.limit, one.ok) for one in limit.targets(ROWS, "cuda")]
    assert found == [(name, pytest.approx(value), *rest) for name, value, *rest in expected]
    assert all(one.limit is None for one in limit.targets(ROWS, "cpu"))


def test_sections_of_one_commit_merge_by_case(tmp_path, clean_commit, monkeypatch):
    first = [{"case": "a", "ratio": 1.0}, {"case": "b", "ratio": 4.0}]
    assert _table.keep(X, "table", first, ratios, cuda=False, folder=tmp_path)
    assert _table.keep(X, "other", first[:1], ratios, cuda=False, folder=tmp_path)
    again = [{"case": "a", "ratio": 9.0}]
    assert _table.keep(X, "table", again, ratios, cuda=False, folder=tmp_path)
    sections = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]
    assert sections["table"]["rows"] == [first[1], again[0]]
    assert sections["table"]["targets"][0]["value"] == pytest.approx(6.0)
    assert sections["table"]["machine"] == MACHINE
    assert sections["other"]["rows"] == first[:1]
    monkeypatch.setattr(_harness, "machine", lambda *, cuda: MACHINE | {"commit": "other"})
    assert _table.keep(X, "table", first[1:], ratios, cuda=False, folder=tmp_path)
    sections = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]
    assert sections["table"]["rows"] == first[1:]  # those of another commit are dropped


def test_a_wrong_case_is_not_reported(tmp_path, clean_commit, capsys):
    wrong = {"case": "bad", "wrong": "relative error 1"}
    assert not _table.keep(X, "s", [wrong], ratios, cuda=False, folder=tmp_path)
    assert not (tmp_path / "x-cpu.json").exists()
    rows = [wrong, {"case": "good", "ratio": 2.0}]
    assert not _table.keep(X, "s", rows, ratios, cuda=False, folder=tmp_path)
    section = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]["s"]
    assert section["rows"] == rows[1:]
    assert [target["ok"] for target in section["targets"]] == [True, False]
    assert "WRONG, not reported: bad" in capsys.readouterr().out


def test_the_gate_passes_right_results_and_stops_one_wrong_number_in_the_longest_row(small):
    A, X = small
    scores = _graphs.uniform(A.indptr, (A.nnz, 3))
    for error in (
        _oracle.spmm_error(A, X, spmm(A, X)),
        _oracle.sddmm_error(A, X, X, sddmm(A, X, X)),
        _oracle.softmax_error(A, scores, edge_softmax(A, scores)),
    ):
        assert _oracle.complaint(error, X.dtype) is None
    for fault in (1 + 1e-4, 0.0, np.nan):
        Y = spmm(A, X)
        Y[A.lengths.argmax(), 3] *= fault
        assert _oracle.complaint(_oracle.spmm_error(A, X, Y), X.dtype)


@pytest.mark.parametrize("dtype", _oracle.LIMITS)
def test_the_gate_allows_a_dtype_its_rounding(small, dtype):
    A, X = small
    A, X = A.astype(_graphs.dtype(dtype)), X.astype(_graphs.dtype(dtype))
    exact = spmm(A.astype(np.float64), X.astype(np.float64))
    error = _oracle.spmm_error(A, X, exact.astype(X.dtype))
    assert error <= _oracle.ROUNDING[dtype] * 1.001
    assert _oracle.complaint(error, X.dtype) is None


def test_the_gate_takes_columns_and_allows_additions_in_turn_their_rounding(small):
    A, X = small
    columns = np.tile(np.uint8([1, 4, 8]), (A.n_rows, 1))
    Y = spmm(A, X)[:, [1, 4, 8]]
    assert _oracle.complaint(_oracle.spmm_error(A, X, Y, columns=columns), X.dtype) is None
    columns[A.lengths.argmax(), 1] = 5
    assert _oracle.complaint(_oracle.spmm_error(A, X, Y, columns=columns), X.dtype)
    assert _oracle.complaint(2e-5, np.float32)
    assert _oracle.complaint(2e-5, np.float32, in_turn=100_000) is None
    assert _oracle.complaint(2e-5, np.float32, in_turn=10_000)
    assert _oracle.complaint(math.nan, np.float32, in_turn=100_000)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_gate_of_maxk_finds_every_wrong_row(monkeypatch, dtype):
    monkeypatch.setattr(_oracle, "CHUNK", 64)
    X = cbsr.features(np.empty(0), 300, dtype)
    X[2::97] = -0.0
    X[2::97, ::3] = 0.0
    S = maxk(X, 8)
    assert _oracle.wrong_maxk_rows(X, S) == 0
    indices, data = S.indices.copy(), S.data.copy()
    indices[1, -1] += 1  # where all tie: not the lowest columns
    data[5, 0] = np.nextafter(data[5, 0], data.dtype.type(9))
    data[99, 0] *= -1  # -0.0 in the place of 0.0
    assert _oracle.wrong_maxk_rows(X, CBSR(indices, data, shape=S.shape)) == 3


def test_sampled_vertices_have_the_first_the_last_and_the_busiest():
    places = torch.tensor([3] * 5 + [*range(50)])
    assert {0, 3, 49} <= set(_oracle.sampled(places, 50, samples=5).tolist())


def dense_attention(kind, A, inputs, grad):
    """Attention of one dense matrix a head, in float64, and all gradients by torch."""
    x = {name: one.detach().double().requires_grad_() for name, one in inputs.items()}
    rows, cols = (torch.from_numpy(part).long() for part in (A.tocoo().row, A.tocoo().col))
    scores = torch.full((*A.shape, grad.shape[1]), -torch.inf, dtype=torch.float64)
    scores[rows, cols] = _oracle.SCORES[kind](x, rows, cols)
    values = x[_oracle.SIDES[kind][1][-1]]
    out = torch.einsum("ijh,jhf->ihf", torch.nan_to_num(scores.softmax(1)), values)
    parts = torch.autograd.grad(out, [*x.values()], grad.double())
    return {"out": out.detach(), **dict(zip(x, parts, strict=True))}


@pytest.mark.parametrize("kind", _oracle.SIDES)
def test_the_gate_of_attention_knows_dense_results_and_finds_what_is_wrong(kind):
    attention = pytest.importorskip("benchmarks.attention")
    from sparsefmt import Graph, generate

    A = generate.power_law(60, 500, seed=0).tocsr()
    ours = attention.Attention(kind, Graph(A), 2, 5)
    ends = attention._baselines.ends_of(A)
    exact = _oracle.Attention(kind, ends, ours.inputs, ours.grad)
    right = dense_attention(kind, A, ours.inputs, ours.grad)
    assert max(exact.errors(right).values()) < 1e-12
    assert exact.complaint({k: one.float() for k, one in right.items()})[1] is None
    assert "wrong" not in ours.checked()
    for name in right:
        wrong = {k: one.clone() for k, one in right.items()}
        wrong[name][-1] += 0.01 * wrong[name].abs().max()
        assert "relative error" in exact.complaint(wrong)[1]


def test_graphs_by_degree_begin_with_the_hub():
    shuffled = _graphs.load("small", device="cpu")
    lengths = _graphs.load("small", device="cpu", by_degree=True).lengths
    assert sorted(lengths, reverse=True) == lengths.tolist()
    assert sorted(lengths) == sorted(shuffled.lengths)
    assert shuffled.has_sorted_indices


def chosen(*arguments, **more):
    options = X.parse(["--device", "cpu", *arguments])
    return dict(_graphs.chosen(options, ("arxiv",), **more))


def test_graphs_are_recipes_paths_or_of_the_folder(tmp_path, capsys):
    path = str(Path(__file__))
    (tmp_path / "dd.npz").touch()
    found = chosen("--data", str(tmp_path), real=("dd", "cora"))
    assert found == {"dd": str(tmp_path / "dd.npz"), "cpu": "cpu"}
    assert "cora skipped: there is no" in capsys.readouterr().out
    assert chosen("--quick") == {"small": "small"}
    found = chosen("--graphs", f"ddi,{path},dd", "--data", str(tmp_path))
    assert found == {"ddi": "ddi", Path(path).stem: path, "dd": str(tmp_path / "dd.npz")}
    with pytest.raises(SystemExit, match=r"nowhere\.npz is neither a file nor one of reddit"):
        _graphs.load("nowhere.npz", device="cpu")


def test_mycielskians_have_no_triangle_and_roads_few_neighbours():
    for k, (vertices, edges) in {2: (2, 1), 3: (5, 5), 4: (11, 20), 5: (23, 71)}.items():
        A = _graphs.mycielskian(k).toarray()
        assert A.shape == (vertices, vertices)
        assert (A == A.T).all()
        assert A.sum() == 2 * edges
        assert np.trace(A @ A @ A) == 0
    A = _graphs.roads(40)
    dense = A.toarray()
    assert (dense == dense.T).all()
    assert 2.5 < A.nnz / A.shape[0] < 3.2
    assert dense.sum(axis=1).max() <= 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sections", "nothing"], "nothing is none of table, other"),
        (["--sections", "gpu"], "section gpu needs --device cuda"),
        (["--widths", "0"], "'0' is no number of 1 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, arguments, complaint):
    sections = X.sections | {"gpu": Section(iter, only="cuda")}
    with pytest.raises(SystemExit):
        _table.Benchmark("x", None, sections)(["--device", "cpu", *arguments])
    assert complaint in capsys.readouterr().err


def test_the_spin_compiles():
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")
    program = nvrtc.createProgram(_harness.SPIN, "benchmark.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_90"])
