"""The benchmarks' own checks, figures and files, on small graphs without a GPU."""

import json
import math
from importlib import import_module

import numpy as np
import pytest

from benchmarks import _graphs, _harness, _oracle, _probe
from benchmarks.__main__ import main
from benchmarks.cbsr import products, selection
from benchmarks.matmul import table
from sparsefmt import CBSR
from sparsefmt.ops import edge_softmax, maxk, sddmm, spmm

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")

MACHINE = {"commit": "0123456789ab", "cpu": "x86_64"}


@pytest.fixture
def small():
    graph = _graphs.weighted(_graphs.load("small", device="cpu"))
    return graph, _graphs.uniform(graph.indptr, (graph.n_cols, 9))


@pytest.fixture
def clean_commit(monkeypatch):
    monkeypatch.setattr(_harness, "machine", lambda *, cuda: dict(MACHINE))


def ratios(rows):
    return [_harness.Target("geomean", _harness.geomean(row["ratio"] for row in rows), 1.5)]


def test_geomean():
    assert _harness.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(_harness.geomean([]))


@pytest.mark.parametrize(
    ("value", "at_least", "ok"),
    [(2.0, True, True), (1.0, True, False), (2.0, False, False), (math.nan, True, False)],
)
def test_a_target_is_reached_from_its_side(value, at_least, ok):
    target = _harness.Target("ratio", value, 1.5, at_least)
    assert target.ok is ok
    assert str(target).endswith("ok" if ok else "MISSED")


def test_a_figure_without_a_limit_misses_nothing():
    assert _harness.Target("ratio", 0.1).ok


def test_medians_run_the_functions_in_turn():
    order = []
    functions = [lambda: order.append("a"), lambda: order.append("b")]
    found = _harness.medians(functions, cuda=False, runs=2, warmups=1)
    assert order == ["a", "b"] * 3
    assert len(found) == 2


@pytest.mark.parametrize(("host", "spin"), [(0.01, 0.2), (0.14, 0.42), (1000.0, 5.0)])
def test_the_gpu_spins_until_the_host_has_launched(monkeypatch, host, spin):
    spins = []
    monkeypatch.setattr(_harness, "_wall_ms", lambda function: host)
    monkeypatch.setattr(_harness, "_wait", lambda: None)
    monkeypatch.setattr(_harness, "_cuda_ms", lambda function, spin: spins.append(spin) or 1.0)
    assert _harness.medians([lambda: None], cuda=True, runs=2, warmups=1) == [1.0]
    assert spins == [pytest.approx(spin)] * 2


@pytest.mark.parametrize(("seconds", "runs"), [(0.0, 60), (0.001, 20), (0.06, 10)])
def test_long_cases_take_fewer_runs_and_short_ones_more(monkeypatch, seconds, runs):
    monkeypatch.setattr(_harness, "_wall_ms", lambda function: seconds * 1e3)
    assert _harness.paced([lambda: None], cuda=False)[1] == runs


def test_columns_line_up_where_a_value_is_missing(capsys):
    columns = {"case": "<8", "ms": "9.3f", "runs": "4d"}
    _harness.print_head("title", columns)
    _harness.print_row({"case": "a", "runs": 3}, columns)
    head, row = capsys.readouterr().out.splitlines()[-2:]
    assert head.index("runs") + 4 == len(row)
    assert row.split() == ["a", "3"]


def test_sections_of_one_commit_merge_by_case(tmp_path, clean_commit):
    first = [{"case": "a", "ratio": 1.0}, {"case": "b", "ratio": 4.0}]
    assert _harness.keep("x", "table", first, ratios, cuda=False, folder=tmp_path)
    assert _harness.keep("x", "other", first[:1], ratios, cuda=False, folder=tmp_path)
    again = [{"case": "a", "ratio": 9.0}]
    assert _harness.keep("x", "table", again, ratios, cuda=False, folder=tmp_path)
    sections = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]
    assert sections["table"]["rows"] == [first[1], again[0]]
    assert sections["table"]["targets"][0]["value"] == pytest.approx(6.0)
    assert sections["table"]["machine"] == MACHINE
    assert sections["other"]["rows"] == first[:1]


def test_rows_of_another_commit_are_dropped(tmp_path, clean_commit, monkeypatch):
    _harness.keep("x", "s", [{"case": "a", "ratio": 1.0}], ratios, cuda=False, folder=tmp_path)
    monkeypatch.setattr(_harness, "machine", lambda *, cuda: MACHINE | {"commit": "other"})
    _harness.keep("x", "s", [{"case": "b", "ratio": 1.0}], ratios, cuda=False, folder=tmp_path)
    rows = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]["s"]["rows"]
    assert [row["case"] for row in rows] == ["b"]


def test_a_wrong_case_is_not_reported(tmp_path, clean_commit, capsys):
    wrong = {"case": "bad", "wrong": "relative error 1"}
    assert not _harness.keep("x", "s", [wrong], ratios, cuda=False, folder=tmp_path)
    assert not (tmp_path / "x-cpu.json").exists()
    rows = [wrong, {"case": "good", "ratio": 2.0}]
    assert not _harness.keep("x", "s", rows, ratios, cuda=False, folder=tmp_path)
    section = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]["s"]
    assert section["rows"] == rows[1:]
    assert [target["ok"] for target in section["targets"]] == [True, False]
    assert "WRONG, not reported: bad" in capsys.readouterr().out


def test_the_gate_passes_right_results(small):
    A, X = small
    scores = _graphs.uniform(A.indptr, (A.nnz, 3))
    for error in (
        _oracle.spmm_error(A, X, spmm(A, X)),
        _oracle.sddmm_error(A, X, X, sddmm(A, X, X)),
        _oracle.softmax_error(A, scores, edge_softmax(A, scores)),
    ):
        assert _oracle.complaint(error, X.dtype) is None


@pytest.mark.parametrize("fault", [1 + 1e-4, 0.0, np.nan])
def test_the_gate_stops_one_wrong_number_in_the_longest_row(small, fault):
    A, X = small
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


def test_the_gate_takes_the_columns_that_a_result_has(small):
    A, X = small
    columns = np.tile(np.uint8([1, 4, 8]), (A.n_rows, 1))
    Y = spmm(A, X)[:, [1, 4, 8]]
    assert _oracle.complaint(_oracle.spmm_error(A, X, Y, columns=columns), X.dtype) is None
    columns[A.lengths.argmax(), 1] = 5
    assert _oracle.complaint(_oracle.spmm_error(A, X, Y, columns=columns), X.dtype)


def test_the_gate_allows_additions_in_turn_their_rounding():
    assert _oracle.complaint(2e-5, np.float32)
    assert _oracle.complaint(2e-5, np.float32, in_turn=100_000) is None
    assert _oracle.complaint(2e-5, np.float32, in_turn=10_000)
    assert _oracle.complaint(math.nan, np.float32, in_turn=100_000)


@pytest.mark.parametrize("dtype", selection.DTYPES)
def test_the_gate_of_maxk_finds_every_wrong_row(monkeypatch, dtype):
    pytest.importorskip("torch")
    monkeypatch.setattr(_oracle, "CHUNK", 64)
    X = selection.features(np.empty(0), 300, dtype)
    X[2::97] = -0.0
    X[2::97, ::3] = 0.0
    S = maxk(X, 8)
    assert _oracle.wrong_maxk_rows(X, S) == 0
    indices, data = S.indices.copy(), S.data.copy()
    indices[1, -1] += 1  # where all tie: not the lowest columns
    data[5, 0] = np.nextafter(data[5, 0], data.dtype.type(9))
    data[99, 0] *= -1  # -0.0 in the place of 0.0
    assert _oracle.wrong_maxk_rows(X, CBSR(indices, data, shape=S.shape)) == 3


def test_the_sampled_rows_have_the_first_the_last_and_the_longest(small):
    A, _ = small
    assert {0, A.n_rows - 1, int(A.lengths.argmax())} <= set(_oracle.sampled_rows(A).tolist())


def test_graphs_by_degree_begin_with_the_hub():
    shuffled = _graphs.load("small", device="cpu")
    lengths = _graphs.load("small", device="cpu", by_degree=True).lengths
    assert sorted(lengths, reverse=True) == lengths.tolist()
    assert sorted(lengths) == sorted(shuffled.lengths)
    assert shuffled.has_sorted_indices


def test_an_unknown_graph_is_refused_by_name():
    with pytest.raises(SystemExit, match=r"nowhere\.npz is neither a file nor one of reddit"):
        _graphs.load("nowhere.npz", device="cpu")


def test_the_table_is_judged_by_dtype_and_width():
    def row(feat, dtype, ratio):
        case = {"case": f"g {feat} {dtype}", "feat": feat, "dtype": dtype, "ratio": ratio}
        return case | {"ceiling": 0.9, "error": 1e-7, "cusparse_error": 0.0, "ratio_f32": 3.0}

    rows = [row(64, "float32", 2.0), row(128, "float32", 0.9), row(16, "float32", 1.5)]
    targets = {t.name: t for t in table.judge_table([*rows, row(64, "float16", 1.9)])}
    assert targets["float32 64/128/256 over cuSPARSE, geomean of 2"].ok is False
    assert targets["float32 64/128/256 over cuSPARSE, worst (g 128 float32)"].value == 0.9
    assert targets["float32 16/32 over cuSPARSE, geomean of 1"].ok
    assert not targets["float16 64/128/256 over cuSPARSE float16, geomean of 1"].ok
    assert targets["float16 64/128/256 over cuSPARSE float32, geomean of 1"].ok


def speed_ups(graph, *ratios):
    """Rows of a graph at the first k, all ways alike."""
    ways = (*products.WAYS, *products.MORE_WAYS)
    return [
        {"case": f"{graph} k={k}", "graph": graph, "k": k, "algorithm": "DEFAULT"}
        | {f"{way}_ratio": ratio for way in ways}
        | {f"{way}_ms": 1 / ratio for way in ways}
        for k, ratio in zip(products.KS, ratios, strict=False)
    ]


def test_the_products_of_maxk_are_judged_by_graph_and_k(tmp_path):
    rows = [*speed_ups("reddit", 9.0, 6.0), *speed_ups("pubmed", 1.0, 1.5)]
    targets = {t.name: t for t in products.judge(rows)}
    assert targets["spgemm reddit k=8 over cuSPARSE"].ok
    assert not targets["sspmm reddit k=8 over cuSPARSE"].ok
    assert targets["spgemm reddit k=16 over cuSPARSE"].limit == 6.0
    assert targets["panels k=8, geomean of 2"].value == pytest.approx(3.0)
    assert not any("pubmed" in name for name in targets)
    products.plot(rows, "a device", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sections", "memory"], "memory needs a GPU"),
        (["--sections", "nothing"], "nothing is none of selection, products"),
    ],
)
def test_sections_that_cannot_run_are_refused(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        import_module("benchmarks.cbsr.maxk").main(["--device", "cpu", *arguments])
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_of_maxk_writes_its_sections(tmp_path):
    pytest.importorskip("torch")
    arguments = ["--device", "cpu", "--graphs", "small", "--k", "32", "--quick"]
    assert import_module("benchmarks.cbsr.maxk").main([*arguments, "--out", str(tmp_path)]) == 0
    sections = json.loads((tmp_path / "maxk-cpu.json").read_text())["sections"]
    cases = {name: [row["case"] for row in section["rows"]] for name, section in sections.items()}
    assert cases["selection"] == ["float32 k=32", "float16 k=32"]
    assert cases["products"] == ["small k=32"]
    assert cases["training"][-1] == "small: MaxK k=32"
    assert all(row["error"] < 1e-5 for row in sections["products"]["rows"])
    assert all(section["targets"] for section in sections.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spmm", "sddmm", "softmax"])
def test_a_cpu_benchmark_writes_its_figures(tmp_path, name):
    arguments = ["--device", "cpu", "--graphs", "small", "--quick", "--out", str(tmp_path)]
    assert main([name, *arguments]) == 0
    section = json.loads((tmp_path / f"{name}-cpu.json").read_text())["sections"]["cpu"]
    assert section["rows"]
    assert all(row["ms"] > 0 and row["error"] < 1e-5 for row in section["rows"])
    assert section["targets"]
    assert section["machine"]["commit"]


def compiled(source, names):
    from cuda.pathfinder import find_nvidia_header_directory

    program = nvrtc.createProgram(source, "benchmark.cu", [], [])
    for name in names:
        nvrtc.addNameExpression(program, name)
    headers = find_nvidia_header_directory("cudart")
    try:
        nvrtc.compileProgram(program, ["-arch=sm_90", f"-I{headers}", "-std=c++17"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return {nvrtc.getLoweredName(program, name) for name in names}


def test_every_gather_probe_compiles():
    names = _probe.expressions()
    assert len(compiled(_probe.SOURCE, names)) == len(names) == 30


def test_the_spin_compiles():
    assert compiled(_harness.SPIN, ["spin"]) == {"spin"}


def test_every_oracle_kernel_compiles():
    kernels = ("spmm_errors", "sddmm_errors", "softmax_errors")
    names = [
        _oracle.expression(kernel, _graphs.dtype(dtype), index)
        for kernel in kernels
        for dtype in _oracle.LIMITS
        for index in (np.int32, np.int64)
    ]
    assert len(compiled(_oracle.SOURCE, names)) == len(names)


def test_messages_are_pygs(tmp_path, capsys):
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")
    options = ["--device", "cpu", "--quick", "--graphs", "small", "--out", str(tmp_path)]
    assert main(["messages", *options]) == 0
    (section,) = json.loads((tmp_path / "messages-cpu.json").read_text())["sections"].values()
    assert section["rows"][0]["error"] < 1e-5


def test_relational_layers_are_pygs(tmp_path, capsys):
    pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")
    options = ["--device", "cpu", "--quick", "--graphs", "small", "--out", str(tmp_path)]
    assert main(["rgcn", *options, "--widths", "16", "--sections", "full,bases"]) == 0
    sections = json.loads((tmp_path / "rgcn-cpu.json").read_text())["sections"]
    assert all(section["rows"][0]["error"] < 1e-5 for section in sections.values())
