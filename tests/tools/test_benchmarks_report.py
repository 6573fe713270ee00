"""What ``benchmarks report`` and ``benchmarks compare`` say of kept results."""

import json

import pytest

pytest.importorskip("torch", reason="the benchmarks are of torch")

from benchmarks import _harness, _table
from benchmarks.__main__ import main


@pytest.fixture
def results(tmp_path):
    def write(name, ms, spread):
        row = {"case": "c", "ms": ms, "torch_ms": 1.0, "spread": {"ms": spread}}
        target = {"name": "worst", "value": 0.5, "limit": 1.0, "at_least": True, "ok": False}
        machine = {"commit": "0" * 12, "device": "a GPU", "cpu": "x"}
        section = {"machine": machine, "rows": [row], "targets": [target]}
        path = tmp_path / f"{name}-gpu.json"
        path.write_text(json.dumps({"sections": {"s": section}}))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("ms", "spread", "status"), [(1.2, 0.01, 1), (1.2, 0.2, 0), (1.04, 0.0, 0), (0.5, 0.0, 0)]
)
def test_only_what_is_slower_beyond_noise_is_named(results, capsys, ms, spread, status):
    assert main(["compare", results("a", 1.0, spread), results("b", ms, spread)]) == status
    assert ("s c ms: 1 -> 1.2" in capsys.readouterr().out) == bool(status)


def test_the_page_has_figures_with_machine_commit_and_age(results, tmp_path):
    results("a", 1.0, 0.0)
    page = tmp_path / "results.md"
    assert main(["report", "--out", str(tmp_path), "-o", str(page)]) == 0
    line = "| a-gpu s | worst | 0.5 | >= 1, missed | a GPU | 000000000 | unknown |"
    assert line in page.read_text()


X = _table.Benchmark("x", None, {"s": _table.Section(iter)})


def test_rows_keep_the_spread_of_their_medians(tmp_path):
    ms = _harness.Median.of([1.0, 2.0, 3.0])
    rows = [{"case": "c", "ms": ms, "ratio": ms / 2}]
    assert _table.keep(X, "s", rows, lambda _: [], cuda=False, folder=tmp_path)
    (row,) = json.loads((tmp_path / "x-cpu.json").read_text())["sections"]["s"]["rows"]
    assert row == {"case": "c", "ms": 2.0, "ratio": 1.0, "spread": {"ms": 2.0}}
