"""Check what attention between rows takes: features of both ends, and a vector a head."""

import math
from typing import NamedTuple

import numpy as np

from ...errors import ShapeError
from ...formats import checks as formats_checks
from ...formats.arrays import Array, as_array
from ...formats.base import Format
from ..engine import checks as engine_checks
from . import checks

#: Queries, keys, values, ``att`` and the edges' scores.
Arrays = tuple[Array, Array, Array | None, Array | None, Array | None]


class Numbers(NamedTuple):
    """What shapes scores and masks, in the order of the ops' arguments."""

    seed: int
    slope: float
    scale: float
    dropout: float
    loops: bool


def additive(
    A: Format, left: Array, right: Array, att: Array, edge_scores: Array | None
) -> tuple[Format, Arrays]:
    """Check the arrays of GATv2, whose keys are the values."""
    A = engine_checks.sparse("A", A)
    left = engine_checks.features("left", left, A=A, heads=True)
    right = engine_checks.features("right", right, A=A, axis="rows", heads=True)
    engine_checks.alike("right", right, "left", left)
    att = _vectors(att, A, left)
    heads = left.shape[1:-1]
    edges = checks.of_entries(edge_scores, A=A, heads=heads, like=("left", left))
    return A, (right, left, None, att, edges)


def products(
    A: Format, queries: Array, keys: Array, values: Array | None, edge_scores: Array | None
) -> tuple[Format, Arrays]:
    """Check the arrays of attention by dot products."""
    A = engine_checks.sparse("A", A)
    keys = engine_checks.features("keys", keys, A=A, heads=True)
    queries = engine_checks.features("queries", queries, A=A, axis="rows", heads=True)
    engine_checks.alike("queries", queries, "keys", keys)
    if values is not None:
        values = engine_checks.features("values", values, A=A, heads=True)
        engine_checks.alike("values", values, "keys", keys)
    heads = keys.shape[1:-1]
    edges = checks.of_entries(edge_scores, A=A, heads=heads, like=("keys", keys))
    return A, (queries, keys, values, None, edges)


def _vectors(att: object, A: Format, left: Array) -> Array:
    """Check ``att``: one vector a head; one head may have an axis or none."""
    array = as_array("att", att, empty=np.float64, beside=A._indices)
    shape, feat = left.shape[1:], left.shape[-1]
    if array.shape not in ([(feat,), (1, feat)] if shape[:-1] in ((), (1,)) else [shape]):
        per_head = "one vector per head" if len(shape) == 2 else "one vector"
        raise ShapeError(
            f"att has shape {array.shape}: give {shape}, {per_head} (left.shape == {left.shape})."
        )
    formats_checks.value_dtype("att.dtype", array.dtype)
    if not (left.dtype.itemsize == 2 and array.dtype == np.float32):
        engine_checks.same_dtype("att", array, "left", left)
    formats_checks.same_device("att", array, "A", A._indices)
    return array


def gradient(grad: object, A: Format, name: str, like: Array) -> Array:
    """Check the gradient of the result, which has the heads, width and dtype of ``like``."""
    array: Array = engine_checks.features("grad", grad, A=A, axis="rows", heads=True)
    engine_checks.alike("grad", array, name, like)
    return array


def numbers(
    A: Format, slope: object, scale: object, dropout: object, seed: object, self_loops: object
) -> Numbers:
    """Check the numbers that shape scores and masks."""
    factor = checks.number("scale", scale)
    if not math.isfinite(factor):
        raise ShapeError(f"scale is {scale!r}: give a finite number, or leave it out.")
    return Numbers(**checks.options(A, slope, dropout, seed, self_loops)._asdict(), scale=factor)


def numbers_of_products(
    A: Format, keys: Array, scale: object, dropout: object, seed: object, self_loops: object
) -> Numbers:
    """As ``numbers``, without a slope; the usual scale where it is left out."""
    usual = 1 / math.sqrt(keys.shape[-1] or 1)
    return numbers(A, 0.0, usual if scale is None else scale, dropout, seed, self_loops)
