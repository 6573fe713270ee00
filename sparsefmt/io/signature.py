"""File types by first bytes: a known signature under another ending is refused."""

import re
from pathlib import Path

from .bounded import fault, reading, stem_and_suffix

_HEAD = 4096
_PACKED = {".gz": "gzip", ".bz2": "bzip2"}
#: What begins so, and the mend; the first one that fits.
_SIGNATURES = (
    (rb"\x1f\x8b", "gzip", "name it with .gz at the end, if text is in it"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "bzip2", "name it with .bz2 at the end, if text is in it"),
    (rb"PK(\x03\x04|\x05\x06)", "a zip archive", "name it .npz, if NumPy or SciPy wrote it"),
    (rb"\x93NUMPY", "a single .npy array", "write the arrays of a matrix with sparsefmt.write"),
    (rb"\x89HDF\r\n|MATLAB 5\.0|PAR1|SQLite format 3|\x28\xb5\x2f\xfd|\xfd7zXZ|7z\xbc\xaf",
     "another binary format", "write it as .npz or .mtx with the program that reads it"),
    (rb"\x80[\x02-\x05][\x00-\xff]", "a pickle", "write it with sparsefmt.write"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text", "write it as UTF-8"),
    (rb"%PDF|\x89PNG|GIF8|\xff\xd8\xff", "a picture or a document", "give a graph file"),
)  # fmt: skip
#: The same behind blanks and a byte order mark.
_TEXTS = (
    (rb"%%?MatrixMarket", "Matrix Market", "name it .mtx"),
    (rb"[{\[]", "JSON", "write one edge a line"),
    (rb"<[?!a-zA-Z]", "XML or HTML", "write one edge a line, or download the file itself"),
    (rb"(graph|digraph|Creator|\*vertices)\b", "another graph format", "write one edge a line"),
)
_EXPECTED = {"Matrix Market": "Matrix Market", "npz": "a zip archive"}


def check(path: Path, kind: str) -> None:
    """Check that a file's first bytes fit its ending.

    Raises
    ------
    FileFormatError
        If they do not; it names the content.
    """
    if kind == "Planetoid":
        return
    with path.open("rb") as raw:
        content, mend = _find(raw.read(_HEAD))
    packed = stem_and_suffix(path)[1]
    if packed and content == _PACKED[packed]:
        with reading(path, _HEAD * 1024) as stream:
            content, mend = _find(stream.read(_HEAD))
    elif packed and not content:
        return  # its reader says that the compressed data is damaged
    if content and content != _EXPECTED.get(kind):
        raise fault(path, f"it holds {content}, which its ending does not say: {mend}.")


def _find(head: bytes) -> tuple[str, str]:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for signatures, begin in ((_SIGNATURES, head), (_TEXTS, text)):
        for pattern, name, mend in signatures:
            if re.match(pattern, begin, re.IGNORECASE if signatures is _TEXTS else 0):
                return name, mend
    return "", ""
