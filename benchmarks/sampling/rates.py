"""Shares of the entries that samples keep, over graphs: ES-SpMM's Table IV."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR
from sparsefmt.formats.arrays import is_cupy
from sparsefmt.ops import sample, sampling_rate

from .. import _graphs, _harness
from .._harness import Target
from ..tiles.cases import sources

SAMPLES = (16, 32, 64, 128, 256, 512)
STRATEGIES = ("bucket", "fastrand", "random")
LIMIT = 1e-12  #: of the difference from the closed form
#: Most entries of the graphs that are generated on the CPU.
MOST = {"cuda": None, "cpu": 2_500_000}
COLUMNS = {
    "case": "<18",
    "rows": "9d",
    "entries": "11d",
    "degree": "8.2f",
    "longest": "8d",
    **{f"rate_{width}": "9.4f" for width in SAMPLES},
}


def rates(options: argparse.Namespace) -> bool:
    """Every real graph of ``--data``, and those generated at the sizes of papers."""
    _harness.print_head("sampling rates: the share of entries kept of S in each row", COLUMNS)
    rows = []
    for name, source in _sources(options):
        A = _graphs.load(source, device=options.device)
        lengths = np.diff(A.indptr.get() if is_cupy(A.indptr) else A.indptr).astype(np.int64)
        row = {"case": name, "rows": A.n_rows, "entries": A.nnz, "longest": int(lengths.max())}
        row |= {"degree": A.nnz / A.n_rows} | _rates_of(A, lengths, options)
        _harness.print_row(row, COLUMNS)
        rows.append(row)
        _harness.free()
    cuda = options.device == "cuda"
    return _harness.keep("sampled", "rates", rows, judge, cuda=cuda, folder=options.out)


def _sources(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A graph whose name a file has is that of the file."""
    files = {path.stem: str(path) for path in sorted(Path(options.data).glob("*.npz"))}
    for name in options.graphs or (*files, *_generated(options.device, files)):
        if name in files:
            yield name, files[name]
        else:
            yield from sources(argparse.Namespace(graphs=(name,), data=options.data), ())


def _generated(device: str, files: dict[str, str]) -> list[str]:
    most = MOST[device]
    papers = _graphs.PAPERS.items()
    small = [name for name, recipe in papers if most is None or recipe.edges <= most]
    return [name for name in small if name not in files]


def _rates_of(A: CSR, lengths: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Each beside the closed form, and the entries of the samples themselves."""
    row: dict[str, Any] = {"difference": 0.0}
    for width in options.sample or SAMPLES:
        kept = int(np.minimum(lengths, width).sum())
        rate = sampling_rate(A, width)
        difference = abs(rate - kept / len(A.indices))
        if not difference <= LIMIT:
            return {"wrong": f"rate of {width} is {rate!r}, not {kept / len(A.indices)!r}"}
        for strategy in options.strategies or STRATEGIES:
            entries = sample(A, width, strategy=strategy).nnz
            if entries != kept:
                return {"wrong": f"{strategy} keeps {entries} entries of {width}, not {kept}"}
        row[f"rate_{width}"] = rate
        row["difference"] = max(row["difference"], difference)
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The difference from the closed form; how many graphs a sample of 64 halves, to know."""
    most = max(row["difference"] for row in rows)
    text = f"largest difference from the closed form, {len(rows)} graphs"
    found = [Target(text, most, LIMIT, at_least=False)]
    halved = [row["case"] for row in rows if row.get("rate_64", 1.0) <= 0.5]
    if halved:
        text = f"graphs of which S=64 keeps at most half ({', '.join(halved)})"
        found.append(Target(text, len(halved)))
    return found
