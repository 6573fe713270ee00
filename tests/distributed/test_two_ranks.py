"""Two ranks with a GPU each, joined by NCCL, compute, send and learn as ranks on the CPU do."""

import math

import dist_cases
import layer_cases
import numpy as np
import pytest
import test_exchange
import train_cases
from dist_cases import BOUNDS, GRAPHS
from layer_cases import LAYERS
from train_cases import write_parts

from sparsefmt.distributed.job.options import MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_product_is_that_of_one_process(gpu_ranks, graph):
    for bounds in BOUNDS:
        for reduce, weighted, scaled in (("sum", True, True), ("mean", False, True), ("sum", 0, 0)):
            case = dist_cases.product, graph, bounds, reduce, weighted, scaled
            assert max(gpu_ranks.run(2, *case)) < 1e-12


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_one_process(gpu_ranks, name):
    few = name in ("gcn weighted", "sage", "gat", "gcn maxk", "sage maxk")
    for graph in GRAPHS if few else ("random",):
        for bounds in BOUNDS:
            assert max(gpu_ranks.run(2, layer_cases.layer, name, graph, bounds)) < 1e-10


@pytest.mark.parametrize("name", ["sage", "gat"])
def test_a_layer_that_receives_nan_is_found_out(gpu_ranks, name):
    assert min(gpu_ranks.run(2, layer_cases.layer_of_a_lost_halo, name)) == math.inf


@pytest.mark.parametrize("model", MODELS)
def test_a_training_loses_as_much_as_that_of_one_process(gpu_ranks, tmp_path, model):
    folder = write_parts(tmp_path / "parts", 2)
    (alone,) = gpu_ranks.run(1, train_cases.losses, folder, {"model": model})
    first, second = gpu_ranks.run(2, train_cases.losses, folder, {"model": model})
    assert first == second
    assert np.abs(np.subtract(first, alone)).max() < 1e-10


EXCHANGES = [
    (test_exchange.test_features_without_a_gradient_are_exchanged_once, "gcn"),
    (test_exchange.test_where_all_read_all_one_all_gather_brings_it,),
    (test_exchange.test_features_travel_in_a_narrower_dtype,),
    (test_exchange.test_rows_are_remembered_for_eight_tensors_until_they_change_or_are_forgotten,),
    (test_exchange.test_products_and_gradients_are_the_same_at_each_call,),
    (test_exchange.test_a_model_may_infer_before_it_trains,),
    (test_exchange.test_a_rank_that_runs_out_of_memory_tells_the_others,),
    (test_exchange.test_products_that_differ_between_ranks_are_named_while_debugging,),
    (test_exchange.test_gradients_of_exchanged_features_are_not_differentiated_again,),
]


@pytest.mark.parametrize("case", EXCHANGES, ids=lambda case: case[0].__name__)
def test_what_is_exchanged_is_the_same(gpu_ranks, case):
    gpu_ranks.run(2, *case)
