"""The parts of ``benchmarks tcgnn`` that need no GPU: what is measured, and how it is judged."""

import argparse
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from sparsefmt import CSR

torch = pytest.importorskip("torch", reason="half of the sections train or compare with it")

from benchmarks import (  # noqa: E402  # without torch they cannot be imported
    _graphs,
    _oracle,
    _tcgnn_blocks,
    _tcgnn_cases,
    _tcgnn_spmm,
    _tcgnn_structured,
    _tcgnn_training,
    _tcgnn_translation,
    tcgnn,
)


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


def by_name(targets):
    return {target.name: target for target in targets}


def test_every_section_is_there():
    for module, function in tcgnn.SECTIONS.values():
        assert callable(getattr(import_module(f"benchmarks.{module}"), function))


def test_the_cpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        tcgnn.main(["--device", "cpu"])
    assert "every section needs one" in capsys.readouterr().err


def test_real_graphs_come_from_the_folder_or_are_skipped(tmp_path, capsys):
    (tmp_path / "dd.npz").touch()
    options = argparse.Namespace(graphs=None, data=tmp_path)
    found = list(_tcgnn_cases.sources(options, ("ddi",), ("dd", "cora")))
    assert found == [("ddi", "ddi"), ("dd", str(tmp_path / "dd.npz"))]
    assert "cora skipped: there is no" in capsys.readouterr().out


def test_graphs_asked_for_are_recipes_paths_or_of_the_folder(tmp_path):
    path = str(Path(__file__))
    (tmp_path / "dd.npz").touch()
    options = argparse.Namespace(graphs=("ddi", path, "dd", "none"), data=tmp_path)
    found = dict(_tcgnn_cases.sources(options, ("arxiv",), ("cora",)))
    assert found == {
        "ddi": "ddi",
        Path(path).stem: path,
        "dd": str(tmp_path / "dd.npz"),
        "none": "none",  # which loading refuses
    }


@pytest.mark.parametrize(("dtype", "right"), [("tf32", 9e-4), ("bfloat16", 4e-3)])
def test_the_limit_of_right_results_is_that_of_the_operands_bits(dtype, right):
    assert _tcgnn_cases.complaint(right, dtype) is None
    assert _tcgnn_cases.complaint(2 * right, dtype) is not None


def test_communities_are_ranges_of_ids_where_ids_are_not_shuffled(small):
    def inside(graph):
        coo = graph.tocoo()
        return float((coo.row // 200 == coo.col // 200).mean())

    assert inside(_graphs.load("small", device="cpu", shuffle=False)) > 0.5 > inside(small)


def test_a_batch_has_its_copies_on_the_diagonal():
    graph = CSR(np.array([0, 2, 2, 3]), np.array([0, 2, 1]), shape=(3, 3))
    found = _tcgnn_structured.batch(graph, 3)
    found.check()
    assert (found.toarray() == np.kron(np.eye(3), graph.toarray())).all()
    assert found.index_dtype == graph.index_dtype


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_the_blocks_are_the_same_matrix_in_both_formats(count, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    matrix = _tcgnn_blocks.Blocks.of(count)
    A = matrix.csr()
    A.check()
    assert A.has_sorted_indices
    assert (A.lengths == 16 * count).all()
    assert (A.toarray() == matrix.bsr(torch.float32).to_dense().numpy()).all()


def test_entries_of_a_condensed_column(small):
    found = _tcgnn_translation.per_column(small.tosgt((16, 8)))
    coo = small.tocoo()
    pairs = {*zip((coo.row // 16).tolist(), coo.col.tolist(), strict=True)}
    assert found == pytest.approx(small.nnz / len(pairs))
    empty = CSR(np.zeros(5, np.int32), np.empty(0, np.int32), shape=(4, 4))
    assert _tcgnn_translation.per_column(empty.tosgt()) == 0


def test_the_normalised_graph_is_that_of_gcn():
    graph = CSR(np.array([0, 2, 3, 4]), np.array([0, 2, 0, 1]), shape=(3, 3))
    looped = graph.toarray()
    np.fill_diagonal(looped, 1)
    degree = looped.sum(1)
    expected = looped / np.sqrt(degree[:, None] * degree)
    found = _tcgnn_training.normalised(graph).toarray()
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(np.float32).eps)


def cell(dtype, ratio, over_csr=1.0, error=1e-4, bias=-2e-6, feat=64):
    case = {"case": f"g {feat} {dtype}", "feat": feat, "dtype": dtype, "ratio": ratio}
    return case | {"over_csr": over_csr, "error": error, "bias": bias}


def test_the_table_is_judged_by_dtype():
    rows = [cell("tf32", 1.5), cell("tf32", 0.9, feat=128, over_csr=0.94), cell("float16", 1.9)]
    targets = by_name(_tcgnn_spmm.judge_table([*rows, cell("tf32", 0.1, error=5e-4, feat=16)]))
    assert not targets["tf32 64/128/256 over cuSPARSE float32, geomean of 2"].ok
    assert not targets["tf32 64/128/256 over cuSPARSE float32, worst (g 128 tf32)"].ok
    assert targets["tf32 64/128/256 over spmm(CSR), worst (g 128 tf32)"].value == 0.94
    assert not targets["tf32 largest relative error"].ok
    assert targets["tf32 largest bias, either way"].value == 2e-6
    assert not targets["float16 64/128/256 over cuSPARSE float16, geomean of 1"].ok
    assert not any("bfloat16" in name for name in targets)


def test_graphs_with_structure_are_judged_together_and_by_group():
    rows = [
        {"case": f"{group} {k}", "group": group, "dtype": "tf32", "over_csr": ratio}
        for group, ratios in (("ids not shuffled", (2.0, 8.0)), ("real", (1.0,)))
        for k, ratio in enumerate(ratios)
    ]
    targets = by_name(_tcgnn_structured.judge(rows))
    assert targets["tf32 over spmm(CSR), geomean of 3"].ok
    assert targets["tf32 over spmm(CSR), ids not shuffled, 2"].value == pytest.approx(4.0)
    assert targets["tf32 over spmm(CSR), worst (real 0)"].value == 1.0


def test_the_largest_share_of_translation_counts():
    rows = [
        {"case": "a", "percent": 1.0, "percent_both": 3.0},
        {"case": "b", "percent": 2.5, "percent_both": 2.8},
    ]
    share, both = _tcgnn_translation.judge(rows)
    assert share.value == pytest.approx(0.025)
    assert not share.ok
    assert both.value == pytest.approx(0.03)
    assert both.limit is None


def test_models_are_judged_by_library_and_precision():
    rows = [
        {"graph": "a", "model": "GCN", "precision": "high", "ms": 2.0, "over_pyg": 4.0},
        {"graph": "a", "model": "GCN", "precision": "highest", "ms": 3.0, "over_torch": 0.5},
    ]
    targets = by_name(_tcgnn_training.judge(rows))
    assert targets["GCN high over PyG, geomean of 1"].value == pytest.approx(4.0)
    assert targets["GCN highest over torch.sparse, worst"].value == 0.5
    assert targets["GCN, tiles in TF32 over CSR in float32, geomean of 1"].value == 1.5


def test_the_kernel_of_signed_errors_compiles():
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")
    from cuda.pathfinder import find_nvidia_header_directory

    program = nvrtc.createProgram(_tcgnn_cases.SIGNED_SOURCE, "benchmark.cu", [], [])
    names = [
        _oracle.expression("signed_errors", _graphs.dtype(dtype), index)
        for dtype in _oracle.LIMITS
        for index in (np.int32, np.int64)
    ]
    for name in names:
        nvrtc.addNameExpression(program, name)
    headers = find_nvidia_header_directory("cudart")
    try:
        nvrtc.compileProgram(program, ["-arch=sm_90", f"-I{headers}", "-std=c++17"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len({nvrtc.getLoweredName(program, name) for name in names}) == len(names)
