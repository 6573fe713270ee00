"""The parts of ``benchmarks tcgnn`` that need no GPU: what is measured, and how it is judged."""

import argparse
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from sparsefmt import CSR
from sparsefmt.ops.tiles.costs import Costs

torch = pytest.importorskip("torch", reason="half of the sections train or compare with it")

from benchmarks import _graphs, _harness, _oracle  # noqa: E402  # without torch they cannot be imported
from benchmarks.matmul import table  # noqa: E402
from benchmarks.tiles import cases, spmm, tcgnn, training  # noqa: E402

#: Prices by which every entry goes to tiles.
EVERYTHING = Costs(slab=0, window=0, row=0, again=1e9, piece=0, launch=0, gain=0)


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


@pytest.fixture
def operands(small, monkeypatch):
    """With values in float16, on the host."""
    monkeypatch.setattr(table, "_empty", lambda X, rows: np.empty((rows, X.shape[1]), X.dtype))
    monkeypatch.setattr(_harness, "poison", lambda array: array.fill(np.nan))
    return table.Operands.of(small, 64, "float16")


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
    found = list(cases.sources(options, ("ddi",), ("dd", "cora")))
    assert found == [("ddi", "ddi"), ("dd", str(tmp_path / "dd.npz"))]
    assert "cora skipped: there is no" in capsys.readouterr().out


def test_graphs_asked_for_are_recipes_paths_or_of_the_folder(tmp_path):
    path = str(Path(__file__))
    (tmp_path / "dd.npz").touch()
    options = argparse.Namespace(graphs=("ddi", path, "dd"), data=tmp_path)
    found = dict(cases.sources(options, ("arxiv",), ("cora",)))
    assert found == {"ddi": "ddi", Path(path).stem: path, "dd": str(tmp_path / "dd.npz")}
    for missing in ("none", ""):
        options.graphs = ("ddi", missing)
        with pytest.raises(SystemExit, match=f"'{missing}' is no file, here or in .*, nor one of"):
            next(cases.sources(options, ("arxiv",)))


@pytest.mark.parametrize(
    ("dtype", "share", "weighted", "right"),
    [
        *(("tf32", 0.0, True, 9e-6), ("tf32", 0.5, False, 1.7e-5), ("tf32", 1.0, True, 4e-5)),
        ("bfloat16", 1.0, True, 4e-3),
    ],
)
def test_the_limit_of_right_results_is_that_of_the_operands_bits(dtype, share, weighted, right):
    assert cases.complaint(right, dtype, share, weighted=weighted) is None
    assert cases.complaint(2 * right, dtype, share, weighted=weighted) is not None


def test_a_row_that_both_units_take_a_part_of_is_rounded_twice():
    complaint = cases.complaint
    for share in (0.0, 1.0):
        assert complaint(1.1e-3, "float16", share)
        assert complaint(6e-3, "bfloat16", share)
    assert complaint(1.1e-3, "float16", 0.5) is None
    assert complaint(6e-3, "bfloat16", 0.5) is None
    assert complaint(1e-2, "bfloat16", 0.5) == "relative error 0.01, at most 0.00881 is right"
    assert complaint(1.1e-3, "tf32", 0.5)  # stored with 24 bits


def test_only_a_share_of_all_entries_prints_as_one(capsys):
    for share in (0.0004, 0.9999, 1.0, None):
        cases.print_row({"share": share}, {"share": "6.3f"})
    assert capsys.readouterr().out.split() == ["0.000", "0.999", "1.000"]


@pytest.mark.parametrize(("way", "feat"), [("costs", 32), ("none", 16)])
def test_the_share_is_that_of_the_split_that_the_product_takes(small, monkeypatch, way, feat):
    def measured(*kind):
        asked.append(kind)
        return EVERYTHING if way == "costs" else None

    asked = []
    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", measured)
    tiles = cases.tiles_of(small)
    share = cases.share_of(tiles, "spmm", "bfloat16", feat, weighted=True)
    assert share == (1.0 if way == "costs" else 0.0)
    assert asked == [("spmm", 2, True, feat)]


def test_a_product_is_checked_with_values_and_without(operands, small):
    tiles = cases.tiles_of(small)
    ones = cases.with_ones(operands)
    assert (ones.A.data == 1).all()
    for held in (operands, cases.without_values(operands), ones):
        product = cases.Tiled.of(tiles, held, "float16", costs=EVERYTHING)
        assert (product.S.data is None) == (held.A.data is None)
        found = product.checked()
        assert "wrong" not in found
        assert found["share"] == 1.0
        assert 0 < found["error"] < 1e-3


def test_communities_are_ranges_of_ids_where_ids_are_not_shuffled(small):
    def inside(graph):
        coo = graph.tocoo()
        return float((coo.row // 200 == coo.col // 200).mean())

    assert inside(_graphs.load("small", device="cpu", shuffle=False)) > 0.5 > inside(small)


def test_the_normalised_graph_is_that_of_gcn():
    graph = CSR(np.array([0, 2, 3, 4]), np.array([0, 2, 0, 1]), shape=(3, 3))
    looped = graph.toarray()
    np.fill_diagonal(looped, 1)
    degree = looped.sum(1)
    expected = looped / np.sqrt(degree[:, None] * degree)
    found = training.normalised(graph).toarray()
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(np.float32).eps)


def cell(dtype, ratio, over_csr=1.0, error=1e-4, bias=-2e-6, feat=64, weighted=True, share=0.0):
    case = cases.case_of("g", feat, dtype, weighted=weighted)
    facts = {"over_csr": over_csr, "error": error, "bias": bias, "share": share}
    return case | {"ratio": ratio} | facts


def test_the_table_is_judged_by_dtype():
    rows = [cell("tf32", 1.5), cell("tf32", 0.9, feat=128, over_csr=0.94), cell("float16", 1.9)]
    targets = by_name(spmm.judge_table([*rows, cell("tf32", 0.1, error=5e-4, feat=16)]))
    assert not targets["tf32 64/128/256 over cuSPARSE float32, geomean of 2"].ok
    assert not targets["tf32 64/128/256 over cuSPARSE float32, worst (g 128 tf32)"].ok
    assert targets["tf32 64/128/256 over spmm(CSR), worst (g 128 tf32)"].value == 0.94
    assert not targets["tf32 largest relative error"].ok
    assert targets["tf32 largest bias, either way"].value == 2e-6
    assert not targets["float16 64/128/256 over cuSPARSE float16, geomean of 1"].ok
    assert not any("bfloat16" in name for name in targets)


def test_the_table_is_judged_with_values_and_without_together_and_apart():
    rows = [cell("tf32", 1.0, over_csr=2.0), cell("tf32", 4.0, over_csr=8.0, weighted=False)]
    targets = by_name(spmm.judge_table(rows))
    both = targets["tf32 64/128/256 over cuSPARSE float32, geomean of 2"]
    assert (both.value, both.limit) == (pytest.approx(2.0), 1.35)
    apart = targets["tf32 without values over cuSPARSE float32, geomean of 1"]
    assert (apart.value, apart.limit) == (pytest.approx(4.0), None)
    assert targets["tf32 with values over spmm(CSR), geomean of 1"].value == pytest.approx(2.0)
    assert rows[1]["case"] == "g 64 tf32 unweighted"


def test_the_limit_of_errors_in_bfloat16_goes_by_the_share_and_that_in_float16_does_not():
    rows = [
        cell(dtype, 2.0, error=error, share=share)
        for dtype, error in (("float16", 1.1e-3), ("bfloat16", 6e-3))
        for share in (0.0, 0.5)
    ]
    targets = by_name(spmm.judge_table(rows))
    assert not targets["float16 largest relative error"].ok
    assert targets["bfloat16 largest relative error"].ok


def test_models_are_judged_by_library_and_precision():
    rows = [
        {"graph": "a", "model": "GCN", "precision": "high", "ms": 2.0, "over_pyg": 4.0},
        {"graph": "a", "model": "GCN", "precision": "highest", "ms": 3.0, "over_torch": 0.5},
    ]
    targets = by_name(training.judge(rows))
    assert targets["GCN high over PyG, geomean of 1"].value == pytest.approx(4.0)
    assert targets["GCN highest over torch.sparse, worst"].value == 0.5
    assert targets["GCN, tiles in TF32 over CSR in float32, geomean of 1"].value == 1.5


def test_the_kernel_of_signed_errors_compiles():
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")
    from cuda.pathfinder import find_nvidia_header_directory

    program = nvrtc.createProgram(cases.SIGNED_SOURCE, "benchmark.cu", [], [])
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
