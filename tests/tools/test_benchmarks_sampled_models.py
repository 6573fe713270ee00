"""What ``benchmarks sampled`` trains, runs over samples and judges, on small graphs on the CPU."""

import argparse
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the sections train models")

from benchmarks import _graphs  # noqa: E402  # without torch they cannot be imported
from benchmarks.sampling import inference, labelled, models, plot, sampled, training  # noqa: E402
from sparsefmt import generate, ops, write  # noqa: E402


def by_name(targets):
    return {target.name: target for target in targets}


# Graphs with labels


def test_communities_are_those_of_the_graph():
    recipe = _graphs.RECIPES["small"]
    sizes = recipe.nodes, recipe.edges
    more = {"exponent": recipe.exponent, "inside": recipe.inside, "community": recipe.community}
    _, labels = generate.power_law_with_labels(*sizes, **more, seed=0)
    assert (_graphs.communities("small", device="cpu") == labels).all()


def test_parts_of_a_planted_graph_share_no_vertex():
    data = labelled.planted("small", device="cpu")
    assert [len(data.parts[part]) for part in labelled.PARTS] == [200, 200, 1600]
    assert len(torch.cat([*data.parts.values()]).unique()) == 2000
    assert data.classes == 10
    alone = data.without_edges()
    assert (alone.graph.csr.nnz, alone.graph.shape) == (0, data.graph.shape)


@pytest.fixture
def cora(tmp_path):
    """A file of the shape of the labelled ones, with sparse features of 101 columns."""
    coo, labels = generate.power_law_with_labels(300, 2000, community=100)
    A, ids = coo.tocsr().sorted_indices(), np.arange(300)
    arrays = {f"{part}_mask": ids % 3 == at for at, part in enumerate(labelled.PARTS)}
    arrays |= {"x_indptr": np.arange(301, dtype=np.int32) * 2, "x_data": np.ones(600, np.uint8)}
    places = np.stack([labels, 3 + ids % 98], 1).ravel().astype(np.int32)
    arrays |= {"x_indices": places, "x_shape": np.array([300, 101], np.int32)}
    arrays |= {"indptr": A.indptr, "indices": A.indices, "shape": np.array(A.shape, np.int32)}
    np.savez(tmp_path / "cora.npz", y=labels.astype(np.int16), **arrays)
    return str(tmp_path / "cora.npz")


def test_features_of_many_columns_add_up_to_one(cora):
    data = labelled.from_file(cora, device="cpu")
    assert data.x.shape == (300, 101)
    assert data.x.sum(1).allclose(torch.ones(300))
    assert len(data.filled) == 600
    assert (data.name, data.classes) == ("cora", 3)


def test_features_of_few_columns_are_standardised(tmp_path, cora):
    with np.load(cora) as file:
        arrays = {name: file[name] for name in file.files if not name.startswith("x_")}
    x = np.random.default_rng(0).random((300, 4)) * [1, 10, 100, 0] + 5
    np.savez(tmp_path / "few.npz", x=x, **arrays)
    data = labelled.from_file(str(tmp_path / "few.npz"), device="cpu")
    assert data.x.mean(0).abs().max() < 1e-4
    assert data.x[:, :3].std(0).allclose(torch.ones(3), atol=1e-2)
    assert data.filled is None


def test_a_graph_without_labels_is_refused(tmp_path):
    write(tmp_path / "bare.npz", generate.star(5))
    with pytest.raises(SystemExit, match="has no labels"):
        labelled.from_file(str(tmp_path / "bare.npz"), device="cpu")


def test_dropout_leaves_about_half_of_the_features(cora):
    data = labelled.from_file(cora, device="cpu")
    recipe = labelled.Recipe()
    model = labelled.GCN(torch.nn.Linear, data, recipe)
    dropped = model._dropped(data.x)
    assert dropped.count_nonzero() == pytest.approx(300, abs=60)
    kept = dropped != 0
    assert (dropped[kept] == 2 * data.x[kept]).all()
    assert model.eval()._dropped(data.x) is not dropped
    assert (model._dropped(data.x) == data.x).all()


def test_the_epoch_of_the_highest_validation_accuracy_is_kept(monkeypatch, cora):
    data = labelled.from_file(cora, device="cpu")
    recipe = labelled.Recipe(hidden=8, epochs=12, lr=0.3)
    seen, right = [], labelled.Labelled.accuracy

    def accuracy(self, logits, part):
        seen.append((float(right(self, logits, part)), logits))
        return right(self, logits, part)

    monkeypatch.setattr(labelled.Labelled, "accuracy", accuracy)
    model = labelled.train(data, recipe, seed=0)
    best = max(range(12), key=lambda epoch: seen[epoch][0])
    assert best != 11
    assert (labelled.predict(model, data) == seen[best][1]).all()


def test_training_learns_and_the_seed_is_all_that_it_depends_on():
    data = labelled.planted("small", device="cpu")
    recipe = labelled.Recipe(hidden=16, epochs=40)
    for sample in (None, 8):
        logits = [
            labelled.predict(labelled.train(data, recipe, seed=seed, sample=sample), data)
            for seed in (0, 0, 1)
        ]
        assert (logits[0] == logits[1]).all()
        assert not (logits[0] == logits[2]).all()
        assert data.accuracy(logits[0], "test") > 0.7


# Models


@pytest.fixture(scope="module")
def trained():
    data = labelled.planted("small", device="cpu")
    recipe = labelled.Recipe(hidden=16, epochs=5)
    return inference.Trained(data, recipe, labelled.train(data, recipe, seed=0))


def test_models_agree_with_the_exact_one(trained):
    exact = trained.exact()
    for model in (trained.model, trained.by_torch()):
        assert trained.error(model, exact) < 1e-5
    for strategy in ("bucket", "fastrand"):
        fewer = trained.exact(lambda A, how=strategy: ops.sample(A, 8, strategy=how))
        model = trained.over(8, strategy)
        assert trained.error(model, fewer) < 1e-5
        assert trained.error(model, exact) > 1e-2
    assert trained.model.first.sample is None


@pytest.mark.parametrize("strategy", sampled.STRATEGIES)
def test_a_wrong_aggregation_is_refused(trained, monkeypatch, strategy):
    aggregation = inference.Aggregation(trained)
    assert aggregation.complaint(8, strategy) is None
    right = ops.spmm_sampled
    seed = {"seed": 1} if strategy == "random" else {"rescale": False}
    wrong = lambda *args, **how: right(*args, **(how | seed))  # noqa: E731
    monkeypatch.setattr(inference, "spmm_sampled", wrong)
    assert aggregation.complaint(8, strategy).startswith("relative error")


def model_row(graph="reddit", strategy="fastrand", sample=64, **more):
    case = {"case": f"{graph} {strategy} S={sample}", "graph": graph, "strategy": strategy}
    facts = {"device": "cuda", "epochs": 200, "sample": sample, "degree": 492.0}
    facts |= {"full_test": 0.97, "full_error": 1e-7, "accuracy": 0.965, "lost": 0.5}
    return case | facts | {"over_torch": 6.0, "over_full": 4.0} | more


def test_models_are_judged_on_the_reddit_sized_graph():
    rows = [
        model_row(alone=0.4),
        model_row(strategy="random", over_torch=4.9, lost=1.2),
        model_row(strategy="bucket", over_torch=9.0, lost=0.9),
        model_row(sample=16, over_torch=11.0, lost=1.5),
        model_row("cora", over_torch=1.0, over_full=0.9, lost=-0.1),
    ]
    targets = by_name(models.judge(rows))
    assert targets["reddit fastrand S=64 over torch.sparse, whole model"].ok
    assert targets["reddit fastrand S=64 points lost"].ok
    assert not targets["reddit random S=64 over torch.sparse, whole model"].ok
    assert not targets["reddit random S=64 points lost"].ok
    assert not any(name.startswith(("cora fastrand", "reddit bucket")) for name in targets)
    assert targets["reddit test accuracy, all entries"].limit == 0.9
    assert targets["reddit test accuracy without edges"].ok
    how = "at less than a point lost (bucket S=64, 0.90 points lost)"
    assert targets[f"reddit best over torch.sparse {how}"].value == 9.0
    none = by_name(models.judge([model_row(lost=3.0)]))
    assert none["reddit cases at less than a point lost"].value == 0
    elsewhere = models.judge([model_row(device="cpu")])
    assert all(target.limit is None for target in elsewhere if "S=64" in target.name)
    quick = by_name(models.judge([model_row(epochs=5, alone=0.9)]))
    assert quick["reddit test accuracy without edges"].limit is None


def test_models_are_measured_and_drawn(tmp_path):
    arguments = ["--sections", "models", "--graphs", "small", "--sample", "8,200"]
    asked = [*arguments, "--device", "cpu", "--quick", "--threads", "1"]
    assert sampled.main([*asked, "--out", str(tmp_path), "--data", str(tmp_path)]) == 0
    section = json.loads((tmp_path / "sampled-cpu.json").read_text())["sections"]["models"]
    rows = {(row["strategy"], row["sample"]): row for row in section["rows"]}
    assert len(rows) == 6
    for (strategy, width), row in rows.items():
        assert row["ms"] > 0
        assert row["over_torch"] == row["torch_ms"] / row["ms"]
        assert row["over_spmm"] == row["spmm_ms"] / row["aggregate_ms"]
        assert len(row.get("draws", ())) == (5 if strategy == "random" else 0)
        assert row["lost"] == pytest.approx(100 * (row["full_test"] - row["accuracy"]))
        if width == 200:  # all entries
            assert (row["lost"], row["rate"]) == (pytest.approx(0, abs=1e-9), 1)
    assert (tmp_path / "sampled-accuracy.png").stat().st_size > 5000


def test_wrong_models_are_reported_and_fail(tmp_path, monkeypatch, capsys):
    arguments = ["--graphs", "small", "--sample", "8", "--out", str(tmp_path)]
    asked = sampled.parse(["--device", "cpu", "--quick", *arguments])
    asked.facts = {}
    shares = inference.scale
    monkeypatch.setattr(inference, "scale", lambda A, row, col: shares(A, row=row * 1.01, col=col))
    assert not models.models(asked)
    assert "WRONG, not reported: small full: logits differ by" in capsys.readouterr().out
    assert not (tmp_path / "sampled-cpu.json").exists()


def test_nothing_is_drawn_of_no_rows(tmp_path):
    plot.plot([], "a device", tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").exists()


# Training


def test_training_is_measured(tmp_path, cora):
    arguments = ["--sections", "training", "--device", "cpu", "--quick", "--threads", "1"]
    folders = ["--out", str(tmp_path), "--data", str(tmp_path)]
    assert sampled.main([*arguments, *folders]) == 0
    section = json.loads((tmp_path / "sampled-cpu.json").read_text())["sections"]["training"]
    (row,) = section["rows"]
    assert row["case"] == f"cora S={training.SAMPLES['cora']}"
    assert len(row["full_tests"]) == len(row["random_tests"]) == 2
    assert row["difference"] == pytest.approx(row["random"] - row["full"])


def test_samples_that_stay_the_same_are_refused(cora, monkeypatch):
    data = labelled.from_file(cora, device="cpu")
    recipe = labelled.Recipe(hidden=8)
    assert training.checked(data, recipe, 2)["error"] < 1e-5
    assert training.checked(data, recipe, 300)["error"] < 1e-5
    make = training.GCNConv
    frozen = lambda *ends, **_: make(*ends)  # noqa: E731
    monkeypatch.setattr(training, "GCNConv", frozen)
    assert "the same sample" in training.checked(data, recipe, 2)["wrong"]


def test_training_is_judged_by_the_standard_error():
    def row(graph, tests):
        facts = {"full": 81.0, "full_sd": 0.5, "full_tests": [81.0, 81.0, 81.0]}
        facts |= {"random": np.mean(tests), "random_sd": 0.4}
        case = {"case": f"{graph} S=4", "graph": graph, "epochs": 200}
        return case | facts | training.compared([test - 81.0 for test in tests])

    (row_of,) = [row("cora", [80.0, 81.0, 81.4])]
    assert row_of["difference"] == pytest.approx(-0.2)
    assert row_of["standard_error"] == pytest.approx(0.4163, abs=1e-4)
    targets = by_name(training.judge([row_of]))
    text = "cora S=4 random less full, points, standard error 0.42"
    assert targets[f"{text}, no worse"].ok
    assert not targets[f"{text}, at least as good"].ok
    worse = training.judge([row("cora", [80.0, 80.1, 79.9])])
    assert [target.ok for target in worse[-2:]] == [False, False]
    for other in (row("small", [80.0, 80.1, 79.9]), row_of | {"epochs": 5}):
        assert all(target.limit is None for target in training.judge([other]))
    assert targets["cora S=4 full, % of 3 seeds (sd 0.50)"].value == 81.0


def test_real_graphs_have_labels_and_parts(shared_data):
    found = argparse.Namespace(graphs=("cora", "tolokers"), data=shared_data, device="cpu")
    cora, tolokers = labelled.labelled(found, labelled.REAL, "")
    assert [len(part) for part in cora.parts.values()] == [140, 500, 1000]
    assert (cora.classes, tolokers.classes) == (7, 2)
    assert cora.filled is not None
    assert tolokers.filled is None
