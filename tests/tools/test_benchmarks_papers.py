"""Papers run on a small planted graph; data sets are read from folders that users have."""

import argparse
import gzip
import json
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the papers' models are trained")
pytest.importorskip("torch_geometric", reason="PyG is what they are measured beside")

from benchmarks import _graphs  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.papers import NAMES, _data, _learning  # noqa: E402
from sparsefmt import COO, Graph, nn  # noqa: E402

OPTIONS = {
    "maxk": "--sections accuracy,approximator --models GIN --k 8 --seeds 1",
    "es_spmm": "--sections accuracy --models GCN --sample 4 --seeds 1 --strategies bucket",
    "tcgnn": "--sections condensed",
    "fusegnn": "--sections aggregate",
    "sensei": "--sections grid --models gcn --widths 8x12",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_paper_keeps_figures_prints_claims_and_draws(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setitem(_graphs.RECIPES, "small", _graphs.Recipe(400, 6_000, 2.3, 0.6, 40))
    monkeypatch.setattr(_graphs, "load", _graphs.load.__wrapped__)
    folders = ["--data", str(tmp_path), "--out", str(tmp_path)]
    options = [*OPTIONS[name].split(), "--device", "cpu", "--quick", *folders]
    assert main(["papers", name, *options]) == 0
    text = capsys.readouterr().out
    assert "| claim | paper, on a GPU | here | cases |" in text
    sections = json.loads((tmp_path / f"papers-{name}-cpu.json").read_text())["sections"]
    assert all(section["rows"] for section in sections.values())
    assert (tmp_path / f"papers-{name}-cpu.svg").read_text().count("</svg>") == 1


def test_labels_are_learned_from_neighbours_and_no_better_than_their_noise_allows():
    data = _data.plant("small", "cpu")
    recipe = _learning.Recipe(hidden=32, layers=2, epochs=30, rate=0.01)

    def reached(graph):
        def make():
            return _learning.Network(lambda n: nn.SAGEConv(n, n), data, recipe)

        return _learning.train(make, data, recipe, seed=0, graph=graph).test

    loops = Graph(COO(*[np.arange(2_000, dtype=np.int32)] * 2, shape=(2_000, 2_000)))
    assert reached(loops) + 5 < reached(data.graph) < 98


def test_areas_under_curves_are_the_shares_of_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, y = rng.integers(0, 5, (40, 2)) / 4, rng.integers(0, 2, (40, 2))
    pairs = [
        (np.sign(a - b) + 1) / 2
        for column in (0, 1)
        for a, b in product(*(scores[y[:, column] == v, column] for v in (1, 0)))
    ]
    counts = [(y[:, column] == 1).sum() * (y[:, column] == 0).sum() for column in (0, 1)]
    halves = pairs[: counts[0]], pairs[counts[0] :]
    expected = np.mean([np.mean(half) for half in halves])
    assert _learning.roc_auc(torch.tensor(scores), torch.tensor(y)) == pytest.approx(expected)


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(data=tmp_path, device="cpu", graphs=None, quick=False)


def test_a_folder_of_ogb_is_read(tmp_path, options):
    folder = tmp_path / "ogbn_products"
    files = {
        "raw/edge": "0,1\n1,2\n",
        "raw/node-feat": "1,0\n0,1\n1,1\n",
        "raw/node-label": "0\n1\n1\n",
        **{f"split/sales_ranking/{part}": f"{i}\n" for i, part in enumerate(_SPLIT)},
    }
    for name, text in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    options.graphs = ("products",)
    (data,) = _data.labelled(options, ())
    assert data.origin == "file"
    assert data.A.toarray().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert data.y.tolist() == [0, 1, 1]
    assert [mask.nonzero().ravel().tolist() for mask in data.splits[0]] == [[0], [1], [2]]


_SPLIT = ("train", "valid", "test")


def test_a_file_of_ours_is_read_with_each_split(tmp_path, options):
    masks = np.eye(4, dtype=bool)
    np.savez(
        tmp_path / "cora.npz",
        indptr=np.int32([0, 1, 2, 2, 3]),
        indices=np.int32([1, 0, 2]),
        shape=np.int32([4, 4]),
        x=np.arange(8, dtype=np.float32).reshape(4, 2),
        y=np.int16([0, 1, 1, -1]),
        **{f"{part}_mask": masks[i] for i, part in enumerate(_data.PARTS)},
        **{f"{part}_masks": masks[i : i + 2] for i, part in enumerate(_data.PARTS)},
    )
    options.graphs = ("cora", "nothing")
    (data,) = _data.labelled(options, ())
    assert (data.outputs, len(data.splits), data.A.nnz) == (2, 2, 3)
    assert torch.allclose(data.x.mean(0), torch.zeros(2), atol=1e-6)
