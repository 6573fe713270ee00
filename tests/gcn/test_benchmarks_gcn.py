"""The benchmark of GCN's normalisation: the composition has the results of the operation."""

import json

import pytest

pytest.importorskip("torch")

from benchmarks import _gcn_norm, _graphs


@pytest.mark.usefixtures("one_thread")
def test_both_ways_agree_and_are_timed(tmp_path):
    graphs = ["--device", "cpu", "--threads", "1", "--graphs", "small", "--quick"]
    assert _gcn_norm.main([*graphs, "--out", str(tmp_path)]) == 0
    sections = json.loads((tmp_path / "gcn-cpu.json").read_text())["sections"]
    assert {*sections} == {"arrays", "tensors"}
    for section in sections.values():
        assert all(row["times"] > 0 and row["error"] < 1e-5 for row in section["rows"])


def test_a_wrong_result_is_not_timed():
    case = next(_gcn_norm.of_arrays(_graphs.load("small", device="cpu")))
    wrong = case._replace(composed=lambda: case.exact()._replace(data=2 * case.exact().data))
    assert {*_gcn_norm._measured(wrong, 1, cuda=False, quick=True)} == {"wrong"}
    other = case._replace(composed=lambda: case.exact().T.tocsr())
    assert "relative error inf" in _gcn_norm._measured(other, 1, cuda=False, quick=True)["wrong"]
