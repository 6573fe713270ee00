"""Content decides against the ending, a header is one, and nothing is empty without a word."""

import bz2
import gzip
import io
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsefmt.errors import FileFormatError
from sparsefmt.io import read

ROOT = Path(__file__).resolve().parents[2]
MARKET = b"%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 5\n"


def zipped():
    stream = io.BytesIO()
    np.savez(stream, indptr=[0, 1], indices=[0], shape=[1, 1])
    return stream.getvalue()


#: what is in the file: how the error calls it, the endings that say so
CONTENTS = {
    "Matrix Market": (MARKET, [".mtx"]),
    "capitals": (b"\xef\xbb\xbf\n" + MARKET.upper(), [".mtx"]),
    "a zip archive": (zipped(), [".npz"]),
    "gzip": (gzip.compress(b"0 1\n"), []),
    "bzip2": (bz2.compress(b"0 1\n"), []),
    "JSON": (b' {"a": 1}\n', []),
    "JSON list": (b"[[0, 1], [1, 2]]\n", []),
    "XML or HTML": (b"<!DOCTYPE html>\n<html>\n", []),
    "a pickle": (pickle.dumps({0: [1]}), []),
    "UTF-16 text": ("0 1\n".encode("utf-16"), []),
    "another binary format": (b"\x89HDF\r\n\x1a\n" + bytes(99), []),
    "another graph format": (b"graph [\n directed 0\n]\n", []),
}
ENDINGS = [".mtx", ".npz", ".csv", ".tsv", ".txt", ".edges"]


CASES = [(c, e) for c, e in itertools.product(CONTENTS, ENDINGS) if e not in CONTENTS[c][1]]
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize(("content", "ending"), CASES)
def test_a_signature_under_another_ending_is_named(tmp_path, content, ending):
    name = {"capitals": "Matrix Market", "JSON list": "JSON"}.get(content, content)
    for packed, pack in PACK.items():
        if ending == ".npz" and packed:
            continue  # is no ending
        path = tmp_path / f"a{ending}{packed}"
        path.write_bytes(pack(CONTENTS[content][0]))
        with pytest.raises(FileFormatError, match=f"it holds {name}, which its ending does not"):
            read(path)


NO_EDGES = ["", "\n\n", "# only\n% comments\n", "u,v\n", '"source","target"\n', "# Edges: 10\n"]


@pytest.mark.parametrize("text", NO_EDGES)
@pytest.mark.parametrize("ending", ["csv", "tsv", "txt", "edges", "csv.gz", "txt.bz2"])
def test_a_list_without_an_edge_says_that_it_is_empty(tmp_path, text, ending):
    path = tmp_path / f"a.{ending}"
    pack = PACK[ending.removeprefix(ending.split(".")[0])]
    path.write_bytes(pack(text.encode()))
    says = r"(there is no edge in it|.*names? )|source is"
    with pytest.raises(FileFormatError, match=rf"a\.{ending}.*: {says}"):
        read(path)
    path.write_bytes(pack(b"# shape: 4 x 6\n"))
    assert read(path).shape == (4, 6)


NO_HEADERS = ['"u, v"', "{u,v}", "1st,2nd", "u,1", '"0","1"', "u,,", "-,-", "u;v", "u,'v"]


@pytest.mark.parametrize("line", NO_HEADERS)
def test_what_is_no_header_is_an_error_in_its_line(tmp_path, line):
    path = tmp_path / "a.csv"
    path.write_text(f"{line}\n0,1\n")
    with pytest.raises(FileFormatError, match=r"a\.csv"):
        read(path)


@pytest.mark.parametrize("words", ["u,v", "Source,Target,Weight", '"from node","to node"', "é,v_2"])
def test_a_header_is_read_once_and_first(tmp_path, words):
    path = tmp_path / "a.csv"
    line = "0,1" + ",2" * (words.count(",") - 1)
    path.write_text(f"{words}\n{line}\n")
    assert read(path).nnz == 1
    for lines in (f"{words}\n{words}\n{line}\n", f"{line}\n{words}\n"):
        path.write_text(lines)
        with pytest.raises(FileFormatError, match="line 2"):
            read(path)


#: In a process of its own, which nothing traces; seconds of the processor, not of a busy clock.
TIMED = """
import sys, time
from sparsefmt import errors, read
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        read(path)
    except errors.FileFormatError as error:
        print(time.process_time() - start, error)
"""


def test_half_a_gigabyte_of_newlines_is_answered_at_once(tmp_path):
    newlines, paths = gzip.compress(b"\n" * 2**24) * 32, []
    heads = {"txt": [b"0 1\n", b"# hello\n"], "csv": [b"u,v\n"], "mtx": [b"", MARKET]}
    for ending, head in ((e, head) for e, some in heads.items() for head in some):
        paths.append(tmp_path / f"{len(paths)}.{ending}.gz")
        paths[-1].write_bytes(gzip.compress(head) + newlines)
    command = [sys.executable, "-c", TIMED, *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for path, line in zip(paths, done.stdout.splitlines(), strict=True):
        seconds, _, message = line.partition(" ")
        assert path.name in message
        assert float(seconds) < 2
