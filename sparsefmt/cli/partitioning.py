"""The command that cuts a graph into parts for several processes: ``partition``."""

import time
from pathlib import Path
from typing import Any

import click

from ..distributed.parts.cutting import write_partition
from ..distributed.parts.files import MASKS
from ..errors import FileFormatError
from ..formats.compressed import CSR
from ..io import file_kind, read_planetoid
from . import tables
from .commands import _PATH, _path_argument, _progress
from .planning import sparsefmt as sparsefmt

#: Names of the files of ``--data``.
DATA = {"features": "x.npy", "labels": "y.npy"}


@sparsefmt.command()
@_path_argument("source", metavar="IN")
@click.option("--parts", type=click.IntRange(1), required=True, help="One for each process.")
@click.option("-o", "--output", **_PATH, required=True, metavar="DIR", help="Folder to write.")
@click.option(
    "--by",
    type=click.Choice(["balanced", "metis"]),
    default="balanced",
    show_default=True,
    help="balanced: rows as they are, equal entries; metis: few edges between parts.",
)
@click.option(
    "--data",
    **_PATH,
    metavar="FOLDER",
    help="x.npy, y.npy, train_mask.npy, val_mask.npy, test_mask.npy, those there are.",
)
@click.option("--num-nodes", type=click.IntRange(0), help="Of an edge list that does not say it.")
def partition(
    source: Path, parts: int, output: Path, by: str, data: Path | None, num_nodes: int | None
) -> None:
    """Cut the square graph IN into parts for several processes.

    Edge lists and the CSR of an .npz are read in pieces, and never whole but for metis.  A folder
    of Planetoid files has features, labels and masks.  Train with

    torchrun --nproc-per-node P -m sparsefmt.distributed.train DIR
    """
    start = time.perf_counter()
    with _progress(2) as step:
        step(f"reading {click.format_filename(source)}")
        graph, given = _input(source, data)
        step(f"writing {click.format_filename(output)}")
        found = write_partition(graph, output, parts, partitioner=by, num_nodes=num_nodes, **given)
    seconds = time.perf_counter() - start
    more = [name for name in found.dtypes if name not in ("source", "target")]
    also = f", with {', '.join(more)}" if more else ""
    tables.console().print(
        f"wrote {click.format_filename(output)}: {found.vertices:,} vertices and {found.edges:,} "
        f"edges in {parts} parts by {by}{also}, in {seconds:.2f} s",
        soft_wrap=True,
    )


def _input(source: Path, data: Path | None) -> tuple[Any, dict[str, Any]]:
    """The graph, or its path, and what is known of its vertices."""
    if data is not None:
        return source, _data_of(data)
    if file_kind(source) != "Planetoid":
        return source, {}
    found = read_planetoid(source)
    x = found.x.toarray() if isinstance(found.x, CSR) else found.x
    masks = {name: getattr(found, f"{name}_mask") for name in MASKS}
    return found.graph, {"features": x, "labels": found.y, "masks": masks}


def _data_of(folder: Path) -> dict[str, Any]:
    """Paths of the files of ``--data`` that there are, by argument of ``write_partition``."""
    names = DATA | {name: f"{name}_mask.npy" for name in MASKS}
    there = {name: folder / file for name, file in names.items() if (folder / file).exists()}
    if not there:
        raise FileFormatError(f"{folder}: none of {', '.join(names.values())} is there: add some.")
    given: dict[str, Any] = {name: there.pop(name) for name in DATA if name in there}
    return given | {"masks": there}
