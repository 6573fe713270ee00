"""Sequences of public calls on one matrix, against float64 oracles, in poisoned memory.

The matrix goes through conversions, slices, samples and other values (``matrix_machine``); between
these its products, attentions and gradients are taken, of features in odd strides.
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from devices import LAYOUTS, WAYS, enqueued, host, laid_out
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from matrix_machine import Matrix, in_own_order

from sparsefmt import ops
from sparsefmt.ops.attention import oracle as oracle_attention
from sparsefmt.ops.cbsr import oracle as oracle_cbsr
from sparsefmt.ops.edges import oracle as oracle_edges
from sparsefmt.ops.matmul import oracle as oracle_matmul
from sparsefmt.ops.sampling import oracle as oracle_sampling
from sparsefmt.testing import (
    assert_close,
    error_bound,
    sddmm_bound,
    sddmm_oracle,
    spmm_oracle,
    stored_entries,
    value_dtypes,
)
from sparsefmt.testing.space import Values, seeded_values

#: Larger values overflow float16 in a product with scales.
LARGEST = 100.0
FLAGS = st.booleans()
STRATEGIES = st.sampled_from(["bucket", "fastrand", "random"])


@dataclass(frozen=True)
class How:
    """How a call is made: its sizes, its numbers and where they lie."""

    seed: int
    width: int
    heads: int
    dtype: np.dtype
    layout: str
    way: str
    out: bool
    device: str = "cpu"

    def numbers(self, *shape, dtype=None, top=2.0, salt=0):
        """Give an array on the device, and the same on the CPU."""
        dtype, seed = dtype or self.dtype, self.seed and self.seed + salt
        made = seeded_values(seed, prod(shape), dtype, Values(max_magnitude=top), True)
        made = made.reshape(shape)
        return laid_out(made, self.layout, self.device), made

    def tensors(self, *shapes):
        """Give leaves that require gradients, in strides that torch knows, and float64 copies."""
        pairs = [self.numbers(*shape, salt=place) for place, shape in enumerate(shapes)]
        found = [torch.as_tensor(a if known(a) else a.copy(), device=self.device) for a, _ in pairs]
        return [one.requires_grad_() for one in found], [made for _, made in pairs]


def known(array):
    return min(array.strides, default=0) >= 0


def hows(**fixed):
    """Draw how a call is made; the simplest is plain, of ones."""
    parts = {
        "seed": st.integers(0, 2**20),
        "width": st.sampled_from([1, 0, 3, 8, 33, 72]),
        "heads": st.sampled_from([1, 2, 3]),
        "dtype": value_dtypes(),
        "layout": st.sampled_from(LAYOUTS),
        "way": st.sampled_from(WAYS),
        "out": FLAGS,
    }
    return st.builds(How, **(parts | fixed))


HOW = hows()
TORCH = hows(dtype=st.sampled_from([np.dtype(np.float64), np.dtype(np.float32)]))


class Calls(Matrix):
    """Operations of ``self.A`` between changes of it."""

    # What the calls share

    def placed(self, how):
        """Fit a way of calling to this matrix: its dtype, and where it is."""
        dtype = how.dtype if self.A.data is None else self.A.dtype
        converted = self.A.format != "csr"  # at each call, which waits for the GPU
        way = "stream" if converted and how.way == "capture" else how.way
        return How(**(vars(how) | {"dtype": dtype, "device": self.device, "way": way}))

    @property
    def B(self):
        """The matrix on the CPU, with its entries in the order of results."""
        A = self.A.to("cpu")
        return A.tocsr() if A.format == "sgt" else A

    def by_rows(self, edges):
        """The CSR on the CPU, whose order numbers what dropout draws, with values of its entries.

        And the place of each in the order of results.
        """
        B, perm = self.A.to("cpu").tocsr_with_perm()
        return B, edges[perm], perm

    def result(self, how, call, shape):
        """Call with a poisoned ``out`` or without, and look at what came back."""
        out = None
        if how.out:
            blank = np.full(shape, np.nan).astype(how.dtype)
            out = laid_out(blank, "plain", self.device)
        found = enqueued(lambda: call(out=out), how.way, self.device)
        assert out is None or found is out
        assert (found.shape, found.dtype) == (shape, how.dtype)
        return host(found)

    def scales(self, how, scaled):
        if not scaled:
            return {}, {}
        pairs = {
            "row_scale": how.numbers(self.A.n_rows, salt=11),
            "col_scale": how.numbers(self.A.n_cols, salt=12),
        }
        return ({name: pair[place] for name, pair in pairs.items()} for place in (0, 1))

    # Changes

    def _moderate(self):
        return all(abs(value) <= LARGEST / 4 for *_, value in self.entries)

    @precondition(_moderate)
    @rule(how=HOW)
    def scale(self, how):
        how = self.placed(how)
        (r, r_), (c, c_) = (how.numbers(size, salt=size) for size in self.shape)
        before, dtype = in_own_order(self.A.to("cpu")), how.dtype
        self.A = ops.scale(self.A, r, c)
        after, self.weighted = in_own_order(self.A.to("cpu")), True
        assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
        exact = np.array([float(r_[i]) * a * float(c_[j]) for i, j, a in before])
        eps, least = oracle_matmul.precision_of(self.A.dtype if self.A.dtype else dtype)
        bound = 4 * (eps * np.abs(exact) + least)
        assert_close(np.array([entry[2] for entry in after]), exact, bound=bound)
        self.entries = stored_entries(self.A.to("cpu"))

    @rule(width=st.integers(1, 9), strategy=STRATEGIES, seed=st.integers(-5, 2**40))
    def sample(self, width, strategy, seed):
        exact, _ = oracle_sampling.sample_oracle(
            self.A.to("cpu").tocsr(), width, strategy=strategy, seed=seed
        )
        self.A = ops.sample(self.A, width, strategy=strategy, seed=seed)
        assert self.A.to("cpu") == exact
        self.entries = stored_entries(exact)

    # Products

    @rule(how=HOW, reduce=st.sampled_from(["sum", "mean", "max", "min"]), scaled=FLAGS)
    def spmm(self, how, reduce, scaled):
        how = self.placed(how)
        (X, x), shape = how.numbers(self.A.n_cols, how.width), (self.A.n_rows, how.width)
        given, exact = self.scales(how, scaled)
        found = self.result(
            how, lambda out: ops.spmm(self.A, X, reduce=reduce, **given, out=out), shape
        )
        bound = error_bound(self.B, x, reduce=reduce, **exact, factor=4)
        assert_close(found, spmm_oracle(self.B, x, reduce=reduce, **exact), bound=bound)

    @rule(how=HOW, method=st.sampled_from(["auto", "gas", "gar"]))
    def aggregate(self, how, method):
        how = self.placed(how)
        X, x = how.numbers(self.A.n_cols, how.width)
        found = host(ops.aggregate(self.A, X, method=method))
        assert_close(found, spmm_oracle(self.B, x), bound=error_bound(self.B, x))

    @rule(how=HOW)
    def aggregate_backward(self, how):
        how, B = self.placed(how), self.B
        X, x = how.numbers(self.A.n_cols, how.width)
        G, g = how.numbers(self.A.n_rows, how.width, salt=1)
        T = None if how.way == "plain" else ops.transpose(self.A)  # to make it waits for the GPU
        call = partial(ops.aggregate_backward, self.A, X, G, transposed=T)
        dX, dA = enqueued(call, how.way, self.device)
        assert_close(host(dX), spmm_oracle(B.T, g), bound=error_bound(B.T, g, factor=4))
        assert_close(host(dA), sddmm_oracle(B, g, x), bound=sddmm_bound(B, g, x, factor=4))

    @rule(how=HOW, reduce=st.sampled_from(["max", "min"]))
    def extrema(self, how, reduce):
        how, B = self.placed(how), self.B
        X, x = how.numbers(self.A.n_cols, how.width)
        Y, arg = ops.spmm_arg(self.A, X, reduce=reduce)
        bound = error_bound(B, x, reduce=reduce, factor=4)
        assert_close(host(Y), spmm_oracle(B, x, reduce=reduce), bound=bound)
        G, g = how.numbers(self.A.n_rows, how.width, salt=1)
        dX, _ = ops.spmm_arg_backward(self.A, X, arg, G)[:2]
        entries, arg, exact = stored_entries(B), host(arg), np.zeros(x.shape)
        for (row, f), e in np.ndenumerate(arg):
            assert (e < 0) == all(entry[0] != row for entry in entries)
            if e >= 0:
                assert entries[e][0] == row
                exact[entries[e][1], f] += entries[e][2] * float(g[row, f])
        assert_close(host(dX), exact, bound=error_bound(B.T, g, factor=4))

    @rule(how=HOW, width=st.integers(1, 9), strategy=STRATEGIES, mean=FLAGS, rescale=FLAGS)
    def spmm_sampled(self, how, width, strategy, mean, rescale):
        how, csr = self.placed(how), self.A.to("cpu").tocsr()
        options = {"strategy": strategy, "seed": how.seed, "mean": mean}
        options["rescale"] = rescale and not mean
        (X, x), shape = how.numbers(self.A.n_cols, how.width), (self.A.n_rows, how.width)
        found = self.result(
            how, lambda out: ops.spmm_sampled(self.A, X, width, **options, out=out), shape
        )
        exact = oracle_sampling.spmm_sampled_oracle(csr, x, width, **options)
        bound = oracle_sampling.spmm_sampled_bound(csr, x, width, **options)
        assert_close(found, exact, bound=2 * bound)

    @rule(how=HOW, k=st.integers(1, 40), reduce=st.sampled_from(["sum", "mean"]), scaled=FLAGS)
    def maxk(self, how, k, reduce, scaled):
        how, B = self.placed(how), self.B
        width = max(how.width, 1)
        X, x = how.numbers(self.A.n_cols, width)
        S = ops.maxk(X, min(k, width))
        S.check()
        kept = np.sort(-x.astype(np.float64), axis=1, kind="stable")[:, : S.k]
        values = -np.sort(-host(S.data).astype(np.float64), axis=1)
        assert np.array_equal(values, -kept)
        s, shape = S.to("cpu"), (self.A.n_rows, width)
        given, scale = self.scales(how, scaled)
        options, exact = {"reduce": reduce, **given}, {"reduce": reduce, **scale}
        found = self.result(how, lambda out: ops.spgemm(self.A, S, **options, out=out), shape)
        bound = oracle_cbsr.spgemm_bound(B, s, **exact, factor=4)
        assert_close(found, oracle_cbsr.spgemm_oracle(B, s, **exact), bound=bound)
        G, g = how.numbers(*shape, salt=1)
        dS = ops.sspmm(self.A, G, S, **options, deterministic=how.out)
        bound = 2 * oracle_cbsr.sspmm_bound(B, g, s, **exact)
        assert_close(host(dS.data), oracle_cbsr.sspmm_oracle(B, g, s, **exact), bound=bound)

    # Entries

    @rule(how=HOW, headed=FLAGS)
    def sddmm(self, how, headed):
        how, heads = self.placed(how), (how.heads,) * headed
        X, x = how.numbers(self.A.n_rows, *heads, how.width)
        Y, y = how.numbers(self.A.n_cols, *heads, how.width, salt=1)
        shape = (self.A.nnz, *heads)
        found = self.result(how, lambda out: ops.sddmm(self.A, X, Y, out=out), shape)
        bound = sddmm_bound(self.B, x, y, factor=4)
        assert_close(found, sddmm_oracle(self.B, x, y), bound=bound)

    @rule(how=HOW, headed=FLAGS)
    def edge_softmax(self, how, headed):
        how, B, shape = self.placed(how), self.B, (self.A.nnz, *(how.heads,) * headed)
        S, s = how.numbers(*shape)
        found = self.result(how, lambda out: ops.edge_softmax(self.A, S, out=out), shape)
        bound = oracle_edges.edge_softmax_bound(B, s, factor=4)
        assert_close(found, oracle_edges.edge_softmax_oracle(B, s), bound=bound)
        (P, p), (G, g) = how.numbers(*shape, salt=1), how.numbers(*shape, salt=2)
        found = self.result(
            how, lambda out: ops.edge_softmax_backward(self.A, P, G, out=out), shape
        )
        bound = oracle_edges.edge_softmax_backward_bound(B, p, g, factor=4)
        assert_close(found, oracle_edges.edge_softmax_backward_oracle(B, p, g), bound=bound)

    # Attention

    def options_of_attention(self, how, dropout, loops):
        loops = loops and self.A.n_rows == self.A.n_cols
        return {"dropout": dropout, "seed": how.seed, "self_loops": loops}

    @rule(how=HOW, dropout=st.sampled_from([0.0, 0.5]), loops=FLAGS, edges=FLAGS)
    def gat(self, how, dropout, loops, edges):
        how = self.placed(how)
        rows, cols, heads = *self.shape, how.heads
        shapes = (cols, heads, how.width), (cols, heads), (rows, heads), (rows, heads, how.width)
        pairs = [how.numbers(*shape, salt=place) for place, shape in enumerate(shapes)]
        (H, el, er, G), exact = zip(*pairs, strict=True)
        E, e = how.numbers(self.A.nnz, heads, salt=9)
        B, e, perm = self.by_rows(e)
        options = self.options_of_attention(how, dropout, loops)
        given = {"edge_scores": E if edges else None, **options}
        options["edge_scores"] = e if edges else None
        found = self.result(
            how, lambda out: ops.gat(self.A, H, el, er, **given, out=out), shapes[3]
        )
        bound = oracle_attention.gat_bound(B, *exact[:3], factor=4, **options)
        assert_close(found, oracle_attention.gat_oracle(B, *exact[:3], **options), bound=bound)
        results = ops.gat_backward(self.A, H, el, er, G, **given)
        self._compare(
            results,
            oracle_attention.gat_backward_oracle(B, *exact, **options),
            oracle_attention.gat_backward_bound(B, *exact, factor=4, **options),
            perm,
        )

    @rule(how=HOW, dropout=st.sampled_from([0.0, 0.5]), loops=FLAGS, edges=FLAGS, of_sums=FLAGS)
    def pairwise(self, how, dropout, loops, edges, of_sums):
        how = self.placed(how)
        (rows, cols), one = self.shape, (how.heads, max(how.width, 1))
        shapes = (rows, *one), (cols, *one), one if of_sums else (cols, *one), (rows, *one)
        pairs = [how.numbers(*shape, top=1.0, salt=at) for at, shape in enumerate(shapes)]
        (q, k, third, G), (q_, k_, third_, g) = zip(*pairs, strict=True)
        E, e = how.numbers(self.A.nnz, how.heads, salt=9)
        B, e, perm = self.by_rows(e)
        options = self.options_of_attention(how, dropout, loops)
        given = {"edge_scores": E if edges else None, **options}
        options["edge_scores"] = e if edges else None
        if of_sums:
            call, back, arrays, exact = ops.gatv2, ops.gatv2_backward, (k, q, third), (q_, k_, None)
            exact = *exact, third_
        else:
            call, back = ops.dot_attention, ops.dot_attention_backward
            arrays, exact = (q, k, third), (q_, k_, third_, None)
        oracle = {} if of_sums else {"scale": 1 / one[1] ** 0.5}
        found = self.result(how, lambda out: call(self.A, *arrays, **given, out=out), shapes[3])
        options |= oracle
        bound = oracle_attention.attend_bound(B, *exact, factor=4, **options)
        assert_close(found, oracle_attention.attend_oracle(B, *exact, **options), bound=bound)
        dq, dk, dv, datt, de = oracle_attention.attend_backward_oracle(B, *exact, g, **options)
        bounds = oracle_attention.attend_backward_bound(B, *exact, g, factor=4, **options)
        order = (1, 0, 3, 4) if of_sums else (0, 1, 2, 4)
        all_ = dq, dk, dv, datt, de
        results = back(self.A, *arrays, G, **given)
        self._compare(results, [all_[at] for at in order], [bounds[at] for at in order], perm)

    def _compare(self, results, exact, bounds, perm):
        """Compare gradients; the fourth is of entries, those of the oracle are by rows."""
        for place, (found, *expected) in enumerate(zip(results, exact, bounds, strict=False)):
            if found is not None:
                found = host(found)[perm] if place == 3 else host(found)
                assert_close(found, expected[0], bound=expected[1])

    @precondition(lambda self: self.shape[0] == self.shape[1])
    @rule(loops=FLAGS)
    def gcn_norm(self, loops):
        values = np.abs(np.array([a for *_, a in in_own_order(self.A.to("cpu"))]))
        if (values.size and 0 < values.min() < 2**-6) or values.max(initial=0) > LARGEST:
            return  # sums of what lies far apart have no bound of their own
        A = self.A if self.A.data is None else self.A.with_data(abs(self.A.data))
        found = ops.gcn_norm(A, self_loops=loops)
        found.check()
        n, entries = self.shape[0], stored_entries(A.to("cpu"))
        missing = set(range(n)) - {i for i, j, _ in entries if i == j} if loops else set()
        entries += [(i, i, 1.0) for i in sorted(missing)]
        entries += [(i, i, 0.0) for i in range(n) if loops and i not in missing]
        degree = np.bincount([i for i, *_ in entries], [a for *_, a in entries], minlength=n)
        s = np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0)
        exact = sorted((i, j, s[i] * a * s[j]) for i, j, a in entries)
        result = sorted(stored_entries(found.to("cpu")))
        assert [entry[:2] for entry in result] == [entry[:2] for entry in exact]
        exact, result = (np.array([a for *_, a in each]) for each in (exact, result))
        eps, least = oracle_matmul.precision_of(found.dtype)
        assert_close(result, exact, bound=4 * (len(entries) + 4) * (eps * exact + least))
