"""Edge lists: what counts as one, and which line is wrong."""

import bz2
import gzip
import re

import numpy as np
import pytest
from test_io_limits import refused_within, save

from sparsefmt import COO
from sparsefmt.errors import FileFormatError
from sparsefmt.io import edge_list, read, write


def edges(A):
    """(source, target) or (source, target, weight) of each entry."""
    columns = [A.col, A.row] + ([] if A.data is None else [A.data])
    return list(zip(*(column.tolist() for column in columns), strict=True))


# name: file, text, edges, shape
GOOD = {
    "tabs": ("a.txt", "0\t1\n2\t1\n", [(0, 1), (2, 1)], (3, 3)),
    "blanks": ("a.txt", "0 1\n  2   1  \n", [(0, 1), (2, 1)], (3, 3)),
    "commas": ("a.csv", "0,1\n2, 1\n", [(0, 1), (2, 1)], (3, 3)),
    "commas in txt": ("a.txt", "0,1\n2,1\n", [(0, 1), (2, 1)], (3, 3)),
    "blanks in csv": ("a.csv", "0 1\n2 1\n", [(0, 1), (2, 1)], (3, 3)),
    "tsv": ("a.tsv", "0\t1\t.5\n", [(0, 1, 0.5)], (2, 2)),
    "edges": ("a.edges", "0 1\n", [(0, 1)], (2, 2)),
    "weights": ("a.csv", "0,1,2.5\n1,0,-1e-3\n", [(0, 1, 2.5), (1, 0, -1e-3)], (2, 2)),
    "SNAP": ("a.txt", "# Nodes: 4 Edges: 2\n# From To\n0\t3\n3\t1\n", [(0, 3), (3, 1)], (4, 4)),
    "percent": ("a.txt", "% sym unweighted\n% 2 4 4\n0 3\n", [(0, 3)], (4, 4)),
    "header": ("a.csv", "source,target\n0,1\n", [(0, 1)], (2, 2)),
    "weight header": ("a.csv", "u,v,w\n0,1,4\n", [(0, 1, 4.0)], (2, 2)),
    "tsv header": ("a.tsv", "u\tv\n0\t1\n", [(0, 1)], (2, 2)),
    "header after comment": ("a.csv", "# hello\nu,v\n0,1\n", [(0, 1)], (2, 2)),
    "comment inside": ("a.txt", "0 1\n# no\n% no\n1 0\n", [(0, 1), (1, 0)], (2, 2)),
    "comment at the end": ("a.txt", "0 1 # yes, one\n1 0\n", [(0, 1), (1, 0)], (2, 2)),
    "blank lines": ("a.txt", "\n0 1\n\n \n1 0\n\n", [(0, 1), (1, 0)], (2, 2)),
    "no last newline": ("a.txt", "0 1\n1 0", [(0, 1), (1, 0)], (2, 2)),
    "Windows": ("a.txt", "0 1\r\n1 0\r\n", [(0, 1), (1, 0)], (2, 2)),
    "byte order mark": ("a.csv", "\ufeffu,v\n0,1\n", [(0, 1)], (2, 2)),
    "duplicates": ("a.txt", "0 1\n0 1\n", [(0, 1), (0, 1)], (2, 2)),
    "zeros": ("a.txt", "0 1 0\n0 1 -0.0\n", [(0, 1, 0.0), (0, 1, 0.0)], (2, 2)),
    "infinite": ("a.txt", "0 1 inf\n1 1 -Infinity\n", [(0, 1, np.inf), (1, 1, -np.inf)], (2, 2)),
    "empty by shape": ("a.csv", "# shape: 3 x 9\nu,v\n", [], (3, 9)),
    "empty by SNAP": ("a.txt", "# Nodes: 0 Edges: 0\n", [], (0, 0)),
    "quoted header": ("a.csv", '"source","target"\n0,1\n', [(0, 1)], (2, 2)),
    "shape": ("a.txt", "# shape: 3 x 9\n8 2\n", [(8, 2)], (3, 9)),
    "late shape": ("a.txt", "# hello\n# shape: 3 x 9\n0 1\n", [(0, 1)], (3, 9)),
    "shape behind names": ("a.csv", "u,v\n# shape: 3 x 9\n0,1\n", [(0, 1)], (3, 9)),
    "shape behind edges": ("a.txt", "0 1\n# shape: 3 x 9\n", [(0, 1)], (3, 9)),
    "one shape twice": ("a.txt", "# shape: 3 x 9\n0 1\n#SHAPE:3X9\n", [(0, 1)], (3, 9)),
    "shape and a return": ("a.txt", "# shape: 3 x 9\r\n0 1\r\n", [(0, 1)], (3, 9)),
    "no shape": ("a.txt", "# The shape: large\n# shapes: 2\n0 1\n", [(0, 1)], (2, 2)),
    "whole floats": ("a.txt", "0.0 1e0\n", [(0, 1)], (2, 2)),
    "latin comment": ("a.txt", b"# \xe9\n0 1\n", [(0, 1)], (2, 2)),
}


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("block", [1 << 22, 4])
def test_lists_read(tmp_path, monkeypatch, case, block):
    name, text, expected, shape = GOOD[case]
    path = save(tmp_path, name, text)
    if block == 4:
        longest = max(map(len, path.read_bytes().split(b"\n")))
        monkeypatch.setattr(edge_list, "_BLOCK", longest)  # a line or two a block
    A = read(path, format="coo")
    assert edges(A) == expected
    assert A.shape == shape


@pytest.mark.parametrize("mark", ["#", "%", "##", "  # "])
@pytest.mark.parametrize("name", ["shape:", " shape: ", "Shape :", "\tSHAPE:\t"])
@pytest.mark.parametrize("sizes", ["5 x 7", "5x7", "5 X  7 ", "05 x 07"])
def test_a_shape_is_read_however_it_is_spaced(tmp_path, mark, name, sizes):
    assert read(save(tmp_path, "a.txt", f"{mark}{name}{sizes}\n0 1\n")).shape == (5, 7)


NO_SIZES = [
    *"|5|5 7|5, 7|(5, 7)|5 x|x 7|5 x 7 x 9|5 x 7,|5 x 7 # all|5 y 7".split("|"),
    *("5 x 7.0", "5e0 x 7", "-1 x 1", "+5 x 7", "5_0 x 7", "\u0665 x 7", "large", "0x5 x 7"),
    *(f"{2**60} x 5", f"5 x {2**63}", f"{10**20 - 1} x 5", f"5 x {'9' * 5000}"),
]


@pytest.mark.parametrize("sizes", NO_SIZES)
@pytest.mark.parametrize("before", ["", "# hello\n\n", "0 1\n"])
def test_a_shape_that_cannot_be_read_is_no_comment(tmp_path, sizes, before):
    path = save(tmp_path, "a.txt", f"{before}# Shape: {sizes}\n0 1\n")
    line = before.count("\n") + 1
    mend = 'do not follow: write "# shape: rows x columns", or begin a comment with another word'
    with pytest.raises(FileFormatError, match=rf"{re.escape(str(path))}, line {line}: .*{mend}"):
        read(path)
    assert read(path, num_nodes=2).shape == (2, 2)


def test_a_line_is_source_target_and_perhaps_a_weight_in_float64(tmp_path):
    A = read(save(tmp_path, "a.txt", "2 0\n"))
    assert A.data is None
    assert A.toarray().tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert read(save(tmp_path, "b.txt", "0 1 1\n")).dtype == np.float64
    assert np.isnan(read(save(tmp_path, "a.txt", "0 1 nan\n")).data).all()


@pytest.mark.parametrize("num_nodes", [2, 5, 100])
def test_num_nodes_gives_the_shape(tmp_path, num_nodes):
    path = save(tmp_path, "a.txt", "# shape: 3 x 9\n0 1\n")
    assert read(path, num_nodes=num_nodes).shape == (num_nodes, num_nodes)


# name: file, text, line, message
BAD = {
    "word": ("a.txt", "0 1\n0 x\n", 2, "'0 x': target is 'x': vertices are integers from 0 to"),
    "source": ("a.txt", "a 1\n", 1, "source is 'a'"),
    "weight": ("a.txt", "0 1 2\n0 1 x\n", 2, "weight is 'x': give a decimal number"),
    "fraction": ("a.txt", "0 1\n0 1.5\n", 2, "target is '1.5'"),
    "negative": ("a.txt", "0 1\n-1 1\n", 2, "source is '-1'"),
    "nan": ("a.txt", "0 1\nnan 1\n", 2, "source is 'nan'"),
    "inf": ("a.txt", "0 inf\n", 1, "target is 'inf'"),
    "large": ("a.txt", f"0 1\n0 {2**53}\n", 2, "vertices are integers from 0 to 9007199254740991"),
    "underscore": ("a.txt", "0 1_0\n", 1, "target is '1_0'"),
    "hexadecimal": ("a.txt", "0 0x10\n", 1, "target is '0x10'"),
    "2 of 3": ("a.txt", "0 1 2\n0 1\n", 2, "2 columns, but the first edge has 3: give as many"),
    "3 of 2": ("a.txt", "0 1\n0 1 2\n", 2, "3 columns, but the first edge has 2"),
    "1 column": ("a.txt", "0\n", 1, "'0' has 1 columns: give source, target and perhaps a weight"),
    "4 columns": ("a.csv", "0,1,2,3\n", 1, "has 4 columns"),
    "4 names": ("a.csv", "a,b,c,d\n0,1,2,3\n", 1, "has 4 columns"),
    "empty field": ("a.csv", "0,1\n0,\n", 2, "target is ''"),
    "trailing comma": ("a.csv", "0,1\n0,1,\n", 2, "3 columns, but"),
    "mixed": ("a.csv", "0,1\n0 1\n", 2, "1 columns, but the first edge has 2"),
    "names in txt": ("a.txt", "source target\n0 1\n", 1, "source is 'source'"),
    "second names": ("a.csv", "u,v\n0,1\nu,v\n", 3, "source is 'u'"),
    "half names": ("a.csv", "0,v\n0,1\n", 1, "target is 'v'"),
    "overflow": ("a.txt", "0 1 1e999\n", 1, "weight is 1e999, beyond float64: write inf"),
    "one overflow": ("a.txt", "0 1 inf\n1 1 -1e999\n", 2, "weight is -1e999, beyond"),
    "row beyond": ("a.txt", "# shape: 3 x 9\n0 2\n0 3\n", 3, "target is '3': .* from 0 to 2"),
    "column beyond": ("a.txt", "# shape: 3 x 9\n9 0\n", 2, "source is '9': .* from 0 to 8"),
    "two shapes": ("a.txt", "# shape: 3 x 9\n0 1\n# shape: 3 x 8\n", 3, "before it says 3 x 9"),
    "after comments": ("a.txt", "# a\n\n% b\n0 1\n\n0 z\n", 6, "target is 'z'"),
    "after names": ("a.csv", "u,v\n0,1\n0,z\n", 3, "target is 'z'"),
    "return": ("a.txt", "0 1\r1 0\n", 1, "4 columns|3 columns|columns"),
    "bytes": ("a.txt", b"0 1\n0 \xff\xfe\n", 2, "target is '\ufffd\ufffd'"),
    "NUL": ("a.txt", b"0 1\n0 \x001\n", 2, "target is "),
    "quotes": ("a.csv", '"0","1"\n1,2\n', 1, "source is '\"0\"'"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_wrong_line_is_named(tmp_path, case):
    name, text, line, message = BAD[case]
    raw = text if isinstance(text, bytes) else text.encode()
    for packed, pack in {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}.items():
        path = save(tmp_path, name + packed, pack(raw))
        place = rf"{re.escape(str(path))}, line {line}: "
        with pytest.raises(FileFormatError, match=rf"{place}.*{message}"):
            read(path)


@pytest.mark.parametrize("edge", ["9 0", "0 3", f"0 {2**32}", f"{2**32} 0"])
def test_a_shape_in_a_later_block_holds_for_the_edges_before_it(tmp_path, monkeypatch, edge):
    monkeypatch.setattr(edge_list, "_BLOCK", 16)
    path = save(tmp_path, "a.txt", f"8 2\n{edge}\n# shape: 3 x 9\n")
    with pytest.raises(FileFormatError, match=r"a\.txt: a line behind edges says .* 3 x 9, but"):
        read(path)


@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_the_wrong_line_is_named_in_any_block(tmp_path, monkeypatch, place):
    monkeypatch.setattr(edge_list, "_BLOCK", 256)
    lines = [f"{i} {i + 1}" for i in range(1000)]
    lines[place] = f"{place} -1"
    with pytest.raises(FileFormatError, match=rf"line {place + 2}: .*target is '-1'"):
        read(save(tmp_path, "a.txt", "# hello\n" + "\n".join(lines)))


@pytest.mark.parametrize(
    ("name", "text", "message", "options"),
    [
        ("a.csv", "u,v\n0,1\n\u0663,2\n", r"a\.csv, line 1: could not convert", {}),
        ("a.txt", "0 1" * 3_000_000, "a line of more than 65536 bytes", {}),
        (
            "a.txt",
            "0 1\n" * 1000,
            "the edges take more than max_bytes=10000",
            {"max_bytes": 10_000},
        ),
        ("a.txt", "0 1\n0 5\n", r"line 2: '0 5': target is '5': .* from 0 to 4", {"num_nodes": 5}),
    ],
    ids=["digits that NumPy alone refuses", "a line without end", "too many edges", "num_nodes"],
)
def test_files_are_refused_by_name(tmp_path, name, text, message, options):
    with pytest.raises(FileFormatError, match=message):
        read(save(tmp_path, name, text), **options)


@pytest.mark.parametrize("packed", [".gz", ".bz2"])
def test_bombs_stop_at_max_bytes(tmp_path, packed):
    pack = gzip.compress if packed == ".gz" else bz2.compress
    path = save(tmp_path, f"a.txt{packed}", pack(b"# \n" * 1_000_000) * 4)
    with refused_within(40e6, "more than max_bytes=1000000 bytes"):
        read(path, max_bytes=1_000_000)


@pytest.mark.parametrize("ending", ["csv", "tsv", "txt", "edges"])
@pytest.mark.parametrize("weighted", [True, False])
def test_numpy_reads_what_is_written(tmp_path, ending, weighted):
    rng = np.random.default_rng(0)
    row, col = rng.integers(0, 50, (2, 200))
    A = COO(row, col, rng.random(200) if weighted else None, shape=(50, 60))
    path = tmp_path / f"a.{ending}"
    write(path, A)
    delimiter, skiprows = (",", 2) if ending == "csv" else (None, 1)
    table = np.loadtxt(path, delimiter=delimiter, skiprows=skiprows)
    assert np.array_equal(table[:, :2], np.stack([col, row], axis=1))
    assert not weighted or np.array_equal(table[:, 2], A.data)


def test_csv_names_its_columns(tmp_path):
    write(tmp_path / "a.csv", COO([0], [1], np.array([0.5]), shape=(2, 3)))
    text = "# shape: 2 x 3\nsource,target,weight\n1,0,0.5\n"
    assert (tmp_path / "a.csv").read_text() == text
