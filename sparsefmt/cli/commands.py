"""The commands of ``sparsefmt``: options, progress and tables.

Results go to stdout, progress and errors to stderr.  On a terminal there are colours, rules and a
progress bar; in a pipe plain text of the same columns.  Output is ASCII but for file names.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import ShapeError
from ..formats.base import Format, FormatName
from ..formats.sgt import check_tile
from ..ops.engine.jit import told
from ..stats import TILES
from . import doctor as medicine
from . import tables

#: Called with the name of the step that begins.
Step: TypeAlias = Callable[[str], None]

FORMATS = ("csr", "csc", "coo", "sgt")
EXAMPLES = """\b
Examples:
  sparsefmt demo                             a generated graph through every format
  sparsefmt info cora.npz                    sizes, degrees, tile density, bytes
  sparsefmt convert web.mtx web.npz          Matrix Market to CSR
  sparsefmt plot web.npz -o web.png          pattern, degrees, tiles
  sparsefmt plan web.npz --widths 128,64,7   how to compute the layers of a model
  sparsefmt partition web.npz --parts 4 -o parts   for training on 4 processes
"""


def _tile(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Convert ``"16x8"`` to ``(16, 8)``."""
    if value is None:
        return None
    height, times, width = value.lower().partition("x")
    if not (times and height.isdecimal() and width.isdecimal()):
        raise click.BadParameter(f"{value!r} is no tile shape: write height x width, as in 16x8.")
    try:
        return check_tile((int(height), int(width)))
    except ShapeError as error:
        raise click.BadParameter(str(error)) from error


def _path(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Convert an option to a path; raise for "" and "-", which ``Path`` takes for "." and "./-"."""
    if value == "-":
        raise click.BadParameter(
            "'-' names no file, and standard input is not read, nor standard output written: give "
            "the name of a file."
        )
    if value == "":
        raise click.BadParameter("the path is empty: give the name of a file.")
    return None if value is None else Path(value)


#: Whether a file can be read is for its reader to say; an output need not be.
_PATH: dict[str, Any] = {"type": click.Path(readable=False), "callback": _path}


def _path_argument(name: str = "path", **options: Any) -> Callable[[Any], Any]:
    return click.argument(name, **_PATH, **options)


def _picture_options(default: str | None = None) -> Callable[[Any], Any]:
    """Add ``--output`` and ``--force``, whose values ``_check_picture`` takes."""
    output = click.option(
        "-o",
        "--output",
        **_PATH,
        default=default,
        show_default=True,
        help="Picture to write: .png, .pdf or .svg.  Replaces a picture of that name.",
    )
    force = click.option("--force", is_flag=True, help="Overwrite a file that is no picture, too.")
    return lambda command: output(force(command))


_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float16", "float32", "float64"]),
    help="Round values to this dtype.  [default: as in the file]",
)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=EXAMPLES,
)
@click.version_option(
    medicine.version("sparsefmt") or "(a checkout, not installed)",
    prog_name="sparsefmt",
    message="%(prog)s %(version)s",
)
@click.pass_context
def sparsefmt(ctx: click.Context) -> None:
    """Sparse formats and GPU kernels for graph neural networks.

    Look at a graph file, convert it, draw it, and see what this machine can run.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@sparsefmt.command()
@_path_argument()
@_dtype_option
def info(path: Path, dtype: str | None) -> None:
    """Print sizes, degrees, tile density and bytes of a graph file."""
    from ..stats import summarize

    with _progress(2) as step:
        A = _read(path, step, dtype)
        step("counting")
        views = tables.info(A, summarize(A))
    console = tables.console()
    console.print(click.format_filename(path), style="bold", soft_wrap=True)
    tables.show(console, views)


@sparsefmt.command()
@_path_argument("source", metavar="IN")
@_path_argument("target", metavar="OUT")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default="csr",
    show_default=True,
    help="Format to convert to.",
)
@click.option(
    "--tile", callback=_tile, metavar="HxW", help="Tile shape, for --format sgt.  [default: 16x8]"
)
@_dtype_option
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
def convert(
    source: Path,
    target: Path,
    format_: FormatName,
    tile: tuple[int, int] | None,
    dtype: str | None,
    force: bool,
) -> None:
    """Read the graph IN, convert it, write it to OUT.

    The ending of OUT says how: .npz holds every format, .mtx and edge lists hold triples.
    """
    from ..io import file_kind, write

    if tile and format_ != "sgt":
        raise click.UsageError(f"--tile is for --format sgt, not {format_}.")
    _check_target(target, force)
    file_kind(target)  # an unknown ending, before the long work
    start = time.perf_counter()
    with _progress(3) as step:
        A = _read(source, step, dtype, format=None)
        step(f"converting to {format_.upper()}")
        B = A.asformat(format_, **({"tile": tile} if tile else {}))
        step(f"writing {click.format_filename(target)}")
        write(target, B)
    console = tables.console()
    size = target.stat().st_size
    console.print(
        f"wrote {click.format_filename(target)}: {B!r}, {tables.size(size)} "
        f"in {time.perf_counter() - start:.2f} s",
        soft_wrap=True,
    )


@sparsefmt.command()
@_path_argument()
@_dtype_option
@_picture_options("spy.png")
@click.option(
    "--tile",
    callback=_tile,
    metavar="HxW",
    default="16x8",
    show_default=True,
    help="Tile shape of the histogram.",
)
def plot(path: Path, dtype: str | None, output: Path, force: bool, tile: tuple[int, int]) -> None:
    """Draw the pattern, degrees and tile density of a graph."""
    from .. import plot as pictures

    _check_picture(output, force)
    with _progress(2) as step:
        A = _read(path, step, dtype)
        step("drawing")
        tiles = sorted({*TILES, tile})
        fig = pictures.draw(A, title=click.format_filename(path.name), tile=tile, tiles=tiles)
        pictures.save(fig, output)
    tables.console().print(f"wrote {click.format_filename(output)}", soft_wrap=True)


@sparsefmt.command()
@_path_argument(required=False)
@_dtype_option
@_picture_options("sparsefmt-demo.png")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU if there is one and CuPy is installed.",
)
def demo(path: Path | None, dtype: str | None, output: Path, force: bool, device: str) -> int:
    """Run a graph through every format: check, time, multiply, draw.

    Without PATH, a graph with a power law and communities is generated.  Every conversion is
    compared with the original, every product with a float64 reference; the exit code is 1 if one
    of them is wrong.
    """
    from . import demo as program

    _check_picture(output, force)
    start = time.perf_counter()
    where, description = program.pick_device(device)
    with _progress(program.n_steps() + 2) as step:
        if path:
            A, title = _read(path, step, dtype, format="coo"), click.format_filename(path.name)
        else:
            step("generating a graph")
            A, title = program.embedded_graph(), "embedded graph: power law, communities"
        outcome = program.run(A, where, step=step)
        step("drawing")
        program.picture(A, outcome, title, description, output)
    console = tables.console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(f"{A.n_rows:,} x {A.n_cols:,}, {A.nnz:,} stored entries")
    console.print(description)
    tables.show(console, [tables.demo(outcome)])
    for line in tables.demo_notes(outcome):
        console.print(line)
    seconds = time.perf_counter() - start
    console.print(f"wrote {click.format_filename(output)}; {seconds:.1f} s in all", soft_wrap=True)
    return 0 if outcome.good else 1


@sparsefmt.command()
def doctor() -> int:
    """Print what this machine has, can run and should install."""
    report = medicine.examine()
    console = tables.console()
    tables.show(console, tables.examination(report))
    todo = list(medicine.advice(report))
    console.print("to install or mend" if todo else "nothing to install", style="bold")
    for line in todo:
        console.print(f"  {line}", soft_wrap=True)
    return 1 if report.broken else 0


# Reading and writing


def _read(
    path: Path, step: Step, dtype: str | None, *, format: FormatName | None = "csr"
) -> Format:
    from ..io import read

    step(f"reading {click.format_filename(path)}")
    A: Format = read(path, format=format, dtype=dtype)
    return A


def _check_target(path: Path, force: bool) -> None:
    """Raise for a target that would fail after the long work, or destroy a file."""
    from ..io.bounded import check_regular

    check_regular(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    if path.exists() and not force:
        name = click.format_filename(path)
        raise click.UsageError(f"{name} exists: give another name, or --force to overwrite it.")


def _check_picture(path: Path, force: bool) -> None:
    """Raise for the same of a picture, which may replace a picture or an empty file."""
    from .. import plot as pictures

    pictures.check_suffix(path)
    _check_target(path, force=True)
    if force or not path.exists() or not path.stat().st_size:
        return
    try:
        replaceable, what = pictures.is_picture(path), "is no picture"
    except PermissionError:
        replaceable, what = False, "cannot be read, so that it may be no picture"
    if not replaceable:
        raise click.UsageError(
            f"{click.format_filename(path)} exists and {what}: give another name, or --force to "
            "overwrite it."
        )


@contextmanager
def _progress(steps: int) -> Iterator[Step]:
    """Draw a progress bar on a terminal, where ``step(text)`` names the step that begins.

    The bar is wiped at the end; it says where a loop or kernel is being compiled.
    """
    console = tables.console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        begun, doing = count(), ""

        def step(text: str) -> None:
            nonlocal doing
            doing = text
            progress.update(task, description=text, completed=next(begun))

        def compiling() -> None:
            progress.update(task, description=f"{doing}: compiling")

        with told(compiling):
            yield step
