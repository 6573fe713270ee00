"""``SPARSEFMT_DEBUG=1``: indices that nobody checked are looked at before they are used."""

import warnings

import numpy as np
import pytest
import torch
from op_cases import matrix

from sparsefmt import CBSR, COO, CSC, CSR, SGT, FormatError, Graph, IndexRangeError, autograd, ops
from sparsefmt.formats import checks

HERE = np.array([0, 1, 2], np.int32)
FAR = np.array([0, 9, 1], np.int32)
ENDS = np.array([0, 1, 2, 3], np.int32)
X = np.ones((3, 4), np.float32)


def far(format):
    """A matrix with an entry in column 9 of 3, or beyond its tile."""
    options = {"shape": (3, 3), "validate": "cheap"}
    if format == "sgt":
        good = matrix("power law", None, np.int32).tosgt()
        arrays = good._arrays() | {"columns": good.columns + 99}
        return SGT(**arrays, shape=good.shape, tile=good.tile, validate="cheap")
    if format == "cbsr":
        return CBSR(FAR[:, None].astype(np.uint8), X[:, :1].copy(), **options)
    if format == "coo":
        return COO(HERE, FAR, **options)
    return (CSR if format == "csr" else CSC)(ENDS, FAR, **options)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr(checks, "DEBUG", True)


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt", "cbsr"])
def test_unread_indices_are_named_and_never_followed(debug, format):
    with pytest.warns(UserWarning, match='validate="cheap" did not read the indices') as seen:
        A = far(format)
    assert seen[0].filename == __file__
    x = np.ones((A.n_cols, 4), np.float32)
    for call in (
        lambda: A @ x,
        lambda: ops.spmm_arg(A, x),
        lambda: ops.sddmm(A, np.ones((A.n_rows, 4), np.float32), x),
        lambda: ops.transpose(A),
        lambda: ops.sample(A, 2),
    ):
        with pytest.raises((IndexRangeError, FormatError)):
            call()
    if format != "cbsr":
        with pytest.raises((IndexRangeError, FormatError)):
            autograd.spmm(Graph(A), torch.ones(A.n_cols, 4))


def test_of_checked_indices_nothing_is_said(debug):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        A = COO(HERE, HERE, shape=(3, 3))
        graph = Graph.from_edge_index(np.stack([HERE, HERE]))
        assert ((A @ X) == (graph.csr @ X)).all()


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt", "cbsr"])
def test_without_it_nothing_is_read(format):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far(format)
