"""Values of entries are in the order of the matrix that is given: each operation, each format."""

import numpy as np
import pytest
from op_cases import features, put
from sampling_cases import host

from sparsefmt import COO, CSR, ops
from sparsefmt.ops.engine.explain import explaining

N, M, HEADS = 23, 17, 3
EPS = np.finfo(np.float32).eps
SQUARE = {"gcn_norm", "gcn_norm_backward"}
LOOPS = {"self_loops": True}
DROPOUT = {"dropout": 0.4, "seed": 5}


def shuffled(format, n_cols=M, *, weighted=True, index_dtype=np.int32):
    """Entries in disorder, repeated ones too, hubs and empty rows; no two values are equal."""
    rng = np.random.default_rng(0)
    nnz = 160
    row = np.where(rng.random(nnz) < 0.2, 4, rng.integers(0, N // 2, nnz) * 2)
    col = rng.integers(0, n_cols, nnz)
    data = (rng.permutation(nnz) + 1).astype(np.float32) / nnz if weighted else None
    row, col = row.astype(index_dtype), col.astype(index_dtype)
    return COO(row, col, data, shape=(N, n_cols)).asformat(format)


class Given:
    """A matrix and operands; ``e`` and ``eh`` have a value, and one for each head, of an entry."""

    def __init__(self, xp, A, e, eh):
        self.A, self.e, self.eh = put(xp, A), put(xp, e), put(xp, eh)
        for name, shape, seed in (
            *(("x", (A.n_cols, 8), 1), ("g", (A.n_rows, 8), 2)),
            *(("xh", (A.n_cols, HEADS, 4), 3), ("gh", (A.n_rows, HEADS, 4), 4)),
            *(("el", (A.n_cols, HEADS), 5), ("er", (A.n_rows, HEADS), 6), ("att", (HEADS, 4), 7)),
            *(("r", (A.n_rows,), 8), ("c", (A.n_cols,), 9)),
        ):
            setattr(self, name, put(xp, features(shape[0], shape[1:], np.float32, seed=seed)))
        self.kept = ops.maxk(self.x, 3)

    def winners(self, reduce):
        """The value of the entry that each maximum comes from, 0 in an empty row."""
        Y, arg = ops.spmm_arg(self.A, self.x, reduce=reduce)
        return Y, np.append(host(self.e), 0)[host(arg)]

    def of_winners(self):
        _, arg = ops.spmm_arg(self.A, self.x, col_scale=self.c)
        return ops.spmm_arg_backward(self.A, self.x, arg, self.g, col_scale=self.c)

    def normalised(self):
        return self.e if self.A.format == "coo" else self.A.with_data(self.e).tocsr().data

    def sampled(self):
        B, perm = ops.sample_with_perm(self.A, 3, strategy="random", seed=2)
        return B.indptr, B.indices, B.data, self.e[perm]


#: Operation -> its results, of which those with a value for each entry are in the order of ``A``.
CALLS = {
    "spmm": lambda s: ops.spmm(s.A, s.x, row_scale=s.r, col_scale=s.c),
    "spmm-mean": lambda s: ops.spmm(s.A, s.x, reduce="mean"),
    "spmm_arg-max": lambda s: s.winners("max"),
    "spmm_arg-min": lambda s: s.winners("min"),
    "spmm_arg_backward": lambda s: s.of_winners(),
    "aggregate": lambda s: ops.aggregate(s.A, s.x),
    "aggregate_backward": lambda s: ops.aggregate_backward(s.A, s.x, s.g),
    "scale": lambda s: ops.scale(s.A, s.r, s.c).data,
    "sddmm": lambda s: ops.sddmm(s.A, s.g, s.x),
    "sddmm-heads": lambda s: ops.sddmm(s.A, s.gh, s.xh),
    "sddmm-cbsr": lambda s: ops.sddmm(s.A, s.g, s.kept),
    "edge_softmax": lambda s: ops.edge_softmax(s.A, s.e),
    "edge_softmax-heads": lambda s: ops.edge_softmax(s.A, s.eh),
    "edge_softmax_backward": lambda s: ops.edge_softmax_backward(s.A, s.eh, s.eh * 2),
    "gat": lambda s: ops.gat(s.A, s.xh, s.el, s.er, edge_scores=s.eh, **DROPOUT),
    "gat_attention": lambda s: ops.gat_attention(s.A, s.el, s.er, edge_scores=s.eh),
    "gat_backward": lambda s: ops.gat_backward(
        s.A, s.xh, s.el, s.er, s.gh, edge_scores=s.eh, **DROPOUT
    ),
    "gatv2": lambda s: ops.gatv2(s.A, s.xh, s.gh, s.att, edge_scores=s.eh, **DROPOUT),
    "gatv2_backward": lambda s: ops.gatv2_backward(
        s.A, s.xh, s.gh, s.att, s.gh, edge_scores=s.eh, **DROPOUT
    ),
    "dot_attention": lambda s: ops.dot_attention(s.A, s.gh, s.xh, edge_scores=s.eh),
    "dot_attention_backward": lambda s: ops.dot_attention_backward(
        s.A, s.gh, s.xh, s.xh * 2, s.gh, edge_scores=s.eh, **DROPOUT
    ),
    "message_aggregate": lambda s: ops.message_aggregate(s.A, s.el, s.eh, reduce="mean"),
    "message_aggregate_backward": lambda s: ops.message_aggregate_backward(
        s.A, s.el, s.eh, s.er, message="relu_add"
    ),
    "edge_combine": lambda s: ops.edge_combine(s.A, s.er, s.el, "sub"),
    "spgemm": lambda s: ops.spgemm(s.A, s.kept, row_scale=s.r),
    "sspmm": lambda s: ops.sspmm(s.A, s.g, s.kept, deterministic=True).data,
    "spmm_sampled": lambda s: ops.spmm_sampled(s.A, s.x, 3, strategy="random", seed=2),
    "sample_with_perm": lambda s: s.sampled(),
    # Whose result is a matrix with an order of its own, and ``grad`` in that of the result.
    "gcn_norm": lambda s: ops.gcn_norm(s.A, self_loops=False).tocsr().data[None],
    "gcn_norm_backward": lambda s: ops.gcn_norm_backward(s.A, s.normalised(), self_loops=False),
}


def test_no_operation_is_left_out():
    other = {"Costs", "compile_all", "explain", "maxk", "sample", "sampling_rate"}
    other |= {"Transpose", "transpose"}
    assert {name.split("-")[0] for name in CALLS} == set(ops.__all__) - other


@pytest.mark.parametrize(
    "index_dtype",
    [np.int32, pytest.param(np.int64, marks=pytest.mark.grid)],  # 30 more loops
)
@pytest.mark.parametrize("format", ["coo", "csc", "sgt"])
@pytest.mark.parametrize("name", CALLS)
def test_entries_are_in_the_order_of_the_matrix(xp, name, format, index_dtype):
    A = shuffled(format, N if name.split("-")[0] in SQUARE else M, index_dtype=index_dtype)
    B = A.tocsr()
    # All values differ: they tell where each entry has gone.
    perm = np.argsort(A.data)[np.argsort(np.argsort(B.data))]
    assert (A.data[perm] == B.data).all()
    assert (format == "sgt") == (perm == np.arange(A.nnz)).all()
    eh = features(A.nnz, (HEADS,), np.float32)
    found = CALLS[name](Given(xp, A, A.data, eh))
    wanted = CALLS[name](Given(xp, B, B.data, eh[perm]))
    for one, other in zip(listed(found), listed(wanted), strict=True):
        own = one.shape[:1] == (A.nnz,)
        np.testing.assert_allclose(one[perm] if own else one, other, rtol=64 * EPS, atol=64 * EPS)


def listed(results):
    results = results if isinstance(results, tuple) else (results,)
    return [host(one) for one in results if one is not None]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt"])
def test_results_are_values_of_the_same_matrix(xp, format, weighted):
    """``A.with_data`` of a result is the matrix of the results."""
    A = shuffled(format, weighted=weighted)
    s = Given(xp, A, np.ones(A.nnz, np.float32), np.ones((A.nnz, HEADS), np.float32))
    products, pattern = host(s.g) @ host(s.x).T, A.with_data(np.ones(A.nnz)).toarray()
    for out in (None, put(xp, np.full(A.nnz, np.nan, np.float32))):
        found = ops.sddmm(s.A, s.g, s.x, out=out)
        assert out is None or found is out
        with explaining():  # the call runs all the same
            np.testing.assert_array_equal(host(ops.sddmm(s.A, s.g, s.x)), host(found))
        B = s.A.with_data(found).to("cpu").toarray()
        np.testing.assert_allclose(B, products * pattern, rtol=64 * EPS, atol=64 * EPS)
    p = s.A.with_data(ops.edge_softmax(s.A, found)).to("cpu").toarray()
    np.testing.assert_allclose(p.sum(1), pattern.any(1), rtol=64 * EPS)


@pytest.mark.parametrize("format", ["coo", "csc"])
def test_a_matrix_without_entries_has_no_order(xp, format):
    A = put(
        xp,
        CSR(
            np.zeros(4, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), shape=(3, 2)
        ).asformat(format),
    )
    X, Y = put(xp, np.ones((3, 4), np.float32)), put(xp, np.ones((2, 4), np.float32))
    assert ops.sddmm(A, X, Y).shape == (0,)
    assert ops.aggregate_backward(A, Y, X)[1].shape == (0,)
    assert (host(ops.spmm_arg(A, Y)[1]) == -1).all()
    assert ops.edge_softmax(A, put(xp, np.ones((0, 2), np.float32))).shape == (0, 2)
