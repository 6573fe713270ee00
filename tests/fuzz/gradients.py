"""Gradients of torch's functions at any point of a sequence of calls, against the oracles."""

import numpy as np
import torch
from calls import FLAGS, STRATEGIES, TORCH, Calls
from devices import host
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sparsefmt import Graph, autograd
from sparsefmt.ops.attention import oracle as oracle_attention
from sparsefmt.ops.edges import oracle as oracle_edges
from sparsefmt.ops.sampling import oracle as oracle_sampling
from sparsefmt.testing import (
    assert_close,
    error_bound,
    sddmm_bound,
    sddmm_oracle,
    spmm_oracle,
)


class Everything(Calls):
    """Operations and gradients of ``self.A`` between changes of it."""

    def structure(self, how):
        """Give the graph without its values, its like on the CPU, and how to call on it."""
        how = type(how)(**(vars(how) | {"device": self.device}))
        B = self.B.with_data(None)
        return Graph(self.A.with_data(None)), B, how

    def differentiated(self, how, result, leaves):
        """Give the gradients of the leaves for a drawn one of the result, and that one."""
        G, g = how.numbers(*result.shape, salt=31)
        G = torch.as_tensor(G.copy(), device=self.device)
        return [host(one) for one in torch.autograd.grad(result, leaves, G)], g

    @rule(how=TORCH, scaled=FLAGS)
    def spmm_gradient(self, how, scaled):
        graph, B, how = self.structure(how)
        rows, cols = self.shape
        shapes = [(cols, how.width), (B.nnz,), *([(rows,), (cols,)] if scaled else [])]
        leaves, exact = how.tensors(*shapes)
        x, w = exact[:2]
        r, c = exact[2:] if scaled else (np.ones(rows), np.ones(cols))
        scales = dict(zip(("row_scale", "col_scale"), leaves[2:], strict=False))
        y = autograd.spmm(graph, *leaves[:2], **scales)
        W, options = B.with_data(w), {"row_scale": r, "col_scale": c}
        assert_close(host(y), spmm_oracle(W, x, **options), bound=error_bound(W, x, **options))
        found, g = self.differentiated(how, y, leaves)
        back = {"row_scale": c, "col_scale": r}
        bound = error_bound(W.T, g, factor=4, **back)
        assert_close(found[0], spmm_oracle(W.T, g, **back), bound=bound)
        left, right = r[:, None] * g, c[:, None] * x
        narrow = left.astype(how.dtype), right.astype(how.dtype)
        bound = 2 * sddmm_bound(B, *narrow, factor=8)
        assert_close(found[1], sddmm_oracle(B, left, right), bound=bound)
        if scaled:
            eps, steps = float(np.finfo(how.dtype).eps), 8 * (how.width + B.nnz + 4)
            inner = spmm_oracle(W, x, col_scale=c), spmm_oracle(W.T, g, col_scale=r)
            size = (
                spmm_oracle(B.with_data(abs(w)), abs(x), col_scale=abs(c)),
                spmm_oracle(B.with_data(abs(w)).T, abs(g), col_scale=abs(r)),
            )
            for one, a, sums, sizes in zip(found[2:], (g, x), inner, size, strict=True):
                bound = steps * eps * (abs(a) * sizes).sum(1)
                assert_close(one, (a * sums).sum(1), bound=bound)

    @rule(how=TORCH)
    def sddmm_gradient(self, how):
        graph, B, how = self.structure(how)
        rows, cols = self.shape
        leaves, (x, y) = how.tensors((rows, how.width), (cols, how.width))
        s = autograd.sddmm(graph, *leaves)
        assert_close(host(s), sddmm_oracle(B, x, y), bound=sddmm_bound(B, x, y))
        (dx, dy), g = self.differentiated(how, s, leaves)
        W = B.with_data(g)
        assert_close(dx, spmm_oracle(W, y), bound=error_bound(W, y))
        assert_close(dy, spmm_oracle(W.T, x), bound=error_bound(W.T, x))

    @rule(how=TORCH)
    def softmax_gradient(self, how):
        graph, B, how = self.structure(how)
        leaves, (s,) = how.tensors((B.nnz, how.heads))
        p = autograd.edge_softmax(graph, *leaves)
        exact = oracle_edges.edge_softmax_oracle(B, s)
        assert_close(host(p), exact, bound=oracle_edges.edge_softmax_bound(B, s))
        (ds,), g = self.differentiated(how, p, leaves)
        bound = oracle_edges.edge_softmax_backward_bound(B, exact, g, factor=64)
        assert_close(ds, oracle_edges.edge_softmax_backward_oracle(B, exact, g), bound=bound)

    @rule(how=TORCH, width=st.integers(1, 9), strategy=STRATEGIES)
    def sampled_gradient(self, how, width, strategy):
        graph, B, how = self.structure(how)
        leaves, (x,) = how.tensors((self.shape[1], how.width))
        options = {"strategy": strategy, "seed": how.seed}
        y = autograd.sampled_aggregate(graph, *leaves, width, **options)
        S, _ = oracle_sampling.sample_oracle(B.tocsr(), width, **options)
        assert_close(host(y), spmm_oracle(S, x), bound=error_bound(S, x))
        (dx,), g = self.differentiated(how, y, leaves)
        assert_close(dx, spmm_oracle(S.T, g), bound=error_bound(S.T, g, factor=4))

    @rule(how=TORCH, k=st.integers(1, 40))
    def maxk_gradient(self, how, k):
        graph, B, how = self.structure(how)
        width = max(how.width, 1)
        leaves, (x, w) = how.tensors((self.shape[1], width), (B.nnz,))
        y = autograd.maxk_aggregate(graph, leaves[0], min(k, width), leaves[1])
        kept = np.zeros(x.shape, bool)
        order = np.argsort(-x.astype(np.float64), axis=1, kind="stable")[:, : min(k, width)]
        np.put_along_axis(kept, order, True, axis=1)
        W, x = B.with_data(w), np.where(kept, x, 0).astype(how.dtype)
        assert_close(host(y), spmm_oracle(W, x), bound=error_bound(W, x))
        (dx, dw), g = self.differentiated(how, y, leaves)
        exact = np.where(kept, spmm_oracle(W.T, g), 0)
        assert_close(dx, exact, bound=error_bound(W.T, g, factor=4))
        assert_close(dw, sddmm_oracle(B, g, x), bound=sddmm_bound(B, g, x, factor=4))

    @rule(how=TORCH, dropout=st.sampled_from([0.0, 0.5]), loops=FLAGS)
    def gat_gradient(self, how, dropout, loops):
        graph, B, how = self.structure(how)
        (rows, cols), heads = self.shape, how.heads
        shapes = (cols, heads, how.width), (cols, heads), (rows, heads), (B.nnz, heads)
        leaves, (h, el, er, e) = how.tensors(*shapes)
        B, e, perm = self.by_rows(e)
        options = self.options_of_attention(how, dropout, loops)
        y = autograd.gat_aggregate(graph, *leaves, **options)
        options["edge_scores"] = e
        bound = oracle_attention.gat_bound(B, h, el, er, **options)
        assert_close(host(y), oracle_attention.gat_oracle(B, h, el, er, **options), bound=bound)
        found, g = self.differentiated(how, y, leaves)
        exact = oracle_attention.gat_backward_oracle(B, h, el, er, g, **options)
        bounds = oracle_attention.gat_backward_bound(B, h, el, er, g, factor=4, **options)
        self._compare(found, exact, bounds, perm)

    @rule(how=TORCH, dropout=st.sampled_from([0.0, 0.5]), loops=FLAGS)
    def dot_gradient(self, how, dropout, loops):
        graph, B, how = self.structure(how)
        (rows, cols), one = self.shape, (how.heads, max(how.width, 1))
        leaves, (q, k, v, e) = how.tensors(
            (rows, *one), (cols, *one), (cols, *one), (B.nnz, how.heads)
        )
        B, e, perm = self.by_rows(e)
        options = self.options_of_attention(how, dropout, loops) | {"scale": 0.25}
        y = autograd.dot_aggregate(graph, *leaves, **options)
        options["edge_scores"] = e
        args = B, q, k, v, None
        exact = oracle_attention.attend_oracle(*args, **options)
        assert_close(host(y), exact, bound=oracle_attention.attend_bound(*args, **options))
        found, g = self.differentiated(how, y, leaves)
        exact = oracle_attention.attend_backward_oracle(*args, g, **options)
        bounds = oracle_attention.attend_backward_bound(*args, g, factor=4, **options)
        keep = (0, 1, 2, 4)
        self._compare(found, [exact[at] for at in keep], [bounds[at] for at in keep], perm)
