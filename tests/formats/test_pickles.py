"""Pickles made before files moved to their rooms still load, and new ones name public places."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import sparsefmt
from sparsefmt import COO, Graph
from sparsefmt.errors import IndexRangeError
from sparsefmt.formats.convert import unpickled

ROOT = Path(__file__).resolve().parents[2]
ROW, COL = np.array([4, 0, 2, 0, 4, 5], np.int32), np.array([1, 3, 2, 0, 1, 6], np.int32)
VALUES = np.array([0.5, -1.0, 2.0, 0.0, 3.25, -0.75], np.float32)


@pytest.fixture(scope="module")
def old():
    """What version 0.1.0 pickled, whose formats were defined at the top of the package."""
    return pickle.loads((ROOT / "tests" / "data" / "formats_v1.pickle").read_bytes())


@pytest.mark.parametrize("values", ["weighted", "unweighted"])
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "sgt"])
def test_old_pickles_of_formats_load(old, kind, values):
    A = COO(ROW, COL, VALUES if values == "weighted" else None, shape=(6, 7))
    found = old[f"{kind} {values}"]
    assert type(found) is type(A.asformat(kind))
    assert found == (A.tosgt((4, 2)) if kind == "sgt" else A.asformat(kind))
    found.check()


def test_old_pickles_of_graphs_features_and_orders_load(old):
    A = COO(ROW, COL, VALUES, shape=(6, 7))
    assert type(old["graph weighted"]) is Graph
    assert old["graph weighted"].csr == A.tocsr()
    assert old["graph transposed weighted"].csr == Graph(A).transposed.csr
    assert old["cbsr"].shape == (4, 6)
    old["cbsr"].check()
    assert len(old["order"].perm) == 6


def test_what_torch_may_load_is_checked():
    """``torch.load`` calls it for files of anyone."""
    fields = {
        name: ("int32", (len(a),), np.array(a, "i4").tobytes())
        for name, a in {"indptr": [0, 1], "indices": [7]}.items()
    }
    A = unpickled("csr", "cpu", fields, {"shape": (1, 8)})
    assert A.indices.tolist() == [7]
    with pytest.raises(IndexRangeError, match=r"indices\[0\] is 7 but there are 7 columns"):
        unpickled("csr", "cpu", fields, {"shape": (1, 7)})


def test_old_places_are_the_same_modules():
    from sparsefmt.compressed import CSR
    from sparsefmt.coo import COO as OLD

    assert CSR is sparsefmt.CSR
    assert OLD is sparsefmt.COO
    for name in ("COO", "CSR", "CSC", "SGT", "CBSR"):  # pickled by their public place
        assert getattr(sparsefmt, name).__module__ == "sparsefmt"
