"""What a cache answers, as predicted from reuse times, against a cache that is simulated."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from op_cases import put

from sparsefmt import COO, CSR, power_law
from sparsefmt.generate import banded
from sparsefmt.plan import locality as module
from sparsefmt.plan import models
from sparsefmt.plan.calibration import CPU, GPU
from sparsefmt.plan.locality import TIMES, Locality, locality
from sparsefmt.plan.planner import plan
from sparsefmt.plan.pricing import work_of
from sparsefmt.plan.pruning import signature
from sparsefmt.reorder import community_order
from sparsefmt.testing import csr


def simulated(columns, held):
    """The share of gathers that a cache of ``held`` rows misses: the least recently used goes."""
    cache, missed = OrderedDict(), 0
    for column in columns.tolist():
        if column in cache:
            cache.move_to_end(column)
        else:
            missed += 1
            cache[column] = None
            if len(cache) > held:
                cache.popitem(last=False)
    return missed / len(columns)


def of_columns(xp, columns, n):
    """A structure of one row for each 8 gathers."""
    indptr = np.arange(0, len(columns) + 8, 8).clip(max=len(columns)).astype(np.int32)
    return put(xp, CSR(indptr, np.asarray(columns, np.int32), shape=(len(indptr) - 1, n)))


def uniform(n=1000, nnz=20_000):
    rng = np.random.default_rng(0)
    return COO(rng.integers(0, n, nnz), rng.integers(0, n, nnz), shape=(n, n)).tocsr()


def planted(ordered):
    """Communities whose vertices lie far apart, or together."""
    rng, n, nnz = np.random.default_rng(1), 2_000, 30_000
    row, inside = rng.integers(0, n, nnz), rng.random(nnz) < 0.9
    col = np.where(inside, row // 100 * 100 + rng.integers(0, 100, nnz), rng.integers(0, n, nnz))
    places = rng.permutation(n)
    scattered = COO(places[row], places[col], shape=(n, n)).tocsr()
    return community_order(scattered).apply(scattered) if ordered else scattered


STRUCTURES = {
    "uniform": uniform,
    "banded": lambda: banded(3_000, 8).tocsr(),
    "planted": lambda: planted(False),
    "planted, ordered": lambda: planted(True),
    "skewed": lambda: power_law(2_000, 30_000, seed=3).tocsr(),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_predicted_misses_are_those_of_a_cache(xp, name):
    A = STRUCTURES[name]()
    found = locality(put(xp, A))
    for held in (4, 16, 50, 100, 200, 400, 700, 1_500, 5_000):
        expected = simulated(A.indices, held)
        # Reuse times are binned by half octaves, and a footprint is a mean: a few in a hundred.
        assert abs(found.misses(held) - expected) < 0.05, (held, found.misses(held), expected)


def test_another_order_shows(xp):
    before, after = (locality(put(xp, planted(ordered))) for ordered in (False, True))
    assert after.misses(200) < before.misses(200) - 0.1


@given(
    A=csr(min_nnz=1, max_side=12, max_nnz=60),
    sizes=st.lists(st.floats(0, 1e6), min_size=2, max_size=8),
)
def test_misses_are_a_share_and_fall_with_the_cache(xp, A, sizes):
    found = locality(put(xp, A))
    misses = [found.misses(held) for held in sorted([*sizes, *(held / 4 for held in range(80))])]
    assert all(0 <= share <= 1 for share in misses)
    assert misses == sorted(misses, reverse=True)
    assert list(found.shares) == sorted(found.shares, reverse=True)
    assert list(found.footprints) == sorted(found.footprints)
    assert len(found.footprints) == len(found.shares)
    assert np.isclose(found.misses(1e9), len(np.unique(A.indices)) / A.nnz)  # of all rows: once
    assert np.isclose(found.misses(0), 1)


def test_no_gathers_miss_nothing(xp):
    empty = CSR(np.zeros(5, np.int32), np.zeros(0, np.int32), shape=(4, 4))
    found = locality(put(xp, empty))
    assert found.shares == found.footprints == ()
    assert [found.misses(held) for held in (0, 1, 1e9)] == [0, 0, 0]
    assert Locality(()).misses(5) == 0
    nothing = CSR(np.zeros(1, np.int32), np.zeros(0, np.int32), shape=(0, 0))
    assert locality(nothing).misses(3) == 0


#: Columns in the order in which they are read, how many there are, and shares by rows of a cache.
ORDERS = {
    "one column": (np.zeros(4_000), 1, {1: 1 / 4_000, 100: 1 / 4_000, 0: 1}),
    "never again": (
        np.random.default_rng(0).permutation(4_000),
        4_000,
        dict.fromkeys((0, 10, 3_999, 1e9), 1),
    ),
    "in turn": (np.tile(np.arange(256), 40), 256, {512: 1 / 40}),
    "one gather": ([3], 5, {7: 1}),
    "one twice": ([3, 3], 5, {7: 0.5}),
    "two": ([3, 4], 5, {7: 1}),
}


@pytest.mark.parametrize("name", ORDERS)
def test_misses_of_known_orders(xp, name):
    columns, n, shares = ORDERS[name]
    found = locality(of_columns(xp, columns, n))
    for held, share in shares.items():
        assert found.misses(held) == pytest.approx(share)
    assert name != "in turn" or found.misses(128) > 0.95


# Parts of what is large


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("most", [1 << 11, 1 << 12, 1 << 13])
def test_parts_tell_of_the_whole(xp, name, most, monkeypatch):
    A = STRUCTURES[name]()
    monkeypatch.setattr(module, "MOST", most)
    assert A.nnz > most
    found = locality(put(xp, A))
    assert all(0 <= share <= 1 for share in found.shares)
    assert list(found.shares) == sorted(found.shares, reverse=True)
    for held in (4, 16, 50, 100, 200, 400):
        if held < found.footprints[-1]:
            # A sample of 4 parts on top.
            assert abs(found.misses(held) - simulated(A.indices, held)) < 0.1, held


@given(A=csr(min_nnz=1, max_side=12, max_nnz=60), most=st.integers(2, 12), held=st.floats(0, 100))
@example(A=of_columns(np, [0] * 9, 1), most=8, held=1.0)
def test_parts_of_any_structure_give_shares(A, most, held):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MOST", most)
        found = locality(A)
    assert 0 <= found.misses(held) <= 1
    assert list(found.shares) == sorted(found.shares, reverse=True)
    assert all(0 <= share <= 1 for share in found.shares)


def test_all_that_may_be_is_looked_at_and_beyond_it_the_last_share_holds(monkeypatch):
    A = uniform(100, 500)
    whole = locality(A)
    monkeypatch.setattr(module, "MOST", A.nnz)
    assert locality(A) == whole
    monkeypatch.setattr(module, "MOST", 1 << 10)
    found = locality(uniform())
    assert TIMES[len(found.shares) - 1] <= 1 << 9
    assert found.misses(1e9) == found.shares[-1]


# Prices

H = models.features()
EXPRESSIONS = [models.gcn(H), models.gat(H, opened=True), models.tagcn(H, 2), models.sage(H)]


@given(
    A=csr(max_side=20, max_nnz=80),
    width=st.integers(1, 2048),
    out=st.integers(1, 2048),
    n=st.integers(1, 1 << 22),
    nnz=st.integers(0, 1 << 26),
)
@pytest.mark.parametrize("constants", [CPU, GPU], ids=["cpu", "gpu"])
def test_work_is_never_negative(constants, A, width, out, n, nnz):
    sizes = {"n": n, "nnz": nnz, "heads": 1, "in": width, "out": out}
    for reach in (locality(A), Locality(())):
        for expression in EXPRESSIONS:
            for primitive in signature(plan(expression, sizes, GPU).chosen.tree, training=True):
                for rounded in (False, True):
                    work = work_of(primitive, sizes, constants, rounded=rounded, locality=reach)
                    assert min(work) >= 0
                    assert constants.predict(work, primitive.kind) >= 0


@pytest.mark.parametrize("constants", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_what_caches_answer_is_no_dearer(expression, constants):
    sizes = {"n": 1 << 20, "nnz": 1 << 24, "heads": 1, "in": 256, "out": 128}
    found = plan(expression, sizes, constants, training=True)
    nothing, all_of_it = Locality(()), Locality((1.0,) * len(TIMES))
    seconds = [found.seconds(one) for one in (nothing, all_of_it)]
    assert 0 < seconds[0] <= seconds[1]
    assert found.seconds(None) == pytest.approx(found.chosen.predicted)
