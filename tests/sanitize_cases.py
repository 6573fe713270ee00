"""Every kernel once over small, awkward shapes: what ``make sanitize`` runs under each tool.

CuPy's memory pool is off: each array is an allocation of its own, and a step beyond it shows.
Arguments choose among the dtypes of the values and among ``PARTS``, all by default.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cupy
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # as CuPy's pool

from tile_cases import blocks, costs

from sparsefmt import COO, CSR, Graph, IndexRangeError, ops
from sparsefmt.ops.attention.gat.cuda import gat_of_vectors_backward, gat_of_vectors_with_statistics
from sparsefmt.ops.attention.pairwise import column_blocks as attention_column_blocks
from sparsefmt.ops.engine import build
from sparsefmt.ops.engine.memory import Scalar
from sparsefmt.ops.engine.structure import structure_of, transposed
from sparsefmt.ops.matmul import cuda as matmul_cuda
from sparsefmt.ops.matmul import cuda_aggregate as matmul_cuda_aggregate
from sparsefmt.ops.sampling import cuda as sampling_cuda
from sparsefmt.ops.sampling.options import STRATEGIES, SampleOptions
from sparsefmt.ops.tiles.split import HEIGHTS

# The last has rows that are cut between blocks.
SHAPES = [(0, 0, 0), (3, 5, 0), (1, 40, 64), (40, 1, 33), (70, 50, 900), (3, 40, 12_000)]
# Vertices and entries of square ones; the last has a row and a column that are cut.
SQUARES = [(0, 0), (5, 0), (1, 3), (60, 700), (40, 12_000)]
WIDTHS = [1, 33, 72]
# Heads and features: side by side, not aligned, wider than a sub-warp reads at a time.
HEADS = [(1, 1), (4, 8), (3, 5), (1, 33), (2, 72), (1, 300)]
DTYPES = [
    (np.float32, np.int32),
    (np.float64, np.int64),
    (np.float16, np.int64),
    (ml_dtypes.bfloat16, np.int32),
]


def main() -> None:
    """Every part of the cases that the arguments choose."""
    chosen = [case for case in DTYPES if np.dtype(case[0]).name in sys.argv[1:]] or DTYPES
    parts = [part for name, part in PARTS.items() if name in sys.argv[1:]] or PARTS.values()
    matmul_cuda.LEAST_GATHERS = matmul_cuda.LEAST_FEATURES = 0  # round those of small matrices too
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    for part, (dtype, index_dtype) in product(parts, chosen):
        part(dtype, index_dtype)
    cupy.cuda.Device().synchronize()
    print("all cases ran")


def matrices(dtype: Any, index_dtype: Any) -> Iterator[COO]:
    """Make small matrices of every kind of shape."""
    rng = np.random.default_rng(0)
    for n_rows, n_cols, nnz in SHAPES:
        row, col = rng.integers(0, max(n_rows, 1), nnz), rng.integers(0, max(n_cols, 1), nnz)
        i, j = row.astype(index_dtype), col.astype(index_dtype)
        data = rng.standard_normal(nnz).astype(dtype)
        yield COO(i, j, data, shape=(n_rows, n_cols)).to("cuda")


def squares(dtype: Any, index_dtype: Any) -> Iterator[COO]:
    """Make square ones with loops, a long row and a long column."""
    rng = np.random.default_rng(0)
    for n, nnz in SQUARES:
        i, j = (rng.integers(0, max(n, 1), nnz).astype(index_dtype) for _ in range(2))
        i[: nnz // 4], j[nnz // 2 : nnz * 3 // 4] = 0, 0
        j[::3] = i[::3]
        yield COO(i, j, np.ones(nnz, dtype), shape=(n, n)).to("cuda")


def weighted_or_not(A: COO) -> tuple[CSR, CSR]:
    """Give the matrix with its values, and without."""
    return A.tocsr(), A.with_data(None).tocsr()


def formats(dtype: Any, index_dtype: Any) -> None:
    """Every conversion, check and part of matrices, and products in each format."""
    for A in matrices(dtype, index_dtype):
        convert(A)


def operations(dtype: Any, index_dtype: Any) -> None:
    """Every operation of matrices and of vertices."""
    for A in matrices(dtype, index_dtype):
        for B in weighted_or_not(A):
            operate(B, A.dtype)
    for A in squares(dtype, index_dtype):
        on_vertices(A)


def samples(dtype: Any, index_dtype: Any) -> None:
    """Every strategy of sampling."""
    for A in matrices(dtype, index_dtype):
        for B in weighted_or_not(A):
            draw(B, A.dtype)


def tiles(dtype: Any, index_dtype: Any) -> None:
    """Products by condensed tiles, of few entries and of many."""
    for A in matrices(dtype, index_dtype):
        for B in weighted_or_not(A):
            multiply_tiles(B, A.dtype, ["all", "mix"])
    multiply_large_tiles(dtype, index_dtype)


def attention(dtype: Any, index_dtype: Any) -> None:
    """Run GAT's attention of matrices, and of vertices with loops of their own."""
    for A in matrices(dtype, index_dtype):
        attend(A.tocsr(), A.dtype)
    for A in squares(dtype, index_dtype):
        attend(A.tocsr(), A.dtype, self_loops=True)


def pairwise(dtype: Any, index_dtype: Any) -> None:
    """Run GATv2's attention and that of dot products, of matrices."""
    for A in matrices(dtype, index_dtype):
        attend_pairwise(A.tocsr(), A.dtype)


def pairwise_with_loops(dtype: Any, index_dtype: Any) -> None:
    """Run GATv2's attention and that of dot products, of vertices with loops of their own."""
    for A in squares(dtype, index_dtype):
        attend_pairwise(A.tocsr(), A.dtype, self_loops=True)


def builds(dtype: Any, index_dtype: Any) -> None:
    """Rows and columns of edges in torch's tensors, with wrong ids, by both ways to build them."""
    import torch

    from sparsefmt.autograd.tensors.reports import check_all

    if np.dtype(index_dtype).itemsize != np.dtype(dtype).itemsize:
        return  # once for each type of indices
    rng = np.random.default_rng(0)
    shapes = (*SHAPES, *((n, n, nnz) for n, nnz in SQUARES))
    for (n_rows, n_cols, nnz), most in product(shapes, (build.SMALL_EDGES, 0)):
        if not nnz:
            continue
        ends = rng.integers(0, n_cols, nnz), rng.integers(0, n_rows, nnz)
        edges = torch.from_numpy(np.stack(ends).astype(index_dtype)).cuda()
        with patch.object(build, "SMALL_EDGES", most):
            for wrong in (False, True):
                if wrong:
                    edges = edges.clone()
                    edges[:, ::7], edges[:, ::11] = -5, 2**31 - 1
                told = tells(build_and_multiply, edges, (n_cols, n_rows)) + tells(check_all)
                assert wrong or not told


def tells(run: Callable[..., None], *args: Any) -> bool:
    """Run, and tell whether an id was found to be wrong."""
    try:
        run(*args)
    except IndexRangeError:
        return True
    return False


def build_and_multiply(edges: Any, sizes: tuple[int, int]) -> None:
    """Build a graph for a product and its gradient, then look at its formats."""
    import torch

    from sparsefmt.autograd import gcn_norm, spmm

    graph = Graph.from_edge_index(edges, num_nodes=sizes)
    x = torch.ones(sizes[0], 9, device="cuda", requires_grad=True)
    spmm(graph, x).sum().backward()
    torch.cuda.synchronize()
    if sizes[0] == sizes[1]:
        gcn_norm(graph)
    assert graph.csr.nnz == edges.shape[1]


#: What may run in a process of its own.
parts = (formats, operations, samples, tiles, attention, pairwise, pairwise_with_loops, builds)
PARTS = {part.__name__: part for part in parts}


def convert(A: COO) -> None:
    """Every conversion, check and part of one matrix."""
    graph = Graph(A)
    _ = graph.transposed.csr, graph.in_degree
    A[::-1, ::2].asformat("csr").sorted_indices()
    if A.nnz and A.n_cols:
        S = ops.maxk(cupy.ones((A.n_rows, A.n_cols), A.dtype), min(3, A.n_cols))
        S.check()
        assert (S @ cupy.ones((A.n_cols, 5), A.dtype)).shape == (A.n_rows, 5)
    for weighted in (A, A.with_data(None)):
        for format in ("coo", "csr", "csc", "sgt"):
            B = weighted.asformat(format)
            B.check()
            B.asformat("csr").tocsc().tocoo()
            B.toarray()
            assert (B @ cupy.ones((A.n_cols, 0), A.dtype)).shape == (A.n_rows, 0)
            assert (B @ cupy.ones((A.n_cols, 9), A.dtype)).shape == (A.n_rows, 9)


def operate(A: CSR, dtype: np.dtype[Any]) -> None:
    """Every operation of one matrix, on rows that lie apart as well."""
    r, c = cupy.ones(A.n_rows, dtype), cupy.ones(A.n_cols, dtype)
    ops.scale(A, r, c)
    for width in WIDTHS:
        X = cupy.ones((A.n_cols, width + 3), dtype)[:, 1 : width + 1]
        X = X if width == 33 else X.copy()
        for reduce in ("sum", "mean", "max", "min"):
            ops.spmm(A, X, reduce=reduce)
            ops.spmm(A, X, reduce=reduce, row_scale=r, col_scale=c)
        if dtype == np.float32:  # features and result of other widths
            ops.spmm(A, X, precision="bf16")
            ops.spmm(A, X, reduce="mean", row_scale=r, col_scale=c, precision="bf16")
        ops.spmm(A.tocoo(), X, row_scale=r, col_scale=c)
        ops.aggregate(A, X, method="gas")
        grad = cupy.ones((A.n_rows, width), dtype)
        _, arg = ops.spmm_arg(A, X, reduce="max", row_scale=r, col_scale=c)
        ops.spmm_arg_backward(A, X, arg, grad, row_scale=r, col_scale=c)
        assert ops.sddmm(A, grad, X).shape == (A.nnz,)
        _, dA = ops.aggregate_backward(A, X, grad)
        assert dA.shape == (A.nnz,)
        pass_messages(A, X, grad)
    sizes = (1, 1), (5, 3), (33, 5), (33, 8), (40, 9), (72, 16), (72, 32), (260, 100), (260, 3)
    for width, k in sizes if A.n_cols else ():
        S = ops.maxk(cupy.ones((A.n_cols, width), dtype), k)
        Y = ops.spgemm(A, S, reduce="mean", row_scale=r, col_scale=c)
        ops.sddmm(A, Y, S)
        for deterministic in (False, True):
            ways = {"row_scale": r, "col_scale": c, "deterministic": deterministic}
            ops.sspmm(A, Y, S, **ways)
            if dtype == np.float32:
                ops.sspmm(A, Y, S, **ways, precision="bf16")
    for shape in ((2, 32), (3, 33), (1, 72), (4, 4)):  # by words of 16 bytes, of 8, and values
        values = cupy.ones((A.nnz, shape[0]), dtype)
        assert ops.spmm(A, cupy.ones((A.n_cols, *shape), dtype), values=values).shape[1:] == shape
    for heads in (1, 3, 8, 16):
        left, right = (cupy.ones((size, heads, 5), dtype) for size in A.shape)
        scores = ops.sddmm(A, left, right)
        ops.spmm(A, right, values=scores, reduce="mean")
        ops.spmm(A.tocoo(), right[:, 0].copy(), values=scores, row_scale=r, col_scale=c)
        p = ops.edge_softmax(A, scores)
        ops.edge_softmax_backward(A, p, scores)


def pass_messages(A: CSR, X: cupy.ndarray, grad: cupy.ndarray) -> None:
    """Sums of messages, their gradients and combinations, in CSR order and in another one."""
    feat = X.shape[1]
    for B in (A, A.tocsc()):
        E = cupy.ones((A.nnz, feat + 1), X.dtype)
        E = E[:, 1:] if feat == 33 else E[:, :feat].copy()
        for message in ("mul", "add", "relu_add", "copy_edge"):
            how = {"message": message, "reduce": "mean" if B is A else "sum"}
            ops.message_aggregate(B, X, E, **how)
            _, dE = ops.message_aggregate_backward(B, X, E, grad, **how)
            assert dE.shape == E.shape
        for op in ("add", "sub", "mul"):
            assert ops.edge_combine(B, grad, X, op).shape == E.shape


def draw(A: CSR, dtype: np.dtype[Any]) -> None:
    """Samples and products with them, before there is a plan of the rows and with one."""
    r, c = cupy.ones(A.n_rows, dtype), cupy.ones(A.n_cols, dtype)
    scales = {"row_scale": r, "col_scale": c}
    for strategy, width in product(STRATEGIES, (1, 9, 3000)):
        how: dict[str, Any] = {"strategy": strategy, "seed": 5}
        for feat in (*WIDTHS, 160):
            X = cupy.ones((A.n_cols, feat + 3), dtype)[:, 1 : feat + 1]
            X, B = X if feat == 33 else X.copy(), A.copy()
            for _ in range(2):
                ops.spmm_sampled(B, X, width, **how, mean=True, **scales)
                ops.spmm_sampled(B, X, width, **how, rescale=True)
                _ = B.chunks
            draw_products(B, X, SampleOptions(5, width, strategy, rescale=True))
        ops.sample(A, width, **how).check()
        draw_rows(A, SampleOptions(5, width, strategy))


def draw_products(A: CSR, X: cupy.ndarray, options: SampleOptions) -> None:
    """What gradients of values take."""
    scale = np.promote_types(X.dtype, np.float32)
    grad, out = cupy.ones((A.n_rows, X.shape[1]), X.dtype), cupy.empty(A.nnz, X.dtype)
    r, c = (cupy.ones(size, scale) for size in A.shape)
    options = options._replace(seed=Scalar(options.seed or 0))
    sampling_cuda.spmm_sampled_da(A, X, grad, r, c, *options, out=out)


def draw_rows(A: CSR, options: SampleOptions) -> None:
    """What is sampled, in rooms of one size and of each row's, by a seed on the device too."""
    for room, seed in product((options.width, 0), (Scalar(5), cupy.ones(1, np.int64))):
        arrays = [cupy.empty(A.n_rows * room or A.nnz, A.index_dtype) for _ in range(3)]
        sampling_cuda.sample_rows(A, *arrays, None, seed, *options[1:3], room)


def arguments_of_attention(A: CSR, dtype: np.dtype[Any]) -> Iterator[tuple[Any, ...]]:
    """Make features of sources and targets, and options: without edges, and with scores of them."""
    for (heads, feat), rich in product(HEADS, (False, True)):
        sources, targets = (cupy.ones((size, heads, feat), dtype) for size in A.shape[::-1])
        edges = cupy.ones((A.nnz, heads), dtype)
        yield sources, targets, {"edge_scores": edges if rich else None}, 0.5 * rich


def attend(A: CSR, dtype: np.dtype[Any], *, self_loops: bool = False) -> None:
    """Run GAT's attention and its gradients."""
    for sources, targets, scores, dropout in arguments_of_attention(A, dtype):
        el, er = sources[..., 0].copy(), targets[..., 0].copy()
        scores["self_loops"] = self_loops
        options: dict[str, Any] = {**scores, "dropout": dropout, "seed": 7}
        out = ops.gat(A, sources, el, er, **options)
        ops.gat_backward(A, sources, el, er, out, **options)
        if dtype == np.float32:
            out = ops.gat(A, sources, el, er, **options, precision="bf16")
            ops.gat_backward(A, sources, el, er, out, **options, precision="bf16")
        assert ops.gat_attention(A, el, er, **scores).shape == (A.nnz, el.shape[1])


def attend_pairwise(A: CSR, dtype: np.dtype[Any], *, self_loops: bool = False) -> None:
    """Run GATv2's attention, that of dot products, and their gradients."""
    for sources, targets, options, dropout in arguments_of_attention(A, dtype):
        options |= {"self_loops": self_loops, "dropout": dropout, "seed": 7}
        att = cupy.ones(sources.shape[1:], dtype)
        for parts in (1, 3) if A.nnz else (1,):  # of the columns: ``count`` cuts no empty matrix
            A = A.sorted_indices().copy()  # for which nothing is decided yet
            with patch.object(attention_column_blocks, "count", lambda *_, n=parts: n):
                out = ops.gatv2(A, sources, targets, att, **options)
                ops.gatv2_backward(A, sources, targets, att, out, **options)
                for values in (None, sources.copy()):
                    out = ops.dot_attention(A, targets, sources, values, **options)
                    ops.dot_attention_backward(A, targets, sources, values, out, **options)


def on_vertices(A: COO) -> None:
    """What takes square matrices only: weights of vertices, GCN's degrees, scores of vectors."""
    for weighted, self_loops in product((A, A.with_data(None)), (False, True)):
        for B in (weighted, weighted.tocsr()):
            normal = ops.gcn_norm(B, self_loops=self_loops)
            normal.check()
            ops.gcn_norm_backward(B, normal.data, self_loops=self_loops)
    for width in WIDTHS:
        X, own = cupy.ones((A.n_rows, width), A.dtype), cupy.ones(A.n_rows, A.dtype)
        ops.aggregate(A, X, method="gas")
        csr = A.tocsr()
        transposed = ops.transpose(csr)
        for apart, kept in ((False, False), (True, False), (True, True)):  # moved before, and back
            given: dict[str, Any] = {"transposed": transposed} if kept else {}
            with patch.object(matmul_cuda_aggregate, "goes_apart", lambda *_, a=apart, **__: a):
                ops.aggregate_backward(csr, X, X, self_weight=own, **given)
    for heads, feat in HEADS if A.n_rows else ():
        attend_by_vectors(A.tocsr(), cupy.ones((A.n_rows, heads, feat), A.dtype))


def attend_by_vectors(A: CSR, H: cupy.ndarray) -> None:
    """Run a layer of graph attention, whose scores are made of its features, and its gradient."""
    source, target = (cupy.ones(H.shape[1:], H.dtype) for _ in range(2))
    T, perm = transposed(A)
    for bias in (None, source):
        args = H, source, target, bias, None, None, None, 0.2, 0.0, False
        saved = gat_of_vectors_with_statistics(A, *args)
        gat_of_vectors_backward(A, structure_of(T), perm, H, *saved, False, *args)


def multiply_tiles(A: CSR, dtype: np.dtype[Any], ways: list[str], part: int = 2) -> None:
    """Products by windows of every height, with all entries on tensor cores, or some."""
    allowed = {"precision": "tf32"} if dtype == np.float32 else {}
    r, c = cupy.ones(A.n_rows, dtype), cupy.ones(A.n_cols, dtype)
    for way, height in product(ways, HEIGHTS):
        allowed["costs"] = replace(costs(way, height), part=part)
        B = A.tosgt((height, 16))
        for width in WIDTHS:
            X = cupy.ones((A.n_cols, width), dtype)
            ops.spmm(B, X, **allowed)
            ops.spmm(B, X, reduce="mean", row_scale=r, col_scale=c, **allowed)
            ops.sddmm(B, cupy.ones((A.n_rows, width), dtype), X, **allowed)
        for shape in ((300,), (3, 5), (2, 16)):  # the first takes several launches
            left, right = (cupy.ones((size, *shape), dtype) for size in A.shape)
            ops.sddmm(B, left, right, **allowed)


def multiply_large_tiles(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> None:
    """Windows that are well filled, and of more slabs than are on the chip at a time."""
    filled = blocks(dtype, index_dtype)
    multiply_tiles(filled.to("cuda"), dtype, ["all"])
    long = filled[:64, np.arange(700) % 53]
    for A in (long.with_data(None), long):
        multiply_tiles(A.to("cuda"), dtype, ["all"], part=1000)


if __name__ == "__main__":
    main()
