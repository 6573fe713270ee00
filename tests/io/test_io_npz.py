"""``.npz``: three layouts, and archives that lie."""

import io
import json
import os
import re
import struct
import sys
import zipfile
import zlib

import numpy as np
import pytest
import scipy.sparse
from test_io_limits import refused_within

from sparsefmt import CBSR, COO, CSR
from sparsefmt.errors import FileFormatError, SparseFmtError, UnsupportedError
from sparsefmt.io import bounded, read, write

INDPTR, INDICES = np.array([0, 2, 2, 3], np.int32), np.array([1, 3, 0], np.int32)
PLAIN = {"indptr": INDPTR, "indices": INDICES, "shape": np.array([3, 4])}
DATA = np.array([0.5, 0.0, -1.0], np.float32)


def save(tmp_path, **members):
    path = tmp_path / "a.npz"
    np.savez(path, **members)
    return path


def header(**changes):
    facts = {"version": 1, "format": "csr", "values": None} | changes
    return np.array(json.dumps({k: v for k, v in facts.items() if v != "leave out"}))


def own(**changes):
    return PLAIN | {"sparsefmt": header()} | changes


# Layouts


def test_plain_arrays_are_read_and_other_members_ignored(tmp_path):
    assert read(save(tmp_path, **PLAIN)) == CSR(INDPTR, INDICES, shape=(3, 4))
    others = {"x": np.ones((3, 2)), "meta": "{}", "y": np.array([None, {}], object)}
    A = read(save(tmp_path, **PLAIN, **others, data=DATA, format="csr"))
    assert A == CSR(INDPTR, INDICES, DATA, shape=(3, 4))
    # What is not read does not count.
    assert read(save(tmp_path, **PLAIN, x=np.zeros(1000)), max_bytes=2000).nnz == 3


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("format", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int8", "uint16", "bool"])
def test_scipy_files(tmp_path, dtype, format, kind, compressed):
    S = getattr(scipy.sparse, f"{format}_{kind}")(X := np.array([[0, 1, 0], [1, 0, 1]], dtype))
    index_dtype = S.tocoo().coords[0].dtype
    if format != "coo" and kind == "array":  # room behind the last pointer, as SciPy allows
        S.data, S.indices = (np.append(a, a[-2:]) for a in (S.data, S.indices))
    scipy.sparse.save_npz(tmp_path / "a.npz", S, compressed=compressed)
    A = read(tmp_path / "a.npz", format=None)
    assert (A.format, A.index_dtype) == (format, index_dtype)
    assert A.dtype == (dtype if dtype.startswith("float") else "float64")
    assert np.array_equal(A.toarray(), X)


def test_coordinates_in_one_member_and_arrays_in_fortran_order_are_read(tmp_path):
    members = {"coords": np.array([[0, 1], [2, 0]]), "data": np.ones(2), "shape": [2, 3]}
    A = read(save(tmp_path, **members, format=b"coo"), format="coo")
    assert A == COO([0, 1], [2, 0], np.ones(2), shape=(2, 3)).astype(index_dtype="int64")
    X = np.asfortranarray(np.array([[1.0, 2.0], [3.0, 4.0]]))
    indices = np.asfortranarray(np.array([[0, 1], [0, 1]], np.uint8))
    facts = header(format="cbsr", values="float64")
    A = read(save(tmp_path, indices=indices, data=X, shape=[2, 2], sparsefmt=facts), format="cbsr")
    assert A.toarray().tolist() == X.tolist()


@pytest.mark.parametrize("format", ["bsr", "dia"])
def test_other_formats_of_scipy_are_unsupported(tmp_path, format):
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.eye_array(4, format=format))
    with pytest.raises(UnsupportedError, match=rf"a\.npz: SciPy's format '{format}'.*\.tocsr\(\)"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "uint64", "int64", ">i4"])
def test_indices_of_any_integer_dtype(tmp_path, dtype):
    A = read(save(tmp_path, **PLAIN | {"indices": INDICES.astype(dtype)}))
    assert A.index_dtype == (np.int64 if dtype == "int64" else np.int32)
    assert A.indices.tolist() == [1, 3, 0]


def test_integers_are_rounded_when_asked(tmp_path):
    path = save(tmp_path, **PLAIN, data=np.array([2**53 + 1, 0, 1]))
    with pytest.raises(FileFormatError, match=r'a\.npz: data\[0\] .* pass dtype="float64"'):
        read(path)
    assert read(path, dtype="float64").data[0] == 2.0**53


UNSUPPORTED = {
    "complex": (PLAIN | {"data": np.ones(3, complex)}, "data is complex128: complex values"),
    "version 2": (own(sparsefmt=header(version=2)), r"layout version 2, .* update sparsefmt"),
    "bfloat16 without ml_dtypes": (
        own(sparsefmt=header(values="bfloat16"), data=np.zeros(3, np.uint16)),
        "pip install ml_dtypes",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_says_so(tmp_path, monkeypatch, case):
    members, message = UNSUPPORTED[case]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match=rf"a\.npz: .*{message}"):
        read(save(tmp_path, **members))


# Members that are wrong

BAD_MEMBERS = {
    "no shape": ({"shape": None}, 'member "shape" is missing .there are indptr, indices'),
    "no indptr": ({"indptr": None}, 'member "indptr" is missing'),
    "no indices": ({"indices": None}, 'member "indices" is missing'),
    "pickle": ({"indices": np.array([1, 3, None], object)}, '"indices" holds pickled Python obj'),
    "pickled data": ({"data": np.array([1, 3, None], object)}, '"data" holds pickled Python obj'),
    "records": ({"data": np.zeros(3, [("a", "f4")])}, 'member "data" is damaged .shape'),
    "no size": ({"data": np.zeros(3, "V0")}, 'member "data" is damaged .shape'),
    "words": ({"data": np.array(["a", "b", "c"])}, "data is <U1: give numbers"),
    "dates": ({"data": np.zeros(3, "M8[s]")}, r"data is datetime64\[s\]: give numbers"),
    "real indices": ({"indices": INDICES.astype(float)}, "indices is float64: indices are int"),
    "boolean indices": ({"indices": INDICES > 0}, "indices is bool"),
    "2-D indices": ({"indices": INDICES[None]}, r"indices has shape \(1, 3\)"),
    "0-D indices": ({"indices": np.int32(3)}, r"indices has shape \(\)"),
    "large index": ({"indices": INDICES + 9}, r"indices\[0\] is 10 but there are 4 columns"),
    "negative index": ({"indices": INDICES - 1}, r"indices\[2\] is -1"),
    "beyond int64": ({"indices": np.array([2**63] * 3, np.uint64)}, "which int64 cannot"),
    "long indptr": ({"indptr": np.zeros(9, np.int32)}, "indptr has shape"),
    "first pointer": ({"indptr": INDPTR + 1}, r"indptr\[0\] is 1"),
    "last pointer": ({"indptr": np.array([0, 2, 2, 2])}, r"indptr\[-1\] is 2"),
    "falling indptr": ({"indptr": np.array([0, 5, 2, 3])}, "indptr decreases from 5 to 2"),
    "long data": ({"data": np.ones(4)}, "data has shape"),
    "2-D data": ({"data": np.ones((3, 1))}, "data has shape"),
    "real shape": ({"shape": np.array([3.0, 4.0])}, "shape is .*: give two integers"),
    "3 sizes": ({"shape": np.array([3, 4, 5])}, "shape is .*: give two integers"),
    "scalar shape": ({"shape": np.array(3)}, "shape is .*: give two integers"),
    "negative shape": ({"shape": np.array([-3, 4])}, "shape is .*-3"),
    "huge shape": ({"shape": np.array([2**60, 4])}, "indptr has shape|sizes go to"),
    "overflow": ({"data": np.array([1e5] * 3, np.longdouble) ** 200}, "overflows float64|exactly"),
}


BAD_OWN = {
    "no JSON": ({"sparsefmt": "{"}, 'member "sparsefmt" is no JSON'),
    "deep JSON": ({"sparsefmt": "[" * 10_000}, 'member "sparsefmt" is no JSON'),
    "long JSON": ({"sparsefmt": "[" * 20_000}, 'member "sparsefmt" has more than 65536 bytes'),
    "a list": ({"sparsefmt": "[]"}, r'member "sparsefmt" is \[\]: it must give version 1'),
    "numbers": ({"sparsefmt": np.ones(3)}, 'member "sparsefmt" is float64: it must be one string'),
    "two strings": ({"sparsefmt": ["a", "b"]}, "it must be one string"),
    "version 0": ({"sparsefmt": header(version=0)}, "it must give version 1"),
    "version x": ({"sparsefmt": header(version="x")}, "it must give version 1"),
    "no version": ({"sparsefmt": header(version="leave out")}, "it must give version 1"),
    "format": ({"sparsefmt": header(format="bsr")}, "a format among coo, csr, csc, cbsr, sgt"),
    "format list": ({"sparsefmt": header(format=["csr"])}, "a format among"),
    "values": ({"sparsefmt": header(values="int8")}, "and the dtype of the values"),
    "no values": ({"sparsefmt": header(values="leave out")}, "and the dtype of the values"),
    "missing data": ({"sparsefmt": header(values="float32")}, 'member "data" is missing'),
    "unsaid data": ({"data": DATA}, "unexpected members data beside a CSR: leave them out"),
    "extra": ({"x": DATA, "y": DATA}, "unexpected members x, y beside a CSR"),
    "other dtype": (
        {"sparsefmt": header(values="float64"), "data": DATA},
        'member "data" is float32 but the header says float64',
    ),
    "bfloat16": (
        {"sparsefmt": header(values="bfloat16"), "data": DATA},
        'member "data" is float32: bfloat16 is stored as uint16 bits',
    ),
    "uint8 indices": ({"indices": INDICES.astype(np.uint8)}, "indices"),
    "no tile": ({"sparsefmt": header(format="sgt")}, "unexpected members indices, indptr"),
}


BAD_SCIPY = {
    "no data": ({"format": b"csr"}, 'member "data" is missing'),
    "coo without col": ({"format": b"coo", "row": INDICES}, 'member "col" is missing'),
    "3-D": ({"format": b"coo", "coords": np.zeros((3, 2), int)}, r"give \(2, nnz\)"),
    "1-D": ({"format": b"coo", "coords": np.zeros(3, int)}, r"give \(2, nnz\)"),
    "numbers": ({"format": np.ones(2)}, 'member "format" is float64: it must be one string'),
    "pickle": ({"format": np.array("csr", object)}, 'member "format" holds pickled'),
}


SGT = {**CSR(INDPTR, INDICES, DATA, shape=(3, 4)).tosgt()._arrays(), "shape": [3, 4]}
#: Members of a file, and what is refused of them.
BAD = {
    **{f"plain, {case}": (PLAIN | changes, text) for case, (changes, text) in BAD_MEMBERS.items()},
    **{f"own, {case}": (own(**changes), text) for case, (changes, text) in BAD_OWN.items()},
    **{f"SciPy's, {case}": (PLAIN | changes, text) for case, (changes, text) in BAD_SCIPY.items()},
    **{
        f"tile {tile}": (SGT | {"sparsefmt": header(format="sgt", values="float32", tile=tile)}, "")
        for tile in (None, 0, [16], [0, 8], "large", [2, 3])
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_members_are_refused(tmp_path, case):
    members, message = BAD[case]
    path = save(tmp_path, **{name: one for name, one in members.items() if one is not None})
    with pytest.raises(FileFormatError, match=f"{re.escape(str(path))}: .*{message}"):
        read(path)


# Archives that lie


def npy(array):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array), allow_pickle=False)
    return out.getvalue()


def archive(tmp_path, compression=zipfile.ZIP_STORED, **members):
    """An archive of raw bytes; ``PLAIN`` where a member is not given."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", compression) as zip_file:
        for name, raw in ({name: npy(one) for name, one in PLAIN.items()} | members).items():
            zip_file.writestr(f"{name}.npy", raw)
    return path


def magic(text, version=(1, 0)):
    body = text.encode("latin-1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(body))
    return b"\x93NUMPY" + bytes(version) + size + body


def described(shape, descr="<i4", order="False"):
    return f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


BAD_BYTES = {
    "no magic": (b"nonsense", 'member "indices" is damaged'),
    "empty": (b"", 'member "indices" is damaged'),
    "version 3": (magic(described("(3,)"), (3, 0)) + b"\0" * 12, "version .3, 0. of the .npy"),
    "version 9": (magic(described("(3,)"), (9, 9)), 'member "indices" is damaged'),
    "huge": (magic(described("(1000000000000,)")), r"needs 4000000000000 bytes, but 0 follow"),
    "more": (magic(described("(4,)")) + b"\0" * 12, r"needs 16 bytes, but 12 follow"),
    "less": (magic(described("(2,)")) + b"\0" * 12, r"needs 8 bytes, but 12 follow"),
    "negative": (magic(described("(-3,)")) + b"\0" * 12, r"shape \(-3,\)"),
    "two negative": (magic(described("(-3, -1)")) + b"\0" * 12, r"shape \(-3, -1\)"),
    "real shape": (magic(described("(3.0,)")) + b"\0" * 12, "damaged"),
    "no shape": (magic("{'descr': '<i4', 'fortran_order': False}\n") + b"\0" * 12, "damaged"),
    "no dictionary": (magic("[1, 2]\n"), "damaged"),
    "no header": (magic("{\n"), "damaged"),
    "code": (magic("__import__('os').abort()\n"), "damaged"),
    "nested": (magic("(" * 500 + "\n"), "damaged|memory|Memory"),
    "long header": (magic("{" + " " * 60000 + "}\n"), "damaged"),
    "dtype": (magic(described("(3,)", "<q9")) + b"\0" * 12, "damaged"),
    "objects": (magic(described("(3,)", "|O")) + b"\0" * 24, "holds pickled Python objects"),
    "cut header": (magic(described("(3,)"))[:30], "damaged"),
    "Python 2": (magic(described("(9L,)")) + b"\0" * 12, "needs 36 bytes, but 12 follow"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_bad_arrays_are_refused(tmp_path, case):
    raw, message = BAD_BYTES[case]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = archive(tmp_path, compression, indices=raw)
        with pytest.raises(SparseFmtError, match=f"{re.escape(str(path))}: .*{message}"):
            read(path)


def test_arrays_of_version_2_and_of_python_2_are_read(tmp_path):
    for raw in (magic(described("(3,)"), (2, 0)), magic(described("(3L,)"))):
        path = archive(tmp_path, indices=raw + INDICES.tobytes())
        assert read(path).indices.tolist() == [1, 3, 0]


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"PK\x03\x04"])
def test_what_is_no_archive_is_refused(tmp_path, raw):
    path = tmp_path / "a.npz"
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"a\.npz: the archive is damaged .not a zip archive"):
        read(path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_truncated_archives_are_refused(tmp_path, share):
    path = save(tmp_path, **PLAIN)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(FileFormatError, match=r"a\.npz: "):
        read(path)


def test_wrong_checksums_and_encrypted_members_are_refused(tmp_path):
    good = archive(tmp_path).read_bytes()
    for place, bit, message in (
        (good.index(INDICES.tobytes()), 2, 'member "indices" is damaged .Bad CRC-32'),
        (good.rindex(b"indices.npy") - 46 + 8, 1, "the archive is damaged .*encrypted"),
    ):
        raw = bytearray(good)
        raw[place] ^= bit
        (tmp_path / "a.npz").write_bytes(raw)
        with pytest.raises(FileFormatError, match=message):
            read(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (24, 10**9, "claims 1000000000 bytes out of"),
        (20, 10**9, "claims .* bytes out of 1000000000: it is truncated"),
        (24, 20, "damaged"),
        (42, 2**31, "Truncated file header"),
        (16, 0, "Bad CRC-32"),
    ],
)
def test_a_central_directory_that_lies_is_refused(tmp_path, offset, value, message):
    """In a field of 4 bytes of a member."""
    path = archive(tmp_path)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"indices.npy") - 46
    assert raw[at : at + 4] == b"PK\x01\x02"
    raw[at + offset : at + offset + 4] = struct.pack("<I", value)
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match=f'(member "indices"|archive) .*{message}'):
        read(path)


def test_members_may_be_copied_in_another_order_but_not_changed(tmp_path):
    A, path = CSR(INDPTR, INDICES, DATA, shape=(3, 4)), tmp_path / "a.npz"
    write(path, A)
    with np.load(path) as members:
        copied = dict(sorted(members.items()))
    assert read(save(tmp_path, **copied)) == A
    with pytest.raises(FileFormatError, match=r"damaged; .* changed matrix with sparsefmt\.write"):
        read(save(tmp_path, **copied | {"data": DATA + 1}))


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "sgt", "cbsr", "bfloat16"])
def test_no_byte_of_a_central_directory_changes_what_is_read(tmp_path, kind):
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 without ml_dtypes")
    A = CSR([0, 1, 1], [1], np.ones(1), shape=(2, 2))
    if kind == "cbsr":
        A = CBSR(np.zeros((1, 1), np.uint8), np.ones((1, 1)), shape=(1, 2))

    def content():
        B = read(path, format=None)
        return f"{B} {B._arrays()}"

    path = tmp_path / "a.npz"
    write(path, A.astype(kind) if kind == "bfloat16" else A.asformat(kind))
    good, raw = content(), path.read_bytes()
    places, refused = range(raw.index(b"PK\1\2"), len(raw)), 0
    with path.open("r+b", buffering=0) as file:
        for place in places:
            os.pwrite(file.fileno(), bytes([raw[place] ^ 1 << place % 8]), place)
            try:
                assert content() == good, place
            except SparseFmtError:
                refused += 1
            os.pwrite(file.fileno(), raw[place : place + 1], place)
    assert len(places) / 2 < refused < len(places)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path, compression):
    with pytest.raises(FileFormatError, match="packed by other means than deflate"):
        read(archive(tmp_path, compression))


def test_members_are_counted_by_their_names(tmp_path):
    path = archive(tmp_path)
    with zipfile.ZipFile(path, "a") as zip_file:
        zip_file.writestr("indices", npy(INDICES))
    with pytest.raises(FileFormatError, match="4 members, 3 of different names"):
        read(path)
    with pytest.raises(FileFormatError, match="1003 members"):
        read(archive(tmp_path, **{f"x{i}": b"" for i in range(1000)}))


def test_names_are_never_paths(tmp_path):
    path = archive(tmp_path, **{"../../evil": npy(DATA)})
    assert read(path).nnz == 3
    assert not (tmp_path.parent.parent / "evil.npy").exists()


def test_bombs_are_refused_before_they_are_inflated(tmp_path):
    zeros = npy(np.zeros(25_000_000, np.int32))
    path = archive(tmp_path, zipfile.ZIP_DEFLATED, indices=zeros)
    assert path.stat().st_size < 200_000
    with refused_within(2e6, r'"indices" has 100000128 bytes.*max_bytes=1000000:'):
        read(path, max_bytes=1_000_000)


def test_the_limit_is_on_all_members_together(tmp_path):
    path = save(tmp_path, **PLAIN)
    total = sum(info.file_size for info in zipfile.ZipFile(path).infolist())
    assert read(path, max_bytes=total).nnz == 3
    with pytest.raises(FileFormatError, match=f"beyond max_bytes={total - 1}: raise max_bytes"):
        read(path, max_bytes=total - 1)


def test_broken_covers_what_zlib_raises():
    assert zlib.error in bounded.BROKEN
