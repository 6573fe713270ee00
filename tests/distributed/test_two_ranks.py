"""Two ranks compute, send and learn alike by gloo on the CPU, and by NCCL with a GPU each."""

import math

import dist_cases
import exchange_cases
import layer_cases
import numpy as np
import pytest
import train_cases
from dist_cases import GRAPHS
from layer_cases import LAYERS
from train_cases import write_parts

from sparsefmt.distributed.job.options import MODELS

BOUNDS = ("balanced", "one each", "all on the last")


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_product_is_that_of_one_process(pair, graph):
    for bounds in BOUNDS:
        for reduce, weighted, scaled in (("sum", True, True), ("mean", False, True), ("sum", 0, 0)):
            case = dist_cases.product, graph, bounds, reduce, weighted, scaled
            assert max(pair.run(2, *case)) < 1e-12


@pytest.mark.parametrize("name", ["gcn weighted", "sage", "gat", "gcn maxk", "sage maxk"])
def test_a_layer_is_that_of_one_process(pair, name):
    for graph in GRAPHS:
        for bounds in BOUNDS:
            assert max(pair.run(2, layer_cases.layer, name, graph, bounds)) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers_over_gpus_are_those_of_one_process(gpu_ranks, name):
    for bounds in BOUNDS:
        assert max(gpu_ranks.run(2, layer_cases.layer, name, "random", bounds)) < 1e-10


@pytest.mark.parametrize("name", ["sage", "gat"])
def test_a_layer_that_receives_nan_is_found_out(pair, name):
    assert min(pair.run(2, layer_cases.layer_of_a_lost_halo, name)) == math.inf


@pytest.mark.parametrize("model", MODELS)
def test_a_training_loses_as_much_as_that_of_one_process(pair, tmp_path, model):
    folder = write_parts(tmp_path / "parts", 2)
    (alone,) = pair.run(1, train_cases.losses, folder, {"model": model})
    first, second = pair.run(2, train_cases.losses, folder, {"model": model})
    assert first == second
    assert np.abs(np.subtract(first, alone)).max() < 1e-10


def test_what_is_exchanged_is_the_same(pair):
    for first, *others, kept in pair.run(2, exchange_cases.constant_features, "gcn"):
        assert (first, *others, kept) == (2, 0, 0, 1, 0, 1)
    for dense, sparse, error in pair.run(2, exchange_cases.gathered):
        assert (dense, sparse) == (1, 0)
        assert error < 1e-10
    for error, share in pair.run(2, exchange_cases.narrow_exchange):
        assert error < 1
        assert share == 0.5
    for error, kept, most in pair.run(2, exchange_cases.memory_of_constants):
        assert error < 1e-10
        assert (kept, most) == (1, 8)


def test_calls_repeat_bit_by_bit_also_after_inference(pair):
    assert pair.run(2, exchange_cases.repeated) == [True] * 2
    assert max(pair.run(2, exchange_cases.inference_before_training)) < 1e-10


def test_what_fails_or_differs_on_one_is_told_to_the_other(pair):
    first, second = pair.run(2, exchange_cases.failures_of_other_kinds)
    assert [kind for kind, _ in first] == [*["RankError"] * 3, "MemoryError"]
    assert [kind for kind, _ in second][::3] == ["MemoryError", "MemoryError"]
    (first, error), (second, _) = pair.run(2, exchange_cases.products_that_differ)
    assert first == second
    assert all(kind == "RankError" and "rank 1" in text for kind, text in first)
    assert error < 1e-12
    for found in pair.run(2, exchange_cases.second_gradients):
        assert [kind for kind, _ in found] == ["UnsupportedError"] * 5
