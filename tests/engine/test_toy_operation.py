"""How an operation enters the house: a toy, which docs/architecture.md shows and explains.

``Y[i, f] = deg(i) * X[i, f]``, where ``deg(i)`` is the number of entries of row i.  In a room its
parts would be files of their own: the function and the row in ``api.py``, the loop in ``cpu.py``,
the oracle in ``oracle.py``.  The row is in the table only while the tests of this module run.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import CSR
from sparsefmt.errors import ShapeError, UnsupportedError
from sparsefmt.formats.oracle import assert_close, stored_entries
from sparsefmt.ops.engine import checks, choose, table
from sparsefmt.ops.engine.structure import Sizes
from sparsefmt.ops.engine.table import Kernel, Op, Price
from sparsefmt.testing import csr, features


def degree_scaled(A, X, *, out=None):
    """``Y[i, f] = deg(i) * X[i, f]``, where ``deg(i)`` is the number of entries of row i."""
    A = checks.sparse("A", A)
    X = checks.features("X", X, A=A, axis="rows")
    out = checks.output(out, shape=X.shape, like=X, inputs=[X], A=A)
    return choose.run(table.find("toy_degree_scaled"), A, X, out=out)


def make_row():
    """The row; a room makes its rows when it is imported: ``DEGREE_SCALED = Op(...)``."""
    return Op(
        "toy_degree_scaled",
        "Tensor x",
        kernels=(
            Kernel("toy_numpy", scale_on_cpu, ("csr",), "cpu", refuses=half_precision),
            choose.convert_to_csr("toy_degree_scaled"),
        ),
        results=lambda S, X: ((X.shape, X),),
        price=lambda S, X: Price(bytes=2 * X.nbytes + 8 * S.n_rows, flops=X.size),
    )


def half_precision(A, X, **_):
    """Reasons against the kernel."""
    return ["float16 has no loop here"] if X.dtype == np.float16 else []


def scale_on_cpu(A, X, *, out):
    """The kernel: ``A`` is a CSR of NumPy arrays, everything is checked."""
    np.multiply(X, A.lengths[:, None], out=out)


def oracle(A, X):
    """Entry by entry, in float64."""
    Y = np.zeros(X.shape)
    for i, _, _ in stored_entries(A):
        Y[i] += X[i]
    return Y


@pytest.fixture(scope="module")
def row():
    """The row, in the table for as long as this module needs it."""
    yield make_row()
    del table._operations["toy_degree_scaled"]


@given(data=st.data())
def test_the_operation_is_its_oracle_in_every_format(row, data):
    A = data.draw(csr(weighted=False))
    X = data.draw(features(A.n_rows, dtype="float32"))
    expected = oracle(A, X)
    # One product of a whole number and a float32: rounded once.
    bound = np.finfo(np.float32).eps * np.abs(expected)
    for format in ("csr", "coo", "csc"):
        assert_close(degree_scaled(A.asformat(format), X), expected, bound=bound)


def test_a_call_asks_only_kernels_of_its_format_and_place(row):
    def names(format, *, gpu):
        return [kernel.name for kernel in row.candidates[format, gpu]]

    assert names("csr", gpu=False) == ["toy_numpy", "toy_degree_scaled_through_csr"]
    assert names("coo", gpu=False) == names("csr", gpu=True) == ["toy_degree_scaled_through_csr"]


def test_a_call_that_no_kernel_takes_lists_the_reasons(row):
    A = CSR([0, 2, 3], [0, 1, 1], shape=(2, 2))
    with pytest.raises(UnsupportedError, match="not toy_numpy: float16 has no loop here"):
        degree_scaled(A, np.ones((2, 3), np.float16))
    with pytest.raises(ShapeError, match="X has 3 rows but A has 2 rows"):
        degree_scaled(A, np.ones((3, 3)))


def test_shapes_and_price_follow_from_sizes_alone(row):
    S, X = Sizes(n_rows=2, n_cols=2, nnz=3, index_dtype="int32"), np.ones((2, 5), np.float32)
    ((shape, like),) = row.results(S, X)
    assert shape == (2, 5)
    assert like is X
    assert row.price(S, X) == Price(bytes=2 * 40 + 16, flops=10)
