"""One case for each row of the table: the public function that runs it, and its arguments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from op_cases import LONG_ROWS, features, rows_of

from sparsefmt import ops
from sparsefmt.formats.base import Format

#: Rows that torch alone calls, whose laws are in tests/autograd.
TORCH_ALONE = {
    *("spmm_arg", "cbsr_to_dense", "dense_to_cbsr", "sspmm", "spmm_sampled_da"),
    "gat_with_statistics",
    *("gat_of_vectors", "gat_of_vectors_with_statistics", "gat_of_vectors_backward"),
    *("attend", "attend_with_statistics", "attend_backward"),
}


#: Rows that add up by atomics on a GPU: tests/gcn compares them with complex steps.
NOT_REPEATED = {"gcn_norm_backward"}


@dataclass(frozen=True)
class Case:
    """A call: each shape in ``sizes`` begins with what it has a row for, as in ``Arg``."""

    name: str
    function: Callable[..., Any]
    sizes: tuple[tuple[Any, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()  #: of the table that it runs; none: that of the name
    format: str = "csr"
    values: bool = False  #: whether the matrix stores values
    square: bool = False
    balanced: int | None = None  #: the place of the features that are made a CBSR

    def __str__(self):
        return self.name

    @property
    def is_mixed(self):
        """Return True if it takes a matrix and arguments, which may be on two devices."""
        return bool(self.sizes) and self.function is not ops.maxk

    def matrix(self, dtype, lengths=LONG_ROWS):
        """Return a matrix whose rows have these lengths."""
        n_cols = len(lengths) if self.square else 500
        A = rows_of(lengths, n_cols, dtype if self.values else None, np.int32)
        return A.asformat(self.format)

    def arguments(self, A, dtype, *, seed=0):
        """Return features for a matrix; the last axes are heads and width."""
        counts = {"rows": A.n_rows, "cols": A.n_cols, "entries": A.nnz}
        shapes = [tuple(counts.get(n, n) for n in size) for size in self.sizes]
        arrays = [
            features(shape[0], shape[1:], dtype, seed=10 * seed + k)
            for k, shape in enumerate(shapes)
        ]
        if self.balanced is not None:
            arrays[self.balanced] = ops.maxk(arrays[self.balanced], 3)
        return arrays

    def run(self, A, args, **options):
        """Return the arrays of all results: of a matrix its values."""
        if self.name.startswith("maxk"):
            S = ops.maxk(*args, 3)
            return [S.indices, S.data, S.toarray()]
        results = self.function(A, *args, **self.options, **options)
        results = results if isinstance(results, tuple) else (results,)
        return [
            result.data if isinstance(result, Format) else result
            for result in results
            if result is not None
        ]


def _spmm_arg(A, X, dY, *, reduce):
    """Run the maximum, its places and both gradients."""
    Y, places = ops.spmm_arg(A, X, reduce=reduce)
    return Y, places, *ops.spmm_arg_backward(A, X, places, dY)


X, GRAD, EDGES = ("cols", 33), ("rows", 33), ("entries", 33)
ARG = "spmm", "spmm_arg_dx", "spmm_arg_da"
DROPOUT = {"dropout": 0.5, "seed": 2}
GAT = ("cols", 4, 16), ("cols", 4), ("rows", 4)
GATV2 = ("cols", 4, 16), ("rows", 4, 16), (4, 16)
DOT = ("rows", 4, 16), ("cols", 4, 16), ("cols", 4, 16)
RESULT = ("rows", 4, 16)

CASES = [
    *(
        Case(f"spmm {reduce}", ops.spmm, (X,), {"reduce": reduce}, ("spmm",), values=True)
        for reduce in ("sum", "mean", "max", "min")
    ),
    *(
        Case(f"spmm of {format}", ops.spmm, (X,), {}, ("spmm",), format, values=True)
        for format in ("csc", "sgt")
    ),
    *(
        Case(f"spmm_arg {reduce}", _spmm_arg, (X, GRAD), {"reduce": reduce}, ARG, values=True)
        for reduce in ("max", "min")
    ),
    Case("aggregate", ops.aggregate, (X,), {}, ("spmm",), values=True),
    Case("aggregate_backward", ops.aggregate_backward, (X, GRAD), values=True),
    Case("spgemm", ops.spgemm, (X,), values=True, balanced=0),
    Case(
        *("sspmm", ops.sspmm, (GRAD, X), {"deterministic": True}, ("sspmm_outer",)),
        values=True,
        balanced=1,
    ),
    Case("sddmm_cbsr", ops.sddmm, (GRAD, X), balanced=1),
    Case("sddmm", ops.sddmm, (GRAD, X)),
    Case("maxk", ops.maxk, (X,)),
    Case("edge_softmax", ops.edge_softmax, (("entries", 4),)),
    Case("edge_softmax_backward", ops.edge_softmax_backward, (("entries", 4), ("entries", 4))),
    Case("gat", ops.gat, GAT, DROPOUT),
    Case("gat_backward", ops.gat_backward, (*GAT, RESULT), DROPOUT),
    Case("gat_attention", ops.gat_attention, GAT[1:]),
    Case("gatv2", ops.gatv2, GATV2, DROPOUT),
    Case("gatv2_backward", ops.gatv2_backward, (*GATV2, RESULT), DROPOUT),
    Case("dot_attention", ops.dot_attention, DOT, DROPOUT),
    Case("dot_attention_backward", ops.dot_attention_backward, (*DOT, RESULT), DROPOUT),
    *(
        Case(
            *(f"spmm_sampled {strategy}", ops.spmm_sampled, (X,)),
            *({"width": 40, "strategy": strategy, "seed": 2}, ("spmm_sampled",)),
            values=True,
        )
        for strategy in ("bucket", "fastrand", "random")
    ),
    Case("gcn_norm", ops.gcn_norm, (), square=True, values=True),
    Case("gcn_norm of counts", ops.gcn_norm, (), {}, ("gcn_norm",), "coo", square=True),
    Case("message_aggregate", ops.message_aggregate, (X, EDGES), {"message": "relu_add"}),
    Case(
        *("message_aggregate_backward", ops.message_aggregate_backward, (X, EDGES, GRAD)),
        {"message": "relu_add"},
    ),
    Case("edge_combine", ops.edge_combine, (GRAD, X), {"op": "sub"}),
]
