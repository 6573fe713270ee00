"""One case or more for each row of the table: a public function, its arguments, and its oracle."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from op_cases import KINDS, ROW_LENGTHS, features, long_rows, matrix, rows_of

from sparsefmt import COO, ops
from sparsefmt.formats.base import Format
from sparsefmt.ops.attention import oracle as attention
from sparsefmt.ops.cbsr import oracle as cbsr
from sparsefmt.ops.edges import oracle as edges
from sparsefmt.ops.matmul.oracle import by_heads, error_bound, precision_of, spmm_oracle
from sparsefmt.ops.messages import oracle as messages
from sparsefmt.ops.sampling import oracle as sampling

#: Rows that torch alone calls, whose laws are those of torch.
TORCH_ALONE = {
    *("spmm_arg", "cbsr_to_dense", "dense_to_cbsr", "sspmm", "spmm_sampled_da", "spmm_sampled_dx"),
    "gat_with_statistics",
    *("gat_of_vectors", "gat_of_vectors_with_statistics", "gat_of_vectors_backward"),
    *("attend", "attend_with_statistics", "attend_backward"),
}
#: Rows that add up by atomics on a GPU: tests/gcn compares them with complex steps.
NOT_REPEATED = {"gcn_norm_backward"}
#: Of a row with features to keep.
K = 3
#: Cases of a function with other options: graphs, rows and memory are tried with the others.
VARIANTS = {
    *("spmm mean", "spmm min", "spmm mean scaled", "spmm max scaled", "spmm of csc", "spmm of sgt"),
    *("aggregate auto", "aggregate gar", "spgemm mean", "sspmm deterministic", "sddmm of heads"),
    *("edge_softmax of 1 axes", "edge_softmax_backward of 1 axes", "message_aggregate add"),
    *("message_aggregate_backward add", "edge_combine add", "edge_combine sub"),
}


@dataclass(frozen=True)
class Case:
    """A call; shapes are of ``rows, cols, entries, feat`` and numbers, as in ``Arg``."""

    name: str
    function: Callable[..., Any]
    shapes: dict[str, tuple[Any, ...]]  #: by the names of parameters, in their order
    #: ``(results, bounds)`` in float64 of a CSR and the same arguments; None: a room has it.
    oracle: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()  #: of the table that it runs; none: that of the name
    format: str = "csr"
    weighted: bool = False  #: whether the matrix stores values
    square: bool = False
    balanced: str = ""  #: the argument that is a CBSR
    entries: tuple[int, ...] = ()  #: places of the results with a row for each entry
    linear: tuple[str, ...] = ()  #: arguments, behind which there are only constants
    reads_all: bool = False  #: whether it reads vertices without entries too
    numbered: bool = False  #: whether a mask or sample depends on the numbers of entries
    widens: bool = False  #: whether results of two bytes are float32
    atomics: bool = False  #: whether it adds up by them on a GPU, in another order each time
    converts: bool = False  #: whether each call converts the matrix, whose sizes the host reads

    def __str__(self):
        return self.name

    def with_heads(self, heads):
        """Return the case of so many heads, ``(2,)``, instead of 4, or of none, ``()``."""
        shapes = {
            name: tuple(size for one in shape for size in (heads if one == 4 else (one,)))
            for name, shape in self.shapes.items()
        }
        return replace(self, shapes=shapes)

    @property
    def is_headed(self):
        """Return True if it has 4 heads, which ``with_heads`` changes."""
        return any(4 in shape for shape in self.shapes.values())

    @property
    def is_mixed(self):
        """Return True if it takes a matrix and arguments, which may be on two devices."""
        return bool(self.shapes) and self.function is not ops.maxk

    @cached_property
    def parameters(self):
        return inspect.signature(self.function).parameters

    def matrix(self, dtype=np.float32, kind="power law", *, index_dtype=np.int32, format=None):
        """Return a matrix of a named kind, or of the lengths of its rows."""
        dtype = dtype if self.weighted else None
        if isinstance(kind, str) and kind in KINDS:
            A = matrix(kind, dtype, index_dtype)
        elif isinstance(kind, str):
            long = kind == "long"
            A = long_rows(dtype, index_dtype) if long else rows_of(
                ROW_LENGTHS[kind], 37, dtype, index_dtype
            )  # fmt: skip
        else:
            A = rows_of(kind, len(kind) if self.square else 500, dtype, index_dtype)
        if self.square and A.n_rows != A.n_cols:
            A = A.tocoo()
            A = COO(A.row, A.col, A.data, shape=(max(A.shape),) * 2)
        return A.asformat(format or self.format)

    def arguments(self, A, dtype=np.float32, *, feat=33, seed=0):
        """Return random arguments for a matrix, by name."""
        counts = {"rows": A.n_rows, "cols": A.n_cols, "entries": A.nnz, "feat": feat}
        args = {}
        for k, (name, shape) in enumerate(self.shapes.items()):
            shape = tuple(counts.get(size, size) for size in shape)
            args[name] = features(shape[0], shape[1:], dtype, seed=10 * seed + k)
        if self.balanced:
            args[self.balanced] = ops.maxk(args[self.balanced], min(K, feat))
        return args

    def run(self, A, args, **options):
        """Return the arrays of all results: of a matrix its values."""
        if self.function is ops.maxk:
            S = ops.maxk(*args.values(), K)
            return [S.indices, S.data, S.toarray()]
        results = self.function(A, **args, **self.options, **options)
        results = results if isinstance(results, tuple) else (results,)
        return [
            result.data if isinstance(result, Format) else result
            for result in results
            if result is not None
        ]

    def expected(self, A, args):
        """Return results and bounds by the oracle, whose entries are in CSR order."""
        B, perm = A.tocsr_with_perm()
        args = {n: v[perm] if self.shapes[n][0] == "entries" else v for n, v in args.items()}
        results, bounds = self.oracle(B, **args, **self.options)
        back = np.argsort(perm)
        pairs = []
        for place, pair in enumerate(zip(results, bounds, strict=True)):
            pairs.append([one[back] for one in pair] if place in self.entries else pair)
        return pairs


def by(oracle, bound, *first, order=None):
    """Make an oracle of these functions: arguments ``first`` go by position, others by name."""

    def expected(A, **args):
        places = [args.pop(name, None) for name in first]
        both = []
        for function in (oracle, bound):
            results = function(A, *places, **args)
            results = results if isinstance(results, tuple) else (results,)
            both.append([results[i] for i in (order or range(len(results)))])
        return both

    return expected


def sums(A, X, method):
    return [spmm_oracle(A, X)], [error_bound(A, X)]


def of_heads(A, X, values, **options):
    return [[by_heads(f, A, X, values, **options)] for f in (spmm_oracle, error_bound)]


def gradients_of_aggregate(A, X, grad):
    """Those of features are a product with the transpose, those of values are dots of rows."""
    return (
        (spmm_oracle(A.T, grad), edges.sddmm_oracle(A, grad, X)),
        (error_bound(A.T, grad), edges.sddmm_bound(A, grad, X)),
    )


def gradients_with_own(A, X, grad, self_weight):
    """Those of a matrix with another entry on the diagonal of each row."""
    coo, own = A.tocoo(), np.arange(A.n_rows)
    row, col = (np.concatenate([ends, own]) for ends in (coo.row, coo.col))
    B = COO(row, col, np.concatenate([coo.data, self_weight]), shape=A.shape)
    diagonal = COO(own, own, shape=A.shape)
    exact, bounds = gradients_of_aggregate(A, X, grad)
    return (
        (spmm_oracle(B.T, grad), exact[1], edges.sddmm_oracle(diagonal, grad, X)),
        (error_bound(B.T, grad), bounds[1], edges.sddmm_bound(diagonal, grad, X)),
    )


def gradients_of_messages(A, E, grad, X=None, **options):
    X = np.zeros((A.n_cols, E.shape[1]), E.dtype) if X is None else X
    exact = messages.message_gradients_oracle(A, X, E, grad, **options)
    sizes = messages.message_gradients_oracle(A, abs(X), abs(E), abs(grad), **options)
    eps, _ = precision_of(E.dtype)
    longest, tiny = int(A.tocsc().lengths.max(initial=0)), 1e-7 * (eps > 1e-4)
    terms = 2 + longest * (1 if eps < 1e-4 else 2.0**-13)
    bounds = 4 * terms * eps * sizes[0] + longest * tiny, 4 * eps * sizes[1] + tiny
    return (exact[1:], bounds[1:]) if options["message"] == "copy_edge" else (exact, bounds)


def bound_of_probabilities(A, el, er, **options):
    """Return the bound of results that are float32 for scores of two bytes."""
    wide = (a.astype(np.float32) if a.dtype.itemsize == 2 else a for a in (el, er))
    return attention.gat_attention_bound(A, *wide, **options)


def combinations(A, left, right, op):
    exact = messages.combine_oracle(A, left, right, op)
    size = messages.combine_oracle(A, abs(left), abs(right), "add" if op == "sub" else op)
    return [exact], [2 * precision_of(left.dtype)[0] * size + 1e-7 * (left.dtype.itemsize == 2)]


def _spmm_arg(A, X, grad, *, reduce):
    """Run the maximum, its places and both gradients."""
    Y, places = ops.spmm_arg(A, X, reduce=reduce)
    return Y, places, *ops.spmm_arg_backward(A, X, places, grad)


X, GRAD, EDGES, HEADS = ("cols", "feat"), ("rows", "feat"), ("entries", "feat"), ("entries", 4)
SCALES = {"row_scale": ("rows",), "col_scale": ("cols",)}
ARG = "spmm", "spmm_arg_dx", "spmm_arg_da"
MASK = {"dropout": 0.5, "seed": 2}
LOOPS = {"options": {**MASK, "self_loops": True}, "square": True, "reads_all": True}
KEYS, RESULT, ATT = ("cols", 4, "feat"), ("rows", 4, "feat"), (4, "feat")
GAT = {"H": KEYS, "el": ("cols", 4), "er": ("rows", 4)}
GATV2 = {"left": KEYS, "right": RESULT, "att": ATT}
DOT = {"queries": RESULT, "keys": KEYS, "values": KEYS}
SUM, PAIRS = (spmm_oracle, error_bound), ("queries", "keys", "values", "att", "grad")
ADDITIVE = ("right", "left", "values", "att", "grad")  # values are the keys
OF_GAT = by(attention.gat_oracle, attention.gat_bound, "H", "el", "er")
GAT_GRADIENTS = by(attention.gat_backward_oracle, attention.gat_backward_bound,
                   "H", "el", "er", "grad", order=(0, 1, 2))  # fmt: skip
GAT_AND_EDGES = by(attention.gat_backward_oracle, attention.gat_backward_bound,
                   "H", "el", "er", "grad", order=(0, 1, 2, 3))  # fmt: skip
ATTENTION = attention.attend_oracle, attention.attend_bound
ATTENTION_GRADIENTS = attention.attend_backward_oracle, attention.attend_backward_bound

CASES = [
    *(
        Case(f"spmm {reduce}", ops.spmm, {"X": X}, by(*SUM, "X"), {"reduce": reduce}, ("spmm",),
             weighted=True, linear=("X",) if reduce in ("sum", "mean") else ())
        for reduce in ("sum", "mean", "max", "min")
    ),
    *(
        Case(f"spmm {reduce} scaled", ops.spmm, {"X": X, **SCALES}, by(*SUM, "X"),
             {"reduce": reduce}, ("spmm",), weighted=reduce != "mean")
        for reduce in ("sum", "mean", "max")
    ),
    Case("spmm unweighted", ops.spmm, {"X": X}, by(*SUM, "X"), rows=("spmm",), linear=("X",)),
    *(
        Case(f"spmm of {format}", ops.spmm, {"X": X}, by(*SUM, "X"), {}, ("spmm",), format,
             weighted=True, converts=format == "csc")
        for format in ("csc", "sgt")
    ),
    Case("spmm of coo", ops.spmm, {"X": X, **SCALES}, by(*SUM, "X"), {}, ("spmm",), "coo",
         weighted=True, atomics=True),
    Case("spmm of heads", ops.spmm, {"X": KEYS, "values": HEADS}, of_heads, {"reduce": "mean"},
         ("spmm",), linear=("X", "values")),
    Case("spmm of heads scaled", ops.spmm, {"X": X, "values": HEADS, **SCALES}, of_heads,
         rows=("spmm",)),
    *(
        Case(f"spmm_arg {reduce}", _spmm_arg, {"X": X, "grad": GRAD}, None, {"reduce": reduce}, ARG,
             weighted=True, converts=True)
        for reduce in ("max", "min")
    ),
    *(
        Case(f"aggregate {method}", ops.aggregate, {"X": X}, sums,
             {"method": method}, ("spmm",), weighted=True, linear=("X",), atomics=method == "gas")
        for method in ("auto", "gas", "gar")
    ),
    Case("aggregate_backward", ops.aggregate_backward, {"X": X, "grad": GRAD},
         gradients_of_aggregate, weighted=True, entries=(1,), linear=("grad",)),
    Case("aggregate_backward of own", ops.aggregate_backward,
         {"X": X, "grad": GRAD, "self_weight": ("rows",)}, gradients_with_own, {},
         ("aggregate_backward",), weighted=True, square=True, reads_all=True, entries=(1,),
         linear=("grad",)),
    Case("spgemm", ops.spgemm, {"S": X, **SCALES}, by(cbsr.spgemm_oracle, cbsr.spgemm_bound, "S"),
         weighted=True, balanced="S"),
    Case("spgemm mean", ops.spgemm, {"S": X}, by(cbsr.spgemm_oracle, cbsr.spgemm_bound, "S"),
         {"reduce": "mean"}, ("spgemm",), balanced="S"),
    Case("sspmm", ops.sspmm, {"dY": GRAD, "S": X, **SCALES}, by(
        cbsr.sspmm_oracle, cbsr.sspmm_bound, "dY", "S"), {"reduce": "mean"}, ("sspmm_outer",),
        weighted=True, balanced="S"),
    Case("sspmm deterministic", ops.sspmm, {"dY": GRAD, "S": X}, by(
        cbsr.sspmm_oracle, cbsr.sspmm_bound, "dY", "S"), {}, ("sspmm_outer",), balanced="S"),
    Case("sddmm_cbsr", ops.sddmm, {"X": GRAD, "Y": X}, by(
        cbsr.sddmm_cbsr_oracle, cbsr.sddmm_cbsr_bound, "X", "Y"), balanced="Y", entries=(0,)),
    *(
        Case(f"sddmm{name}", ops.sddmm, {"X": x, "Y": y}, by(
            edges.sddmm_oracle, edges.sddmm_bound, "X", "Y"), {}, ("sddmm",), entries=(0,),
            linear=("X", "Y"))
        for name, x, y in (("", GRAD, X), (" of heads", RESULT, KEYS))
    ),
    Case("maxk", ops.maxk, {"X": X}),
    *(
        Case(f"edge_softmax of {len(shape)} axes", ops.edge_softmax, {"scores": shape},
             by(edges.edge_softmax_oracle, edges.edge_softmax_bound, "scores"), {},
             ("edge_softmax",), entries=(0,))
        for shape in (("entries",), HEADS)
    ),
    *(
        Case(f"edge_softmax_backward of {len(shape)} axes", ops.edge_softmax_backward,
             {"probabilities": shape, "grad": shape},
             by(edges.edge_softmax_backward_oracle, edges.edge_softmax_backward_bound,
                "probabilities", "grad"), {}, ("edge_softmax_backward",), entries=(0,),
             linear=("grad",))
        for shape in (("entries",), HEADS)
    ),
    Case("gat", ops.gat, GAT, OF_GAT, linear=("H",)),
    Case("gat of edges", ops.gat, {**GAT, "edge_scores": HEADS}, OF_GAT, rows=("gat",), **LOOPS),
    Case("gat_backward", ops.gat_backward, {**GAT, "grad": RESULT}, GAT_GRADIENTS, MASK,
         numbered=True, linear=("grad",), converts=True),
    Case("gat_backward of edges", ops.gat_backward, {**GAT, "grad": RESULT, "edge_scores": HEADS},
         GAT_AND_EDGES, rows=("gat_backward",), entries=(3,), converts=True, **LOOPS),
    Case("gat_attention", ops.gat_attention, {"el": GAT["el"], "er": GAT["er"]}, by(
        attention.gat_attention_oracle, bound_of_probabilities, "el", "er"), entries=(0,),
        widens=True),
    Case("gatv2", ops.gatv2, GATV2, by(*ATTENTION, *ADDITIVE[:4])),
    Case("gatv2 of edges", ops.gatv2, {**GATV2, "edge_scores": HEADS},
         by(*ATTENTION, *ADDITIVE[:4]), rows=("gatv2",), **LOOPS),
    Case("gatv2_backward", ops.gatv2_backward, {**GATV2, "grad": RESULT},
         by(*ATTENTION_GRADIENTS, *ADDITIVE, order=(1, 0, 3)), MASK, numbered=True,
         converts=True),
    Case("gatv2_backward of edges", ops.gatv2_backward,
         {**GATV2, "grad": RESULT, "edge_scores": HEADS},
         by(*ATTENTION_GRADIENTS, *ADDITIVE, order=(1, 0, 3, 4)), rows=("gatv2_backward",),
         entries=(3,), converts=True, **LOOPS),
    Case("dot_attention", ops.dot_attention, DOT, by(*ATTENTION, *PAIRS[:4]), linear=("values",)),
    Case("dot_attention of edges", ops.dot_attention, {**DOT, "edge_scores": HEADS},
         by(*ATTENTION, *PAIRS[:4]), rows=("dot_attention",), **LOOPS),
    Case("dot_attention_backward", ops.dot_attention_backward, {**DOT, "grad": RESULT},
         by(*ATTENTION_GRADIENTS, *PAIRS, order=(0, 1, 2)), MASK, numbered=True,
         linear=("grad",), converts=True),
    Case("dot_attention_backward of edges", ops.dot_attention_backward,
         {**DOT, "grad": RESULT, "edge_scores": HEADS},
         by(*ATTENTION_GRADIENTS, *PAIRS, order=(0, 1, 2, 4)), rows=("dot_attention_backward",),
         entries=(3,), converts=True, **LOOPS),
    *(
        Case(f"spmm_sampled {strategy}", ops.spmm_sampled, {"X": X, **scales},
             by(sampling.spmm_sampled_oracle, sampling.spmm_sampled_bound, "X", "width"),
             {"width": width, "strategy": strategy, "seed": 2, **factor}, ("spmm_sampled",),
             weighted=bool(scales), numbered=True, linear=("X",))
        for strategy, width, scales, factor in (
            ("bucket", 40, {}, {"mean": True}), ("fastrand", 8, SCALES, {}),
            ("random", 3, SCALES, {"rescale": True})
        )
    ),
    Case("gcn_norm", ops.gcn_norm, {}, square=True, weighted=True),
    Case("gcn_norm of counts", ops.gcn_norm, {}, None, {}, ("gcn_norm",), "coo", square=True),
    *(
        Case(f"message_aggregate {message}", ops.message_aggregate, {"X": X, "E": EDGES},
             by(messages.message_oracle, messages.message_bound, "X", "E"),
             {"message": message, "reduce": reduce}, ("message_aggregate",))
        for message, reduce in (("relu_add", "sum"), ("mul", "mean"), ("add", "mean"))
    ),
    Case("message_aggregate copy_edge", ops.message_aggregate, {"E": EDGES},
         lambda A, E, X, **options: by(messages.message_oracle, messages.message_bound, "X", "E")(
             A, X=np.zeros((A.n_cols, E.shape[1]), E.dtype), E=E, **options),
         {"X": None, "message": "copy_edge", "reduce": "sum"}, ("message_aggregate",)),
    *(
        Case(f"message_aggregate_backward {message}", ops.message_aggregate_backward,
             {"X": X, "E": EDGES, "grad": GRAD}, gradients_of_messages,
             {"message": message, "reduce": reduce}, ("message_aggregate_backward",), entries=(1,),
             linear=("grad",))
        for message, reduce in (("add", "sum"), ("relu_add", "mean"), ("mul", "sum"))
    ),
    Case("message_aggregate_backward copy_edge", ops.message_aggregate_backward,
         {"E": EDGES, "grad": GRAD}, gradients_of_messages,
         {"X": None, "message": "copy_edge", "reduce": "mean"}, ("edge_combine",),
         entries=(0,)),
    *(
        Case(f"edge_combine {op}", ops.edge_combine, {"left": GRAD, "right": X}, combinations,
             {"op": op}, ("edge_combine",), entries=(0,))
        for op in ("add", "sub", "mul")
    ),
]  # fmt: skip
#: The cases by name.
NAMED = {case.name: case for case in CASES}
