"""Launch products of a sparse matrix with features, and the gradients of maxima and minima.

Scales are float32 for 2-byte values, else of their dtype.  Nothing is checked but what a kernel
cannot do: the callers have checked their arrays.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.compressed import COO, CSR
from ..engine import jit
from ..engine.call import Launcher, Prepared, Result
from ..engine.jit import ITEMSIZE, fill, filling, row_bytes
from ..engine.memory import Memory, memory_of
from ..engine.structure import Sizes, Structure, structure_of

#: Mean entries of a row from which slices of 256 bytes beat 128: 1.02 to 1.06x on graphs of 50 and
#: more, 0.90x on graphs of 12 (H200, float32).
DENSE_ROWS = 32
#: Bytes of 256-byte slices of X up to which 2-byte features gain by them (1.03x) and a product with
#: ``col_scale``, which then reads half as many scales (1.08 to 1.14x): the L2 still helps.
WIDE_BYTES = 96 * 2**20
#: Bytes of 256-byte slices of X below which 128 bytes are better: more of a slice is in the L1.
SMALL_BYTES = 2 * 2**20

SUM, SCALED_SUM, OWN_SUM, CHOSEN_SUM, EXTREME, EXTREME_ARG = range(6)  # as in spmm.cu
UNWEIGHTED, DIRECT, SCALED, INDIRECT, HEADS = range(5)
THREADS = 128  # of a block in spmm.cu and sddmm.cu
COO_RUN = 32  # consecutive entries of a sub-warp, as in spmm.cu
_FLAGS = {"mean": 1, "min": 2}
_ONE_MORE, _SHARED = 4, 8  # likewise

_FILE, _DA_FILE = "matmul/spmm.cu", "edges/sddmm.cu"
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
PARAMETERS = {
    "spmm_csr_balanced": "16PqIIiiIi",
    "spmm_csr_cut_rows": "11P3iI",
    "spmm_coo_atomic": "7Pq2Ii",
    "spmm_arg_da": "9PqIi",
    "round_rows": "2P2q2i",
}
#: What float32 features may be rounded to, where that is allowed: half the bytes of a gather.
NARROW, NARROW_TYPES = "bfloat16", ("float32", "bfloat16")
#: Features of a row, and how often it is gathered on average, from which its rounding pays: with 64
#: features 1.05x on rows of 11 entries, 1.9x on those of 500, 0.98x on those of 5; with 16 features
#: 0.73 to 1.07x (H100).
LEAST_FEATURES, LEAST_GATHERS = 64, 8


def against_rounding(nnz: int, rows: int, feat: int) -> list[str]:
    """List the reasons against rounding these rows of features before ``nnz`` gathers."""
    if feat < LEAST_FEATURES:
        return _FEW_FEATURES
    return _FEW_GATHERS if nnz < LEAST_GATHERS * rows else []


#: Made once: each call is told so.
_FEW_FEATURES = [f"rows have less than {LEAST_FEATURES} features"]
_FEW_GATHERS = [f"a row is gathered less than {LEAST_GATHERS} times on average"]


class Shape(NamedTuple):
    """How a sub-warp reads rows of features: ``lanes`` times ``vector`` values at a time."""

    lanes: int
    vector: int

    @property
    def width(self) -> int:
        """Count the features that a sub-warp reads at a time."""
        return self.lanes * self.vector


def load(
    file: str, kernel: str, types: tuple[str, ...], constants: tuple[int, ...] = ()
) -> jit.Kernel:
    """Load a kernel of this room."""
    return jit.load(file, kernel, PARAMETERS[kernel], types, constants)


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that this module may launch: file and C++ name."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        wide, rare = _shapes(types[0])
        for constants in _of_products(wide, rare):
            yield _FILE, jit.expression("spmm_csr_balanced", (*types, types[0]), constants)
        for shape in ((4, wide), (8, wide), *rare):
            of_heads = *shape, SCALED_SUM, HEADS
            yield _FILE, jit.expression("spmm_csr_balanced", (*types, types[0]), of_heads)
        for reduction in (SCALED_SUM, OWN_SUM, *_OTHERS):
            yield _FILE, jit.expression("spmm_csr_cut_rows", types, (reduction,))
        for shape in ((4, wide), (8, wide), *rare):
            yield _FILE, jit.expression("spmm_coo_atomic", types, shape)
        yield _DA_FILE, jit.expression("spmm_arg_da", types, ())
    of_rounded = list(_of_products(*_shapes(NARROW), reductions=()))
    for index_dtype, constants in product(("int32", "int64"), of_rounded):
        narrow = "float32", index_dtype, NARROW
        yield _FILE, jit.expression("spmm_csr_balanced", narrow, constants)
    yield _FILE, jit.expression("round_rows", NARROW_TYPES, ())


_OTHERS = CHOSEN_SUM, EXTREME, EXTREME_ARG


def _shapes(dtype: str) -> tuple[int, list[tuple[int, int]]]:
    """Return the values of a load of 16 bytes; lanes and values of less aligned rows."""
    wide = 16 // ITEMSIZE[dtype]
    return wide, [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)


def _of_products(
    wide: int, rare: list[tuple[int, int]], reductions: tuple[int, ...] = _OTHERS
) -> Iterator[tuple[int, ...]]:
    """List lanes, values, REDUCE and WEIGHTS of products; rare shapes have general kernels.

    ``reductions`` are those beside sums.
    """
    sums = list(product((SUM, SCALED_SUM, OWN_SUM), (UNWEIGHTED, DIRECT, SCALED, INDIRECT)))
    chosen = [
        (kind, weights)
        for kind, weights in product(reductions, (DIRECT, INDIRECT))
        if kind != CHOSEN_SUM or weights == INDIRECT
    ]
    for lanes in (4, 8, 16):
        yield from ((lanes, wide, *c) for c in (sums + chosen if lanes < 16 else sums))
    for shape, reduction in product(rare, (SCALED_SUM, OWN_SUM, *reductions)):
        yield (*shape, reduction, INDIRECT)
    yield from ((*shape, kind, UNWEIGHTED) for shape in rare for kind in (SCALED_SUM, OWN_SUM))


# Products with a CSR


def sizes(S: Structure) -> tuple[int, ...]:
    """Compare the sizes of a structure with limits of launches; fills depend on numbers of rows."""
    size = S.n_cols * 256
    dense, wide = S.nnz >= DENSE_ROWS * S.n_rows, (size <= WIDE_BYTES, size > SMALL_BYTES)
    return S.nnz > 0 or -S.n_rows, S.n_rows > 0, dense, *wide, S.nnz >= LEAST_GATHERS * S.n_cols


def _prepare(
    S: Structure, m: Memory, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum",
    own: Array | None = None, own_scale: Array | None = None, one_more: bool = False,
    bias: Array | None = None, *, out: Array | None = None, arg: Array | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Prepare ``out[i] = r[i] * reduce of a[e] c[j] x[j]`` over the entries of row i.

    The value of entry e is ``values[perm[e]]``; with heads, of a sum or mean, they are of shape
    (nnz, heads), ``out`` of (n_rows, heads, feat), and x too or of (n_cols, feat) for all heads.
    ``arg``, of out's shape, takes the entries that win a max or min, -1 in an empty row.
    ``reduce`` may also be "chosen": the sum of those ``a[e] c[j] x[j, f]`` whose ``arg[j, f]``,
    given in x's shape, is ``perm[e]``.  Where x is uint16 it is ``rounded``, of float32.

    To a row of a sum or mean its last pass adds ``own_scale[i] * own[i] + bias``, without scale
    ``own[i] + bias``, and with ``one_more``, of one factor, ``(1 + own_scale[0]) * own[i] + bias``.
    Rows whose ``own_scale`` is 0 are not read, without ``one_more``.
    """
    dtype, narrow = m.dtype(x), m.dtype(x) == "uint16"
    dtype = "float32" if narrow else dtype
    heads = values.shape[1] if values is not None and values.ndim == 2 else 0
    shape = x.shape[1:2] if values is None or values.ndim < 2 else (heads, x.shape[-1])
    feat = prod(shape)
    results, count = (Result(shape, dtype),), S.n_rows * feat
    if not (S.nnz and count):
        fills = [(filling(count * ITEMSIZE[dtype]), ("out",))]
        if arg is not None and reduce != "chosen":  # no entry wins
            fills.append((filling(count * ITEMSIZE[S.index_dtype], 0xFF), ("arg",)))
        return Prepared(tuple(fills) if count else (), results)
    stride, own_stride = m.row_stride(x), -1
    if own is not None:
        own_stride = row_bytes(m.row_stride(own), dtype)
    rows, result, own_at = (m.pointer(a) for a in (x, out, own))
    gathered = NARROW if narrow else dtype
    data, cols = values is not None, col_scale is not None
    wide = not heads and reduce in ("sum", "mean") and is_wide(S, gathered, scaled=cols)
    alignment = (rows | (result | own_at | max(own_stride, 0)) >> narrow) % 16
    if heads:  # a load has the features of one
        alignment |= feat // heads * ITEMSIZE[dtype]
    load_of_row = load_shape(gathered, feat=feat, stride=stride, alignment=alignment, wide=wide)
    rare = load_of_row.vector * ITEMSIZE[gathered] < 16
    if heads:
        reduction, weights = SCALED_SUM, HEADS
    elif reduce == "chosen":
        row_bytes(feat, S.index_dtype)  # the kernel counts in the rows of arg as in those of X
        reduction, weights = CHOSEN_SUM, INDIRECT
    elif reduce in ("max", "min"):
        reduction = EXTREME_ARG if arg is not None else EXTREME
        weights = DIRECT if data and not (rare or perm is not None or cols) else INDIRECT
    else:
        scaled = rare or row_scale is not None or reduce == "mean"
        reduction = OWN_SUM if own is not None else SCALED_SUM if scaled else SUM
        weights = _weights(data, cols, indirect=rare or perm is not None)
    shared = heads and x.ndim == 2
    flags = _FLAGS.get(reduce, 0) | _ONE_MORE * one_more | _SHARED * bool(shared)
    types = dtype, S.index_dtype
    kernel = load(
        _FILE, "spmm_csr_balanced", (*types, gathered), (*load_of_row, reduction, weights)
    )
    launch = kernel.ready(
        S.blocks * -(-feat // load_of_row.width),
        after=(row_bytes(stride, gathered), S.blocks, feat, flags, max(own_stride, 0), heads),
        threads=THREADS,
    )
    launches: list[tuple[jit.Launch, Any]] = [(launch, _ARGUMENTS)]
    workspace = 0, 0
    if S.n_cuts:
        kernel = load(_FILE, "spmm_csr_cut_rows", types, (max(reduction, SCALED_SUM),))
        blocks = jit.warps_to_blocks(S.n_cuts * -(-feat // jit.WARP))
        add_up = kernel.ready(blocks, after=(S.n_cuts, feat, flags, max(own_stride, 0)))
        launches.append((add_up, _ARGUMENTS_OF_CUTS))
        # Partial results of rows that blocks share: their values, then the entries that win.
        with_arg = arg is not None and reduce != "chosen"
        nbytes = shared_rows_bytes(S, dtype, feat, arg=with_arg)
        workspace = shared_rows_bytes(S, dtype, feat), nbytes
    return Prepared(tuple(launches), results, workspace)


#: Arguments that both kernels of a product take last.
_LAST = "arg", "workspace", "workspace_end", "own", "own_scale", "bias"
_ARGUMENTS = (
    *("indptr", "indices", "start", "slot", "values", "perm", "col_scale", "row_scale"),
    *("x", "out", *_LAST, "nnz"),
)
_ARGUMENTS_OF_CUTS = "indptr", "start", "cut", "row_scale", "out", *_LAST
spmm = Launcher(_prepare, sizes, in_place=("x", "own"))


def _round_first(S: Structure, m: Memory, *args: Any, **options: Any) -> Any:
    """Prepare ``spmm`` of float32 features that are rounded to bfloat16 once."""

    def run(A: CSR | Structure, x: Array, *args: Any, **options: Any) -> Any:
        feat = x.shape[1]
        return spmm(A, rounded(memory_of(x).rows_in_place(x))[:, :feat], *args, **options)

    return run if S.nnz else _prepare(S, m, *args, **options)


spmm_rounded = Launcher(_round_first, sizes)


def shape_of_heads(S: CSR | Structure | Sizes, x: Array, values: Array) -> tuple[int, int, int]:
    """Return the shape of a product with values of several heads."""
    return S.n_rows, values.shape[1], x.shape[-1]


def rounded(x: Array) -> Any:
    """Round rows of float32 features, of any shape, to bfloat16, in whole words of 16 bytes."""
    m, n, feat = memory_of(x), x.shape[0], prod(x.shape[1:])
    width = rounded_width(feat)
    result = m.empty((n, width), "uint16", x)
    words_of_row = width // 8
    words = n * words_of_row
    with m.on_device(x):
        kernel = load(_FILE, "round_rows", NARROW_TYPES)
        at = m.pointer(x), m.pointer(result)
        sizes = words, m.row_stride(x), words_of_row, feat
        kernel(-(-words // jit.THREADS), (*at, *sizes), stream=m.stream(x))
    return result


def rounded_width(feat: int) -> int:
    """Count the values from one row of rounded features to the next."""
    return -(-feat // 8) * 8


def shared_rows_bytes(S: Structure, dtype: str, feat: int, *, arg: bool = False) -> int:
    """Count bytes for partial results of rows that blocks share; 0 unless a row is very long.

    At most feat / 256 bytes an entry (float32), where all rows are long; 1 % of reddit's at 256.
    """
    return 2 * S.n_cuts * feat * (max(ITEMSIZE[dtype], 4) + arg * ITEMSIZE[S.index_dtype])


def load_shape(dtype: str, *, feat: int, stride: int, alignment: int, wide: bool = False) -> Shape:
    """Choose the widest loads that alignment allows, in slices that stay in the L2.

    64-byte slices for narrow features, 256-byte ones where they pay (``wide``), else 128 bytes;
    loads of 8 bytes or of one value where rows of X or of the result are not aligned to more.
    ``alignment`` has the lowest bits of both addresses.
    """
    size = ITEMSIZE[dtype]
    alignment |= stride * size | feat * size
    if alignment % 16 == 0:
        if feat * size <= 64:
            return Shape(4, 16 // size)
        return Shape(16 if wide and feat * size > 128 else 8, 16 // size)
    if alignment % 8 == 0 and size < 8:
        return Shape(16, 8 // size)
    return Shape(8 if feat <= 8 else 32, 1)


def is_wide(S: Structure, dtype: str, *, scaled: bool) -> bool:
    """Return True if slices of 256 bytes pay: measured, see the constants."""
    dense = S.nnz >= DENSE_ROWS * S.n_rows
    size = S.n_cols * 256
    if scaled:
        return dense or size <= WIDE_BYTES
    return size <= WIDE_BYTES if ITEMSIZE[dtype] == 2 else dense and size > SMALL_BYTES


def _weights(data: bool, cols: bool, *, indirect: bool) -> int:
    """Return the template argument WEIGHTS of a sum or mean."""
    if not (data or cols):
        return UNWEIGHTED
    return INDIRECT if indirect else SCALED if cols else DIRECT


# Products with a COO


def spmm_coo(
    A: COO, x: Array, *, values: Array, row_scale: Array, col_scale: Array,
    out: Array | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Add ``r[i] a[e] c[j] x[j]`` to ``out[i]`` for every entry, atomically, in no fixed order."""
    m, dtype, feat = memory_of(x), memory_of(x).dtype(x), x.shape[1]
    out = m.empty((A.n_rows, feat), dtype, x) if out is None else out
    x = m.rows_in_place(x)
    # Atomics add in float32 at least, words of 16 bytes; a 2-byte result is rounded once, at the
    # end.
    sums = out if out.itemsize >= 4 else m.empty(out.shape, "float32", x)
    with m.on_device(x):
        fill(m.pointer(sums), A.n_rows * feat * sums.itemsize, 0, m.stream(x))
        if A.nnz and feat:
            arrays = A.row, A.col, values, row_scale, col_scale, x, sums
            at = tuple(map(m.pointer, arrays))
            alignment, stride = (m.pointer(x) | m.pointer(sums)) % 16, m.row_stride(x)
            shape = load_shape(dtype, feat=feat, stride=stride, alignment=alignment)
            blocks = -(-A.nnz * shape.lanes // (THREADS * COO_RUN))
            types = dtype, A.index_dtype.name
            kernel = load(_FILE, "spmm_coo_atomic", types, tuple(shape))
            sizes = A.nnz, row_bytes(stride, dtype), blocks, feat
            slices = -(-feat // shape.width)
            kernel(blocks * slices, (*at, *sizes), threads=THREADS, stream=m.stream(x))
        if sums is not out:
            out[...] = sums
    return out


# Which entries win, and the way back to them


def spmm_arg(
    A: CSR | Structure, x: Array, values: Array, row_scale: Array, col_scale: Array, reduce: str
) -> tuple[Any, Any]:
    """Compute ``spmm`` by maximum or minimum, and which entries win."""
    S, m = structure_of(A), memory_of(x)
    arg = m.empty((S.n_rows, x.shape[1]), S.index_dtype, x)
    return spmm(S, x, values, None, row_scale, col_scale, reduce, arg=arg), arg


def spmm_arg_dx(
    A: CSR | Structure, perm: Array, grad: Array, arg: Array, values: Array, row_scale: Array,
    col_scale: Array,
) -> Any:  # fmt: skip
    """Compute the gradient of ``spmm_arg`` in the features: each winner has its share.

    ``A`` is the transpose: its entry k is entry ``perm[k]`` of the product, whose values and scales
    these are.
    """
    grad = memory_of(grad).contiguous(grad)  # the kernel reads it and arg by the same places
    return spmm(A, grad, values, perm, col_scale, row_scale, "chosen", arg=arg)


def spmm_arg_da(
    A: CSR | Structure, x: Array, grad: Array, arg: Array, row_scale: Array, col_scale: Array
) -> Any:
    """Compute the gradient of ``spmm_arg`` in the values: each result's goes to the winner."""
    S, m = structure_of(A), memory_of(x)
    dtype, feat = m.dtype(x), x.shape[1]
    out = m.empty((S.nnz,), dtype, x)
    if not S.nnz:
        return out
    x, grad = m.rows_in_place(x), m.contiguous(grad)
    row_scale, col_scale = m.factors(row_scale), m.factors(col_scale)
    with m.on_device(x):
        kernel = load(_DA_FILE, "spmm_arg_da", (dtype, S.index_dtype))
        arrays = m.pointers(arg, grad, x, row_scale, col_scale, out)
        sizes = S.nnz, row_bytes(m.row_stride(x), dtype), feat
        args = (S.indptr, S.indices, S.start, *arrays, *sizes)
        kernel(S.blocks, args, threads=THREADS, stream=m.stream(x))
    return out
