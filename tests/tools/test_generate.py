"""Synthetic graphs: exact sizes, the law they promise, the same on every device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import host

from sparsefmt import DtypeError, IndexRangeError, ShapeError, UnsupportedError, _random, generate
from sparsefmt.generate import banded, dense_block, power_law, power_law_with_labels, star


def device(xp):
    return "cpu" if xp is np else "cuda"


OPTIONS = {
    "exponent": st.floats(2.01, 5),
    "inside": st.floats(0, 1),
    "community": st.integers(1, 50),
    "seed": st.integers(0, 1 << 70),
    "shuffle": st.booleans(),
    "index_dtype": st.sampled_from([np.int32, np.int64]),
}


@settings(max_examples=30)
@given(n_nodes=st.integers(0, 40), fill=st.floats(0, 1), options=st.fixed_dictionaries(OPTIONS))
def test_sizes_are_exact_and_entries_distinct(xp, n_nodes, fill, options):
    n_edges, community = int(fill * (n_nodes * (n_nodes - 1) // 2)), options["community"]
    A, labels = power_law_with_labels(n_nodes, n_edges, device=device(xp), **options)
    A.check()
    row, col = host(A.row), host(A.col)
    assert A.shape == (n_nodes, n_nodes)
    assert A.index_dtype == labels.dtype == options["index_dtype"]
    assert len({*zip(row.tolist(), col.tolist(), strict=True)}) == A.nnz == n_edges
    assert (row != col).all()
    sizes = np.bincount(host(labels), minlength=1) if n_nodes else np.zeros(0)
    assert sizes.sum() == n_nodes
    assert (sizes[:-1] == community).all()


def test_the_seed_alone_decides_the_graph(xp, monkeypatch):
    same = [power_law(300, 2000, seed=seed, device=device(xp)) for seed in (5, 5, 6)]
    assert same[0] == same[1]
    assert same[0] != same[2]
    assert power_law(30, 60, community=2**70) == power_law(30, 60, community=30)
    monkeypatch.setattr(generate, "CHUNK_ENTRIES", 128)
    assert power_law(300, 2000, seed=5, device=device(xp)) == same[0]


@pytest.mark.gpu
def test_both_devices_make_the_same_graph():
    assert power_law(5000, 100_000, device="cuda").to("cpu") == power_law(5000, 100_000)


def test_degrees_have_a_heavy_tail_and_communities_hold_their_share(xp):
    A, labels = power_law_with_labels(20_000, 400_000, inside=0.6, community=500, device=device(xp))
    labels, row, col = host(labels), host(A.row), host(A.col)
    share = (labels[row] == labels[col]).mean()
    assert 0.55 < share < 0.65
    for ends in (row, col):
        degrees = np.sort(np.bincount(ends, minlength=20_000))
        assert degrees[-200:].sum() > 0.1 * A.nnz
        assert 0.5 < degrees[-1] / np.sqrt(A.nnz) < 1.5


def test_a_steeper_law_has_a_thinner_tail(xp):
    laws = (power_law(5000, 100_000, exponent=e, device=device(xp)) for e in (2.1, 2.6, 4.0))
    tops = [int(xp.bincount(A.row).max()) for A in laws]
    assert tops[0] >= tops[1] > tops[2]


def test_shuffling_spreads_what_would_lie_together(xp):
    options = {"community": 100, "inside": 1.0, "device": device(xp)}
    A, labels = power_law_with_labels(1000, 5000, shuffle=False, **options)
    assert host(labels).tolist() == (np.arange(1000) // 100).tolist()
    distances = [float(abs(B.row - B.col).mean()) for B in (A, power_law(1000, 5000, **options))]
    assert distances[0] < 60 < 250 < distances[1]


def test_saturated_hubs_do_not_stop_it(xp, monkeypatch):
    monkeypatch.setattr(generate, "WEIGHTED_ROUNDS", 1)
    assert power_law(20, 190, inside=1.0, community=2, device=device(xp)).nnz == 190


@given(n=st.integers(0, 9), half_width=st.integers(0, 10))
def test_bands(xp, n, half_width):
    i = np.arange(n)
    expected = abs(i[:, None] - i) <= half_width
    A = banded(n, half_width, device=device(xp))
    np.testing.assert_array_equal(host(A.toarray()), expected)
    assert A.nnz == expected.sum()


@given(n=st.integers(0, 9), data=st.data())
def test_stars_and_dense_blocks(xp, n, data):
    expected = np.zeros((n, n))
    expected[:1], expected[:, :1], expected[:1, :1] = 1, 1, 0
    np.testing.assert_array_equal(host(star(n, device=device(xp)).toarray()), expected)
    size = data.draw(st.integers(0, n))
    expected = np.zeros((n, n))
    expected[:size, :size] = 1
    A = dense_block(n, size, device=device(xp), index_dtype=np.int64)
    np.testing.assert_array_equal(host(A.toarray()), expected)
    assert A.index_dtype == np.int64


def test_random_numbers_depend_on_counter_seed_and_stream(xp):
    counters = xp.arange(4096)
    drawn = [_random.uniform(counters, seed, stream) for seed in (0, 1) for stream in (0, 1)]
    for i, numbers in enumerate(drawn):
        assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
        assert abs(float(numbers.mean()) - 0.5) < 5 / np.sqrt(12 * 4096)
        for other in drawn[:i]:
            assert abs(np.corrcoef(host(numbers), host(other))[0, 1]) < 5 / np.sqrt(4096)
    assert (_random.bits(counters[5:6], 7) == _random.bits(counters, 7)[5]).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: power_law(10, 46), ShapeError, "n_edges is 46 but 10 vertices take at most 45"),
        (lambda: power_law(0, 1), ShapeError, "0 vertices take at most 0"),
        (lambda: power_law(-1, 0), ShapeError, "n_nodes is -1: give 0 or more"),
        (lambda: power_law(10.0, 4), ShapeError, "n_nodes is 10.0: give an integer"),
        (lambda: power_law(10, "4"), ShapeError, "n_edges is '4'"),
        (lambda: power_law(10, -4), ShapeError, "n_edges is -4"),
        (lambda: power_law(10, 4, community=0), ShapeError, "community is 0: give 1 or more"),
        (lambda: power_law(10, 4, exponent=2), UnsupportedError, "exponent is 2: means exist"),
        (lambda: power_law(10, 4, exponent=np.inf), UnsupportedError, "exponent is inf"),
        (lambda: power_law(10, 4, exponent="3"), UnsupportedError, "exponent is '3'"),
        (lambda: power_law(10, 4, inside=1.1), UnsupportedError, "inside is 1.1"),
        (lambda: power_law(10, 4, inside=np.nan), UnsupportedError, "inside is nan"),
        (lambda: power_law(10, 4, inside=None), UnsupportedError, "inside is None"),
        (lambda: power_law(10, 4, seed=-1), UnsupportedError, "seed is -1"),
        (lambda: power_law(10, 4, seed=None), UnsupportedError, "seed is None"),
        (lambda: power_law(10, 4, index_dtype=np.uint8), DtypeError, "index_dtype is uint8"),
        (lambda: power_law(1 << 31, 4), IndexRangeError, "use int64 indices"),
        (lambda: dense_block(3, 4), ShapeError, "size is 4 but there are 3 vertices"),
        (lambda: banded(3, -1), ShapeError, "half_width is -1"),
        (lambda: star(3, index_dtype=float), DtypeError, "index_dtype is float64"),
    ],
)
def test_what_makes_no_graph_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
