"""Hypothesis strategies for sparse matrices and features.

Strategies shrink to the smallest matrix that still fails.  A flag that is True (the default) says
that something *may* occur, False that it never does.

Examples
--------
>>> from hypothesis import given
>>> @given(A=csr(self_loops=False))
... def test_transposing_twice_changes_nothing(A):
...     assert A.T.T == A
>>> test_transposing_twice_changes_nothing()
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, Unpack

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from .._caches import cache
from ..errors import SparseFmtError
from ..formats import checks
from ..formats.arrays import INDEX_DTYPES, Array, DType
from ..formats.cbsr import CBSR, column_dtype
from ..formats.compressed import COO, CSC, CSR
from ..formats.sgt import SGT, check_tile
from . import space as samples
from .space import KINDS, MatrixOptions, Shape, Space, ValueOptions, Values, scatter

_FORMATS = ("coo", "csr", "csc", "sgt")
_TILES = st.sampled_from(samples.TILES)
# More values than this come from one drawn seed: drawing them singly would be slow.
_DRAWN_SINGLY = 64

_T = TypeVar("_T")
_Dtype: TypeAlias = np.dtype[Any]
_Sizes: TypeAlias = int | SearchStrategy[int]
_Shapes: TypeAlias = Shape | SearchStrategy[Shape] | None
_V = TypeVar("_V", bound=Values)


def index_dtypes() -> SearchStrategy[_Dtype]:
    """Draw the dtypes that indices have: int32 and int64.

    >>> index_dtypes().validate()
    """
    return st.sampled_from(INDEX_DTYPES)


def value_dtypes(*, bfloat16: bool | None = None) -> SearchStrategy[_Dtype]:
    """Draw the dtypes that values have: float32, float64, float16 and bfloat16.

    Parameters
    ----------
    bfloat16 : bool, optional
        Whether bfloat16 is among them; if left out, where ``ml_dtypes`` is installed.

    Examples
    --------
    >>> value_dtypes(bfloat16=False).validate()
    """
    if bfloat16 not in (True, False, None):
        raise InvalidArgument(f"{bfloat16=} must be True, False or None")
    if bfloat16 and "bfloat16" not in [dtype.name for dtype in samples.value_types()]:
        raise InvalidArgument(f"{bfloat16=} needs the package ml_dtypes")
    return st.sampled_from(samples.value_types(bfloat16=bfloat16 is not False))


def feature_widths() -> SearchStrategy[int]:
    """Draw widths of features: none, one, odd ones, and those around a warp's size.

    >>> feature_widths().validate()
    """
    return st.sampled_from(samples.WIDTHS)


# Matrices


def coo(**options: Unpack[MatrixOptions]) -> SearchStrategy[COO]:
    """Draw matrices in coordinate form.

    Parameters
    ----------
    dtype : dtype or strategy, optional
        Of the values.
    index_dtype : dtype or strategy, optional
    shape : (n_rows, n_cols) or strategy, optional
    max_side : int
        Bounds both sides where ``shape`` is left out (8).
    min_nnz, max_nnz : int
        Bounds of the number of stored entries (0 and 24).
    weighted : bool, optional
        Whether there are values; either if left out.
    duplicates, explicit_zeros, unsorted, empty_rows, hubs, self_loops, rectangular : bool
        Whether these may occur; a row with 5 entries or more is a hub.
    max_magnitude : float, optional
        Of finite values (16, which keeps products and sums finite in float16); nonzero ones are
        at least 1/64.  None for all normal numbers of the dtype.
    allow_nan, allow_infinity : bool
        Off unless asked for; subnormal values never occur.

    Raises
    ------
    InvalidArgument
        If an option has a wrong type or value, or if options cannot hold together.

    Examples
    --------
    >>> coo(shape=(3, 4), weighted=True, dtype="float32", duplicates=False).validate()
    """
    return _matrix(_space(**options), "coo")


def csr(**options: Unpack[MatrixOptions]) -> SearchStrategy[CSR]:
    """Draw matrices in compressed sparse rows; options as for ``coo``.

    >>> csr(empty_rows=False, min_nnz=1).validate()
    """
    return _matrix(_space(**options), "csr")


def csc(**options: Unpack[MatrixOptions]) -> SearchStrategy[CSC]:
    """Draw matrices in compressed sparse columns; options as for ``coo`` (rows are still rows).

    >>> csc(rectangular=False, self_loops=False).validate()
    """
    return _matrix(_space(**options), "csc")


def sgt(*, tile: _Shapes = None, **options: Unpack[MatrixOptions]) -> SearchStrategy[SGT]:
    """Draw matrices in condensed tiles; other options as for ``coo``.

    Parameters
    ----------
    tile : (height, width) or strategy, optional
        One of ``TILES`` if left out.

    Examples
    --------
    >>> sgt(tile=(16, 8), weighted=False).validate()
    """
    return _matrix(_space(**options), "sgt", _either(tile, _TILES, check_tile))


def cbsr(
    *,
    shape: _Shapes = None,
    max_side: int = 8,
    k: int | None = None,
    explicit_zeros: bool = True,
    **values: Unpack[ValueOptions],
) -> SearchStrategy[CBSR]:
    """Draw row-balanced sparse features, as ``maxk`` makes them.

    Parameters
    ----------
    shape, max_side, explicit_zeros, dtype, max_magnitude, allow_nan, allow_infinity
        As for ``coo``; there is at least one column.
    k : int, optional
        Stored entries of each row; 1 to 8 if left out.

    Examples
    --------
    >>> cbsr(shape=(5, 300), k=2).validate()
    """
    space = _space(shape=shape, max_side=max_side, explicit_zeros=explicit_zeros, **values)
    if k is not None and not (samples.is_size(k) and k >= 1):
        raise InvalidArgument(f"{k=} must be a positive integer")
    if max_side < (k or 1):
        raise InvalidArgument(f"{max_side=} leaves no room for k={k or 1} columns")
    return _cbsr(space, k)


def graphs(
    *,
    kinds: Sequence[str] = tuple(KINDS),
    format: str | None = "csr",
    max_side: int | None = None,
    large: bool = False,
    rectangular: bool = True,
    index_dtype: DType | SearchStrategy[_Dtype] = None,
    weighted: bool | None = None,
    **values: Unpack[ValueOptions],
) -> SearchStrategy[Any]:
    """Draw graphs of the kinds that kernels go wrong on.

    Parameters
    ----------
    kinds : sequence of str
        Among "empty", "one_row", "star", "power_law", "banded", "dense_block", "isolated_rows".
    format : "coo", "csr", "csc" or "sgt", optional
        None for any of them.
    max_side : int, optional
        16 if left out, or 2000 for large graphs.
    large : bool
        Sides from half of ``max_side`` on; only kind and sides shrink, the rest is from a seed.
    rectangular, index_dtype, weighted, dtype, max_magnitude, allow_nan, allow_infinity
        As for ``coo``.

    Examples
    --------
    >>> graphs(kinds=["star", "power_law"], format=None, dtype="float32").validate()
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or isinstance(kinds, str):
        raise InvalidArgument(f"{kinds=} must be some of {', '.join(KINDS)}")
    if format is not None and format not in _FORMATS:
        raise InvalidArgument(f"{format=} must be None or one of {', '.join(_FORMATS)}")
    space = _space(
        max_side=(2000 if large else 16) if max_side is None else max_side,
        rectangular=rectangular,
        index_dtype=index_dtype,
        weighted=weighted,
        **values,
    )
    return _graphs(space, tuple(kinds), _FORMATS if format is None else (format,), large)


def features(
    rows: _Sizes, *, width: _Sizes | None = None, **values: Unpack[ValueOptions]
) -> SearchStrategy[Any]:
    """Draw dense features of shape (rows, width); more than 64 values come from a drawn seed.

    Parameters
    ----------
    rows : int or strategy
        One per vertex.
    width : int or strategy, optional
        ``feature_widths()`` if left out.
    dtype, max_magnitude, allow_nan, allow_infinity
        As for ``coo``.

    Examples
    --------
    >>> features(5, width=3, dtype="float16").validate()
    """
    heights = _either(rows, st.nothing(), samples.size)
    widths = _either(width, feature_widths(), samples.size)
    return _features(heights, widths, _checked(Values(**values)))


_value_dtype = partial(checks.value_dtype, "dtype")
_index_dtype = partial(checks.index_dtype, "index_dtype")


def _checked(values: _V) -> _V:
    """Check that options can hold together, and return them."""
    fault = values.fault()
    if fault:
        raise InvalidArgument(fault)
    _either(values.dtype, value_dtypes(), _value_dtype)
    return values


def _space(**options: Any) -> Space:
    space = Space(**options)
    _either(space.index_dtype, index_dtypes(), _index_dtype)
    if isinstance(space.shape, SearchStrategy):  # what depends on the shape is checked when drawn
        _checked(replace(space, shape=None, min_nnz=0, empty_rows=True))
        return space
    return _checked(space)


def _either(value: object, default: SearchStrategy[_T], check: Callable[[Any], _T]) -> Any:
    """Return a strategy of checked values, from a strategy, a value or, for None, the default."""
    if value is None:
        return default
    if isinstance(value, SearchStrategy):
        return value.map(partial(_valid, check))
    return st.just(_valid(check, value))


def _valid(check: Callable[[Any], _T], value: object) -> _T:
    try:
        return check(value)
    except SparseFmtError as error:
        raise InvalidArgument(str(error)) from error


@cache
def _numbers(dtype: _Dtype, values: Values, zeros: bool) -> SearchStrategy[float]:
    """Draw single values; those nearer to zero than the least magnitude become 0.0, or 1.0."""
    least, top = samples.magnitudes(dtype, values.max_magnitude)
    width: Any = 32 if dtype.name == "bfloat16" else 8 * dtype.itemsize
    finite = st.floats(-top, top, width=width, allow_subnormal=False)
    special = [np.nan] * values.allow_nan + [np.inf, -np.inf] * values.allow_infinity
    numbers: SearchStrategy[float] = finite.map(partial(samples.without_small, least, zeros))
    return numbers | st.sampled_from(special) if special else numbers


def _arrays(count: int, dtype: _Dtype, values: Values, zeros: bool = True) -> SearchStrategy[Array]:
    """Draw ``count`` values, one by one, so that each shrinks, or many from a seed."""
    if count > _DRAWN_SINGLY:
        seeds = st.integers(0, 2**32 - 1)
        return seeds.map(lambda seed: samples.seeded_values(seed, count, dtype, values, zeros))
    each = _numbers(dtype, values.only_values(), zeros)
    return st.lists(each, min_size=count, max_size=count).map(
        lambda drawn: np.array(drawn, np.float64).astype(dtype)
    )


@st.composite
def _features(draw: DrawFn, rows: Any, widths: Any, values: Values) -> Array:
    shape = (draw(rows), draw(widths))
    dtype = draw(_either(values.dtype, value_dtypes(), _value_dtype))
    return draw(_arrays(shape[0] * shape[1], dtype, values)).reshape(shape)


@st.composite
def _matrix(draw: DrawFn, space: Space, format: str, tiles: SearchStrategy[Shape] = _TILES) -> Any:
    shape = _draw_shape(draw, space)
    space = _checked(replace(space, shape=shape))
    entries = np.array(_draw_entries(draw, space, shape), np.int64).reshape(-1, 2)
    return _finish(draw, space, format, entries, tiles)


def _draw_shape(draw: DrawFn, space: Space) -> Shape:
    if isinstance(space.shape, SearchStrategy):
        return tuple(_checked(replace(space, shape=draw(space.shape))).shape)
    if space.shape is not None:
        return tuple(space.shape)
    n_rows = draw(st.sampled_from(space.possible_rows()))
    return n_rows, draw(st.integers(*space.possible_cols(n_rows)))


def _draw_entries(draw: DrawFn, space: Space, shape: Shape) -> list[Shape]:
    limit = space.limit(shape)
    if 0 in (*shape, limit):
        return []
    rows, cols = (st.integers(0, size - 1) for size in shape)
    wanted: list[Shape] = []
    if space.hubs and min(shape[1], limit) >= samples.HUB and draw(st.booleans()):
        hub = draw(rows)
        length = draw(st.integers(samples.HUB, min(shape[1], limit)))
        wanted = [(hub, col) for col in range(length)]
    wanted += draw(st.lists(st.tuples(rows, cols), min_size=space.min_nnz, max_size=limit))
    return space.settle(wanted, shape, 0 if space.empty_rows else draw(cols))


def _finish(draw: DrawFn, space: Space, format: str, entries: Array, tiles: Any = _TILES) -> Any:
    """Draw dtypes and values for entries, and build the matrix."""
    fits = max(space.shape) <= np.iinfo(np.int32).max
    default = st.sampled_from(INDEX_DTYPES if fits else INDEX_DTYPES[1:])
    index = draw(_either(space.index_dtype, default, _index_dtype))
    if index == np.int32 and not fits:
        raise InvalidArgument(f"index_dtype={index} is too small for shape={space.shape}")
    data = None
    if draw(st.booleans()) if space.weighted is None else space.weighted:
        dtype = draw(_either(space.dtype, value_dtypes(), _value_dtype))
        data = draw(_arrays(len(entries), dtype, space, space.explicit_zeros))
    A = samples.build("csr" if format == "sgt" else format, entries, data, space.shape, index)
    return A.tosgt(draw(tiles)) if format == "sgt" else A


@st.composite
def _cbsr(draw: DrawFn, space: Space, k: int | None) -> CBSR:
    if space.shape is None:
        n_rows, n_cols = (draw(st.integers(least, space.max_side)) for least in (0, k or 1))
    else:
        n_rows, n_cols = _draw_shape(draw, space)
    if n_cols < (k or 1):
        raise InvalidArgument(f"shape={n_rows, n_cols} leaves no room for k={k or 1} columns")
    k = draw(st.integers(1, min(n_cols, 8))) if k is None else k
    row = st.lists(st.sampled_from(range(n_cols)), min_size=k, max_size=k, unique=True)
    rows = [sorted(draw(row)) for _ in range(n_rows)]
    indices = np.array(rows, column_dtype(n_cols)).reshape(n_rows, k)
    dtype = draw(_either(space.dtype, value_dtypes(), _value_dtype))
    data = draw(_arrays(n_rows * k, dtype, space, space.explicit_zeros))
    return CBSR(indices, data.reshape(n_rows, k), shape=(n_rows, n_cols))


@st.composite
def _graphs(
    draw: DrawFn, space: Space, kinds: Sequence[str], formats: Sequence[str], large: bool
) -> Any:
    kind, format = draw(st.sampled_from(kinds)), draw(st.sampled_from(formats))
    sides = st.integers(space.max_side // 2 if large else 0, space.max_side)
    n_rows = draw(sides)
    shape = (n_rows, draw(sides) if space.rectangular else n_rows)
    place = st.integers(0, space.max_side)
    row, col = KINDS[kind](*shape, draw(place), draw(place))
    seed = draw(st.integers(0, 2**32 - 1)) if large else 0
    if seed:
        row, col = scatter(row, col, shape, seed)
    return _finish(draw, replace(space, shape=shape), format, np.stack([row, col], axis=1))
