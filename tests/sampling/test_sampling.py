"""Products with a sample of each row against loops in float64, and the sample as a graph."""

from dataclasses import replace
from functools import partial

import laws.checks
import numpy as np
import pytest
from laws.cases import NAMED
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    KINDS,
    WIDTHS,
    far_apart,
    features,
    host,
    intact,
    long_rows,
    matrix,
    name_of,
    poisoned,
    put,
    quick_oracle,
    rows_of,
)
from sampling_cases import PRIMES, SAMPLES, STRATEGIES, prime_rows, sddmm_sampled

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.sampling.oracle import sample_oracle, sddmm_sampled_bound, sddmm_sampled_oracle
from sparsefmt.testing import assert_close

FACTORS = [{}, {"mean": True}, {"rescale": True}]


def on(xp, A, planned=False):
    """Where the arrays live; on a GPU with a plan of the rows, or before there is one."""
    B = put(xp, A)
    if B is not A and planned:
        _ = B.chunks
    return B


def check(xp, A, X, width, **options):
    """Check the product before and after there is a plan of the rows."""
    case = NAMED["spmm_sampled bucket"]
    case = replace(case, options={"width": width, **options})
    for planned in (False, True)[: 1 if xp is np else 2]:
        laws.checks.check(xp, case, A, {"X": X}, matrix=partial(on, planned=planned))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_kind_of_graph_and_sample(xp, strategy, kind, weighted, index_dtype):
    A = matrix(kind, np.float32 if weighted else None, index_dtype).tocsr()
    X = features(A.n_cols, 19, np.float32)
    for k, width in enumerate(SAMPLES):
        check(xp, A, X, width, strategy=strategy, seed=2**63 + k)


@pytest.mark.parametrize("width", SAMPLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_577_divides(xp, strategy, dtype, width):
    k = SAMPLES.index(width)
    A = prime_rows(dtype if k % 2 else None, INDEX_DTYPES[k % 2])
    for feat in (1, 40, 72, 257):
        X = features(211, feat, dtype) / dtype(64)  # rescaled sums stay within float16
        check(xp, A, X, width, strategy=strategy, seed=-k, **FACTORS[k % 3])


@pytest.mark.covering("strategy", "dtype", "width", one_in=3)
@pytest.mark.parametrize("width", [1, 50, 2500, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_many_sub_warps_share(xp, strategy, dtype, width):
    for k, feat in enumerate((8, 40, 130)):
        A = long_rows(dtype if k % 2 else None, INDEX_DTYPES[k % 2])
        X = features(A.n_cols, feat, dtype)
        B = sample_oracle(A, width, strategy=strategy, seed=k)[0]
        expected, bound = quick_oracle(B, X, "mean" if k == 2 else "sum")
        for planned in (False, True):
            out, buffer = poisoned(xp, (A.n_rows, feat), dtype)
            options = {"strategy": strategy, "seed": k, "mean": k == 2}
            ops.spmm_sampled(on(xp, A, planned), put(xp, X), width, out=out, **options)
            assert_close(out, expected, bound=bound)
            assert intact(xp, buffer)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_entry_that_is_not_sampled_never_touches_a_bad_value(xp, strategy, bad):
    """Of a row of 37 columns the sample of 9 is finite; the row after it meets the rest."""
    A = sparsefmt.CSR([0, 37, 74], np.tile(np.arange(37), 2), shape=(2, 37))
    B = sample_oracle(A, 9, strategy=strategy, seed=1)[0]
    X = np.full((37, 24), bad, np.float32)
    X[B.indices[:9]] = 1
    found = ops.spmm_sampled(put(xp, A), put(xp, X), 9, strategy=strategy, seed=1)
    assert found[0].tolist() == [9.0] * 24
    check(xp, A, X, 9, strategy=strategy, seed=1)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
def test_half_precision_sums_in_float32(xp, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    A = sparsefmt.CSR([0, 9000], np.zeros(9000, int), shape=(1, 1))
    for strategy in STRATEGIES:
        Y = ops.spmm_sampled(put(xp, A), xp.ones((1, 8), dtype), 4096, strategy=strategy)
        assert float(Y[0, 5]) == 4096


@pytest.mark.parametrize("width", SAMPLES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_kernel_sums_just_the_entries_of_the_sample(xp, strategy, width):
    """Sums of integers below 2**30 are exact in any order, and no two sets have the same."""
    A = prime_rows(None, np.int32)
    values = np.random.default_rng(3).integers(0, 2**30, A.nnz).astype(np.float64)
    X = np.random.default_rng(4).integers(0, 2**10, (211, 20)).astype(np.float64)
    for B in (put(xp, A), put(xp, A.with_data(values))):
        C = ops.sample(B, width, strategy=strategy, seed=5)
        for part in (np.s_[:, :3], np.s_[:]):  # narrow, and in several slices
            x = put(xp, X)[part]
            found = ops.spmm_sampled(B, x, width, strategy=strategy, seed=5)
            assert bool((found == ops.spmm(C, x)).all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sample_of_all_is_the_whole_product(xp, strategy):
    A = long_rows(np.float32, np.int32)
    X = features(A.n_cols, 33, np.float32)
    expected, bound = quick_oracle(A, X)
    for width in (10_000, 2**31 - 1, 10**30):
        for factor in ({}, {"rescale": True}):
            found = ops.spmm_sampled(put(xp, A), put(xp, X), width, strategy=strategy, **factor)
            assert_close(found, expected, bound=bound)
            if xp is np:
                assert (found == ops.spmm(A, X)).all()
    B, perm = ops.sample_with_perm(put(xp, A), 10_000, strategy=strategy)
    assert B == put(xp, A)
    assert (host(perm) == np.arange(A.nnz)).all()


@pytest.mark.parametrize("feat", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_products_at_sampled_entries(xp, strategy, dtype, feat):
    k = WIDTHS.index(feat)
    graphs = matrix("power law", None, INDEX_DTYPES[k % 2]).tocsr(), rows_of(PRIMES[2:], 30, None,
        INDEX_DTYPES[k % 2])  # fmt: skip
    for A, width in zip(graphs, (SAMPLES[k % 6], 9), strict=True):
        X, Y = features(A.n_rows, feat, dtype), features(A.n_cols, feat, dtype, seed=2)
        r, c = features(A.n_rows, (), dtype, seed=3), features(A.n_cols, (), dtype, seed=4)
        scales = {"row_scale": r, "col_scale": c} if k % 2 else {}
        how = {"strategy": strategy, "seed": k, **FACTORS[k % 3]}
        gap = (0, 3, 8)[k % 3]
        place = (lambda a: far_apart(xp, a, gap=gap)) if feat else (lambda a: put(xp, a))  # noqa: B023
        out, buffer = poisoned(xp, (A.nnz,), dtype)
        there = {name: put(xp, one) for name, one in scales.items()}
        sddmm_sampled(xp, put(xp, A), place(X), place(Y), width, out, **there, **how)
        expected = sddmm_sampled_oracle(A, X, Y, width, **scales, **how)
        bound = sddmm_sampled_bound(A, X, Y, width, **scales, **how)
        assert_close(out, expected, bound=bound)
        assert intact(xp, buffer)


def test_explain_names_the_kernel_and_why_not_the_others():
    A = matrix("power law", np.float32, np.int32)
    X = features(A.n_cols, 4, np.float32)
    found = ops.explain("spmm_sampled", A.tocsr(), X, 5, strategy="random", mean=True)
    assert found.chosen.name == "spmm_sampled_csr_numba"
    assert "not spmm_sampled_csr_balanced: the arrays are on the CPU" in str(found)
    text = str(ops.explain("spmm_sampled", A, X, 5))
    assert "spmm_sampled runs spmm_sampled_through_csr (deterministic, converts to CSR" in text
