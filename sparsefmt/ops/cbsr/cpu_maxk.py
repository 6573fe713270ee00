"""Compiled loop of MaxK: the k-th largest of a row by a search for its bits, 64 columns at a time.

Values come as the unsigned integers that hold them, so that 2-byte floats need no widening.  Their
keys are unsigned integers in the same order; a search by bits counts the keys that reach a limit,
and ends when those are ``k``.  No key is 0, which pads a row to whole words of 64 columns.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from ...formats.arrays import Array
from ..engine.lanes import Builder, Context, Kind, Lanes, Signature, Values, operation, splat
from ..engine.loops import Int, inlined, parallel

_WORD = 64


def _compared(sign: str) -> Any:
    """Compare the 64 keys from ``at`` on with a limit; return the bits of an integer."""

    @operation
    def compared(typing: Context, keys: Kind, at: Kind, limit: Kind) -> Any:
        kind = Lanes(keys.dtype, _WORD)

        def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
            array = context.make_array(keys)(context, builder, args[0])
            start = builder.gep(array.data, [args[1]])
            address = builder.bitcast(start, context.get_value_type(kind).as_pointer())
            run = builder.load(address, align=keys.dtype.bitwidth // 8)
            right = splat(builder, context.cast(builder, args[2], limit, keys.dtype), _WORD)
            return builder.bitcast(builder.icmp_unsigned(sign, run, right), ir.IntType(_WORD))

        return types.uint64(keys, at, limit), build

    return compared


reach, exceed = _compared(">="), _compared(">")


@operation
def ones(typing: Context, word: Kind) -> Any:
    """Count the bits that are set."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), build


@operation
def lowest(typing: Context, word: Kind) -> Any:
    """Find the lowest bit that is set."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), build


@inlined
def _fill_keys(keys: Array, row: Array, infinity: Any) -> None:
    """Write the keys of a row: -0 has that of 0, and every NaN the largest."""
    sign = np.uint64(1) << np.uint64(8 * row.itemsize - 1)
    for f in range(np.uint64(len(row))):
        x = np.uint64(row[f])
        key = np.uint64(0) - x if x & sign else x | sign
        keys[f] = ~np.uint64(0) if x & ~sign > infinity else key


@inlined
def _limit(keys: Array, k: Int) -> Any:
    """Find the k-th largest key, or a lower one which no more than ``k`` keys reach."""
    limit = np.uint64(0)
    for bit in range(8 * keys.itemsize - 1, -1, -1):
        higher, reached = limit | np.uint64(1) << np.uint64(bit), 0
        for at in range(0, len(keys), _WORD):
            reached += ones(reach(keys, at, higher))
        if reached >= k:
            limit = higher
        if reached == k:
            break
    return limit


@inlined
def _write(row: Array, keys: Array, limit: Int, columns: Array, values: Array) -> None:
    """Write all that exceed the limit, and the first that equal it, as many as are left."""
    left, place = len(values), 0
    for at in range(0, len(keys), _WORD):
        left -= ones(exceed(keys, at, limit))
    for at in range(0, len(keys), _WORD):
        chosen = exceed(keys, at, limit)
        equal = reach(keys, at, limit) ^ chosen
        while equal and left > 0:
            chosen |= equal & -equal
            equal &= equal - np.uint64(1)
            left -= 1
        while chosen:
            column = at + lowest(chosen)
            columns[place], values[place] = column, row[column]
            chosen &= chosen - np.uint64(1)
            place += 1


@parallel
def maxk(X: Array, infinity: Any, shape: Any, S: Any, pieces: Int) -> None:
    """Choose by bits: ``X`` is (flat, row stride), ``S`` (columns, values), ``infinity`` bits."""
    bits, stride = X
    n_rows, feat = shape
    columns, values = S
    k = len(values) // max(n_rows, 1)
    for piece in numba.prange(pieces):
        keys = np.zeros(-(-feat // _WORD) * _WORD, bits.dtype)
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            row, own = bits[i * stride : i * stride + feat], slice(i * k, (i + 1) * k)
            _fill_keys(keys, row, infinity)
            _write(row, keys, _limit(keys, k), columns[own], values[own])
