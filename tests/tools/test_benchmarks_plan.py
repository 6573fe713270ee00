"""The benchmark of the planner: its graphs, and a cell of every kind."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.plan import cell, graphs, plan


def test_a_mycielskian_has_no_triangle_and_the_known_sizes():
    for k, (vertices, edges) in {2: (2, 1), 3: (5, 5), 4: (11, 20), 5: (23, 71)}.items():
        A = graphs.mycielskian(k).toarray()
        assert A.shape == (vertices, vertices)
        assert (A == A.T).all()
        assert A.sum() == 2 * edges
        assert np.trace(A @ A @ A) == 0


def test_roads_have_few_neighbours_and_both_directions():
    A = graphs.roads(40)
    dense = A.toarray()
    assert (dense == dense.T).all()
    assert 2.5 < A.nnz / A.shape[0] < 3.2
    assert dense.sum(axis=1).max() <= 6


def test_every_cell_is_checked_and_told(tmp_path, capsys):
    options = ["--device", "cpu", "--graphs", "small", "--widths", "8x12", "--quick"]
    assert plan.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "plan-cpu.json").read_text())["sections"]["grid"]["rows"]
    assert [row["case"] for row in rows] == [
        f"small {model} 8x12 {kind}"
        for model in ("gcn", "gat")
        for kind in ("inference", "training")
    ]
    for row in rows:
        assert row["oracle_ms"] <= min(row["ms"], row["own_ms"])
        assert row["of_oracle"] <= 1
    assert "gat, training, over_own" in capsys.readouterr().out


def test_a_wrong_composition_is_not_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cell, "LIMIT", -1.0)
    options = ["--device", "cpu", "--graphs", "small", "--widths", "8x12", "--models", "gcn"]
    assert plan.main([*options, "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG, not reported: small gcn 8x12 inference" in capsys.readouterr().out


def test_pairs_of_widths_are_read():
    assert plan._pairs("32x256,8x1") == ((32, 256), (8, 1))
    for text in ("32", "32x", "1x2x3", "axb"):
        with pytest.raises(plan.argparse.ArgumentTypeError):
            plan._pairs(text)
