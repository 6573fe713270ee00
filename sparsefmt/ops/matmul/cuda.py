"""Launch products of a sparse matrix with features, and the gradients of maxima and minima.

Scales are float32 for 2-byte values, else of their dtype.  Nothing is checked but what a kernel
cannot do: the callers have checked their arrays.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ...formats.arrays import VALUE_DTYPES
from ...formats.compressed import CSR
from ...formats.coo import COO
from ..engine import jit
from ..engine.jit import Launch
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.memory import Memory, memory_of
from ..engine.structure import Structure, structure_of

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
    """Say why rounding so many rows of features does not pay before ``nnz`` are gathered, if so."""
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
        """Features that a sub-warp reads at a time."""
        return self.lanes * self.vector


def load(
    file: str, kernel: str, types: tuple[str, ...], constants: tuple[int, ...] = ()
) -> jit.Kernel:
    """Load a kernel of this room."""
    return jit.load(file, kernel, PARAMETERS[kernel], types, constants)


def instantiations() -> Iterator[tuple[str, str]]:
    """Every kernel that this module may launch: file and C++ name."""
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
    of_rounded = list(_of_products(*_shapes(NARROW), others=()))
    for index_dtype, constants in product(("int32", "int64"), of_rounded):
        narrow = "float32", index_dtype, NARROW
        yield _FILE, jit.expression("spmm_csr_balanced", narrow, constants)
    yield _FILE, jit.expression("round_rows", NARROW_TYPES, ())


_OTHERS = CHOSEN_SUM, EXTREME, EXTREME_ARG


def _shapes(dtype: str) -> tuple[int, list[tuple[int, int]]]:
    """Give the values of a load of 16 bytes; lanes and values where rows are aligned to less."""
    wide = 16 // ITEMSIZE[dtype]
    return wide, [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)


def _of_products(
    wide: int, rare: list[tuple[int, int]], others: tuple[int, ...] = _OTHERS
) -> Iterator[tuple[int, ...]]:
    """Lanes, values, REDUCE and WEIGHTS of products; rare shapes have the general kernels only.

    ``others`` are the reductions beside sums.
    """
    sums = list(product((SUM, SCALED_SUM, OWN_SUM), (UNWEIGHTED, DIRECT, SCALED, INDIRECT)))
    chosen = [
        (kind, weights)
        for kind, weights in product(others, (DIRECT, INDIRECT))
        if kind != CHOSEN_SUM or weights == INDIRECT
    ]
    for lanes in (4, 8, 16):
        yield from ((lanes, wide, *c) for c in (sums + chosen if lanes < 16 else sums))
    for shape, reduction in product(rare, (SCALED_SUM, OWN_SUM, *others)):
        yield (*shape, reduction, INDIRECT)
    yield from ((*shape, kind, UNWEIGHTED) for shape in rare for kind in (SCALED_SUM, OWN_SUM))


# Products with a CSR


class Own(NamedTuple):
    """What each row of a sum or mean gets of its own, in the last pass over it.

    ``factors[i] * rows[i] + bias``; without factors ``rows[i] + bias``, and with ``one_more``, of
    one factor, ``(1 + factors[0]) * rows[i] + bias``.  Rows whose own factor is 0 are not read.
    """

    rows: Any = None
    factors: Any = None
    one_more: bool = False
    bias: Any = None


_NOTHING = Own()


def spmm(
    A: CSR | Structure, x: Any, values: Any = None, perm: Any = None, row_scale: Any = None,
    col_scale: Any = None, reduce: str = "sum", *, out: Any = None, arg: Any = None,
    narrow: bool = False, own: Own = _NOTHING, **_: Any,
) -> Any:  # fmt: skip
    """``out[i] = r[i] * reduce of a[e] c[j] x[j]`` over the entries of row i.

    The value of entry e is ``values[perm[e]]``; with heads, of a sum or mean, they are of shape
    (nnz, heads), ``out`` of (n_rows, heads, feat), and x too or of (n_cols, feat) for all heads.
    ``arg``, of out's shape, takes the entries that win a max or min, -1 in an empty row.
    ``reduce`` may also be "chosen": the sum of those ``a[e] c[j] x[j, f]`` whose ``arg[j, f]``,
    given in x's shape, is ``perm[e]``.  ``narrow`` rounds x, of float32, to bfloat16 once: sums and
    all else stay float32.  ``own`` is for a matrix with entries.
    """
    S, m = structure_of(A), memory_of(x)
    dtype, feat = m.dtype(x), x.shape[1]
    shape: tuple[int, ...] = (S.n_rows, feat)
    heads, shared = 0, False
    if values is not None and values.ndim == 2:
        shape = shape_of_heads(S, x, values)
        heads, shared, feat = shape[1], x.ndim == 2, prod(shape[1:])
    if out is None:
        out = m.empty(shape, dtype, x)
    if not (S.n_rows and feat):
        return out
    x = m.rows_in_place(x)
    if narrow:
        x = rounded(x)
    if values is not None or row_scale is not None or col_scale is not None:
        values = m.contiguous(values)
        row_scale, col_scale = m.factors(row_scale), m.factors(col_scale)
    given = arg, row_scale, values, perm, col_scale
    rows, result, winners, *factors = m.pointers(x, out, *given)
    # _kept holds temporaries until the launch.
    _kept, own_at, stride = _NO_ROWS if own.rows is None else _in_memory(m, own, dtype)
    with m.on_device(x):
        if not S.nnz:
            _fill_empty(S, dtype, reduce, feat, result, winners, m.stream(x))
            return out
        alignment = (rows | (result | own_at[0] | max(stride, 0)) >> narrow) % 16
        winning, scaled, data, permuted, cols = [one is not None for one in given]
        wide = not heads and is_wide(S, NARROW if narrow else dtype, scaled=cols)
        case: tuple[Any, ...] = dtype, reduce, feat, m.row_stride(x), alignment, stride
        case += own.one_more, scaled, cols, wide, data, permuted, winning, heads, shared, narrow
        launch_case(S, m, x, case, rows, result, factors, winners, own_at)
    return out


class Case(NamedTuple):
    """What the launches of a product are decided for, beside the sizes of its structure."""

    dtype: str
    reduce: str
    feat: int  #: of all heads
    stride: int  #: values from one row of features to the next
    alignment: int  #: the lowest 4 bits of all addresses
    own_stride: int = -1  #: bytes from one row of its own to the next, -1 without them
    one_more: bool = False  #: as in ``Own``
    scaled: bool = False  #: whether there are row scales
    cols: bool = False  #: column scales
    #: ``is_wide``, for sums and means without heads: it decides the order of sums, and so goes by
    #: the exact sizes.
    wide: bool = False
    data: bool = False  #: values of the entries
    perm: bool = False  #: their permutation
    arg: bool = False  #: entries that win, or have won
    heads: int = 0  #: 0 for one value an entry
    shared: bool = False  #: whether all heads have the same features
    narrow: bool = False  #: whether the features are rounded


def launch_case(
    S: Structure, m: Memory, x: Any, case: tuple[Any, ...], rows: int, result: int,
    factors: Sequence[int], winners: int = 0, own: Sequence[int] = (0, 0, 0),
) -> None:  # fmt: skip
    """Launch a product, with a workspace beside ``x`` if blocks share rows.

    ``case`` has the first fields of a ``Case``, or all.  What follows are addresses: ``factors``
    those of row scales, values, their permutation and column scales, ``own`` those of rows of their
    own, their factors and the bias.
    """
    scale, *of_entries = factors
    nbytes, launch, add_up = S.once_alike(_launches, *case)
    begin, stream = 0, m.stream(x)
    if add_up is not None:
        # Partial results of rows that blocks share: their values, then the entries that win.
        workspace = m.empty((nbytes[1],), "uint8", x)
        begin = m.pointer(workspace)
    behind = winners, begin, begin + nbytes[0], *own
    arrays = S.indptr, S.indices, S.start, S.slot  # ``S.arrays`` is a call more
    launch(stream, *arrays, *of_entries, scale, rows, result, *behind, S.nnz)
    if add_up is not None:
        add_up(stream, S.indptr, S.start, S.cut, scale, result, *behind)


def shape_of_heads(S: Any, x: Any, values: Any) -> tuple[int, int, int]:
    """Give the shape of a product with values of several heads."""
    return S.n_rows, values.shape[1], x.shape[-1]


def spmm_with_own(A: CSR | Structure, *arguments: Any, narrow: bool = False, **_: Any) -> Any:
    """``spmm`` of its first six arguments, and of the fields of ``Own``."""
    return spmm(A, *arguments[:6], narrow=narrow, own=Own(*arguments[6:]))


def _in_memory(m: Any, own: Own, dtype: str) -> tuple[Any, Sequence[int], int]:
    """Give arrays as the kernel reads them, their addresses, and bytes from one row to the next."""
    rows, bias = m.rows_in_place(own.rows), m.contiguous(own.bias)
    factors = None if own.factors is None else m.factors(own.factors)
    kept = rows, factors, bias
    return kept, m.pointers(*kept), row_bytes(m.row_stride(rows), dtype)


#: What that is without rows.
_NO_ROWS = None, (0, 0, 0), -1


def _fill_empty(
    S: Structure, dtype: str, reduce: str, feat: int, result: int, winners: int, stream: int
) -> None:
    """Write the result of a matrix without entries: 0, and no entry that wins."""
    fill(result, S.n_rows * feat * ITEMSIZE[dtype], 0, stream)
    if winners and reduce != "chosen":
        fill(winners, S.n_rows * feat * ITEMSIZE[S.index_dtype], 0xFF, stream)


def _launches(S: Structure, *fields: Any) -> tuple[tuple[int, int], Launch, Launch | None]:
    """Decide a product: bytes of the workspace, its launch, and that for rows that blocks share.

    A call gives both launches the addresses of the structure's arrays, and the first one the number
    of entries, so that graphs of about one size share them.
    """
    case = Case(*fields)
    dtype, reduce, feat, stride, alignment, own_stride, *_ = case
    gathered = NARROW if case.narrow else dtype
    wide = case.wide and reduce in ("sum", "mean")
    if case.heads:  # a load has the features of one
        alignment |= feat // case.heads * ITEMSIZE[dtype]
    shape = load_shape(gathered, feat=feat, stride=stride, alignment=alignment, wide=wide)
    reduction, weights = _variant(case, rare=shape.vector * ITEMSIZE[gathered] < 16)
    if reduce == "chosen":
        row_bytes(feat, S.index_dtype)  # the kernel counts in the rows of arg as in those of X
    flags = _FLAGS.get(reduce, 0) | _ONE_MORE * case.one_more | _SHARED * case.shared
    types = dtype, S.index_dtype
    constants = (*shape, reduction, weights)
    kernel = load(_FILE, "spmm_csr_balanced", (*types, gathered), constants)
    launch = kernel.ready(
        S.blocks * -(-feat // shape.width),
        after=(row_bytes(stride, gathered), S.blocks, feat, flags, max(own_stride, 0), case.heads),
        threads=THREADS,
    )
    if not S.n_cuts:
        return (0, 0), launch, None
    kernel = load(_FILE, "spmm_csr_cut_rows", types, (max(reduction, SCALED_SUM),))
    blocks = jit.warps_to_blocks(S.n_cuts * -(-feat // jit.WARP))
    add_up = kernel.ready(blocks, after=(S.n_cuts, feat, flags, max(own_stride, 0)))
    values = shared_rows_bytes(S, dtype, feat)
    nbytes = shared_rows_bytes(S, dtype, feat, arg=case.arg and reduce != "chosen")
    return (values, nbytes), launch, add_up


def rounded(x: Any) -> Any:
    """Round rows of float32 features, of any shape, to bfloat16, in whole words of 16 bytes."""
    m, n, feat = memory_of(x), x.shape[0], prod(x.shape[1:])
    width = rounded_width(feat)
    found = m.empty((n, width), "uint16", x)
    words_of_row = width // 8
    words = n * words_of_row
    with m.on_device(x):
        kernel = load(_FILE, "round_rows", NARROW_TYPES)
        at = m.pointer(x), m.pointer(found)
        sizes = words, m.row_stride(x), words_of_row, feat
        kernel(-(-words // jit.THREADS), (*at, *sizes), stream=m.stream(x))
    return found


def rounded_width(feat: int) -> int:
    """Values from one row of rounded features to the next."""
    return -(-feat // 8) * 8


def shared_rows_bytes(S: Structure, dtype: str, feat: int, *, arg: bool = False) -> int:
    """Bytes for the partial results of rows that blocks share; 0 unless a row is very long.

    At most feat / 256 bytes an entry (float32), where all rows are long; 1 % of reddit's at 256.
    """
    return 2 * S.n_cuts * feat * (max(ITEMSIZE[dtype], 4) + arg * ITEMSIZE[S.index_dtype])


def load_shape(dtype: str, *, feat: int, stride: int, alignment: int, wide: bool = False) -> Shape:
    """The widest loads that alignment allows, in slices that stay in the L2.

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
    """Whether slices of 256 bytes pay: measured, see the constants."""
    dense = S.nnz >= DENSE_ROWS * S.n_rows
    size = S.n_cols * 256
    if scaled:
        return dense or size <= WIDE_BYTES
    return size <= WIDE_BYTES if ITEMSIZE[dtype] == 2 else dense and size > SMALL_BYTES


def _variant(case: Case, *, rare: bool) -> tuple[int, int]:
    """Template arguments REDUCE and WEIGHTS; rare shapes and reductions have the general ones."""
    if case.heads:
        return SCALED_SUM, HEADS
    if case.reduce == "chosen":
        return CHOSEN_SUM, INDIRECT
    if case.reduce in ("max", "min"):
        plain = case.data and not (rare or case.perm or case.cols)
        return EXTREME_ARG if case.arg else EXTREME, DIRECT if plain else INDIRECT
    reduction = SCALED_SUM if rare or case.scaled or case.reduce == "mean" else SUM
    if case.own_stride >= 0:
        reduction = OWN_SUM
    if not (case.data or case.cols):
        return reduction, UNWEIGHTED
    if rare or case.perm:
        return reduction, INDIRECT
    return reduction, SCALED if case.cols else DIRECT


# Products with a COO


def spmm_coo(
    A: COO, x: Any, *, values: Any, row_scale: Any, col_scale: Any, out: Any = None, **_: Any
) -> Any:
    """``out[i] += r[i] a[e] c[j] x[j]`` for every entry, atomically and in no fixed order."""
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
    A: CSR | Structure, x: Any, values: Any, row_scale: Any, col_scale: Any, reduce: str
) -> tuple[Any, Any]:
    """Compute ``spmm`` by maximum or minimum, and which entries win."""
    S, m = structure_of(A), memory_of(x)
    arg = m.empty((S.n_rows, x.shape[1]), S.index_dtype, x)
    return spmm(S, x, values, None, row_scale, col_scale, reduce, arg=arg), arg


def spmm_arg_dx(
    A: CSR | Structure, perm: Any, grad: Any, arg: Any, values: Any, row_scale: Any, col_scale: Any
) -> Any:
    """Gradient of ``spmm_arg`` in the features: the winners in each column have their share.

    ``A`` is the transpose: its entry k is entry ``perm[k]`` of the product, whose values and scales
    these are.
    """
    grad = memory_of(grad).contiguous(grad)  # the kernel reads it and arg by the same places
    return spmm(A, grad, values, perm, col_scale, row_scale, "chosen", arg=arg)


def spmm_arg_da(
    A: CSR | Structure, x: Any, grad: Any, arg: Any, row_scale: Any, col_scale: Any
) -> Any:
    """Gradient of ``spmm_arg`` in the values: each result gives its share to the winner."""
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
