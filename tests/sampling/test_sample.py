"""The sample of each row as a graph: which entries it has, and that ``random`` is random."""

import ctypes
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from host_cupy import COMPILER
from laws.options import OPTIONS
from op_cases import INDEX_DTYPES, KINDS, features, host, matrix, name_of, put, rows_of
from sampling_cases import PRIMES, SAMPLES, STRATEGIES, prime_rows
from scipy import stats

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.engine import jit
from sparsefmt.ops.sampling.oracle import places_oracle, sample_oracle

#: Tests whose chances are counted together.
SIGNIFICANCE = 1e-3


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("width", [*SAMPLES, 2**40])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sample_is_that_of_the_oracle(xp, strategy, width, index_dtype):
    for k, A in enumerate(
        (
            *(matrix(kind, np.float64, index_dtype).tocsr() for kind in KINDS),
            rows_of(np.arange(200), 50, None, index_dtype),
            prime_rows(np.float32, index_dtype),
        )
    ):
        seed = (k - 3) * 2**62 + k
        if width == 2**40 and A.nnz > 10_000:
            continue
        B, perm = ops.sample_with_perm(put(xp, A), width, strategy=strategy, seed=seed)
        expected, numbers = sample_oracle(A, width, strategy=strategy, seed=seed)
        B.check()
        assert B.to("cpu") == expected
        assert perm.dtype == index_dtype
        assert (host(perm) == numbers).all()
        assert B == ops.sample(put(xp, A), width, strategy=strategy, seed=seed)


@pytest.mark.parametrize("width", [1, 2, 50, 576, 577, 1000])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_entry_is_sampled_twice_and_none_of_another_row(xp, strategy, width):
    lengths = np.concatenate([np.arange(120), PRIMES])
    A = rows_of(lengths, 9, None, np.int64)
    for seed in range(4):
        B, perm = ops.sample_with_perm(put(xp, A), width, strategy=strategy, seed=seed)
        perm = host(perm)
        assert (host(B.lengths) == np.minimum(lengths, width)).all()
        row = np.repeat(np.arange(len(lengths)), host(B.lengths))
        assert (np.searchsorted(A.indptr, perm, side="right") - 1 == row).all()
        assert len(np.unique(perm)) == len(perm)


def test_only_random_goes_by_the_seed_of_64_bits(xp):
    A = put(xp, rows_of(np.full(40, 90), 30, None, np.int32))
    X = put(xp, features(30, 8, np.float32))
    for strategy in STRATEGIES:
        make = lambda seed: ops.sample_with_perm(A, 9, strategy=strategy, seed=seed)[1]  # noqa: B023, E731
        of = lambda seed: ops.spmm_sampled(A, X, 9, strategy=strategy, seed=seed)  # noqa: B023, E731
        assert bool((make(-1) == make(2**64 - 1)).all())
        assert bool((of(-(2**70)) == of(0)).all())
        for seed in (1, 2**32, 2**63):
            assert bool((make(seed) == make(0)).all()) == (strategy != "random")


@pytest.mark.parametrize("width", SAMPLES)
def test_the_rate_is_the_closed_form(xp, width):
    for kind in KINDS:
        A = matrix(kind, None, np.int32).tocsr()
        lengths = A.lengths.tolist()
        expected = sum(min(one, width) for one in lengths) / A.nnz if A.nnz else 1.0
        rate = ops.sampling_rate(put(xp, A), width)
        assert isinstance(rate, float)
        assert rate == expected
        assert ops.sample(put(xp, A), width, strategy="fastrand").nnz == round(rate * A.nnz)


# The kernels' own choice, without a GPU

_PLACES = """
#include <algorithm>
using std::min;
#define __device__
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
#include "sampling/rows.cuh"
#define PLACES(STRATEGY) \\
    extern "C" void STRATEGY##_(unsigned long long seed, long long row, unsigned length, \\
                                unsigned kept, unsigned* places) { \\
        Sample<STRATEGY> sample(seed); \\
        sample.of_row(row, length, kept); \\
        for (unsigned k = 0; k < kept; ++k) places[k] = sample.place(k); \\
    }
PLACES(BUCKET)
PLACES(FASTRAND)
PLACES(RANDOM)
extern "C" void distances_(unsigned long long seed, long long rows, unsigned length, unsigned k,
                           unsigned other, long long* counts) {
    Sample<RANDOM> sample(seed);
    for (long long row = 0; row < rows; ++row) {
        sample.of_row(row, length, 1);
        ++counts[(sample.place(k) + length - sample.place(other)) % length];
    }
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The functions of sampling.cuh, compiled as C++."""
    folder = tmp_path_factory.mktemp("header")
    (folder / "places.cpp").write_text(_PLACES)
    include = Path(jit.__file__).parent.parent
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{include}", "places.cpp"]
    subprocess.run([*command, "-o", "places.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "places.so"))


#: Lengths to 2**31 - 1, numbers of rows beyond 32 bits, seeds of 64.
LONG = [2**20, 577 * 587 * 593, 2**30 + 1, 2**31 - 2**15, 2**31 - 1]


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the header with")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_header_of_the_kernels_chooses_as_the_oracle(header, strategy):
    choose = getattr(header, f"{strategy.upper()}_")
    rng = np.random.default_rng(0)
    for length in [*range(1, 200), *filter(None, PRIMES), *LONG]:
        for width in (1, 7, length - 1, length, 100):
            kept = min(length, max(width, 1), 5000)
            seed = int(rng.integers(0, 2**64, dtype=np.uint64))
            row = int(rng.integers(0, 2**40 if length % 2 else 300))
            found = np.full(kept, 2**32 - 1, np.uint32)
            arguments = ctypes.c_ulonglong(seed), ctypes.c_longlong(row), length, kept
            choose(*arguments, ctypes.c_void_p(found.ctypes.data))
            assert found.tolist() == places_oracle(length, kept, strategy, seed, row)


def places(xp, length, width, *, rows, seeds):
    """The sampled places of rows of one length, (draws, width)."""
    indptr = np.arange(rows + 1, dtype=np.int32) * length
    A = put(xp, sparsefmt.CSR(indptr, np.zeros(rows * length, np.int32), shape=(rows, 1)))
    found = []
    for seed in seeds:
        B, perm = ops.sample_with_perm(A, width, strategy="random", seed=seed)
        assert B.nnz == rows * width
        found.append(host(perm).reshape(rows, width) - indptr[:-1, None])
    return np.concatenate(found)


def p_value(codes, cells):
    """Of counts of so many equally likely cells, by chi-square; two-sided."""
    counts = np.bincount(codes, minlength=cells)
    assert len(counts) == cells
    expected = len(codes) / cells
    p = stats.chi2.sf(((counts - expected) ** 2).sum() / expected, cells - 1)
    return 2 * min(p, 1 - p)


def pairs(first, second, length):
    """A number for each of the ``length * (length - 1)`` pairs of two places."""
    return first * (length - 1) + second - (second > first)


#: Numbers of rows and of seeds: 10**5 draws together, along the one or the other.
DRAWS = [(100_000, range(7, 8)), (50, range(2000))]


@pytest.mark.parametrize("rows_seeds", DRAWS, ids=["rows", "seeds"])
def test_places_and_pairs_of_places_are_uniform(xp, rows_seeds, one_thread):
    rows, seeds = rows_seeds
    found = {}
    for length in (2, 3, 5, 7, 11, 12, 13, 31, 100, 127, 128, *[577] * (rows < 1000)):
        width = min(length - 1, 6)
        drawn = places(xp, length, width, rows=rows, seeds=seeds)
        for k in range(width):
            found[length, k] = p_value(drawn[:, k], length)
        for k, other in ((0, 1), (1, 2), (0, width - 1)):
            if k < other < width and length < 200:  # 4 draws a cell at least
                codes = pairs(drawn[:, k], drawn[:, other], length)
                found[length, k, other] = p_value(codes, length * (length - 1))
    worst = min(found, key=found.get)
    assert found[worst] > SIGNIFICANCE / len(found), f"{worst}: {found[worst]}"


@pytest.mark.parametrize("rows_seeds", DRAWS, ids=["rows", "seeds"])
def test_whole_samples_are_uniform(xp, rows_seeds, one_thread):
    """Of short rows every ordered sample, 120 or more of them."""
    found = {}
    for length, width in ((5, 4), (6, 3), (7, 3), (8, 3), (10, 3), (12, 3)):
        drawn = places(xp, length, width, rows=rows_seeds[0], seeds=rows_seeds[1])
        _, codes = np.unique(drawn, axis=0, return_inverse=True)
        cells = int(np.prod(range(length, length - width, -1)))
        found[length] = p_value(codes.reshape(-1), cells)
    worst = min(found, key=found.get)
    assert found[worst] > SIGNIFICANCE / len(found), f"{worst}: {found[worst]}"


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the header with")
def test_distances_of_places_are_uniform_over_a_million_rows(header):
    """Of neighbours, and of numbers whose pairs are neighbours in the other half."""
    rows, found = 1_000_000, {}
    for length in (8, 11, 12, 16, 31, 63, 64, 100, 127, 128, 129, 599, 600, 1024):
        side = 2 ** ((length - 1).bit_length() // 2)
        for k, other in ((0, 1), (0, side)):
            counts = np.zeros(length, np.int64)
            at = ctypes.c_void_p(counts.ctypes.data)
            header.distances_(ctypes.c_ulonglong(3), ctypes.c_longlong(rows), length, k, other, at)
            assert counts[0] == 0
            found[length, other] = p_value(np.repeat(np.arange(length - 1), counts[1:]), length - 1)
    worst = min(found, key=found.get)
    assert found[worst] > SIGNIFICANCE / len(found), f"{worst}: {found[worst]}"


def test_samples_of_neighbouring_rows_and_seeds_are_independent(xp, one_thread):
    found = {}
    for length in (7, 31, 100):
        first = places(xp, length, 1, rows=300, seeds=range(400)).reshape(400, 300)
        for name, (a, b) in {
            "rows": (first[:, :-1:2], first[:, 1::2]),
            "seeds": (first[:-1:2], first[1::2]),
            "both": (first[:-1:2, :-1:2], first[1::2, 1::2]),
        }.items():
            found[length, name] = p_value((a * length + b).reshape(-1), length**2)
    worst = min(found, key=found.get)
    assert found[worst] > SIGNIFICANCE / len(found), f"{worst}: {found[worst]}"


def test_every_place_of_a_long_row_is_drawn_once():
    """Twice through the rounds where a pair lies beyond the length: a permutation."""
    for length in (2, 3, 12, 129, 1000, 4097, 65_537):
        drawn = places_oracle(length, length - 1, "random", 5, 3)
        assert len(set(drawn)) == length - 1
        assert set(drawn) < set(range(length))


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_sampled_into_places_of_their_own(strategy, index_dtype):
    """With rooms of one size or of each row's, and a seed that lies on the device."""
    import cupy

    from sparsefmt.ops.sampling import cuda as sampling_cuda

    lengths = np.concatenate([np.arange(40), [577, 0, 1154]])
    A = rows_of(lengths, 30, None, index_dtype)
    B, seed = A.to("cuda"), cupy.full(1, -5, np.int64)
    expected, numbers = sample_oracle(A, 6, strategy=strategy, seed=-5)
    for room in (6, 0):
        starts = np.arange(len(lengths)) * room if room else A.indptr[:-1]
        size = len(lengths) * room if room else A.nnz
        arrays = [cupy.full(size, -7, index_dtype) for _ in range(3)]
        sampling_cuda.sample_rows(B, *arrays, None, seed, 6, strategy, room)
        cols, entries, rows = (a.get() for a in arrays)
        free = np.ones(size, bool)
        for row, (at, kept) in enumerate(zip(starts, expected.lengths, strict=True)):
            own, there = slice(at, at + kept), slice(*expected.indptr[row : row + 2])
            assert (cols[own] == expected.indices[there]).all()
            assert (entries[own] == numbers[there]).all()
            assert (rows[own] == row).all()
            free[own] = False
        assert (cols[free] == A.n_cols).all()


@pytest.mark.parametrize("width", [2**31 - 1, 2**31, 2**63, 10**5000], ids=int.bit_length)
def test_any_width_is_taken(xp, width):
    B = put(xp, matrix("power law", np.float32, np.int32).tocsr())
    assert ops.sample(B, width, strategy="random") == B
    assert ops.sampling_rate(B, width) == 1.0


def test_seeds_of_any_size_are_taken(xp):
    B = put(xp, matrix("power law", np.float32, np.int32).tocsr())
    seeds = -(10**5000), 2**64 - 1, np.int64(-1), np.uint64(2**64 - 1)
    first, *others = (ops.sample(B, 3, strategy="random", seed=seed) for seed in seeds)
    assert first != others[0]
    assert others[0] == others[1] == others[2]


def test_rounding_to_infinity_does_not_warn(xp):
    """Warnings are errors here."""
    C = put(xp, sparsefmt.CSR([0, 9], np.zeros(9, int), shape=(1, 1)))
    found = ops.spmm_sampled(C, xp.full((1, 4), 6e4, np.float16), 5, rescale=True)
    assert bool(xp.isinf(found).all())


@pytest.mark.parametrize("name", ["width", "strategy", "seed"])
def test_wrong_options_of_samples_are_refused(name):
    A = matrix("power law", None, np.int32)
    for value, error, text in OPTIONS[name]:
        options = {"width": 5, name: value}
        for call in (ops.sample, ops.sample_with_perm, ops.sampling_rate)[
            : 3 if name == "width" else 2
        ]:
            with pytest.raises(error, match=f"(?s)^{name} is .*{text}"):
                call(A, **options)


def test_a_mean_is_not_rescaled():
    A, X = matrix("power law", None, np.int32).tocsr(), np.ones((45, 4))
    for call in (ops.spmm_sampled, partial(ops.explain, "spmm_sampled")):
        with pytest.raises(
            sparsefmt.UnsupportedError, match=r"^mean and rescale are both True: .*"
        ):
            call(A, X, 5, mean=True, rescale=True)
