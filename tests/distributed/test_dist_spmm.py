"""Products over ranks are those of one process, gradients too."""

import dist_cases
import pytest
from dist_cases import BOUNDS, GRAPHS

RANKS = (2, 3, 4, 8)


@pytest.mark.covering("graph", "bounds", "count", one_in=4)
@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_product_over_ranks_is_that_of_one_process(ranks, graph, bounds, count):
    for reduce, weighted, scaled in (("sum", True, True), ("mean", False, True), ("sum", 0, 0)):
        case = dist_cases.product, graph, bounds, reduce, weighted, scaled
        assert max(ranks.run(count, *case)) < 1e-12
