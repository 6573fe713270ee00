"""Every benchmark runs on a small graph on the CPU, checks its results and keeps its figures."""

import json
from argparse import ArgumentTypeError

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the sections run torch's autograd")
pytest.importorskip("torch_geometric", reason="PyG is what they are measured beside")

from benchmarks import (  # noqa: E402
    _graphs,
    _oracle,
    attention,
    cbsr,
    formats,
    matmul,
    plan,
    sampling,
    tiles,
    wallclock,
)
from benchmarks.__main__ import COMMANDS, ROOMS, command, main  # noqa: E402
from sparsefmt import ops  # noqa: E402
from sparsefmt.ops.engine import small as engine_small  # noqa: E402


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


def run(folder, name, *arguments):
    """The sections that a benchmark keeps."""
    options = ["--device", "cpu", "--quick", "--out", str(folder), *arguments]
    assert main([name, *options]) == 0
    return json.loads((folder / f"{name}-cpu.json").read_text())["sections"]


def test_every_name_leads_to_a_benchmark(capsys):
    assert all(callable(command(name)) for name in (*ROOMS, *COMMANDS))
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*ROOMS, *COMMANDS))
    assert main(["nothing"]) == 2


@pytest.fixture
def least(monkeypatch):
    """Graphs and widths of the least size, and loops of NumPy and SciPy where there are some."""
    recipe = _graphs.Recipe(400, 6_000, 2.3, 0.6, 40)
    monkeypatch.setitem(_graphs.RECIPES, "small", recipe)
    monkeypatch.setattr(_graphs, "load", _graphs.load.__wrapped__)
    for name in ("MOST", "MOST_OF_ATTENTION"):
        monkeypatch.setattr(engine_small, name, 1 << 40)
    monkeypatch.setattr(wallclock, "HIDDEN", 16)
    monkeypatch.setattr(cbsr, "CPU_ROWS", 500)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("softmax", "--heads 1"),
        ("sddmm", "--widths 8"),
        ("convert", ""),
        ("spmm", "--sections table"),
        ("maxk", "--k 8"),
        ("fuse", "--kinds gat --dtypes float32"),
        ("tcgnn", "--widths 16 --dtypes tf32"),
        ("sampled", "--sample 16 --dtypes float32"),
        ("messages", ""),
        ("rgcn", "--widths 16 --sections full"),
        ("training", "--sections fuse"),
        ("overhead", ""),
        ("wallclock", "--sections small,loader"),
        ("plan", "--models gcn --widths 8x12"),
    ],
)
def test_a_benchmark_checks_its_results_and_keeps_its_figures(tmp_path, least, name, arguments):
    sections = run(tmp_path, name, *arguments.split())
    rows = [row for section in sections.values() for row in section["rows"]]
    assert rows
    assert all(row["device"] == "cpu" for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    assert all(error < 1e-2 for error in errors)
    assert all(section["machine"]["commit"] for section in sections.values())


def test_wrong_results_are_not_kept(tmp_path, least, small, monkeypatch, capsys):
    assert not formats.differs(small.tocsc(), None, small)
    assert "wrong" in formats.differs(small.T.tocsr()[:-1], None, small)
    monkeypatch.setattr(matmul, "spmm", lambda A, X, out: out.fill(1.0))
    monkeypatch.setattr(plan, "RIGHT", -1.0)
    options = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main(["spmm", *options, "--sections", "table"]) == 1
    assert "WRONG, not reported: small 32 float32: relative error" in capsys.readouterr().out
    assert not (tmp_path / "spmm-cpu.json").exists()
    assert main(["plan", *options, "--models", "gcn", "--widths", "8x12"]) == 1
    assert "WRONG, not reported: small gcn 8x12 inference" in capsys.readouterr().out


def test_pairs_of_widths_are_read():
    assert plan.pairs("32x256,8x1") == ((32, 256), (8, 1))
    with pytest.raises((ArgumentTypeError, ValueError)):
        plan.pairs("axb")


@pytest.mark.parametrize(
    ("dtype", "share", "weighted", "right"),
    [
        *(("tf32", 0.0, True, 9e-6), ("tf32", 0.5, False, 1.7e-5), ("tf32", 1.0, True, 4e-5)),
        ("bfloat16", 1.0, True, 4e-3),
    ],
)
def test_the_limit_of_right_results_is_that_of_the_operands_bits(dtype, share, weighted, right):
    limit = tiles.limit_of(dtype, share, weighted=weighted)
    assert _oracle.over(right, limit) is None
    assert _oracle.over(2 * right, limit) is not None
    for share, least in ((0.0, 1e-3), (1.0, 1e-3), (0.5, 1e-3 + 2.0**-11)):  # rounded twice
        assert tiles.limit_of("float16", share, weighted=True) == least


# Samples


def test_a_sample_by_another_strategy_is_refused(small):
    def complaint(strategy, as_if, width=16):
        B, perm = ops.sample_with_perm(small, width, strategy=strategy)
        return sampling.sample_complaint(small, B, perm, 16, as_if)

    for strategy in sampling.STRATEGIES:
        assert complaint(strategy, strategy) is None
    assert "is no sample by bucket" in complaint("random", "bucket")
    assert "is no sample by fastrand" in complaint("bucket", "fastrand")
    assert "not as long" in complaint("bucket", "bucket", width=15)
    A = _graphs.weighted(small)
    B, perm = ops.sample_with_perm(A, 16)
    assert "columns" in sampling.sample_complaint(A, B, np.roll(perm, 1), 16, "bucket")
    other = B.with_data(B.data + 1)
    assert "values" in sampling.sample_complaint(A, other, perm, 16, "bucket")


def test_places_of_samples():
    is_sample = sampling.is_sample
    assert is_sample([0, 1, 2], 10, 3, "bucket")
    assert is_sample([0, 7, 4], 10, 3, "fastrand")
    assert is_sample([0, 587 - 577, 20], 577, 3, "fastrand")
    assert is_sample(np.array([9, 0, 4]), 10, 3, "random")
    for places in ([9, 0, 9], [9, 0, 10], [-1, 0, 1], [1, 2]):
        assert not is_sample(np.array(places), 10, 3, "random")
    for strategy in sampling.STRATEGIES:
        assert is_sample([0, 1, 2], 3, 5, strategy)


def test_a_batch_has_the_edges_of_its_graph_and_targets_that_ascend(small):
    seeds = np.array([5, 3, 8])
    vertices, edges = wallclock.sampled_batch(small, seeds, 0)
    assert vertices[:3].tolist() == seeds.tolist()
    assert len(np.unique(vertices)) == len(vertices)
    assert (np.diff(edges[1]) >= 0).all()
    dense = small.toarray()
    assert (dense[vertices[edges[1]], vertices[edges[0]]] > 0).all()
    counts = np.bincount(edges[1])[:3]
    assert counts.tolist() == np.minimum(small.lengths[seeds], wallclock.FAN_OUT[0]).tolist()


# Attention


def test_kernels_and_allocations_of_the_size_of_the_edges_are_counted():
    names = ["gat_forward", "ampere_sgemm_128x64", "Memcpy DtoD", "elementwise", "Memset"]
    assert attention.counted(names) == {"kernels": 2, "gemms": 1, "copies": 2}
    sizes = [4 * 1000, 4 * 4 * 1000, 777_777, 512 * 9]
    assert attention.edge_sized(sizes, 1000, 4) == sizes[:2]
    assert attention.edge_sized(sizes, 1000, 4, but=16_000) == sizes[:1]
