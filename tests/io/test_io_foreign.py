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
    assert (data.dtype, data.tolist()) == (np.float64, [0, 1, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_stay_as_they_are(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own")
    data = np.array([0.5, np.nan, np.inf]).astype(dtype)
    assert foreign.values("data", data) is data


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("given", [*INTEGERS, "float32", "float64", "longdouble"])
def test_a_dtype_that_is_asked_for_is_given(given, dtype):
    assert foreign.values("data", np.ones(3, given), dtype).dtype == dtype


@given(value=st.integers(-(2**63), 2**63 - 1))
def test_int64_is_exact_or_refused(value):
    if int(float(value)) == value:
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


def test_long_doubles_become_float64_where_they_fit():
    data = foreign.values("w", np.array([0.5, np.inf, np.nan], np.longdouble))
    assert (data.dtype, data.tolist()[:2]) == (np.float64, [0.5, np.inf])
    if np.finfo(np.longdouble).nmant == np.finfo(np.float64).nmant:
        pytest.skip("long double is float64 on this platform")
    with pytest.raises(DtypeError, match=r"w\[0\] is .* float64 cannot hold exactly"):
        foreign.values("w", np.array([1], np.longdouble) / 3)


def test_infinity_and_nan_are_no_overflow_and_bytes_come_in_any_order():
    data = foreign.values("w", np.array([np.inf, -np.inf, np.nan]), "float16")
    assert np.array_equal(data, np.array([np.inf, -np.inf, np.nan], "float16"), equal_nan=True)
    assert foreign.values("w", np.array([1.5], ">f4")).dtype == np.dtype("float32")


REFUSED = [
    (1e300, "float64", "float32", DtypeError, r"w\[1\] is .* overflows float32: use a wider dtype"),
    (1e10, "float32", "float16", DtypeError, r"w\[1\] is .* overflows float16: use a wider dtype"),
    (70000, "int32", "float16", DtypeError, r"w\[1\] is .* overflows float16: use a wider dtype"),
    *(
        (1, given, wanted, UnsupportedError, "complex values are not supported")
        for given in ("complex64", "complex128")
        for wanted in (None, "float32")
    ),
    *((0, given, None, DtypeError, r"w is .*: give numbers") for given in ("U1", "S1", "M8[s]")),
    (b"", "V4", None, DtypeError, r"w is .*: give numbers"),
    (None, object, None, DtypeError, "w holds Python objects"),
    (1, "float64", "int32", DtypeError, "dtype is int32"),
]


@pytest.mark.parametrize(("value", "given", "wanted", "error", "message"), REFUSED)
def test_values_that_do_not_fit_or_are_no_numbers_are_refused(value, given, wanted, error, message):
    array = np.zeros(2, given)
    array[1] = value
    with pytest.raises(error, match=message):
        foreign.values("w", array, wanted)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64", ">i4"])
def test_small_indices_become_int32(dtype):
    for array in (np.array([0, 7], dtype), np.zeros(0, dtype)):
        assert foreign.indices("i", array).dtype == np.int32


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_large_unsigned_indices_become_int64(dtype):
    found = foreign.indices("i", np.array([0, 2**31], dtype))
    assert (found.dtype, found.tolist()) == (np.int64, [0, 2**31])


@pytest.mark.parametrize(
    ("array", "wanted", "error", "message"),
    [
        ([2**31], "int32", IndexRangeError, "i holds 2147483648, which int32 cannot: use int64"),
        ([-(2**31) - 1], "int32", IndexRangeError, "i holds -2147483649, which int32 cannot"),
        ([2**63], "int64", IndexRangeError, r"int64 cannot: indices are at most 2\*\*63 - 1"),
        ([2**63], None, IndexRangeError, r"int64 cannot: indices are at most 2\*\*63 - 1"),
        *(
            (array, None, DtypeError, r"i is .*: indices are integers")
            for array in ([0.0], [True], ["a"], [1j])
        ),
        ([1], "int16", DtypeError, "index_dtype is int16"),
    ],
)
def test_indices_that_do_not_fit_or_are_no_integers_are_refused(array, wanted, error, message):
    with pytest.raises(error, match=message):
        foreign.indices("i", np.array(array), wanted)


@pytest.mark.parametrize(
    ("shape", "nnz", "dtype"),
    [((2**31 - 1, 1), 0, "int32"), ((1, 2**31), 0, "int64"), ((1, 1), 2**31, "int64")],
)
def test_the_smallest_index_dtype(shape, nnz, dtype):
    assert foreign.index_dtype(shape, nnz) == dtype
