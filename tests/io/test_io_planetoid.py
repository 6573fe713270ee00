"""Planetoid's raw files: read as the pickles they are, without running any of them."""

import io
import pickle
import struct
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse

from sparsefmt import CSR
from sparsefmt.errors import FileFormatError, SparseFmtError
from sparsefmt.io import read, read_planetoid

# Seven vertices: 0 .. 3 in allx, of which 0 and 1 train; 6 and 4 test; 5 is in no file (CiteSeer).
NEIGHBOURS = {0: [1, 2], 1: [0], 2: [0, 2, 3], 3: [6, 6], 4: [0], 5: [], 6: [3]}
EDGES = {(0, 1), (0, 2), (0, 4), (2, 3), (3, 6)}
ALLX = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]], np.float32)
TX = np.array([[0, 0, 5], [0, 4, 0]], np.float32)
ALLY = np.array([[1, 0], [0, 1], [1, 0], [0, 0]], np.int32)
TY = np.array([[0, 1], [1, 0]], np.int32)
TEST = [6, 4]


def parts(sparse=True):
    matrix = scipy.sparse.csr_matrix if sparse else np.array
    graph = defaultdict(list, NEIGHBOURS)
    x = {"x": matrix(ALLX[:2]), "allx": matrix(ALLX), "tx": matrix(TX)}
    return x | {"y": ALLY[:2], "ally": ALLY, "ty": TY, "graph": graph}


def save(folder, protocol=2, name="tiny", **changes):
    for part, value in (parts() | changes).items():
        raw = value if isinstance(value, bytes) else pickle.dumps(value, protocol)
        (folder / f"ind.{name}.{part}").write_bytes(raw)
    (folder / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in TEST))
    return folder


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("sparse", [True, False])
def test_everything_is_read(tmp_path, sparse, protocol):
    data = read_planetoid(save(tmp_path, protocol, **parts(sparse)))
    x = np.zeros((7, 3), np.float32)
    x[[0, 1, 2, 3, 6, 4]] = np.concatenate([ALLX, TX])
    assert isinstance(data.x, CSR) == sparse
    assert data.x.dtype == np.float32
    assert np.array_equal(data.x.toarray() if sparse else data.x, x)
    assert data.y.tolist() == [0, 1, 0, -1, 0, -1, 1]
    assert np.flatnonzero(data.train_mask).tolist() == [0, 1]
    assert np.flatnonzero(data.val_mask).tolist() == [2, 3]
    assert np.flatnonzero(data.test_mask).tolist() == [4, 6]
    coo = data.graph.tocoo()
    found = set(zip(coo.row.tolist(), coo.col.tolist(), strict=True))
    assert found == EDGES | {(j, i) for i, j in EDGES}
    assert (data.graph.nnz, data.graph.data) == (2 * len(EDGES), None)
    assert data.graph.has_sorted_indices
    assert data.graph.index_dtype == np.int32
    data.graph.check()
    assert read(tmp_path) == read(tmp_path / "ind.tiny.graph") == data.graph
    assert read(tmp_path, format="coo").nnz == data.graph.nnz


def test_numpy_integers_and_both_kinds_of_scipy_are_read(tmp_path):
    graph = {np.int64(k): [np.int32(v) for v in vs] for k, vs in NEIGHBOURS.items()}
    assert read(save(tmp_path, graph=graph)).nnz == 2 * len(EDGES)
    kind = scipy.sparse.csr_array
    changes = {"x": kind(ALLX[:2]), "allx": kind(ALLX), "tx": kind(TX)}
    assert read_planetoid(save(tmp_path, **changes)).x.nnz == 6


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", ">f8", ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_features_of_other_dtypes(tmp_path, dtype, order):
    given = {"x": ALLX[:2], "allx": ALLX, "tx": TX}
    changes = {name: np.asarray(one, dtype=dtype, order=order) for name, one in given.items()}
    x = read_planetoid(save(tmp_path, **changes)).x
    assert x.dtype == ("float32" if dtype == "float32" else "float64")
    assert np.array_equal(x[[6, 4]], TX)


def python2_array(array):
    """What Python 2 wrote: protocol 0, and raw bytes as a string."""
    raw = "".join(f"\\x{byte:02x}" for byte in array.tobytes())
    sizes = "".join(f"I{size}\n" for size in array.shape)
    kind = array.dtype.str
    return (
        "cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n("
        f"{sizes}tcnumpy\ndtype\n(S'{kind[1:]}'\nI0\nI1\ntR(I3\nS'{kind[0]}'\nNNNI-1\nI-1\nI0\ntb"
        f"I00\nS'{raw}'\ntb"
    )


def python2_csr(matrix):
    state = "".join(
        f"S'{name}'\n{python2_array(getattr(matrix, name))}s"
        for name in ("indptr", "indices", "data")
    )
    rows, cols = matrix.shape
    return (
        "ccopy_reg\n_reconstructor\n(cscipy.sparse.csr\ncsr_matrix\nc__builtin__\nobject\nNtR(d"
        f"S'_shape'\n(I{rows}\nI{cols}\ntsS'maxprint'\nI50\ns{state}b"
    )


def test_files_of_python_2(tmp_path):
    graph = "ccollections\ndefaultdict\n(c__builtin__\nlist\ntR"
    for key, values in NEIGHBOURS.items():
        graph += f"I{key}\n(l" + "".join(f"I{value}\na" for value in values) + "s"
    old = {"graph": f"{graph}.".encode()}
    for name in ("x", "allx", "tx", "y", "ally", "ty"):
        part = parts()[name]
        text = python2_array(part) if isinstance(part, np.ndarray) else python2_csr(part)
        old[name] = f"{text}.".encode()
    a, b = read_planetoid(save(tmp_path, **old)), read_planetoid(save(tmp_path))
    assert a.graph == b.graph
    assert a.x == b.x
    assert np.array_equal(a.y, b.y)


# Malice


class Call:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


MARKER = []


def strike(*args):
    MARKER.append(args)
    return {}


MALICE = {
    "os.system": b"cos\nsystem\n(S'touch evil'\ntR.",
    "eval": b"c__builtin__\neval\n(S'1/0'\ntR.",
    "builtins.exec": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x031/0\x85R.",
    "getattr": b"c__builtin__\ngetattr\n(c__builtin__\nobject\nS'x'\ntR.",
    "a class by its path": b"\x80\x04\x8c\x0bcollections\x8c\x10defaultdict.keys\x93.",
    "object": b"(I1\nios\nsystem\n.",
    "numpy.load": b"cnumpy\nload\n(S'x'\ntR.",
    "a subclass": b"cnumpy.core.multiarray\n_reconstruct.__class__\n.",
}


@pytest.mark.parametrize("case", MALICE)
def test_code_is_refused_by_name(tmp_path, case):
    save(tmp_path, graph=MALICE[case])
    with pytest.raises(FileFormatError, match=r"ind\.tiny\.graph: .* nothing of it was run"):
        read(tmp_path)


@pytest.mark.parametrize("part", ["graph", "x", "allx", "tx", "y", "ally", "ty"])
def test_code_is_never_run(tmp_path, part):
    save(tmp_path, **{part: Call(strike, "x")})
    with pytest.raises(FileFormatError, match=rf"ind\.tiny\.{part}: .*asks for .*strike"):
        read_planetoid(tmp_path)
    assert MARKER == []


def test_extension_codes_do_not_reach_the_registry(tmp_path):
    import copyreg

    copyreg.add_extension(__name__, "strike", 240)
    try:
        copyreg._extension_cache[240] = strike
        with pytest.raises(FileFormatError, match="nothing of it was run"):
            read(save(tmp_path, graph=b"\x80\x02\x82\xf0)R."))
        assert MARKER == []
    finally:
        copyreg.remove_extension(__name__, "strike", 240)


def test_records_cannot_be_used_to_change_the_reader(tmp_path):
    """BUILD on a class would set its attributes."""
    save(tmp_path, graph=b"ccollections\ndefaultdict\n(dS'items'\nI1\nsb.")
    with pytest.raises(FileFormatError):
        read(tmp_path)
    assert read(save(tmp_path)).nnz == 10


def frombuffer(shape):
    """A pickle of an array of this shape, which is a pickle too."""
    return b"\x80\2cnumpy.core.numeric\n_frombuffer\n(K\1N" + shape + b"X\1\0\0\0CtR."


LARGE = b"(\x8a\x09" + bytes(7) + b"\x80\0t"
LISTS = b"]q\0" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(28))


BAD = {
    "empty": ({"graph": b""}, "nothing of it was run"),
    "text": ({"graph": b"hello"}, "nothing of it was run"),
    "cut": ({"graph": pickle.dumps(NEIGHBOURS, 2)[:-9]}, "nothing of it was run"),
    "a list": ({"graph": [[1], [0]]}, "a list instead of a dictionary"),
    "a set": ({"graph": {0: (1, 2)}}, "neighbours that are no list"),
    "words": ({"graph": {"a": [1]}}, "a str instead of a vertex"),
    "word": ({"graph": {0: ["a"]}}, "a str instead of a vertex"),
    "real": ({"graph": {0: [1.5]}}, "a float instead of a vertex"),
    "real scalar": ({"graph": {0: [np.float64(1.5)]}}, "a float instead of a vertex"),
    "array": ({"graph": {0: [np.ones(2)]}}, "a array instead of scalar"),
    "negative": ({"graph": {0: [-1]}}, "vertices from -1 to 0"),
    "far": ({"graph": {0: [2**40]}}, "vertices from 0 to 1099511627776"),
    "farther": ({"graph": {0: [2**70]}}, "nothing of it was run"),
    "no arrays": ({"x": {}}, "a _?dict instead of array or buffer"),
    "3-D": ({"y": np.ones((2, 1, 1))}, r"an array of shape \(2, 1, 1\)"),
    "objects": ({"y": np.array([[None]])}, "values of dtype 'O8?'"),
    "strings": ({"y": np.array([["a"]])}, "values of dtype 'U1'"),
    "complex": ({"y": np.ones((2, 2), complex)}, "values of dtype 'c16'"),
    "other classes": ({"x": Call(defaultdict)}, "a mapping instead of array or buffer"),
    "another matrix": ({"x": scipy.sparse.csc_matrix(ALLX)}, "it asks for scipy.sparse._csc"),
    "sparse labels": ({"ty": scipy.sparse.csr_matrix(TY)}, r"ty: labels are a CSR .*\.toarray"),
    "rows": ({"x": ALLX[:1]}, "the parts do not fit together"),
    "labels": ({"ally": ALLY[:3]}, "the parts do not fit together"),
    "widths": ({"tx": TX[:, :2]}, "the parts do not fit together"),
    "classes": ({"ty": TY[:, :1]}, "the parts do not fit together"),
    "tests": ({"tx": TX[:1], "ty": TY[:1]}, "the parts do not fit together"),
    "shape": ({"x": frombuffer(b"(K\1(%stt" % LISTS)}, "a shape with other sizes"),
    "long shape": ({"x": frombuffer(b"(" + b"K\1" * 33 + b"t")}, "a tuple as a shape"),
    "large shape": ({"x": frombuffer(LARGE)}, "a shape with other sizes"),
    "half dense": ({"tx": TX}, "allx and tx are not both sparse or both dense"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parts_are_refused(tmp_path, case):
    changes, message = BAD[case]
    with pytest.raises(FileFormatError, match=rf"ind\.tiny\..*{message}"):
        read_planetoid(save(tmp_path, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": np.array([0, 9, 2])}, "indptr decreases"),
        ({"indices": np.array([7, 7], np.int32)}, "but there are 3 columns"),
        ({"data": np.ones(5)}, "data has shape"),
        ({"_shape": (2,)}, "shape is"),
        ({"_shape": None}, "shape is None"),
        ({"indptr": None}, "a NoneType instead of array or buffer"),
    ],
)
def test_bad_matrices_are_refused(tmp_path, change, message):
    x = scipy.sparse.csr_matrix(ALLX[:2])
    x.__dict__.update(change)
    with pytest.raises(FileFormatError, match=rf"ind\.tiny\.x: .*{message}"):
        read_planetoid(save(tmp_path, x=x))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6\nx\n", "test.index, line 2: 'x' is no vertex"),
        ("6\n-4\n", "test.index, line 2: '-4' is no vertex"),
        ("6\n6\n", "test vertices are distinct and at least 4"),
        ("6\n3\n", "test vertices are distinct and at least 4"),
        ("6\n900000000000\n", "900000000001 vertices do not fit in max_bytes"),
        ("6\n" * 3000, "test.index: 6000 bytes of numbers do not fit in max_bytes"),
    ],
)
def test_bad_test_vertices_are_refused(tmp_path, text, message):
    save(tmp_path)
    (tmp_path / "ind.tiny.test.index").write_text(text)
    with pytest.raises(FileFormatError, match=message):
        read_planetoid(tmp_path, max_bytes=100_000)


@pytest.mark.parametrize("blank", [chr(code) for code in range(256) if chr(code).isspace()])
def test_blanks_of_every_kind_around_test_vertices_do_not_count(tmp_path, blank):
    save(tmp_path)
    raw = f"{blank}6{blank}\n4\n{blank}".encode("latin-1")
    (tmp_path / "ind.tiny.test.index").write_bytes(raw)
    assert np.flatnonzero(read_planetoid(tmp_path).test_mask).tolist() == [4, 6]


def test_missing_parts_and_objects_that_are_no_matrix_are_refused(tmp_path):
    save(tmp_path)
    (tmp_path / "ind.tiny.tx").unlink()
    with pytest.raises(FileNotFoundError, match=r"ind\.tiny\.tx"):
        read_planetoid(tmp_path)
    raw = b"ccopy_reg\n_reconstructor\n(c__builtin__\nobject\nc__builtin__\nobject\nNtR."
    with pytest.raises(FileFormatError, match="an object instead of a csr_matrix"):
        read_planetoid(save(tmp_path, x=raw))


def test_features_that_are_not_all_dense_are_within_max_bytes(tmp_path):
    wide = {"x": scipy.sparse.csr_matrix((0, 10**5)), "y": ALLY[:0], "ally": ALLY[:0]}
    wide |= {name: np.zeros((rows, 10**5), np.uint8) for name, rows in {"allx": 0, "tx": 2}.items()}
    save(tmp_path, **wide)
    (tmp_path / "ind.tiny.test.index").write_text("5\n900\n")
    with pytest.raises(FileFormatError, match="901 vertices do not fit in max_bytes=100000000"):
        read_planetoid(tmp_path, max_bytes=10**8)


def test_two_data_sets_in_a_folder_need_a_name(tmp_path):
    save(tmp_path, name="a")
    save(tmp_path, name="b", graph={0: [1]})
    with pytest.raises(FileFormatError, match=r"ind\.a\.graph, ind\.b\.graph: give the path of"):
        read(tmp_path)
    assert read(tmp_path / "ind.b.graph").nnz == 2
    assert read_planetoid(tmp_path / "ind.a.graph").graph.nnz == 10


def test_large_files_and_little_text_with_many_edges_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="are more than max_bytes=10: raise max_bytes"):
        read(save(tmp_path), max_bytes=10)
    once = list(range(1000))
    save(tmp_path, graph=dict.fromkeys(range(1000), once))
    with pytest.raises(FileFormatError, match="1000000 edges do not fit in max_bytes=1000000"):
        read(tmp_path, max_bytes=1_000_000)


SIZES = [head + struct.pack("<Q", 2**40) + b"x." for head in (b"\5\x96", b"\4\x8e", b"\4\x95")]
DECLARED = [*(b"\x80" + size for size in SIZES), b"\x80\x02Nr\xff\xff\xff\x7f."]


@pytest.mark.parametrize("raw", [*DECLARED, b"(" * 1000 + b".", b"]" + b"2a" * 100 + b"."])
def test_declared_sizes_allocate_nothing(tmp_path, raw):
    with pytest.raises(FileFormatError, match="nothing of it was run"):
        read(save(tmp_path, graph=raw))


@pytest.mark.parametrize("protocol", range(5))
def test_no_mutation_of_a_pickle_escapes(tmp_path, protocol):
    rng = np.random.default_rng(protocol)
    good = {name: pickle.dumps(value, protocol) for name, value in parts().items()}
    save(tmp_path)
    for _ in range(100):
        name = str(rng.choice(list(good)))
        raw = bytearray(good[name])
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(len(raw))] = rng.integers(256)
        (tmp_path / f"ind.tiny.{name}").write_bytes(raw)
        try:
            read_planetoid(tmp_path, max_bytes=2**20)
        except SparseFmtError:
            pass
        (tmp_path / f"ind.tiny.{name}").write_bytes(good[name])


def test_what_the_tests_call_malice_works_elsewhere():
    class Open(pickle.Unpickler):
        def find_class(self, module, name):
            return strike

    Open(io.BytesIO(MALICE["os.system"])).load()
    assert MARKER.pop() == ("touch evil",)


def test_empty_graphs_and_labels_without_classes_are_read(tmp_path):
    assert read(save(tmp_path, graph={})).shape == (0, 0)
    none = {name: np.zeros((rows, 0)) for name, rows in {"y": 2, "ally": 4, "ty": 2}.items()}
    assert read_planetoid(save(tmp_path, **none)).y.tolist() == [-1] * 7


def test_sizes_and_encodings_that_contradict_the_bytes_are_refused(tmp_path):
    raw = pickle.dumps(ALLY[:2], 2)
    for changed, message in (
        (raw.replace(b"latin1", b"rot_13"), "bytes encoded otherwise than as latin1"),
        (raw.replace(b"K\x02K\x02\x86", b"K\x02K\x03\x86"), r"4 values for .* shape \(2, 3\)"),
    ):
        with pytest.raises(FileFormatError, match=message):
            read_planetoid(save(tmp_path, y=changed))
