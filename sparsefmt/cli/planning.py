"""The commands ``plan``, ``calibrate`` and ``partition``."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ..distributed.parts.cutting import write_partition
from ..distributed.parts.files import MASKS
from ..errors import FileFormatError, ShapeError
from ..formats.compressed import CSR
from ..io import file_kind, read_planetoid
from ..plan import models
from ..plan.calibration import calibrate as measured
from ..plan.calibration import constants_of, path_of
from ..plan.expression import Expression
from ..plan.planner import plan as plan_of
from . import tables
from .commands import _PATH, _check_picture, _path_argument, _picture_options, _progress, _read
from .commands import sparsefmt as sparsefmt

#: Hops of the models that have several.
HOPS = 2
MODELS = ("gcn", "sage", "gin", "gat", "sgc", "tagcn")
WITH_HOPS = ("sgc", "tagcn")
#: Names of the files of ``--data``.
DATA = {"features": "x.npy", "labels": "y.npy"}


def _widths(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Convert ``"602,256,41"`` to numbers."""
    parts = [part.strip() for part in value.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(
            f"{value!r} is no list of widths: write those of the features, of hidden layers and of "
            "the classes, as in 602,256,41."
        )
    return [int(part) for part in parts]


def _expression(model: str, first: bool, hops: int) -> Expression:
    """Build the expression of a layer; the features of the first one are constant."""
    H = models.features(constant=first)
    if model == "gat":
        return models.gat(H, opened=True)
    layer: Expression = getattr(models, model)(H, *([hops] if model in WITH_HOPS else []))
    return layer


@sparsefmt.command()
@_path_argument(metavar="GRAPH")
@click.option("--model", type=click.Choice(MODELS), default="gcn", show_default=True)
@click.option(
    "--widths",
    callback=_widths,
    required=True,
    metavar="N,N,...",
    help="Features, hidden layers, classes: 602,256,41 are two layers.",
)
@click.option("--training", is_flag=True, help="Price the gradients too.")
@click.option("--hops", type=click.IntRange(1, 16), help=f"Of sgc, tagcn.  [default: {HOPS}]")
@click.option("--heads", type=click.IntRange(1), help="Of gat.  [default: 1]")
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="How often it will run.  [default: what runs once is free]",
)
@click.option("--device", default="cpu", show_default=True, help="Whose constants: cpu, cuda, ...")
@_picture_options()
def plan(
    path: Path,
    model: str,
    widths: list[int],
    training: bool,
    hops: int | None,
    heads: int | None,
    steps: int | None,
    device: str,
    output: Path | None,
    force: bool,
) -> None:
    """Compare compositions of a model's layers on a graph.

    For each layer: every association of its matrices, the seconds that the device's constants
    predict, what beats it, and the one to run.
    """
    if hops is not None and model not in WITH_HOPS:
        raise click.UsageError(f"--hops is for --model {' or '.join(WITH_HOPS)}, not {model}.")
    if heads is not None and model != "gat":
        raise click.UsageError(f"--heads is for --model gat, not {model}.")
    from .. import plot as pictures

    if output:
        _check_picture(output, force)
    constants = constants_of(device)
    with _progress(1) as step:
        A = _read(path, step, None)
    if A.n_rows != A.n_cols:
        raise ShapeError(
            f"{click.format_filename(path)} has shape {A.shape}: layers of models are of square "
            "graphs, whose vertices are sources and targets."
        )
    sizes = {"n": A.n_rows, "nnz": A.nnz, "heads": heads or 1}
    plans = [
        plan_of(
            _expression(model, number == 0, hops or HOPS),
            {**sizes, "in": before, "out": after},
            constants,
            training=training,
            runs=steps,
        )
        for number, (before, after) in enumerate(pairwise(widths))
    ]
    console = tables.console()
    console.print(f"{model} on {click.format_filename(path)}, constants of {constants.device}")
    for number, layer_plan in enumerate(plans, 1):
        console.print(f"\nlayer {number}: {layer_plan.explain()}", soft_wrap=True)
    if output:
        pictures.save(pictures.draw_plans(plans), output)
        console.print(f"\nwrote {click.format_filename(output)}", soft_wrap=True)


@sparsefmt.command()
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
def calibrate(device: str) -> None:
    """Measure this device's primitives for the planner.

    Takes up to three minutes; the constants go to the user's cache, by device and version.
    """
    path = path_of(device)
    with _progress(5) as step:
        measured(device, step).save(path)
    constants_of.cache_clear()
    tables.console().print(f"wrote {click.format_filename(path)}", soft_wrap=True)


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

    Edge lists and the CSR of an .npz are read in pieces, but for metis.  A folder of Planetoid
    files has features, labels and masks.  Train with

    torchrun --nproc-per-node P -m sparsefmt.distributed.train DIR
    """
    start = time.perf_counter()
    with _progress(2) as step:
        step(f"reading {click.format_filename(source)}")
        graph, args = _input(source, data)
        step(f"writing {click.format_filename(output)}")
        result = write_partition(graph, output, parts, partitioner=by, num_nodes=num_nodes, **args)
    seconds = time.perf_counter() - start
    more = [name for name in result.dtypes if name not in ("source", "target")]
    also = f", with {', '.join(more)}" if more else ""
    tables.console().print(
        f"wrote {click.format_filename(output)}: {result.vertices:,} vertices and {result.edges:,} "
        f"edges in {parts} parts by {by}{also}, in {seconds:.2f} s",
        soft_wrap=True,
    )


def _input(source: Path, data: Path | None) -> tuple[Any, dict[str, Any]]:
    """Return the graph, or its path, and the data of its vertices by argument of the writer."""
    if data is not None:
        return source, _data_of(data)
    if file_kind(source) != "Planetoid":
        return source, {}
    planetoid = read_planetoid(source)
    x = planetoid.x.toarray() if isinstance(planetoid.x, CSR) else planetoid.x
    masks = {name: getattr(planetoid, f"{name}_mask") for name in MASKS}
    return planetoid.graph, {"features": x, "labels": planetoid.y, "masks": masks}


def _data_of(folder: Path) -> dict[str, Any]:
    """Return the paths of the files in ``--data``, by argument of ``write_partition``."""
    names = DATA | {name: f"{name}_mask.npy" for name in MASKS}
    paths = {name: folder / file for name, file in names.items() if (folder / file).exists()}
    if not paths:
        raise FileFormatError(f"{folder}: none of {', '.join(names.values())} is there: add some.")
    arguments: dict[str, Any] = {name: paths.pop(name) for name in DATA if name in paths}
    return arguments | {"masks": paths}
