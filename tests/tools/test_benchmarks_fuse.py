"""The parts of ``benchmarks fuse`` that need no GPU: its oracle, its targets, the CPU."""

import argparse
import json
import time
from functools import partial
from importlib import import_module

import pytest

torch = pytest.importorskip("torch", reason="the sections run torch's autograd")

from benchmarks import _graphs  # noqa: E402  # without torch they cannot be imported
from benchmarks.attention import (  # noqa: E402
    cases,
    cpu,
    fuse,
    launches,
    layers,
    memory,
    pace,
    profile,
    table,
    training,
)
from benchmarks.matmul import aggregate  # noqa: E402
from sparsefmt import generate, write  # noqa: E402


def by_name(targets):
    return {target.name: target for target in targets}


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


@pytest.fixture
def options(tmp_path):
    def make(*arguments):
        return fuse.parse(["--device", "cpu", "--quick", "--out", str(tmp_path), *arguments])

    return make


def test_every_section_is_there():
    for module, function in fuse.SECTIONS.values():
        assert callable(getattr(import_module(f"benchmarks.{module}"), function))


def test_only_the_section_of_the_cpu_runs_there_by_itself(options):
    found = options()
    assert found.sections == ("cpu",)
    assert found.graphs is found.widths is found.kinds is found.dtypes is None


def test_all_other_sections_run_on_a_gpu(monkeypatch):
    monkeypatch.setattr("benchmarks._options.parse_device", lambda device: device)
    assert fuse.parse([]).sections == tuple(name for name in fuse.SECTIONS if name != "cpu")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        *((["--sections", name], f"{name} needs a GPU") for name in sorted(fuse.ON_GPU)),
        (["--sections", "nothing"], "nothing is none of aggregate, attention"),
        (["--kinds", "gcn"], "gcn is none of gat, gatv2, dot"),
        (["--dtypes", "float64"], "float64 is none of float32"),
    ],
)
def test_what_cannot_run_is_refused(capsys, options, arguments, complaint):
    with pytest.raises(SystemExit):
        options(*arguments)
    assert complaint in capsys.readouterr().err


def test_the_section_of_the_cpu_is_refused_on_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks._options.parse_device", lambda device: device)
    with pytest.raises(SystemExit):
        fuse.parse(["--sections", "cpu"])
    assert "cpu is measured with --device cpu" in capsys.readouterr().err


def test_real_graphs_come_from_their_files_whoever_asks_for_them(tmp_path, capsys):
    (tmp_path / "pubmed.npz").touch()
    found = partial(cases.graphs_of, generated=("reddit",))
    assert dict(found(argparse.Namespace(graphs=None, data=tmp_path))) == {
        "pubmed": str(tmp_path / "pubmed.npz"),
        "reddit": "reddit",
    }
    assert "cora skipped: there is no" in capsys.readouterr().out
    asked = argparse.Namespace(graphs=("pubmed", "arxiv"), data=tmp_path)
    assert [name for name, _ in found(asked)] == ["pubmed", "arxiv"]


# Judging


def attention_row(kind, graph, heads, feat, dtype="float32", ms=1.0, **more):
    row = cases.case_of(kind, graph, heads, feat, dtype)
    return row | {"ms": ms, "spmm": 3.0, "device": "cuda"} | more


def test_attention_is_judged_by_milliseconds_and_the_gain_of_halves():
    rows = [
        attention_row("gat", "arxiv", 4, 32, ms=2.3, over_pyg=9.0),
        attention_row("gatv2", "reddit", 1, 128, ms=51.0),
        attention_row("gat", "reddit", 4, 32, "bfloat16", ms=50.0, over_f32=1.2),
        attention_row("gat", "reddit", 1, 128, "bfloat16", over_f32=2.7),
        attention_row("gat", "arxiv", 1, 128, "bfloat16", over_f32=1.1),
        attention_row("gatv2", "reddit", 1, 128, "bfloat16", over_f32=0.9),
        attention_row("gat", "reddit", 1, 128, "float16", over_f32=1.0),
    ]
    targets = by_name(table.judge(rows))
    met = targets["gat arxiv 4x32 float32 ms"]
    assert (met.limit, met.ok) == (2.4, True)
    assert not targets["gatv2 reddit 1x128 float32 ms"].ok
    assert targets["gat reddit 4x32 bfloat16 ms"].limit is None
    assert targets["gatv2 reddit 1x128 bfloat16, over float32"].value == 0.9
    for kind, shape, least in (("gat", "4x32", 1.2), ("gatv2", "1x128", 0.9)):
        gain = targets[f"{kind} reddit bfloat16 over float32, worst ({shape})"]
        assert (gain.value, gain.limit, gain.ok) == (least, 1.5, False)
    mean = targets["gat reddit bfloat16 over float32, geomean of 2"]
    assert (mean.value, mean.limit) == (pytest.approx(1.8), None)
    for elsewhere in ("gat reddit float16", "gat arxiv bfloat16"):
        assert targets[f"{elsewhere} over float32, worst (1x128)"].limit is None
    there = [row | {"device": "cpu"} for row in rows]
    assert all(target.limit is None for target in table.judge(there))


def test_every_shape_that_is_stated_is_measured_and_other_graphs_have_all():
    for kind, graph, *shape in table.LIMITS:
        assert tuple(shape) in table.shapes(kind, graph)
    assert table.shapes("gatv2", "arxiv") == [(4, 32)]
    assert table.shapes("gat", "other") == [(4, 32), (1, 128), (1, 16)]
    assert table.KINDS == fuse.KINDS
    assert table.DTYPES == fuse.DTYPES


def test_aggregation_is_judged_over_cusparse_and_by_milliseconds():
    def row(graph, feat, ms, ratio):
        facts = {"ms": ms, "ratio": ratio, "dx_error": 1e-7, "da_error": 2e-7}
        return {"case": f"{graph} {feat}", "graph": graph, "feat": feat} | facts

    rows = [row("reddit", 64, 5.3, 1.0), row("reddit", 256, 21.0, 4.0), row("ddi", 64, 1.0, 2.0)]
    targets = by_name(aggregate.judge(rows))
    assert targets["over cuSPARSE's SpMM and SDDMM, geomean of 3"].ok
    assert targets["over cuSPARSE's SpMM and SDDMM, worst (reddit 64)"].value == 1.0
    assert (targets["reddit 64 ms"].limit, targets["reddit 64 ms"].ok) == (5.2, False)
    assert (targets["reddit 256 ms"].limit, targets["reddit 256 ms"].ok) == (21.5, True)
    assert not by_name(aggregate.judge(rows[:1]))["over cuSPARSE's SpMM and SDDMM, geomean of 1"].ok


def test_memory_is_judged_by_peaks_and_allocations():
    def row(graph, peak, kind="gat", **more):
        facts = {"peak_mib": peak, "features_mib": 100.0, "largest_mib": 100.5, "edge_sized": 0}
        return {"case": f"{kind} {graph}", "graph": graph, "kind": kind} | facts | more

    rows = [row("arxiv", 300, share=0.09), row("reddit", 500), row("products", 6000, edge_sized=1)]
    targets = by_name(memory.judge(rows))
    assert not targets["gat arxiv peak over PyG's"].ok
    assert targets["gat reddit peak, GiB"].ok
    assert not targets["gat products peak, GiB"].ok
    assert targets["gat reddit allocations of the edges' size"].ok
    assert not targets["gat products allocations of the edges' size"].ok
    assert targets["gat reddit largest allocation over that of the features"].ok
    wide = by_name(memory.judge([row("reddit", 700, "dot", largest_mib=103.0)]))
    assert not wide["dot reddit largest allocation over that of the features"].ok
    assert not wide["dot reddit peak, GiB"].ok


def test_allocations_of_the_edges_size_are_found_however_they_are_rounded():
    sizes = [1000, 4000, 4096, 16384, 5000, 32000]
    assert memory.edge_sized(sizes, 1000, 4) == [1000, 4000, 4096, 16384, 32000]
    assert memory.edge_sized(sizes, 1000, 4, but=16000) == [1000, 4000, 4096, 32000]


def test_launches_are_counted_without_products_and_copies():
    events = [
        ("gat_balanced<float>", 9.0),
        ("sm90_xmma_gemm_f32f32", 3.0),
        ("Memset (Device)", 1.0),
    ]
    row = {"case": "GAT g", "model": "GAT"} | launches.of(events * 8)
    assert (row["kernels"], row["gemms"], row["copies"]) == (8, 8, 8)
    assert row["gpu_ms"] == pytest.approx(0.104)
    assert by_name(launches.judge([row]))["GAT g kernels"].ok
    row |= {"kernels": 9}
    assert not by_name(launches.judge([row]))["GAT g kernels"].ok
    assert profile.counted(["nvjet_tst_64x8", "cub::DeviceScan"])["gemms"] == 1


def test_training_is_judged_on_real_graphs_and_a_gpu():
    def row(model, graph, over, device="cuda"):
        case = {"case": f"{model} {graph}", "model": model, "graph": graph, "device": device}
        case |= {"error": 3e-7, "pyg_error": 1e-7}
        return case | {"over_pyg": over, "pyg_ms": 1.0, "captured_ms": 0.1}

    targets = by_name(training.judge([row("GCN", "cora", 2.5), row("GAT", "pubmed", 2.5)]))
    assert targets["GCN cora over PyG"].ok
    assert not targets["GAT pubmed over PyG"].ok
    assert targets["GAT pubmed captured, over PyG eager"].value == pytest.approx(10.0)
    assert not targets["largest error over PyG's own (GCN cora)"].ok
    for other in (row("GCN", "arxiv", 0.5), row("GCN", "cora", 0.5, "cpu")):
        assert by_name(training.judge([other]))[f"{other['case']} over PyG"].limit is None


def test_training_that_was_not_measured_on_a_gpu_is_missed(monkeypatch, tmp_path, capsys):
    row = {"case": "GCN cora", "model": "GCN", "graph": "cora", "device": "cuda", "over_pyg": 3.0}
    targets = by_name(training.judge([row]))
    absent = {name: target for name, target in targets.items() if "not measured" in name}
    assert not any(target.ok for target in absent.values())
    assert absent["GAT pubmed over PyG, not measured"].limit == 3.0
    assert len(absent) == 3
    assert not any("not measured" in t.name for t in training.judge([row | {"device": "cpu"}]))
    nowhere = argparse.Namespace(device="cuda", graphs=None, data=tmp_path, out=tmp_path)
    assert not training.training(nowhere)
    assert capsys.readouterr().out.count("MISSED") == 4


def test_layers_are_judged_by_model_and_mode():
    rows = [
        {"case": f"{over}", "model": "GCN", "mode": "inductive", "over_pyg": over, "error": 1e-6}
        | {"pyg_error": 1e-6 / over}
        for over in (1.0, 4.0)
    ]
    targets = by_name(layers.judge([*rows, {"model": "GAT", "mode": "x", "error": 2e-4}]))
    assert targets["GCN inductive over PyG, geomean of 2"].value == pytest.approx(2.0)
    assert targets["GCN inductive over PyG, worst"].value == 1.0
    assert targets["largest error"].value == 2e-4
    most = targets["largest error over PyG's own (4.0)"]
    assert (most.value, most.limit) == (pytest.approx(4.0), 2.0)
    assert not most.ok
    assert not targets["largest error, PyG not run"].ok
    assert len(targets) == 5
    (rounded,) = cases.precision([{"case": "c", "error": 1e-7, "pyg_error": 1e-9}])
    assert rounded.ok
    assert cases.precision([{"case": "c", "error": 1e-7}]) == []


def test_the_cpu_is_judged_over_pyg():
    rows = [{"case": kind, "kind": kind, "over_pyg": 3.9} for kind in ("gat", "gatv2")]
    targets = by_name(cpu.judge([*rows, {"case": "dot", "kind": "dot"}]))
    assert not targets["gat over PyG"].ok
    assert targets["gatv2 over PyG"].limit is None
    assert len(targets) == 2


@pytest.mark.parametrize(
    ("ms", "quick", "counts"), [(0.0, True, 5), (0.03, False, 10), (0.001, False, 20)]
)
def test_what_takes_long_runs_less_often(ms, quick, counts):
    calls = []

    def slow():
        calls.append(0)
        time.sleep(ms)

    assert pace.paced([slow], cuda=False, quick=quick)[1] == counts
    if ms == 0.03:
        assert len(calls) == pace.LONG_RUNS + pace.LONG_WARMUPS


# Sections on the CPU


def sections_of(folder):
    return json.loads((folder / "fuse-cpu.json").read_text())["sections"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The path of a graph of 2000 entries."""
    path = tmp_path_factory.mktemp("graphs") / "tiny.npz"
    write(path, generate.power_law(300, 2000, community=50))
    return str(path)


def test_the_section_of_the_cpu_writes_its_figures(tmp_path, tiny):
    pytest.importorskip("torch_geometric")
    arguments = ["--device", "cpu", "--graphs", tiny, "--quick", "--threads", "1"]
    arguments += ["--kinds", ",".join(fuse.KINDS)]
    assert fuse.main([*arguments, "--out", str(tmp_path)]) == 0
    section = sections_of(tmp_path)["cpu"]
    assert [row["kind"] for row in section["rows"]] == [*fuse.KINDS]
    assert all(row["ms"] > 0 and row["over_pyg"] > 0 for row in section["rows"])
    assert all(row["error"] < 1e-5 for row in section["rows"])
    assert section["machine"]["commit"]


def test_a_wrong_gradient_is_reported_and_fails(tmp_path, tiny, monkeypatch, capsys):
    right = cases.Attention.both

    def wrong(self, forward=None):
        out, *gradients = right(self, forward)
        return out, *gradients[:-1], gradients[-1] * 1.01

    monkeypatch.setattr(cases.Attention, "both", wrong)
    arguments = ["--device", "cpu", "--graphs", tiny, "--quick", "--kinds", "gat"]
    arguments += ["--threads", "1"]
    assert fuse.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "WRONG, not reported: gat tiny 4x32 float32: errors of er" in capsys.readouterr().out
    assert not (tmp_path / "fuse-cpu.json").exists()


@pytest.mark.parametrize("section", ["attention", "layers", "training"])
def test_sections_that_need_torch_run_on_the_cpu_too(tmp_path, tiny, section):
    pytest.importorskip("torch_geometric")
    arguments = ["--device", "cpu", "--sections", section, "--graphs", tiny, "--quick"]
    arguments += ["--widths", "16", "--kinds", "gat", "--threads", "1", "--out", str(tmp_path)]
    assert fuse.main(arguments) == 0
    found = sections_of(tmp_path)[section]
    assert found["rows"]
    assert found["targets"]
    assert all(row["ms"] > 0 and row["over_pyg"] > 0 for row in found["rows"])


def test_the_gradients_of_an_aggregation_are_checked(small, monkeypatch):
    ours = aggregate.Operands.of(small, 8)
    row = ours.checked(cuda=False)
    assert max(row["dx_error"], row["da_error"]) < 1e-5
    dX, dA = ours()[:2]
    dA[0] *= 1.1
    monkeypatch.setattr(aggregate, "aggregate_backward", lambda *_, **__: (dX, dA))
    assert ours.checked(cuda=False)["wrong"].startswith("da: relative error")
