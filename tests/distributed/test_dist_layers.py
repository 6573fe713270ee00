"""Products and layers over ranks are those of one process, gradients too."""

import math

import dist_cases
import layer_cases
import pytest
from dist_cases import BOUNDS, GRAPHS
from layer_cases import LAYERS


@pytest.mark.covering("name", "graph", "bounds", one_in=5)
@pytest.mark.parametrize(("count", "bounds"), [*zip((2, 3, 4, 2), BOUNDS, strict=True)])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_over_ranks_is_that_of_one_process(ranks, name, graph, count, bounds):
    assert max(ranks.run(count, layer_cases.layer, name, graph, bounds)) < 1e-10


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "agnn", "rgcn"])
def test_a_layer_that_receives_nan_is_found_out(ranks, name):
    assert min(ranks.run(2, layer_cases.layer_of_a_lost_halo, name)) == math.inf


@pytest.mark.parametrize("name", ["gcn weighted", "sage max", "gat", "gcn maxk", "rgcn max"])
def test_ranks_that_are_alike_pass_where_they_are_compared(ranks, name):
    assert max(ranks.run(3, layer_cases.layer_while_debugging, name)) < 1e-10


@pytest.mark.parametrize("name", ["gcn weighted", "sage", "gat", "gcn maxk"])
def test_eight_ranks_compute_it_too(ranks, name):
    for graph, bounds in zip(("hub", "isolated", "hub", "isolated"), BOUNDS, strict=True):
        assert max(ranks.run(8, layer_cases.layer, name, graph, bounds)) < 1e-10


@pytest.mark.parametrize("name", ["gat", "gat wider", "gat edges"])
def test_attention_over_rows_without_entries_is_that_of_one_process(ranks, name):
    places = zip(GRAPHS, (2, 3, 4, 2, 3), (*BOUNDS, "one each"), strict=True)
    for graph, count, bounds in places:
        assert max(ranks.run(count, layer_cases.layer_of_squares, name, graph, bounds)) < 1e-10


@pytest.mark.covering("graph", "bounds", "count", one_in=4)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_product_over_ranks_is_that_of_one_process(ranks, graph, bounds, count):
    for reduce, weighted, scaled in (("sum", True, True), ("mean", False, True), ("sum", 0, 0)):
        case = dist_cases.product, graph, bounds, reduce, weighted, scaled
        assert max(ranks.run(count, *case)) < 1e-12
