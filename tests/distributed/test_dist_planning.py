"""Models planned for a graph of ranks compute what they did, and all ranks choose alike."""

import math

import planning_cases
import pytest
from dist_cases import BOUNDS, GRAPHS
from planning_cases import LAYERS


@pytest.mark.covering("name", "constant", "graph", one_in=2)
@pytest.mark.parametrize(
    ("count", "graph", "bounds"),
    [(2, "hub", "balanced"), (4, "random", "empty ranks"), (4, "isolated", "one each")],
)
@pytest.mark.parametrize("constant", [False, True], ids=["features that train", "that stay"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_composition_over_ranks_is_the_layer_of_one_process(
    ranks, name, constant, count, graph, bounds
):
    case = planning_cases.all_compositions, name, graph, bounds, constant
    assert max(ranks.run(count, *case)) < 1e-10


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_planned_model_that_receives_nan_is_found_out(ranks, name):
    assert min(ranks.run(2, planning_cases.of_a_lost_halo, name)) == math.inf


@pytest.mark.covering("name", "training", "graph", "bounds", one_in=3)
@pytest.mark.parametrize(("count", "bounds"), [*zip((2, 4, 4), BOUNDS, strict=True)])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_all_ranks_choose_alike_whatever_their_shares_and_constants(
    ranks, name, training, graph, count, bounds
):
    found = ranks.run(count, planning_cases.choices, name, graph, bounds, training)
    assert all(one == found[0] for one in found)
    planned = training or name != "gat"  # which in inference runs as it is
    assert ("CHOSEN" in found[0][0]) == planned
    assert not planned or "since processes share the graph" in found[0][0]


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
@pytest.mark.parametrize("count", [2, 4])
def test_features_travel_at_the_narrower_width(ranks, name, count):
    for widths in ((32, 4), (4, 32)):
        for found in ranks.run(count, planning_cases.bytes_of, name, widths):
            assert found["bytes"] == 4 * found["each"]
            assert found["exchange"] > 0


def test_attention_takes_the_scores_along(ranks):
    for widths in ((32, 4), (4, 32)):
        for found in ranks.run(2, planning_cases.bytes_of, "gat", widths):
            assert found["bytes"] <= 5 * found["each"]


def test_features_that_stay_travel_once(ranks):
    for first, second in ranks.run(2, planning_cases.constant_features):
        assert (first > 0, second) == (True, 0)


def test_features_that_stay_travel_once_also_where_the_plan_was_not_given_them(ranks):
    assert ranks.run(2, planning_cases.not_given) == [0, 0]


def test_a_plan_forgets_features_that_stay_with_the_graph(ranks):
    for found in ranks.run(2, planning_cases.forgotten):
        assert max(found) < 1e-10


def test_features_in_fewer_bytes_are_priced_so(ranks):
    for wide, narrow in ranks.run(2, planning_cases.narrow):
        assert narrow < wide


def test_a_planned_model_runs_on_other_graphs_copied_and_restored(ranks):
    for found in ranks.run(2, planning_cases.others):
        assert max(found) < 1e-10


def test_a_plan_explains_the_exchange_to_one_rank_alone(ranks):
    first, second = ranks.run(2, planning_cases.held)
    (head,) = (line for line in first.splitlines() if "composition" in line)
    assert head.split() == ["composition", "predicted", "exchange", "once", "measured"]
    assert "halo = " in first
    assert "conv" in second


def test_ranks_that_ask_for_different_plans_are_refused(ranks):
    for found in ranks.run(3, planning_cases.refusals):
        assert [kind for kind, _ in found] == ["RankError"] * 6 + ["UnsupportedError"]
        words = ["steps is 3 on rank 2", "training is", "x is", "rank 2 cannot"]
        words += ["model.lin.weight is", "model.bias is", "mode is"]
        assert all(word in text for word, (_, text) in zip(words, found, strict=True))


def test_of_one_rank_a_model_is_planned_as_of_one_process(ranks):
    ((first, second),) = ranks.run(1, planning_cases.of_one_rank)
    assert "exchange" not in first
    assert first == second
