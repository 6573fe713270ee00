"""One matrix through any sequence of conversions, slices and values, against its entries."""

import pickle
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsefmt.formats.arrays import to_device
from sparsefmt.io import read, write
from sparsefmt.testing import coo, csc, csr, graphs, index_dtypes, sgt, stored_entries, value_dtypes

NUMBERS = st.floats(-100, 100, width=16, allow_subnormal=False)


def in_own_order(A):
    """Entries in the order in which ``with_data`` takes values: a tiled matrix keeps CSR order."""
    return stored_entries(A.tocsr() if A.format == "sgt" else A)


def rounded(values, dtype):
    return np.array(values, np.float64).astype(dtype).astype(np.float64).tolist()


class Matrix(RuleBasedStateMachine):
    """``self.A`` goes through the library, ``self.entries`` through lists and dicts."""

    device = "cpu"  #: of every array

    @initialize(A=st.one_of(coo(), csr(), csc(), sgt(), graphs(format=None)))
    def start(self, A):
        self.A, self.shape, self.weighted = A.to(self.device), A.shape, A.data is not None
        self.entries = stored_entries(A)

    # The same entries in other memory

    @rule(format=st.sampled_from(["coo", "csr", "csc", "sgt"]))
    def convert(self, format):
        self.A, before = self.A.asformat(format), self.A
        assert self.A.format == format
        assert (self.A.dtype, self.A.index_dtype) == (before.dtype, before.index_dtype)

    @rule(format=st.sampled_from(["coo", "csr", "csc", "sgt"]))
    def convert_structure_and_carry_values(self, format):
        B, perm = self.A.with_data(None).asformat_with_perm(format)
        self.A = B if self.A.data is None else B.with_data(self.A.data[perm])

    @rule(tile=st.tuples(st.integers(1, 9), st.integers(1, 9)))
    def tile(self, tile):
        self.A = self.A.tosgt(tile)
        assert self.A.tile == tile

    @precondition(lambda self: self.A.format in ("csr", "csc"))
    @rule()
    def sort(self):
        self.A = self.A.sorted_indices()
        assert self.A.has_sorted_indices

    @rule(dtype=index_dtypes())
    def cast_indices(self, dtype):
        self.A = self.A.astype(index_dtype=dtype)
        assert self.A.index_dtype == dtype

    @rule()
    def copy(self):
        self.A, before = self.A.copy(), self.A
        assert self.A == before

    @rule(protocol=st.sampled_from([2, pickle.DEFAULT_PROTOCOL]))  # 2 is that of torch.save
    def pickle(self, protocol):
        self.A, before = pickle.loads(pickle.dumps(self.A, protocol)), self.A
        assert self.A == before

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "matrix.npz"
            write(path, self.A)
            self.A = read(path).to(self.device)

    # Other entries

    @rule()
    def transpose(self):
        self.A, self.shape = self.A.T, self.shape[::-1]
        self.entries = [(col, row, value) for row, col, value in self.entries]

    @rule(dtype=value_dtypes())
    def cast_values(self, dtype):
        self.A = self.A.astype(dtype)
        if self.weighted:
            values = rounded([value for _, _, value in self.entries], dtype)
            pairs = zip(self.entries, values, strict=True)
            self.entries = [(row, col, value) for (row, col, _), value in pairs]

    @rule(data=st.data(), dtype=value_dtypes())
    def give_values(self, data, dtype):
        """Values that repeat a short drawn list: one to each entry, in the matrix's own order."""
        few = data.draw(st.lists(NUMBERS, min_size=1, max_size=5))
        values = np.resize(np.array(few), self.A.nnz).astype(dtype)
        places = in_own_order(self.A)
        self.A, self.weighted = self.A.with_data(to_device(values, self.device)), True
        pairs = zip(places, rounded(values, dtype), strict=True)
        self.entries = [(row, col, value) for (row, col, _), value in pairs]

    @rule()
    def drop_values(self):
        self.A, self.weighted = self.A.with_data(None), False
        self.entries = [(row, col, 1.0) for row, col, _ in self.entries]

    @rule(data=st.data())
    def choose_rows(self, data):
        chosen, key = self._choose(data, self.shape[0])
        self.A, self.shape = self.A[key], (len(chosen), self.shape[1])
        self.entries = [
            (new, col, value)
            for new, old in enumerate(chosen)
            for row, col, value in self.entries
            if row == old
        ]

    @rule(data=st.data())
    def choose_columns(self, data):
        chosen, key = self._choose(data, self.shape[1])
        self.A, self.shape = self.A[:, key], (self.shape[0], len(chosen))
        self.entries = [
            (row, new, value)
            for new, old in enumerate(chosen)
            for row, col, value in self.entries
            if col == old
        ]

    def _choose(self, data, size):
        """Which places, and a key that says so: a slice, a mask or integers."""
        kind = data.draw(st.sampled_from(["slice", "mask", "integers"]))
        if kind == "slice":
            key = data.draw(st.slices(size))
            return list(range(size))[key], key
        if kind == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            return np.flatnonzero(mask).tolist(), self._key(mask, bool)
        chosen = data.draw(st.lists(st.integers(0, size - 1), max_size=12) if size else st.just([]))
        # The same places, some counted from the end.
        return chosen, self._key([i - size if i % 2 else i for i in chosen], np.int64)

    def _key(self, places, dtype):
        return to_device(np.array(places, dtype), self.device)

    # What holds throughout

    @invariant()
    def it_is_valid(self):
        self.A.check()

    @invariant()
    def it_holds_the_same_entries(self):
        assert self.A.shape == self.shape
        assert (self.A.data is not None) == self.weighted
        assert self.A.nnz == len(self.entries)
        found, expected = (
            Counter((row, col, value.hex()) for row, col, value in entries)
            for entries in (stored_entries(self.A), self.entries)
        )
        assert found == expected
