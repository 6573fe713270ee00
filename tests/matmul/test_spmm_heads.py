"""Products with several heads: a value of each for every entry, features of each or of all."""

from dataclasses import replace

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import check
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    REDUCTIONS,
    features,
    in_data_order,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
)

from sparsefmt.errors import ShapeError, UnsupportedError
from sparsefmt.formats.oracle import float64
from sparsefmt.ops import explain, spmm
from sparsefmt.ops.matmul.oracle import spmm_oracle

F32 = np.float32
#: Side by side, not aligned, of few heads and many, none, wider than a sub-warp reads.
SHAPES = [(1, 7), (2, 16), (4, 8), (3, 5), (8, 64), (5, 33), (0, 4), (4, 0), (2, 257)]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_every_dtype_and_number_of_heads(xp, dtype, index_dtype, reduce):
    for case in (NAMED["spmm of heads"], NAMED["spmm of heads scaled"]):
        A = case.matrix(dtype, index_dtype=index_dtype)
        for heads, feat in SHAPES:
            each = replace(case, options={"reduce": reduce}).with_heads((heads,))
            check(xp, each, A, each.arguments(A, dtype, feat=feat))


def test_heads_that_share_their_values_are_one_product(xp):
    """Maxima, tiles and all else of a product are theirs too."""
    for format in FORMATS:
        A = put(xp, matrix("power law", F32, np.int32)).asformat(format)
        X = put(xp, features(45, (3, 5), F32))
        for reduce in REDUCTIONS:
            out, buffer = poisoned(xp, (60, 3, 5), F32)
            assert spmm(A, X, reduce=reduce, out=out) is out
            flat = spmm(A.tocsr(), X.reshape(45, 15), reduce=reduce)
            assert bool((out.reshape(60, 15) == flat).all()) or format == "coo"
            assert intact(xp, buffer)


def test_one_value_each_takes_the_place_of_the_matrix_own(xp):
    for format in FORMATS:
        A = matrix("power law", F32, np.int32).asformat(format)
        X, values = features(45, 6, F32), features(600, (), F32, seed=2)
        found = spmm(put(xp, A), put(xp, X), values=put(xp, values))
        exact = spmm_oracle(in_data_order(A).with_data(values), X)
        assert np.allclose(float64(found), exact, atol=1e-5)


def test_heads_of_their_own_are_summed_alone():
    A, X = matrix("power law", F32, np.int32).tocsr(), features(45, (3, 4), F32)
    values = features(600, 3, F32)
    for call in (spmm, lambda *a, **k: explain("spmm", *a, **k)):
        with pytest.raises(UnsupportedError, match="for one head at a time"):
            call(A, X, values=values, reduce="max")
        with pytest.raises(ShapeError, match="values has 3 heads but X has 2: give both the same"):
            call(A, X[:, :2], values=values)
