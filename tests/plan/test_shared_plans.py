"""Plans for graphs whose rows processes share: what they exchange is a primitive with a price."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt.plan import models
from sparsefmt.plan.calibration import CPU, GPU
from sparsefmt.plan.expression import Hop, Leaf, Product, over_processes
from sparsefmt.plan.planner import plan
from sparsefmt.plan.pricing import GLOO, NVLINK, work_of
from sparsefmt.plan.pruning import signature
from sparsefmt.plan.rules import Primitive, steps, text_of

SIZES = {"n": 20_000, "nnz": 400_000, "halo": 9_000, "own": 200_000, "heads": 1}
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
WIDTHS = [(256, 8), (8, 256), (64, 64)]


def planned(name, widths, constants=GPU, **options):
    sizes = SIZES | dict(zip(("in", "out"), widths, strict=True))
    return plan(over_processes(EXPRESSIONS[name]), sizes, constants, **options)


def widths_of(tree, training):
    return [e.primitive.size[1] for step in steps(tree) for e in step.exchanges(training)]


@pytest.mark.parametrize("constants", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_best_of_all_trees_is_promoted_with_what_is_exchanged(
    name, widths, training, constants
):
    found = planned(name, widths, constants, training=training, runs=1)
    best = min(candidate.predicted for candidate in found.candidates)
    assert found.chosen.predicted <= best * (1 + 1e-9)


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
            seconds = [
                GPU.predict(work_of(p, sizes, GPU), p.kind)
                for p in (exchange.primitive, exchange.overlapped)
            ]
            exposed = max(0.0, seconds[0] - share * seconds[1])
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
    sizes = SIZES | {"in": 64, "out": 8}
    found = plan(EXPRESSIONS[name], sizes, GPU, training=True)
    for candidate in found.candidates:
        assert "exchange" not in candidate.parts
        assert all(p.kind != "exchange" for p in signature(candidate.tree, training=True))
    assert "exchange" not in found.explain()


def test_explain_says_what_the_exchange_costs():
    text = planned("gcn", (256, 8)).explain()
    (head,) = (line for line in text.splitlines() if "composition" in line)
    assert head.split() == ["composition", "predicted", "exchange", "once", "measured"]
    for candidate in planned("gcn", (256, 8)).candidates:
        (line,) = (x for x in text.splitlines() if f"  {text_of(candidate.tree)}  " in x)
        assert f"{candidate.parts['exchange'] * 1e3:.3f} ms" in line
