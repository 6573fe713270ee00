"""Casts of what files and other libraries bring: exact, or refused with the reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt.errors import DtypeError, IndexRangeError, UnsupportedError
from sparsefmt.formats import foreign

INTEGERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_become_float64(dtype):
    data = foreign.values("data", np.array([0, 1, 1], dtype))
    assert data.dtype == np.float64
    assert data.tolist() == [0, 1, 1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_stay_as_they_are(dtype):
    data = np.array([0.1, np.nan, np.inf], dtype)
    assert foreign.values("data", data) is data


def test_bfloat16_stays_as_it_is():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own")
    data = np.array([0.5], ml_dtypes.bfloat16)
    assert foreign.values("data", data) is data


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("given", [*INTEGERS, "float32", "float64", "longdouble"])
def test_a_dtype_that_is_asked_for_is_given(given, dtype):
    assert foreign.values("data", np.ones(3, given), dtype).dtype == dtype


@given(value=st.integers(-(2**63), 2**63 - 1))
def test_int64_is_exact_or_refused(value):
    exact = int(float(value)) == value
    if exact:
        assert int(foreign.values("w", np.array([value]))[0]) == value
    else:
        with pytest.raises(DtypeError, match=rf"w\[0\] is {value}, which float64 cannot hold"):
            foreign.values("w", np.array([value]))


@pytest.mark.parametrize("value", [2**53, 2**53 + 2, 2**63, 2**64 - 2**11])
def test_large_uint64_that_float64_holds(value):
    assert int(foreign.values("w", np.array([value], np.uint64))[0]) == value


@pytest.mark.parametrize("value", [2**53 + 1, 2**63 + 1, 2**64 - 1])
def test_large_uint64_that_float64_does_not_hold(value):
    with pytest.raises(DtypeError, match='pass dtype="float64" to round'):
        foreign.values("w", np.array([0, value], np.uint64))
    assert foreign.values("w", np.array([0, value], np.uint64), "float64")[1] == float(value)


def test_long_doubles_that_fit_become_float64():
    data = foreign.values("w", np.array([0.5, np.inf, np.nan], np.longdouble))
    assert data.dtype == np.float64
    assert data.tolist()[:2] == [0.5, np.inf]


def test_long_doubles_that_do_not_fit_are_refused():
    if np.finfo(np.longdouble).nmant == np.finfo(np.float64).nmant:
        pytest.skip("long double is float64 on this platform")
    with pytest.raises(DtypeError, match=r"w\[0\] is .* float64 cannot hold exactly"):
        foreign.values("w", np.array([1], np.longdouble) / 3)


@pytest.mark.parametrize(
    ("value", "given", "wanted"),
    [(1e300, "float64", "float32"), (1e10, "float32", "float16"), (70000, "int32", "float16")],
)
def test_overflow_is_refused(value, given, wanted):
    with pytest.raises(DtypeError, match=rf"w\[1\] is .* overflows {wanted}: use a wider dtype"):
        foreign.values("w", np.array([0, value], given), wanted)


def test_infinity_and_nan_are_no_overflow():
    data = foreign.values("w", np.array([np.inf, -np.inf, np.nan]), "float16")
    assert np.array_equal(data, np.array([np.inf, -np.inf, np.nan], "float16"), equal_nan=True)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("wanted", [None, "float32"])
def test_complex_values_are_unsupported(dtype, wanted):
    with pytest.raises(UnsupportedError, match="complex values are not supported"):
        foreign.values("w", np.ones(2, dtype), wanted)


@pytest.mark.parametrize("array", [["a"], [b"a"], np.zeros(1, "M8[s]"), np.zeros(1, "V4")])
def test_what_is_no_number_is_refused(array):
    with pytest.raises(DtypeError, match=r"w is .*: give numbers"):
        foreign.values("w", np.array(array))


def test_objects_are_refused():
    with pytest.raises(DtypeError, match="w holds Python objects"):
        foreign.values("w", np.array([None]))


def test_a_dtype_that_values_cannot_have_is_refused():
    with pytest.raises(DtypeError, match="dtype is int32"):
        foreign.values("w", np.ones(1), "int32")


def test_big_endian_values():
    assert foreign.values("w", np.array([1.5], ">f4")).dtype == np.dtype("float32")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64", ">i4"])
def test_small_indices_become_int32(dtype):
    assert foreign.indices("i", np.array([0, 7], dtype)).dtype == np.int32


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_index_dtypes_stay_as_they_are(dtype):
    array = np.array([0, 7], dtype)
    assert foreign.indices("i", array) is array


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_large_unsigned_indices_become_int64(dtype):
    found = foreign.indices("i", np.array([0, 2**31], dtype))
    assert found.dtype == np.int64
    assert found.tolist() == [0, 2**31]


def test_empty_unsigned_indices_become_int32():
    assert foreign.indices("i", np.zeros(0, np.uint64)).dtype == np.int32


@pytest.mark.parametrize(
    ("value", "given", "wanted", "message"),
    [
        (2**31, "int64", "int32", "i holds 2147483648, which int32 cannot: use int64"),
        (-(2**31) - 1, "int64", "int32", "i holds -2147483649, which int32 cannot"),
        (2**63, "uint64", "int64", r"which int64 cannot: indices are at most 2\*\*63 - 1"),
        (2**63, "uint64", None, r"which int64 cannot: indices are at most 2\*\*63 - 1"),
    ],
)
def test_indices_that_do_not_fit_are_refused(value, given, wanted, message):
    with pytest.raises(IndexRangeError, match=message):
        foreign.indices("i", np.array([value], given), wanted)


@pytest.mark.parametrize("array", [[0.0], [True], ["a"], [1j]])
def test_indices_that_are_no_integers_are_refused(array):
    with pytest.raises(DtypeError, match=r"i is .*: indices are integers"):
        foreign.indices("i", np.array(array))


def test_an_index_dtype_that_indices_cannot_have_is_refused():
    with pytest.raises(DtypeError, match="index_dtype is int16"):
        foreign.indices("i", np.array([1]), "int16")


@pytest.mark.parametrize(
    ("shape", "nnz", "dtype"),
    [((2**31 - 1, 1), 0, "int32"), ((1, 2**31), 0, "int64"), ((1, 1), 2**31, "int64")],
)
def test_the_smallest_index_dtype(shape, nnz, dtype):
    assert foreign.index_dtype(shape, nnz) == dtype
