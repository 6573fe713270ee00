"""The parts of ``benchmarks sampled`` that need no GPU: its oracle, its targets, the CPU."""

import json
from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the sections train models")

from benchmarks import _graphs  # noqa: E402  # without torch they cannot be imported
from benchmarks.sampling import rates, sampled, table  # noqa: E402
from sparsefmt import generate, ops, write  # noqa: E402


def by_name(targets):
    return {target.name: target for target in targets}


@pytest.fixture
def small():
    return _graphs.load("small", device="cpu")


@pytest.fixture
def options(tmp_path):
    def make(*arguments):
        folders = ["--out", str(tmp_path), "--data", str(tmp_path)]
        return sampled.parse(["--device", "cpu", "--quick", *folders, *arguments])

    return make


def test_every_section_is_there():
    for module, function in sampled.SECTIONS.values():
        assert callable(getattr(import_module(f"benchmarks.{module}"), function))


def test_all_but_the_table_runs_on_the_cpu(options, monkeypatch):
    assert options().sections == ("rates", "models", "training")
    assert options("--sample", "16,64").sample == (16, 64)
    monkeypatch.setattr("benchmarks._options.parse_device", lambda device: device)
    assert sampled.parse([]).sections == tuple(sampled.SECTIONS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sections", "table"], "table needs a GPU"),
        (["--sections", "nothing"], "nothing is none of table, rates"),
        (["--strategies", "first"], "first is none of bucket, fastrand, random"),
        (["--sample", "0"], "'0' is no number of 1 or more"),
        (["--dtypes", "float64"], "float64 is none of float32"),
    ],
)
def test_what_cannot_run_is_refused(capsys, options, arguments, complaint):
    with pytest.raises(SystemExit):
        options(*arguments)
    assert complaint in capsys.readouterr().err


# The table


@pytest.mark.parametrize("strategy", sampled.STRATEGIES)
@pytest.mark.parametrize("width", [1, 16, 200])
def test_products_over_samples_are_right(small, strategy, width):
    ours = table.Operands.of(small, 9, "float32")
    row = ours.checked(width, strategy)
    assert row["error"] < 1e-5
    assert row["rate"] == ops.sampling_rate(small, width)
    assert "chunks" not in ours.A._built().parts


def test_a_wrong_product_is_refused(small, monkeypatch):
    ours = table.Operands.of(small, 9, "float32")
    monkeypatch.setattr(table, "spmm_sampled", lambda *_, **__: ours.Y.fill(1.0))
    assert ours.checked(16, "bucket")["wrong"].startswith("relative error")
    monkeypatch.setattr(table, "spmm_sampled", lambda *_, **__: None)
    assert "relative error nan" in ours.checked(16, "bucket")["wrong"]


def test_a_sample_by_another_strategy_is_refused(small):
    def complaint(strategy, as_if, width=16):
        B, perm = ops.sample_with_perm(small, width, strategy=strategy)
        return table.sample_complaint(small, B, perm, 16, as_if)

    for strategy in sampled.STRATEGIES:
        assert complaint(strategy, strategy) is None
    assert "is no sample by bucket" in complaint("random", "bucket")
    assert "is no sample by fastrand" in complaint("bucket", "fastrand")
    assert "not as long" in complaint("bucket", "bucket", width=15)


def test_the_columns_and_values_of_a_sample_are_compared(small):
    A = _graphs.weighted(small)
    B, perm = ops.sample_with_perm(A, 16)
    moved = np.roll(perm, 1)
    assert "columns" in table.sample_complaint(A, B, moved, 16, "bucket")
    other = B.with_data(B.data + 1)
    assert "values" in table.sample_complaint(A, other, perm, 16, "bucket")


def test_places_of_samples():
    is_sample = table.is_sample
    assert is_sample([0, 1, 2], 10, 3, "bucket")
    assert is_sample([0, 7, 4], 10, 3, "fastrand")
    assert is_sample([0, 587 - 577, 20], 577, 3, "fastrand")
    assert is_sample(np.array([9, 0, 4]), 10, 3, "random")
    for places in ([9, 0, 9], [9, 0, 10], [-1, 0, 1], [1, 2]):
        assert not is_sample(np.array(places), 10, 3, "random")
    for strategy in sampled.STRATEGIES:
        assert is_sample([0, 1, 2], 3, 5, strategy)


def test_the_table_has_every_cell_and_names_what_is_wrong(small, monkeypatch):
    run, counted = [], table.spmm_sampled

    def paced(calls, *, cuda, quick):
        run.append([call() is None for call in calls])
        return [2.0, 2.2, 3.0, 8.0][: len(calls)], 5

    monkeypatch.setattr("benchmarks._cusparse.best_spmm", lambda *_: ("ALG", lambda: None))
    monkeypatch.setattr("benchmarks._harness.paced", paced)
    arguments = ["--sample", "16", "--dtypes", "float32,float16", "--quick"]
    monkeypatch.setattr("benchmarks._options.parse_device", lambda device: device)
    options = sampled.parse(arguments)
    rows = list(table._rows_of(small, "small", 16, options))
    assert [row["case"] for row in rows][::3] == [
        "small 16 float32 bucket S=16",
        "small 16 float16 bucket S=16",
    ]
    assert run == [[False, False, False, True]] * 6
    for row in rows:
        assert (row["over_cusparse"], row["over_spmm"], row["weighted"]) == (4.0, 1.5, 1.1)
        itemsize = 2 if row["dtype"] == "float16" else 4
        assert row["gb_s"] == pytest.approx(row["rate"] * 30_000 * 16 * itemsize / 2e6)

    def wrong(A, X, width, **how):
        out = counted(A, X, width, **how)
        out[0] *= 1.1 if A.data is not None else 1
        return out

    monkeypatch.setattr(table, "spmm_sampled", wrong)
    row = next(table._rows_of(small, "small", 16, options))
    assert row["wrong"].startswith("with values: relative error 0.1")
    assert "ms" not in row


def table_row(graph, strategy, sample, dtype="float32", **more):
    case = {"case": f"{graph} {strategy} S={sample}", "graph": graph, "strategy": strategy}
    facts = {"over_cusparse": 10.0, "over_spmm": 1.2, "weighted": 1.1, "error": 1e-7}
    return case | {"sample": sample, "dtype": dtype, "feat": 128} | facts | more


def test_the_table_is_judged_over_cusparse_and_over_spmm():
    rows = [
        table_row("reddit", "bucket", 16, over_cusparse=37.0),
        table_row("reddit", "random", 64, weighted=1.2),
        table_row("products", "fastrand", 16),
        table_row("flickr", "random", 256, over_spmm=0.97),
        table_row("com-amazon", "bucket", 16),
        table_row("reddit", "bucket", 16, "bfloat16", over_cusparse=1.0, weighted=2.0, error=1e-3),
        table_row("reddit", "bucket", 16, feat=64, over_cusparse=1.0),
    ]
    targets = by_name(table.judge(rows))
    assert (targets["reddit bucket S=16 over cuSPARSE"].limit) == 38.0
    assert not targets["reddit bucket S=16 over cuSPARSE"].ok
    assert targets["reddit random S=64 over cuSPARSE"].ok
    assert "products fastrand S=16 over cuSPARSE" not in targets
    assert not targets["flickr over spmm, worst (flickr random S=256)"].ok
    assert targets["com-amazon over spmm, worst (com-amazon bucket S=16)"].ok
    with_values = "with values over without, float32, worst (reddit random S=64)"
    assert (targets[with_values].limit, targets[with_values].ok) == (1.15, False)
    other = "with values over without, other cases, worst (reddit bucket S=16)"
    assert targets[other].limit is None
    assert targets["bfloat16 relative error, worst (reddit bucket S=16)"].ok
    assert table.judge([]) == []


# Rates


def test_a_wrong_rate_is_reported_and_fails(options, monkeypatch, capsys, small):
    asked = options("--sections", "rates", "--graphs", "small", "--sample", "16")
    monkeypatch.setattr(rates, "sampling_rate", lambda A, width: 0.5)
    assert not rates.rates(asked)
    assert "WRONG, not reported: small: rate of 16 is 0.5, not 0.69" in capsys.readouterr().out
    monkeypatch.setattr(rates, "sampling_rate", ops.sampling_rate)
    monkeypatch.setattr(rates, "sample", lambda A, width, **_: small)
    assert not rates.rates(asked)
    assert "bucket keeps 30000 entries of 16, not" in capsys.readouterr().out


def test_graphs_of_the_folder_come_before_generated_ones(tmp_path, options):
    write(tmp_path / "pubmed.npz", generate.star(5))
    asked = options()
    found = dict(rates._sources(asked))
    assert next(iter(found.items())) == ("pubmed", str(tmp_path / "pubmed.npz"))
    assert "flickr" in found
    assert "reddit" not in found
    assert rates.rates(options("--graphs", "pubmed"))
    section = json.loads((tmp_path / "sampled-cpu.json").read_text())["sections"]["rates"]
    (row,) = section["rows"]
    assert (row["rows"], row["entries"], row["longest"], row["rate_16"]) == (5, 8, 4, 1.0)
