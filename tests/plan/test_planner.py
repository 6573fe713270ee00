"""Prices, choices and what a plan says; the constants of a device, and the commands."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import cli
from sparsefmt.errors import DtypeError, FileFormatError, ShapeError
from sparsefmt.generate import power_law
from sparsefmt.plan import calibration, models, planner
from sparsefmt.plan.calibration import CPU, GPU, Sample, fitted
from sparsefmt.plan.expression import Hop, Leaf, Product, over_processes
from sparsefmt.plan.planner import CLOSE, TELLING, plan
from sparsefmt.plan.pricing import GLOO, NVLINK, Constants, Work, work_of
from sparsefmt.plan.pruning import signature
from sparsefmt.plan.rules import Primitive, steps, text_of

#: The last two of graphs whose rows processes share.
SIZES = {
    **{"n": 20_000, "nnz": 400_000, "heads": 4, "in": 128, "out": 32},
    **{"halo": 9_000, "own": 200_000},
}
H, STAYS = models.features(), models.features(constant=True)
EXPRESSIONS = {
    "gcn": models.gcn(H),
    "gcn of features that stay": models.gcn(STAYS),
    "sage": models.sage(H),
    "gin": models.gin(H),
    "gat": models.gat(H, opened=True),
    "gat of features that stay": models.gat(STAYS, opened=True),
    "tagcn": models.tagcn(H, 2),
}


@pytest.mark.parametrize("constants", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("widths", [(128, 32), (256, 8), (8, 256), (64, 64)], ids=str)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_best_of_all_trees_is_promoted_whatever_the_device(name, widths, training, constants):
    """Of graphs whose rows processes share too, with what these exchange."""
    sizes = SIZES | dict(zip(("in", "out"), widths, strict=True))
    for expression in (EXPRESSIONS[name], over_processes(EXPRESSIONS[name])):
        found = plan(expression, sizes, constants, training=training, runs=1)
        best = min(candidate.predicted for candidate in found.candidates)
        assert found.chosen.predicted <= best * (1 + 1e-9)


@given(st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 1 << 22), st.integers(0, 1 << 26))
def test_work_is_never_negative_and_grows_with_every_size(width, out, n, nnz):
    sizes = {"n": n, "nnz": nnz, "heads": 1, "in": width, "out": out}
    for expression in EXPRESSIONS.values():
        for primitive in signature(plan(expression, sizes, GPU).chosen.tree, training=True):
            work = work_of(primitive, sizes, GPU)
            assert min(work) >= 0
            larger = {name: 2 * size for name, size in sizes.items()}
            more = work_of(primitive, larger, GPU)
            assert sum(more[3:7]) >= sum(work[3:7])
            assert more.flops >= work.flops


@pytest.mark.parametrize("widths", [(128, 32), (32, 128)], ids=["narrowing", "widening"])
def test_constant_features_are_aggregated_once_whatever_the_widths(widths):
    sizes = SIZES | dict(zip(("in", "out"), widths, strict=True))
    for constants in (CPU, GPU):
        found = plan(models.gcn(STAYS), sizes, constants, orders=(sizes,))
        free = {name for name, seconds in found.chosen.parts.items() if not seconds}
        assert set(found.chosen.parts) - {"gemm"} == free
        assert 0 < found.chosen.predicted < plan(models.gcn(H), sizes, constants).chosen.predicted


def test_what_entries_gather_beside_their_features_costs_a_gpu():
    names, sizes = ("nnz", "n", "w"), SIZES | {"w": 32}
    for constants, costs in ((CPU, False), (GPU, True)):
        for kind, beside in (("spmm_scaled", "factor"), ("spmm_weighted", "value")):
            works = (work_of(Primitive(kind, names, b), sizes, constants) for b in ("", beside))
            alone, more = (constants.predict(work, kind) for work in works)
            assert (alone < more) == costs


def test_what_is_constant_is_shared_among_the_runs():
    free, alone, shared = (plan(models.gcn(STAYS), SIZES, CPU, runs=runs) for runs in (None, 1, 10))
    for a, b, c in zip(free.candidates, alone.candidates, shared.candidates, strict=True):
        assert a.once == b.once == c.once
        assert math.isclose(b.predicted, a.predicted + a.once)
        assert math.isclose(c.predicted, a.predicted + a.once / 10)


def test_a_measurement_outweighs_predictions():
    found = plan(models.gcn(H), SIZES, CPU)
    slow = found.promoted[-1].tree
    again = found.with_measured({found.chosen.tree: 2.0, slow: 1.0})
    assert again.chosen.tree == slow
    assert found.chosen.tree != slow


def test_the_layers_own_code_stays_where_no_composition_is_clearly_faster():
    unplanned = plan(models.gcn(H), SIZES, CPU)
    own, other = (candidate.tree for candidate in unplanned.promoted[:2])
    found = plan(models.gcn(H), SIZES, CPU, own=lambda tree: tree == own)
    for seconds, chosen in ((0.98, own), (0.96, other)):
        timed = found.with_measured({own: 1.0, other: seconds})
        assert timed.chosen.tree == chosen
        assert timed.explain().count("CHOSEN") == 1
        assert ("CHOSEN, the layer as it is" in timed.explain()) == (chosen == own)
        assert unplanned.with_measured({own: 1.0, other: seconds}).chosen.tree == other


@pytest.fixture
def no_run_is_short(monkeypatch):
    """Let the clock decide however short a run is."""
    monkeypatch.setattr(planner, "SHORT", 0.0)


@pytest.mark.usefixtures("no_run_is_short")
@pytest.mark.parametrize("constants", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_clock_decides_between_the_layers_own_code_and_what_is_predicted_alike(constants):
    sizes = SIZES | {"in": 32}
    for own in plan(models.gcn(H), sizes, constants).promoted:
        found = plan(models.gcn(H), sizes, constants, own=lambda tree, own=own: tree == own.tree)
        first, *others = found.close
        near = own.predicted <= CLOSE * found.promoted[0].predicted
        assert (first.tree == own.tree) == (near or own.tree == found.promoted[0].tree)
        assert others if near else True


def test_a_clock_decides_no_short_runs(monkeypatch):
    sizes, long = SIZES | {"in": 32}, plan(models.gcn(H), SIZES | {"in": 32}, GPU)
    for own in long.promoted:
        best = long.promoted[0]
        near = own.predicted <= CLOSE * best.predicted
        monkeypatch.setattr(planner, "SHORT", 2 * best.predicted)
        found = plan(models.gcn(H), sizes, GPU, own=lambda tree, own=own: tree == own.tree)
        assert [c.tree for c in found.close] == [found.chosen.tree]
        assert found.chosen.tree == (own.tree if near else best.tree)


@pytest.mark.usefixtures("no_run_is_short")
def test_only_predictions_that_differ_and_are_close_leave_a_doubt():
    found = plan(models.gcn(H), SIZES, CPU)
    best, *doubtful = found.close
    assert best is found.chosen
    assert doubtful
    for candidate in doubtful:
        assert best.predicted / TELLING < candidate.predicted <= CLOSE * best.predicted
    for candidate in found.promoted:
        if candidate not in found.close:
            ratio = candidate.predicted / best.predicted
            assert ratio <= 1 / TELLING or ratio > CLOSE


def test_of_equal_trees_the_first_is_chosen():
    found = plan(models.gin(H), SIZES | {"in": 32}, GPU)
    assert found.chosen is found.candidates[0]
    assert plan(Product((models.graph(), H)), SIZES, CPU).chosen.tree  # of one hop alone


def test_a_plan_explains_every_tree_and_pruning_keeps_the_choice():
    found = plan(models.gcn(H), SIZES, CPU)
    text = found.explain()
    for candidate in found.candidates:
        assert text_of(candidate.tree) in text
    assert text.count("CHOSEN") == 1
    assert text.count("beaten by #") == len(found.candidates) - len(found.promoted)
    one = plan(models.gcn(H), SIZES, CPU, orders=(SIZES,))
    assert len(one.promoted) < len(found.promoted)
    assert one.chosen.predicted == found.chosen.predicted


# Constants


def test_fitting_gives_back_the_constants_that_made_the_samples():
    rng = np.random.default_rng(0)
    true = (1e-5, 0.0, 2e-9, 0.0, 0.0, 1e-11, 4e-11, 0.0)
    bare_constants = Constants("", calibration.cache_of("cpu"), {})
    samples = []
    for n, nnz, w in rng.integers([10**3, 10**3, 1], [10**7, 10**7, 256], (40, 3)).tolist():
        sizes = {"n": n, "nnz": nnz, "w": w}
        primitive = Primitive("spmm_unweighted", ("nnz", "n", "w"))
        work = work_of(primitive, sizes, bare_constants)
        samples.append(Sample(primitive, sizes, float(np.dot(work, true))))
        flat = Primitive("broadcast", ("n", "w"))
        samples.append(Sample(flat, sizes, 1e-6 + 1e-10 * sizes["n"] * w))
    found = fitted(samples, "cpu")
    for sample in samples:
        work = work_of(sample.primitive, sample.sizes, found)
        seconds = found.predict(work, sample.primitive.kind)
        assert math.isclose(seconds, sample.seconds, rel_tol=0.05)
    assert min(map(min, found.seconds.values())) >= 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"seconds": {"other": [1]}}', '{"seconds": 3}', "\x00"]
)
def test_constants_return_from_their_file_and_from_no_other(tmp_path, text):
    path = tmp_path / "new" / "constants.json"
    CPU.save(path)
    assert Constants.load(path) == CPU
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"constants\.json"):
        Constants.load(path)


def test_every_kind_of_primitive_has_a_price_of_each_device():
    kinds = {
        p
        for e in EXPRESSIONS.values()
        for c in plan(e, SIZES, CPU).candidates
        for p in signature(c.tree, training=True)
    }
    for constants in (CPU, GPU):
        for primitive in kinds:
            seconds = constants.predict(work_of(primitive, SIZES, constants), primitive.kind)
            assert 0 < seconds < 1
            assert len(constants.seconds["other"]) == len(Work._fields)


# Graphs whose rows processes share: what they exchange is a primitive with a price


def planned(name, widths, constants=GPU, **options):
    sizes = SIZES | dict(zip(("in", "out"), widths, strict=True))
    return plan(over_processes(EXPRESSIONS[name]), sizes, constants, **options)


def widths_of(tree, training):
    return [e.primitive.size[1] for step in steps(tree) for e in step.exchanges(training)]


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_features_are_exchanged_at_the_narrower_width(name):
    for widths, narrow in (((256, 8), "out"), ((8, 256), "in")):
        tree = planned(name, widths, training=True).chosen.tree
        assert widths_of(tree, True) == [narrow, narrow]  # and gradients the other way
        assert widths_of(tree, False) == [narrow]
    sizes = SIZES | {"in": 64, "out": 63, "nnz": 0, "own": 0}  # products cost the same
    found = plan(over_processes(EXPRESSIONS["gcn"]), sizes, CPU, training=True)
    assert set(widths_of(found.chosen.tree, True)) == {"out"}


def test_features_that_stay_are_exchanged_once_and_their_scores_at_each_run():
    for name in ("gcn of features that stay", "gat of features that stay"):
        for candidate in planned(name, (256, 8), training=True).candidates:
            exchanges = [e for s in steps(candidate.tree) for e in s.exchanges(True)]
            for one in exchanges:
                assert one.first_only == (one.primitive.size[1] == "in")
            assert exchanges
    tree = planned("gat of features that stay", (8, 256), training=True).chosen.tree
    assert sorted(widths_of(tree, True)) == ["heads", "heads", "in"]


def test_the_product_of_own_entries_hides_what_travels_beside_it():
    for own, share in ((0, 0.0), (SIZES["nnz"], 1.0)):
        sizes = SIZES | {"in": 8, "out": 256, "own": own}
        for candidate in plan(over_processes(EXPRESSIONS["gin"]), sizes, GPU).candidates:
            (exchange,) = (e for s in steps(candidate.tree) for e in s.exchanges(False))
            both = exchange.primitive, exchange.overlapped
            seconds, hidden = (GPU.predict(work_of(p, sizes, GPU), p.kind) for p in both)
            exposed = max(0.0, seconds - share * hidden)
            assert math.isclose(candidate.parts["exchange"], exposed)


def test_attention_hides_no_exchange_and_sharing_changes_sparse_matrices_alone():
    for candidate in planned("gat", (8, 256), training=True).candidates:
        assert all(e.overlapped is None for s in steps(candidate.tree) for e in s.exchanges(True))
    shared = over_processes(models.tagcn(H, 1))
    (hop,) = {f for t in shared.terms for f in t.factors if isinstance(f, Hop)}
    assert [f.halo for f in hop.factors] == ["", "halo", ""]
    assert over_processes(H) == H
    assert isinstance(over_processes(models.gin(H)), Product)
    assert isinstance(over_processes(models.graph()), Leaf)


@given(st.integers(0, 1 << 26), st.integers(1, 2048), st.sampled_from([2, 4, 8]))
def test_an_exchange_costs_a_call_and_its_bytes(rows, width, travelling):
    primitive, sizes = Primitive("exchange", ("halo", "w")), {"halo": rows, "w": width}
    for constants, (call, byte) in ((CPU, GLOO), (GPU, NVLINK)):
        work = work_of(primitive, sizes, constants, travelling=travelling)
        seconds = constants.predict(work, "exchange")
        assert math.isclose(seconds, call + byte * rows * width * travelling)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_graph_of_one_process_has_nothing_to_exchange(name):
    found = plan(EXPRESSIONS[name], SIZES | {"in": 64, "out": 8}, GPU, training=True)
    for candidate in found.candidates:
        assert "exchange" not in candidate.parts
        assert all(p.kind != "exchange" for p in signature(candidate.tree, training=True))
    assert "exchange" not in found.explain()


def test_explain_says_what_the_exchange_costs():
    found = planned("gcn", (256, 8))
    text = found.explain()
    (head,) = (line for line in text.splitlines() if "composition" in line)
    assert head.split() == ["composition", "predicted", "exchange", "once", "measured"]
    for candidate in found.candidates:
        (line,) = (x for x in text.splitlines() if f"  {text_of(candidate.tree)}  " in x)
        assert f"{candidate.parts['exchange'] * 1e3:.3f} ms" in line


# Commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calibration.constants_of.cache_clear()
    A = power_law(200, 1000, seed=1).tocsr()
    np.savez("graph.npz", indptr=A.indptr, indices=A.indices, shape=np.array(A.shape, np.int32))
    yield tmp_path
    calibration.constants_of.cache_clear()


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "sgc", "tagcn"])
def test_every_model_is_planned_on_the_command_line(folder, capsys, model):
    picture = Path(f"{model}.svg")
    arguments = ["plan", "graph.npz", "--model", model, "--widths", "64,32,7", "--training"]
    assert cli.main([*arguments, "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("CHOSEN") == 2
    assert "layer 2" in out
    assert picture.read_text().lstrip().startswith("<?xml")


WIDTHS = ["--widths", "4,3"]
REFUSED = [
    *((["--widths", widths], "602,256,41") for widths in ("", "5", "5,", "a,b", "0,3", "-1,3")),
    (["--widths", "1.5,2"], "602,256,41"),
    ([*WIDTHS, "--heads", "2"], "--heads is for --model gat, not gcn"),
    ([*WIDTHS, "--hops", "3"], "--hops is for --model sgc or tagcn, not gcn"),
    (["--model", "gat", "--hops", "2", *WIDTHS], "--hops is for --model sgc or tagcn, not gat"),
    (["--model", "sgc", "--heads", "1", *WIDTHS], "--heads is for --model gat, not sgc"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_widths_options_and_graphs_that_do_not_fit_are_refused(folder, capsys, options, text):
    assert cli.main(["plan", "graph.npz", *options]) == cli.BAD_INPUT
    assert text in " ".join(capsys.readouterr().err.split())
    np.savez("wide.npz", indptr=[0, 1], indices=[2], shape=np.array([1, 3], np.int32))
    assert cli.main(["plan", "wide.npz", "--widths", "64,32"]) == cli.BAD_INPUT
    assert "wide.npz has shape (1, 3)" in capsys.readouterr().err.replace("\n", " ")


def test_calibration_is_kept_and_used(folder, capsys, monkeypatch):
    monkeypatch.setattr(calibration, "GRAPHS", ((60, 3, True), (90, 4, False)))
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    assert cli.main(["calibrate"]) == 0
    assert len(list(folder.glob("cache/sparsefmt/constants-*.json"))) == 1
    assert cli.main(["plan", "graph.npz", "--widths", "64,32"]) == 0
    assert calibration.name_of("cpu") in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"expression": "gcn"}, DtypeError, "expression is a str: give one of sparsefmt.plan"),
        ({"constants": {}}, DtypeError, "constants is a dict: give calibration.constants_of"),
        ({"sizes": [3]}, DtypeError, "sizes is a list: give a dict"),
        ({"sizes": {"n": 3, "nnz": 5}}, ShapeError, "sizes has no 'in' but n, nnz: give"),
        ({"sizes": {**SIZES, "out": -1}}, ShapeError, r"sizes\['out'\] is -1: give an integer"),
        ({"sizes": {**SIZES, "out": 1.5}}, ShapeError, r"sizes\['out'\] is 1.5"),
        ({"runs": 0}, ShapeError, "runs is 0: give an integer, 1 or more, or None"),
        ({"itemsize": 3}, ShapeError, "itemsize is 3: give the 2, 4 or 8 bytes"),
    ],
)
def test_what_makes_no_plan_is_refused_by_name(change, error, text):
    given = {"expression": models.gcn(H), "sizes": SIZES, "constants": CPU} | change
    with pytest.raises(error, match=text):
        plan(**given)


def test_products_that_may_round_their_features_gather_half_the_bytes():
    primitive = Primitive("spmm_scaled", ("nnz", "n", "w"))
    sizes = {"nnz": 10_000_000, "n": 100_000, "w": 256}
    exact, rounded = (work_of(primitive, sizes, GPU, rounded=r) for r in (False, True))
    assert rounded.near + rounded.far == (exact.near + exact.far) / 2
    passed = rounded.cached + rounded.streamed - exact.cached - exact.streamed
    assert passed == 6 * sizes["n"] * sizes["w"]  # reads float32, writes bfloat16
    assert GPU.predict(rounded, primitive.kind) < GPU.predict(exact, primitive.kind)
    for kind, other, itemsize in (
        ("spmm_scaled", {"w": 32}, 4),
        ("spmm_scaled", {"nnz": 400_000}, 4),
        ("spmm_scaled", {}, 2),
        ("sddmm", {}, 4),
    ):
        changed = Primitive(kind, primitive.size), sizes | other, GPU, itemsize
        assert work_of(*changed, rounded=True) == work_of(*changed)
