"""Sums of messages with features of their entries, both gradients, and combinations."""

from dataclasses import replace

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import check
from op_cases import INDEX_DTYPES, features, matrix, name_of

from sparsefmt import ops
from sparsefmt.errors import DtypeError, FormatError, UnsupportedError
from sparsefmt.ops import edge_combine, message_aggregate, message_aggregate_backward

F32, F64 = np.float32, np.float64


@pytest.mark.covering("dtype", "index_dtype", one_in=2)
@pytest.mark.parametrize("dtype", [np.float16, F32, F64], ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_hubs_are_cut_and_put_together(xp, dtype, index_dtype):
    for case in (NAMED["message_aggregate mul"], NAMED["message_aggregate_backward mul"]):
        A = case.matrix(dtype, "long", index_dtype=index_dtype)
        for reduce, feat in (("sum", 7), ("mean", 33), ("sum", 40)):
            case = replace(case, options={"message": "mul", "reduce": reduce})
            for B in (A, A.T.tocsr()):
                check(xp, case, B, case.arguments(B, dtype, feat=feat))


A0 = matrix("power law", F32, np.int32).tocsr()
X0, E0, G0 = features(45, 4, F32), features(600, 4, F32), features(60, 4, F32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: message_aggregate(A0, None, E0), DtypeError, "X"),
        (
            lambda: message_aggregate(A0, X0, E0, reduce="max"),
            UnsupportedError,
            r'spmm\(\.\.\., reduce="max"\)',
        ),
        (
            lambda: message_aggregate_backward(
                A0, X0, E0, G0, transposed=ops.transpose(matrix("dense block", F32, np.int32))
            ),
            FormatError,
            "transposed was made of another matrix",
        ),
        (lambda: edge_combine(A0, G0, X0, "dot"), UnsupportedError, "call sddmm"),
    ],
)
def test_what_another_function_does_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
