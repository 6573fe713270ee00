"""What ranks send each other: how often, how much, and what they make of it."""

import math

import exchange_cases
import pytest
import torch
from dist_cases import BOUNDS, worst


def test_the_judge_of_these_tests_sees_nan_empty_results_and_other_shapes():
    ones = torch.ones(5, 3)
    assert worst([(ones, ones), (None, None), (ones * math.nan, ones)]) == math.inf
    assert worst([(None, ones), (ones, ones)]) == 1
    assert worst([(ones[:0], ones[:0])]) == 0
    for other in (ones[:0], ones[:1]):
        with pytest.raises(AssertionError):
            worst([(other, ones)])


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_features_without_a_gradient_are_exchanged_once(ranks, name):
    for first, second, third, changed, last, kept in ranks.run(
        3, exchange_cases.constant_features, name
    ):
        assert (second, third, changed, last) == (0, 0, 1, 0)
        assert first == (2 if name == "gcn" else 1)  # GCN's factors too, which stay
        assert kept == (1 if name == "gcn" else 0)  # features are forgotten with their tensor


@pytest.mark.parametrize("name", ["gat", "transformer", "agnn", "sage"])
def test_all_steps_of_a_layer_share_one_exchange(ranks, name):
    assert ranks.run(2, exchange_cases.shared_exchange, name) == [1, 1]


@pytest.mark.parametrize(("width", "number"), [(256, 1), (300, 2)])
def test_maxk_sends_its_values_and_column_numbers_alone(ranks, width, number):
    k = 32
    for forward, step, dense_forward, dense_step in ranks.run(
        2, exchange_cases.maxk_bytes, k, width
    ):
        assert forward / dense_forward == (k * (4 + number)) / (width * 4)
        assert step / dense_step < 1 / 5


@pytest.mark.parametrize("count", [2, 4])
def test_features_travel_in_a_narrower_dtype(ranks, count):
    for error, share in ranks.run(count, exchange_cases.narrow_exchange):
        assert error < 1
        assert share == 0.5


@pytest.mark.parametrize("count", [2, 3, 8])
def test_where_all_read_all_one_all_gather_brings_it(ranks, count):
    for dense, sparse, error in ranks.run(count, exchange_cases.gathered):
        assert (dense, sparse) == (1, 0)
        assert error < 1e-10


@pytest.mark.parametrize("bounds", ["balanced", "one each"])
@pytest.mark.parametrize("name", ["sage", "sage max", "gin", "gat", "gatv2", "transformer"])
def test_sources_may_be_other_vertices_than_targets(ranks, name, bounds):
    assert max(ranks.run(3, exchange_cases.between_two_sets, name, bounds)) < 1e-10


@pytest.mark.parametrize("bounds", BOUNDS)
def test_losses_and_scores_are_those_of_the_whole_graph(ranks, bounds):
    for found in ranks.run(4, exchange_cases.training, bounds):
        assert all(one < 1e-12 for one in found)


@pytest.mark.parametrize("count", [1, 2])
def test_what_does_not_fit_is_refused_in_a_sentence_that_says_the_mend(ranks, count):
    for found in ranks.run(count, exchange_cases.refusals):
        for wanted, word, kind, text in found:
            assert kind == wanted, (word, kind, text)
            assert word in text
            assert text.endswith("."), text
            assert any(mend in text for mend in ("give", "leave", "use ", "run ", "make ")), text


def assert_told(said, words):
    """All ranks say the same: these words, and the number of the last one, which differs."""
    assert said[0] == said[1] == said[2]
    for (kind, text), word in zip(said[0], words, strict=True):
        assert kind == "RankError"
        assert "rank 2" in text
        assert word in text
        assert text.endswith(".")


def test_ranks_that_differ_are_refused_alike_by_the_number_of_the_rank(ranks):
    said = ranks.run(3, exchange_cases.disagreements)
    words = ["bounds", "source_bounds", "exchange_dtype", "", "torch.int32", "values", "bounds"]
    assert_told(said, words)


def test_a_rank_that_runs_out_of_memory_tells_the_others(ranks):
    said = ranks.run(3, exchange_cases.failures_of_other_kinds)
    own = [("MemoryError", ""), ("ValueError", "odd"), ("OutOfMemoryError", "CUDA out of memory.")]
    assert said[1] == [*own, own[0]]
    assert said[0] == said[2]
    for (kind, text), (name, _) in zip(said[0], own, strict=False):
        assert kind == "RankError"
        assert text.startswith(f"rank 1 cannot take part: {name}")
        assert text.endswith("; see the error of that rank.")
    assert said[0][-1] == own[0]  # all of them alike


def test_products_that_differ_between_ranks_are_named_while_debugging(ranks):
    said, errors = zip(*ranks.run(3, exchange_cases.products_that_differ), strict=True)
    assert max(errors) < 1e-12
    words = [
        *("reduce is mean", "edge_weight is torch.float64", "col_scale is torch.float64"),
        *("x is torch.float64 with rows of shape (4,)", "x is torch.float32", "x is a list: give"),
        *("x.requires_grad is True", "k is 3", "k is 2", "the call is an exchange"),
        *("x.shape[1:] is (4,)", "whether x is as it was exchanged is False"),
        "torch.is_grad_enabled() is True",
    ]
    assert_told(said, words)


def test_gradients_of_exchanged_features_are_not_differentiated_again(ranks):
    for found in ranks.run(2, exchange_cases.second_gradients):
        for kind, text in found:
            assert kind == "UnsupportedError"
            assert "features that ranks exchange cannot be differentiated again" in text


def test_rows_are_remembered_for_eight_tensors_until_they_change_or_are_forgotten(ranks):
    for error, kept, most in ranks.run(3, exchange_cases.memory_of_constants):
        assert error < 1e-10
        assert (kept, most) == (1, 8)


def test_views_are_told_apart_beside_a_rank_without_rows(ranks):
    assert max(ranks.run(3, exchange_cases.views_beside_an_empty_rank)) < 1e-10


def test_a_model_may_infer_before_it_trains(ranks):
    assert max(ranks.run(2, exchange_cases.inference_before_training)) < 1e-10


def test_an_exchange_keeps_nothing_upstream(ranks):
    assert ranks.run(2, exchange_cases.freed_without_a_collection) == [[True, True]] * 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_two_bytes_divide_in_float32(ranks, dtype, k, autocast):
    # Two times 20 000 / 40 000, which rounds to 1/2; a float16 of 1 / 40 000 is off by 0.001.
    for forward, backward in ranks.run(2, exchange_cases.means_of_two_bytes, dtype, k, autocast):
        assert forward == 0
        assert backward <= torch.finfo(dtype).eps


@pytest.mark.parametrize("count", [2, 4])
def test_weights_of_attention_come_with_edges_of_the_whole_graph(ranks, count):
    assert max(ranks.run(count, exchange_cases.attention_weights)) < 1e-10


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_one_rank_computes_as_without_ranks(ranks, name):
    assert ranks.run(1, exchange_cases.on_one_rank, name) == [(True, 0)]


@pytest.mark.parametrize("name", ["gcn", "gcn maxk", "sage", "gin", "gat", "transformer"])
def test_layers_take_autocast(ranks, name):
    # Sums of two parts in bfloat16 differ from one sum by few roundings of 2**-8.
    for alike, error in ranks.run(2, exchange_cases.autocast, name):
        assert alike
        assert error < 2**-4


def test_products_and_gradients_are_the_same_at_each_call(ranks):
    assert ranks.run(4, exchange_cases.repeated) == [True] * 4


def test_a_propagation_by_edge_weights_is_that_of_one_process(ranks):
    assert max(ranks.run(3, exchange_cases.weighted_propagation)) < 1e-12
