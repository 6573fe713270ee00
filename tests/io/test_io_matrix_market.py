"""Matrix Market: what scipy.io reads, with sizes believed only when the text bears them out."""

import bz2
import gzip
import json
import re
import tarfile

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from test_io_limits import refused_within

from sparsefmt import COO
from sparsefmt.errors import FileFormatError, SparseFmtError, UnsupportedError
from sparsefmt.io import matrix_market, read, write

# Names of the archive's members, so that each is a test of its own; a test checks the list.
READ = """2col_array 3by0 Franz6_id1959_aug LFAT5 LFAT5_hypersparse array_hermitian
array_skew-symmetric array_symmetric bcsstk13 comments_full coordinate_hermitian_row
coordinate_pattern_symmetric_row coordinate_skew_symmetric_row coordinate_symmetric_row
coordinate_symmetric_row_general_dup coordinate_symmetric_row_general_zero cryg2500 empty eye3
eye3_array eye3_complex eye3_pattern jagmesh7 karate kepner_gilbert_graph lp_afiro matrix_int64
nist_ex1 nist_ex1_freeformat row_3by4 skew_int64 west0067
windows_lineendings_nist_ex1_more_freeformat young1c""".split()
REJECT = """full_noheader invalid_bad_banner invalid_bad_field invalid_bad_format
invalid_bad_symmetry invalid_bad_value invalid_dimensions_out_of_range_1
invalid_dimensions_out_of_range_3 invalid_indices_out_of_range_1 invalid_indices_out_of_range_2
invalid_indices_out_of_range_3 invalid_matrix_coord_too_long invalid_truncated_header_1
invalid_truncated_line_1 invalid_truncated_lines mangle1 mangled3 mangled8
overflow_index_gt_int64""".split()
EITHER = """dim_over_32_bit overflow_value_gt_float64 permissive_banner_one_percent_eye3
vector_coordinate""".split()


@pytest.fixture(scope="module")
def cases(shared_data, tmp_path_factory):
    archive = shared_data / "mm_io_cases_shared.tar.gz"
    if not archive.is_file():
        pytest.skip(f"no Matrix Market cases at {archive}")
    folder = tmp_path_factory.mktemp("mm")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "mm"


@pytest.fixture(scope="module")
def expected(cases):
    return json.loads((cases / "expected.json").read_text())


def checksums(A, integers):
    """Sum and weighted sum of all entries: exact for integers."""
    data = [1] * A.nnz if A.data is None else A.data.tolist()
    data = [int(value) for value in data] if integers else data
    places = zip(A.row.tolist(), A.col.tolist(), strict=True)
    weights = [(7 * i + 3 * j) % 11 + 1 for i, j in places]
    return sum(data), sum(v * w for v, w in zip(data, weights, strict=True))


def test_every_case_of_the_archive_is_here(cases):
    for folder, names in {"read": READ, "reject": REJECT, "either": EITHER}.items():
        assert sorted(path.stem for path in (cases / folder).iterdir()) == sorted(names)


@pytest.mark.parametrize("name", READ)
def test_archive_files_read_with_their_checksums(cases, expected, name):
    path, facts = cases / "read" / f"{name}.mtx", expected[f"{name}.mtx"]
    if facts["field"] == "complex":
        with pytest.raises(UnsupportedError, match=f"{name}.mtx: .* complex values are not supp"):
            read(path)
        return
    if name in ("matrix_int64", "skew_int64"):
        with pytest.raises(FileFormatError, match='pass dtype="float64" to round'):
            read(path)
        A = read(path, format="coo", dtype="float64")
        rounded = scipy.io.mmread(path, spmatrix=False)
        assert np.array_equal(A.toarray(), rounded.toarray().astype(np.float64))
        return
    A = read(path, format="coo")
    integers = facts["field"] != "real"
    found, weighted = checksums(A, integers)
    assert list(A.shape) == facts["shape"]
    assert (A.data is None) == (facts["field"] == "pattern")
    assert facts["nnz_expanded"] in (None, A.nnz)
    size = 0.0 if integers or A.data is None else 1e-12 * float(np.abs(A.data).sum())
    assert abs(found - facts["sum"]) <= size
    assert abs(weighted - facts["wsum"]) <= 11 * size


@pytest.mark.parametrize("name", REJECT)
def test_archive_files_that_are_refused(cases, name):
    path = cases / "reject" / f"{name}.mtx"
    with pytest.raises((ValueError, OverflowError)) as by_scipy:
        scipy.io.mmread(path, spmatrix=False)
    with pytest.raises(FileFormatError, match=re.escape(str(path))) as by_us:
        read(path)
    if found := re.match(r"Line (\d+):", str(by_scipy.value)):
        assert f"{path}, line {found[1]}: " in str(by_us.value)


@pytest.mark.parametrize("name", EITHER)
def test_archive_files_where_either_will_do(cases, expected, name):
    path, facts = cases / "either" / f"{name}.mtx", expected[f"{name}.mtx"]
    if name in ("overflow_value_gt_float64", "vector_coordinate"):
        with pytest.raises(FileFormatError, match=r"beyond float64|a vector file"):
            read(path)
        return
    A = read(path, format="coo")
    if "shape" in facts:
        assert list(A.shape) == facts["shape"]
    assert np.isfinite(A.data).all()
    assert A.nnz == 3


# Small files


def banner(text):
    return f"%%MatrixMarket matrix {text}\n"


PACK = {"mtx": bytes, "mtx.gz": gzip.compress, "mtx.bz2": bz2.compress}


def save(tmp_path, text, ending="mtx"):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(PACK[ending](text.encode("latin-1")))
    return path


REAL = banner("coordinate real general")
INTEGER = banner("coordinate integer general")
PATTERN = banner("coordinate pattern general")
ARRAY = banner("array real general")
SYMMETRIC = banner("array real symmetric")
PAIRS = banner("coordinate real symmetric")
SKEW = banner("coordinate integer skew-symmetric")
SKEW_PATTERN = banner("coordinate pattern skew-symmetric")
UNSIGNED = banner("coordinate unsigned-integer general")
UNSIGNED_SKEW = banner("coordinate unsigned-integer skew-symmetric")
SKEW_ARRAY = banner("array real skew-symmetric")

# name: text, line (None: the file as a whole), part of the message
BAD = {
    "1e11 entries": (REAL + "9 9 100000000000\n1 1 1\n", None, "more than max_bytes"),
    "1e8 entries": (REAL + "9 9 100000000\n1 1 1\n", 3, "ends after 6 bytes of the 100000000"),
    "1e8 edges": (PATTERN + "9 9 100000000\n1 1\n", 3, "copy the file again, or mend the entry"),
    "wide array": (ARRAY + "1000000 1000000\n1\n", None, "20000000000000 bytes to read, more than"),
    "array 3e4": (ARRAY + "30000 30000\n1\n", 3, "ends after 2 bytes of the 900000000 entries"),
    "sym array": (SYMMETRIC + "30000 30000\n1\n", 3, "of the 450015000"),
    "skew array": (SKEW_ARRAY + "30000 30000\n1\n", 3, "449985000"),
    "entries beyond int64": (REAL + "9 9 99999999999999999999\n", None, "Integer out of range"),
    "symmetric 2 x 3": (PAIRS + "2 3 1\n2 1 5\n", None, "cannot be 2 x 3: make it square"),
    "symmetric 3 x 2": (SYMMETRIC + "3 2\n1\n2\n3\n4\n5\n", None, "matrix cannot be 3 x 2"),
    "skew pattern": (SKEW_PATTERN + "2 2 1\n2 1\n", None, "pattern matrix cannot be skew"),
    "unsigned skew": (UNSIGNED_SKEW + "2 2 1\n2 1 5\n", None, "cannot be skew-symmetric"),
    "negated minimum": (SKEW + f"2 2 1\n2 1 {-(2**63)}\n", None, r"the negative of -2\*\*63"),
    "pattern array": (banner("array pattern general") + "2 2\n1\n1\n1\n1\n", None, "pattern"),
    "half": (INTEGER + "2 2 1\n1 1 1.5\n", 3, "'1 1 1.5' is not an entry of 3 numbers of field"),
    "power": (INTEGER + "2 2 1\n1 1 1e3\n", 3, "'1 1 1e3' is not an entry"),
    "tail": (REAL + "2 2 1\n1 1 1.5xyz\n", 3, "'1 1 1.5xyz' is not an entry"),
    "second tail": (REAL + "2 2 2\n1 1 1\n2 2 5kg\n", 4, "'2 2 5kg' is not an entry"),
    "hexadecimal": (REAL + "2 2 1\n1 1 0x10\n", 3, "'1 1 0x10' is not an entry"),
    "Fortran": (REAL + "2 2 1\n1 1 1d5\n", 3, "'1 1 1d5' is not an entry"),
    "two points": (REAL + "2 2 1\n1 1 1.5.2\n", 3, "'1 1 1.5.2' is not an entry"),
    "two powers": (REAL + "2 2 1\n1 1 1e5e2\n", 3, "'1 1 1e5e2' is not an entry"),
    "point in power": (REAL + "2 2 1\n1 1 1e5.2\n", 3, "'1 1 1e5.2' is not an entry"),
    "no power": (REAL + "2 2 1\n1 1 1e\n", 3, "'1 1 1e' is not an entry"),
    "minus inside": (REAL + "2 2 1\n1 1 5-3\n", 3, "'1 1 5-3' is not an entry"),
    "nan tail": (REAL + "2 2 1\n1 1 nant\n", 3, "'1 1 nant' is not an entry"),
    "infant": (REAL + "2 2 1\n1 1 infant\n", 3, "'1 1 infant' is not an entry"),
    "word": (REAL + "2 2 1\n1 1 one\n", 3, "'1 1 one' is not an entry"),
    "4 words": (REAL + "2 2 1\n1 1 1 1\n", None, "promises 3 numbers but 4 follow"),
    "valued pattern": (PATTERN + "2 2 1\n1 1 7\n", None, "promises 2 numbers but 3 follow"),
    "two on a line": (PATTERN + "2 2 2\n1 1 2 2\n", None, "Truncated"),
    "no value": (REAL + "2 2 1\n1 1 \n\n", 3, "Invalid floating-point value"),
    "broken over lines": (PATTERN + "2 2 2\n1\n1\n2 2\n", 3, "Invalid integer value"),
    "zero based": (REAL + "2 2 1\n0 1 5\n", 3, "Row index out of bounds: indices count from 1"),
    "column": (REAL + "2 2 1\n1 3 5\n", 3, "Column index out of bounds"),
    "negative": (REAL + "2 2 1\n1 -1 5\n", 3, "Column index out of bounds"),
    "overflow": (REAL + "2 2 1\n1 1 1e999\n", 3, "1e999 is beyond float64: write inf"),
    "long overflow": (REAL + f"2 2 1\n1 1 {'9' * 400}\n", 3, "is beyond float64"),
    "one overflow": (REAL + "2 2 2\n1 1 inf\n2 2 -1e999\n", 4, "-1e999 is beyond float64"),
    "array overflow": (ARRAY + "1 2\n1\n1e999\n", 4, "1e999 is beyond float64"),
    "symmetric overflow": (SYMMETRIC + "2 2\n1\n1e999\ninf\n", 4, "1e999 is beyond float64"),
    "big integer": (INTEGER + f"2 2 1\n1 1 {2**53 + 1}\n", None, r'pass dtype="float64" to round'),
    "big cell": (banner("array integer general") + f"1 1\n{2**53 + 1}\n", None, "cannot hold exa"),
    "int64": (INTEGER + f"2 2 1\n1 1 {2**63}\n", 3, r"integers lie between -2\*\*63"),
    "comment inside": (REAL + "2 2 2\n1 1 5\n% c\n2 2 5\n", 4, "'% c' is not an entry"),
    "too many": (ARRAY + "1 1\n1\n2\n", 4, "Too many values .* mend the entry count"),
    "empty array with value": (ARRAY + "0 5\n1\n", None, "promises 0 numbers but 1 follow"),
    "1 x 1 skew": (SKEW_ARRAY + "1 1\n5\n", None, "0 numbers but 1 follow"),
    "four sizes": (REAL + "2 2 1 7\n1 1 5\n", None, "dimension line not of length 3"),
    "real sizes": (REAL + "2.5 2 1\n1 1 5\n", None, "Invalid integer value"),
    "NUL": (REAL + "2 2 1\n1 1 \x005\n", 3, "is not an entry of 3 numbers"),
    "empty": ("", 1, "Missing banner"),
    "banner only": (REAL, 2, "Premature EOF"),
    "vector": ("%%MatrixMarket vector coordinate real general\n4 1\n1 5\n", 1, "a vector file"),
    "long header": (REAL + "%" + "x" * 70000 + "\n2 2 0\n", None, "more than 65536 bytes"),
    "comma": (REAL + "2 2 1\n1,1,5\n", 3, "'1,1,5' is not an entry"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path, case):
    text, line, message = BAD[case]
    for ending in PACK:
        path = save(tmp_path, text, ending)
        place = f"{path}, line {line}: " if line else f"{path}"
        if not text and ending != "mtx":
            place, message = f"{path}", ""  # what is packed of nothing has no line
        with pytest.raises(FileFormatError, match=f"{re.escape(place)}.*{message}"):
            read(path, max_bytes=2**36)


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "hermitian"])
def test_complex_values_are_unsupported(tmp_path, symmetry):
    text = banner(f"coordinate complex {symmetry}") + "1 1 1\n1 1 5 0\n"
    with pytest.raises(UnsupportedError, match=f"a complex {symmetry} matrix, and complex"):
        read(save(tmp_path, text))


@pytest.mark.parametrize("field", ["real", "double", "integer", "unsigned-integer", "pattern"])
@pytest.mark.parametrize("layout", ["coordinate", "array"])
@pytest.mark.parametrize("ending", ["mtx", "mtx.gz"])
def test_a_hermitian_matrix_without_complex_values_is_symmetric(tmp_path, field, layout, ending):
    if (layout, field) == ("array", "pattern"):
        pytest.skip("Matrix Market has no arrays without values")
    body = "2 2\n5\n3\n4\n"
    if layout == "coordinate":
        body = "2 2 3\n1 1 5\n2 1 3\n2 2 4\n"
        body = "2 2 3\n1 1\n2 1\n2 2\n" if field == "pattern" else body
    heads = [banner(f"{layout} {field} {symmetry}") for symmetry in ("hermitian", "symmetric")]
    A, B = (read(save(tmp_path, head + body, ending), format="coo") for head in heads)
    assert A == B
    assert A.nnz == 4


# name: text, dense matrix
GOOD = {
    "words": (REAL + "1 3 3\n1 1 NaN\n1 2 -Infinity\n1 3 inf\n", [[np.nan, -np.inf, np.inf]]),
    "signs": (REAL + "1 3 3\n1 1 -1.5e-3\n1 2 .5\n1 3 5.E+2\n", [[-1.5e-3, 0.5, 500.0]]),
    "blank lines": (REAL + "\n%\n\n1 1 1\n\n\n1 1 5\n\n", [[5.0]]),
    "no last newline": (REAL + "1 1 1\n1 1 5", [[5.0]]),
    "shortest": (REAL + "1 1 1\n1 1 5", [[5.0]]),
    "Windows": (REAL + "1 2 1\r\n1 2 5\r\n", [[0.0, 5.0]]),
    "tabs": (REAL + "1 2 1\n\t1\t2\t5\t\n", [[0.0, 5.0]]),
    "zeros in an array": (ARRAY + "2 2\n0\n-1\n0\n2\n", [[0.0, 0.0], [-1.0, 2.0]]),
    "skew": (SKEW_ARRAY + "2 2\n3\n", [[0.0, -3.0], [3.0, 0.0]]),
    "double": (banner("coordinate double general") + "1 1 1\n1 1 0.5\n", [[0.5]]),
    "capitals": ("%%MatrixMarket MATRIX Coordinate Real GENERAL\n1 1 1\n1 1 5\n", [[5.0]]),
    "0 x 2 array": (ARRAY + "0 2\n", np.zeros((0, 2))),
    "2 x 0 array": (ARRAY + "2 0\n", np.zeros((2, 0))),
    "0 x 0 array": (ARRAY + "0 0\n", np.zeros((0, 0))),
    "tiny": (REAL + "1 1 1\n1 1 1e-400\n", [[0.0]]),
    "zero in a big power": (REAL + "1 1 1\n1 1 0e999\n", [[0.0]]),
    "unsigned": (UNSIGNED + f"1 1 1\n1 1 {2**63}\n", [[2.0**63]]),
}


@pytest.mark.parametrize("case", GOOD)
def test_small_files_read(tmp_path, case):
    text, dense = GOOD[case]
    A = read(save(tmp_path, text))
    assert A.dtype == np.float64
    assert np.array_equal(A.toarray(), dense, equal_nan=True)


def test_explicit_zeros_and_duplicates_survive_in_order(tmp_path):
    A = read(save(tmp_path, REAL + "2 2 4\n2 1 0\n1 1 3\n2 1 -0\n1 1 4\n"), format="coo")
    assert A.row.tolist() == [1, 0, 1, 0]
    assert A.data.tolist() == [0, 3, 0, 4]
    assert np.signbit(A.data).tolist() == [False, False, True, False]


def test_arrays_patterns_and_integers_become_entries(tmp_path):
    assert read(save(tmp_path, ARRAY + "2 2\n0\n1\nnan\n0\n"), format="coo").nnz == 2
    A = read(save(tmp_path, banner("coordinate pattern symmetric") + "3 3 2\n2 1\n3 3\n"))
    assert A.data is None
    assert A.toarray().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    A = read(save(tmp_path, INTEGER + f"1 1 1\n1 1 {2**53 + 1}\n"), dtype="float64")
    assert A.data.tolist() == [2.0**53]  # rounded when asked


def test_a_fault_is_found_in_any_block(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_market, "_BLOCK", 64)
    lines = [f"{i} {i} {i}.5\n" for i in range(1, 101)]
    good = save(tmp_path, REAL + "100 100 100\n" + "".join(lines))
    assert read(good).nnz == 100
    for place in (0, 7, 50, 99):
        bad = [*lines[:place], f"{place + 1} {place + 1} 1.5.\n", *lines[place + 1 :]]
        path = save(tmp_path, REAL + "100 100 100\n" + "".join(bad))
        with pytest.raises(FileFormatError, match=f"line {place + 3}: .*1.5.' is not an entry"):
            read(path)


def test_promises_are_refused_before_anything_is_allocated(tmp_path):
    path = save(tmp_path, REAL + "9 9 500000000\n1 1 1\n")
    with refused_within(20e6, "ends after 6 bytes"):
        read(path, max_bytes=2**40)  # whatever memory is left here


@pytest.mark.parametrize("ending", ["mtx.gz", "mtx.bz2"])
def test_bombs_stop_at_max_bytes(tmp_path, ending):
    path = save(tmp_path, REAL + "1 1 1\n1 1 5\n", ending)
    with path.open("ab") as file:
        file.write(PACK[ending](b"\n" * 5_000_000) * 10)
    with refused_within(30e6, "more than max_bytes=1000000 bytes: raise max_b"):
        read(path, max_bytes=1_000_000)


@pytest.mark.parametrize("ending", ["mtx.gz", "mtx.bz2"])
@pytest.mark.parametrize("damage", ["cut", "flip", "junk"])
def test_damaged_compression_is_refused(tmp_path, ending, damage):
    path = tmp_path / f"a.{ending}"
    write(path, scipy_like(np.random.default_rng(0)))
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 0xFF
    bad = {"cut": raw[: len(raw) // 2], "flip": raw, "junk": b"not compressed at all"}
    path.write_bytes(bad[damage])
    with pytest.raises(FileFormatError, match=r"a\.mtx\..*(compressed data is damaged|line)"):
        read(path)


def scipy_like(rng):
    row, col = rng.integers(0, 100, (2, 500))
    return COO(row, col, rng.random(500), shape=(100, 100))


def test_scipy_reads_what_is_written_and_writes_what_is_read(tmp_path):
    A = scipy_like(np.random.default_rng(1))
    write(tmp_path / "a.mtx", A)
    B = scipy.io.mmread(tmp_path / "a.mtx", spmatrix=False)
    assert np.array_equal(B.coords, A.coords)
    assert np.array_equal(B.data, A.data)
    B = scipy.sparse.random_array((30, 20), density=0.2, rng=np.random.default_rng(2))
    scipy.io.mmwrite(tmp_path / "a.mtx", B)
    assert np.array_equal(read(tmp_path / "a.mtx").toarray(), B.toarray())


def test_errors_are_value_errors_and_lines_without_end_are_refused(tmp_path):
    for error in (ValueError, SparseFmtError):
        with pytest.raises(error, match="banner"):
            read(save(tmp_path, "nonsense"))
    path = save(tmp_path, REAL + "1 1 1\n1 1 " + "1" * 5_000_000)
    with pytest.raises(FileFormatError, match="a line of more than 65536 bytes"):
        read(path)


def test_an_error_of_a_call_is_not_the_files(tmp_path, monkeypatch):
    """SciPy without ``spmatrix=``, which is older than what is allowed, raises so."""
    monkeypatch.setattr(scipy.io, "mmread", lambda path: None)
    with pytest.raises(TypeError, match="spmatrix"):
        read(save(tmp_path, REAL + "1 1 1\n1 1 1\n"))
