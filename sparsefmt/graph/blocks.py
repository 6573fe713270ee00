"""Matrices side by side on a diagonal: arrays of the pieces one after another, with offsets."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from ..errors import DeviceError, DtypeError
from ..formats import checks, primitives
from ..formats.arrays import Array, is_cupy, namespace
from ..formats.base import Format
from ..formats.compressed import Compressed
from ..formats.coo import COO

SomeCompressed = TypeVar("SomeCompressed", bound=Compressed)


class Blocks(NamedTuple):
    """Where each piece begins: its rows, columns and entries; the last number is the end."""

    rows: list[int]
    cols: list[int]
    entries: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole."""
        return self.rows[-1], self.cols[-1]

    @property
    def nnz(self) -> int:
        """Entries of the whole."""
        return self.entries[-1]


class Facts(NamedTuple):
    """What a piece is: names of its device and dtypes, None for no values, and its sizes."""

    device: str
    dtype: str | None
    index_dtype: str
    n_rows: int
    n_cols: int
    nnz: int


def blocks_of(pieces: Sequence[Facts]) -> Blocks:
    """Lay out pieces.

    Raises
    ------
    DeviceError, DtypeError
        If they are on several devices, some have values and others none, or dtypes differ.
    IndexRangeError
        If there are more rows, columns or entries than the index dtype counts.
    """
    kind = pieces[0][:3]
    for number, one in enumerate(pieces):
        if one[:3] != kind:
            _refuse(number, one, pieces[0])
    found = Blocks(*([0, *accumulate(sizes)] for sizes in list(zip(*pieces, strict=True))[3:]))
    checks.sizes_fit(found.shape, found.nnz, np.dtype(kind[2]))
    return found


def _refuse(number: int, found: Facts, first: Facts) -> None:
    """Say in what a piece differs from the first one."""
    if found.device != first.device:
        raise DeviceError(
            f"graphs[{number}] is on {found.device} but graphs[0] on {first.device}: move one of "
            f'them, graph.to("{first.device}") for instance.'
        )
    if found.dtype != first.dtype:
        values = [
            "no values" if one is None else f"values of {one}" for one in (found[1], first[1])
        ]
        raise DtypeError(
            f"graphs[{number}] has {values[0]} but graphs[0] has {values[1]}: give all values of "
            "one dtype, or none, with_data(None) for instance."
        )
    raise DtypeError(
        f"graphs[{number}] has {found.index_dtype} indices but graphs[0] has "
        f"{first.index_dtype}: make all of them of one dtype."
    )


def _ends(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def compressed(parts: Sequence[SomeCompressed], at: Blocks) -> SomeCompressed:
    """Join the CSR, or CSC, of all pieces."""
    first = parts[0]
    major, minor = (at.rows, at.cols)[first._major], (at.rows, at.cols)[1 - first._major]
    dtype, xp = first.index_dtype, namespace(first.indices)
    indptr = xp.empty(major[-1] + 1, dtype)
    indptr[-1] = at.nnz
    _joined([part.indptr[:-1] for part in parts], major, at.entries, out=indptr[:-1])
    indices = _joined([part.indices for part in parts], at.entries, minor)
    data = None if first.data is None else xp.concatenate([part.data for part in parts])
    return first._trusted(indptr=indptr, indices=indices, data=data, shape=at.shape)


def coordinates(parts: Sequence[COO], at: Blocks) -> COO:
    """Join the COO of all pieces."""
    first = parts[0]
    xp = namespace(first.row)
    both = xp.empty((2, at.nnz), first.index_dtype)  # sources, then targets, as PyG has them
    _joined([part.col for part in parts], at.entries, at.cols, out=both[0])
    _joined([part.row for part in parts], at.entries, at.rows, out=both[1])
    data = None if first.data is None else xp.concatenate([part.data for part in parts])
    return COO._trusted(row=both[1], col=both[0], data=data, shape=at.shape)


def places(parts: Sequence[Array | None], at: Blocks, like: Array) -> Array | None:
    """Join permutations of entries, of which None stands for each at its own place."""
    if all(part is None for part in parts):
        return None
    xp, dtype = namespace(like), like.dtype
    counts = np.diff(at.entries)
    given = [
        xp.arange(int(count), dtype=dtype) if part is None else part
        for part, count in zip(parts, counts, strict=True)
    ]
    return _joined(given, at.entries, at.entries)


def user_coo(A: Format) -> COO:
    """Give a matrix as COO, its entries in the order that they have in it."""
    if isinstance(A, COO):
        return A
    coo, perm = A.tocoo_with_perm()
    back = primitives.inverse(perm)
    return COO._trusted(row=coo.row[back], col=coo.col[back], data=A.data, shape=A.shape)


def _joined(
    parts: Sequence[Array], begins: list[int], offsets: list[int], *, out: Array | None = None
) -> Array:
    """Concatenate arrays that begin at ``begins``, and add ``offsets[k]`` to part ``k``."""
    first = parts[0]
    xp, total = namespace(first), begins[-1]
    out = xp.empty(total, first.dtype) if out is None else out
    xp.concatenate(parts, out=out)
    if not is_cupy(first):
        out += np.repeat(np.array(offsets[:-1], first.dtype), np.diff(begins))
        return out
    both = xp.asarray(np.array([begins, offsets], first.dtype))
    out += both[1][primitives.expand(both[0], total)]
    return out
