"""Sequences of public calls on one matrix, against float64 oracles, in poisoned memory.

The matrix goes through conversions, slices, samples and other values (``matrix_machine``); between
these every operation, and every function of torch with its gradients, is called on it as
``tests/laws`` calls them, with values that repeat, zeros and features in odd strides.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from devices import LAYOUTS, WAYS, enqueued, host, laid_out
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from laws.calls import CALLS
from laws.cases import CASES
from laws.test_laws_of_autograd import check_step
from matrix_machine import Matrix, in_own_order

from sparsefmt import CBSR, Graph, ops
from sparsefmt.ops.matmul.oracle import precision_of
from sparsefmt.ops.sampling.oracle import sample_oracle
from sparsefmt.testing import assert_close, stored_entries, value_dtypes
from sparsefmt.testing.space import Values, seeded_values

#: Larger values overflow float16 in a product with scales.
LARGEST = 100.0
STRATEGIES = st.sampled_from(["bucket", "fastrand", "random"])


@dataclass(frozen=True)
class Style:
    """How a call is made: its sizes, its numbers and where they lie."""

    seed: int
    width: int
    heads: int
    k: int
    dtype: np.dtype
    layout: str
    way: str
    out: bool

    def numbers(self, *shape, top=2.0, salt=0):
        """Make an array: of ones for seed 0, else some of its values are zeros."""
        seed = self.seed and self.seed + salt
        made = seeded_values(seed, prod(shape), self.dtype, Values(max_magnitude=top), True)
        return made.reshape(shape)


STYLE = {
    "seed": st.integers(0, 2**20),
    "width": st.sampled_from([1, 0, 3, 8, 33, 72]),
    "heads": st.sampled_from([1, 2, 3]),
    "k": st.integers(1, 40),
    "dtype": value_dtypes(),
    "layout": st.sampled_from(LAYOUTS),
    "way": st.sampled_from(WAYS),
    "out": st.booleans(),
}
STYLES = st.builds(Style, **STYLE)
FLOATS = st.sampled_from([np.dtype(np.float64), np.dtype(np.float32)])
OF_TORCH = st.builds(Style, **(STYLE | {"dtype": FLOATS}))


def several(cases):
    """Draw some of the cases: there are more of them than ways to change a matrix."""
    return st.lists(st.sampled_from(cases), min_size=1, max_size=6)


def with_drawn_options(case, style, width):
    """Replace the seed and the width of a sample, which cases fix."""
    drawn = {"seed": style.seed, "width": width}
    options = {name: drawn.get(name, value) for name, value in case.options.items()}
    return replace(case, options=options)


class Everything(Matrix):
    """Operations and gradients of ``self.A`` between changes of it."""

    def of_values(self, style):
        """Return the style in the dtype of the matrix."""
        return style if self.A.data is None else replace(style, dtype=self.A.dtype)

    def _moderate(self):
        return all(abs(value) <= LARGEST / 4 for *_, value in self.entries)

    @precondition(_moderate)
    @rule(style=STYLES)
    def scale(self, style):
        style = self.of_values(style)
        r, c = (style.numbers(size, salt=size) for size in self.shape)
        before = in_own_order(self.A.to("cpu"))
        self.A = ops.scale(self.A, *(laid_out(one, style.layout, self.device) for one in (r, c)))
        after, self.weighted = in_own_order(self.A.to("cpu")), True
        assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
        exact = np.array([float(r[i]) * a * float(c[j]) for i, j, a in before])
        eps, least = precision_of(self.A.dtype)
        bound = 4 * (eps * np.abs(exact) + least)
        assert_close(np.array([entry[2] for entry in after]), exact, bound=bound)
        self.entries = stored_entries(self.A.to("cpu"))

    @rule(width=st.integers(1, 9), strategy=STRATEGIES, seed=st.integers(-5, 2**40))
    def sample(self, width, strategy, seed):
        options = {"strategy": strategy, "seed": seed}
        exact, _ = sample_oracle(self.A.to("cpu").tocsr(), width, **options)
        self.A = ops.sample(self.A, width, **options)
        assert self.A.to("cpu") == exact
        self.entries = stored_entries(exact)

    @rule(cases=several([c for c in CASES if c.oracle]), style=STYLES, width=st.integers(1, 9))
    def operations(self, cases, style, width):
        style = self.of_values(style)
        for case in cases:
            if not case.square or self.shape[0] == self.shape[1]:
                self.operate(with_drawn_options(case, style, width), style)

    def operate(self, case, style):
        """Call an operation, with a poisoned ``out`` or without."""
        if "self_weight" in case.shapes and not self.weighted:
            return  # of a matrix of ones it is no entry
        A = self.A.to("cpu")
        args = self.arguments(case, A, style)
        there = {name: self.placed(value, style.layout) for name, value in args.items()}
        expected, options = case.expected(A, args), {}
        if style.out and "out" in case.parameters:
            blank = np.full(expected[0][0].shape, np.nan).astype(style.dtype)
            options["out"] = laid_out(blank, "plain", self.device)
        way = style.way
        if case.converts or A.format != "csr":  # at each call, which waits for the GPU
            way = "stream" if way == "capture" else way
        if "transposed" in case.parameters and way != "plain":  # to make it waits too
            options["transposed"] = ops.transpose(self.A)
        results = enqueued(lambda: case.run(self.A, there, **options), way, self.device)
        assert "out" not in options or results[0] is options["out"]
        for result, (exact, bound) in zip(results, expected, strict=True):
            assert result.dtype in (style.dtype, np.float32 if case.widens else style.dtype)
            assert_close(host(result), exact, bound=2 * bound)

    def arguments(self, case, A, style):
        """Make arguments of a case, of the style's heads, width and entries kept of a row."""
        sizes = {"rows": A.n_rows, "cols": A.n_cols, "entries": A.nnz, "feat": style.width}
        sizes["feat"] = max(style.width, 1 if case.balanced or "att" in case.shapes else 0)
        top = 1.0 if {"att", "queries"} & {*case.shapes} else 2.0
        args = {}
        for salt, (name, shape) in enumerate(case.shapes.items()):
            shape = [sizes.get(size, style.heads) for size in shape]
            args[name] = style.numbers(*shape, top=top, salt=salt)
        if case.balanced:
            features = args[case.balanced]
            args[case.balanced] = ops.maxk(features, min(style.k, features.shape[1]))
        return args

    def placed(self, value, layout):
        if isinstance(value, CBSR):
            return value.to(self.device)
        return laid_out(value, layout, self.device)

    @rule(calls=several(CALLS), style=OF_TORCH)
    def gradients(self, calls, style):
        graph = Graph(self.A.with_data(None))
        for call in calls:
            if not call.square or self.shape[0] == self.shape[1]:
                self.differentiate(call, graph, style)

    def differentiate(self, call, graph, style):
        """Call a function of torch, and differentiate its result."""
        feat = max(style.width, call.options.get("k", 0))
        dtype = getattr(torch, style.dtype.name)
        args = call.arguments(graph, dtype=dtype, feat=feat, seed=style.seed, grad=False)
        for name, value in args.items():
            laid = value.numpy()
            if value.is_floating_point():
                laid = laid_out(laid, style.layout, self.device)
            known = laid.copy() if min(laid.strides, default=0) < 0 else laid
            args[name] = torch.as_tensor(known, device=self.device)
            args[name].requires_grad_(name not in call.constants)
        loops = graph.n_rows if call.options.get("self_loops") else 0
        check_step(call, graph, args, terms=graph.nnz + loops + feat)
