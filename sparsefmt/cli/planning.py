"""The commands of the planner: ``plan`` and ``calibrate``."""

from itertools import pairwise
from pathlib import Path

import click

from ..errors import ShapeError
from ..plan import models
from ..plan.calibration import calibrate as measured
from ..plan.calibration import constants_of, path_of
from ..plan.expression import Expression
from ..plan.planner import plan as plan_of
from . import tables
from .commands import _check_picture, _path_argument, _picture_options, _progress, _read
from .commands import sparsefmt as sparsefmt

#: Hops of the models that have several.
HOPS = 2
MODELS = ("gcn", "sage", "gin", "gat", "sgc", "tagcn")
WITH_HOPS = ("sgc", "tagcn")


def _widths(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """``"602,256,41"`` as numbers."""
    parts = [part.strip() for part in value.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(
            f"{value!r} is no list of widths: write those of the features, of hidden layers and of "
            "the classes, as in 602,256,41."
        )
    return [int(part) for part in parts]


def _expression(model: str, first: bool, hops: int) -> Expression:
    """Write a layer; the features of the first one are constant."""
    H = models.features(constant=first)
    if model in WITH_HOPS:
        found: Expression = getattr(models, model)(H, hops)
    elif model == "gat":
        found = models.gat(H, opened=True)
    else:
        found = getattr(models, model)(H)
    return found


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
    """Compare the ways to compute a model's layers on a graph.

    For each layer: every association of its matrices, the seconds that the device's constants
    predict, what beats it, and the one to run.
    """
    if hops is not None and model not in WITH_HOPS:
        raise click.UsageError(f"--hops is for --model {' or '.join(WITH_HOPS)}, not {model}.")
    if heads is not None and model != "gat":
        raise click.UsageError(f"--heads is for --model gat, not {model}.")
    from .. import plot
    from .plan_picture import draw

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
    for number, found in enumerate(plans, 1):
        console.print(f"\nlayer {number}: {found.explain()}", soft_wrap=True)
    if output:
        plot.save(draw(plans), output)
        console.print(f"\nwrote {click.format_filename(output)}", soft_wrap=True)


@sparsefmt.command()
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
def calibrate(device: str) -> None:
    """Measure this device's primitives for the planner.

    Takes up to three minutes; the constants are kept in the user's cache, by device and version.
    """
    path = path_of(device)
    with _progress(5) as step:
        measured(device, step).save(path)
    constants_of.cache_clear()
    tables.console().print(f"wrote {click.format_filename(path)}", soft_wrap=True)
