"""Tables of the commands: with rules on a terminal, columns of text in a pipe.

Everything fits 80 columns, and is ASCII but for file names.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ..formats.base import Format
from ..stats import Stats, TileStats
from . import doctor

if TYPE_CHECKING:
    from .demo import Outcome


def console(*, stderr: bool = False) -> Console:
    """Build a console that prints text as it is: brackets in a file name are no markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def show(to: Console, tables: Iterable[Table]) -> None:
    """Print the tables, each with an empty line after it."""
    for table in tables:
        to.print(table)
        to.print()


def size(count: float) -> str:
    """Write a number of bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _table(title: str, *columns: str) -> Table:
    """Build a table whose columns are aligned right, but for the first."""
    rules = box.SIMPLE_HEAD if console().is_terminal else None
    table = Table(title=title, title_justify="left", title_style="bold", box=rules, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _facts(title: str, facts: Mapping[str, tuple[str, ...] | str]) -> Table:
    """Build a table of names and their values, without a head, all aligned left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = False
    for name, values in facts.items():
        table.add_row(name, *([values] if isinstance(values, str) else values))
    for column in table.columns:
        column.overflow = "fold"
    return table


# sparsefmt info


def info(A: Format, stats: Stats) -> list[Table]:
    """Build the tables of sizes, degrees, tiles and bytes of a matrix."""
    return [_sizes(A, stats), _degrees(stats), _tiles(stats.tiles), _bytes(stats)]


def _sizes(A: Format, stats: Stats) -> Table:
    symmetric = {True: "yes", False: "no", None: "no, rectangular"}
    return _facts(
        "graph",
        {
            "vertices (rows x columns)": f"{A.n_rows:,} x {A.n_cols:,}",
            "stored entries": f"{A.nnz:,}, one in {1 / stats.density:,.0f} cells"
            if A.nnz
            else "none",
            "values": "none (unweighted)" if A.dtype is None else str(A.dtype),
            "indices": str(A.index_dtype),
            "symmetric pattern": symmetric[stats.is_symmetric],
            "self loops": f"{stats.self_loops:,}",
            "duplicates": f"{stats.duplicates:,}",
            "mean |row - column|": f"{stats.bandwidth:,.1f}",
        },
    )


def _degrees(stats: Stats) -> Table:
    table = _table("degrees", "", "min", "mean", "median", "max", "std", "empty", "gini", "top 1%")
    for name, d in (("in (row)", stats.in_degree), ("out (column)", stats.out_degree)):
        numbers = f"{d.min:,} {d.mean:,.2f} {d.median:,g} {d.max:,} {d.std:,.2f} {d.empty:,}"
        table.add_row(name, *numbers.split(), f"{d.gini:.3f}", f"{d.top_share:.1%}")
    return table


def _tiles(tiles: Iterable[TileStats]) -> Table:
    names = ("tile", "tiles", "density", "condensed", "density", "saved")
    table = _table("tiles before and after condensing (SGT)", *names)
    for tile in tiles:
        # The same entries in more tiles: density falls in proportion.
        before = tile.density * tile.tile_count / tile.dense_tile_count if tile.tile_count else 0.0
        table.add_row(
            f"{tile.tile[0]}x{tile.tile[1]}",
            f"{tile.dense_tile_count:,}",
            f"{before:.2%}",
            f"{tile.tile_count:,}",
            f"{tile.density:.2%}",
            f"{tile.reduction:.1%}",
        )
    return table


def _bytes(stats: Stats) -> Table:
    table = _table("bytes in each format", "format", "size", "bytes an entry")
    for name, count in stats.nbytes.items():
        name, _, tile = name.partition(" ")
        table.add_row(
            f"{name.upper()} {tile}", size(count), f"{count / stats.nnz:.2f}" if stats.nnz else "-"
        )
    return table


# sparsefmt demo


def demo(outcome: "Outcome") -> Table:
    """Build a table with a row for each format: conversions out of it, SpMM in it, its bytes."""
    names = list(outcome.products)
    columns = [f"to {name.upper()}" for name in names]
    table = _table("milliseconds", "from", *columns, "exact", "A @ X", "error", "MiB")
    for name, product in outcome.products.items():
        times = (outcome.seconds.get((name, target)) for target in names)
        table.add_row(
            name.upper(),
            *("-" if seconds is None else _milliseconds(seconds) for seconds in times),
            "yes" if outcome.exact_from(name) else "NO",
            _milliseconds(product.seconds),
            f"{product.error:.0e}" + ("" if product.verified else " WRONG"),
            f"{outcome.nbytes[name] / 2**20:.2f}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{2 if seconds < 1 else 0}f}"


def demo_notes(outcome: "Outcome") -> Iterator[str]:
    """Yield lines that explain the columns, and say whether all is well."""
    kernels: dict[str, list[str]] = {}
    for name, product in outcome.products.items():
        kernels.setdefault(product.kernel, []).append(name.upper())
    by = "; ".join(f"{', '.join(names)} by {kernel}" for kernel, names in kernels.items())
    yield f"A @ X with {outcome.features} float32 features: {by}"
    yield "error: max of |Y - Y64| / sum |a||x|, Y64 the product in float64"
    if outcome.good:
        yield "every conversion gave the original, every product lies in float32's error bound"
    else:
        yield "WRONG RESULTS: please report this, with the output of sparsefmt doctor"


# sparsefmt doctor


def examination(report: doctor.Report) -> Iterator[Table]:
    """Yield the tables of what the machine has, and what would run where on it."""
    yield _facts("this machine", report.system)
    versions = {name: version or "not installed" for name, version in report.versions.items()}
    packages = " and ".join(f"{name} {version}" for name, version in report.cupy.packages)
    yield _facts("libraries", versions | {"cupy": packages or "not installed"})
    cuda: dict[str, tuple[str, ...] | str] = {
        "driver runs CUDA": _version(report.driver.cuda, "no driver"),
        "CuPy's CUDA runtime": _version(report.cupy.runtime, "not found"),
        "NVRTC (compiler)": _version(report.cupy.nvrtc, "not found"),
    }
    for device in report.driver.devices:
        capability = f"compute capability {_version(device.capability, '')}"
        cuda[f"device {device.ordinal}"] = f"{device.name}, {capability}, {size(device.memory)}"
    yield _facts("GPU", cuda if report.driver.devices else cuda | {"devices": "none"})
    runs = doctor.runs(report).items()
    rows = {name: ("yes" if able else "no", where) for name, (able, where) in runs}
    yield _facts("what would run, and where", rows)


def _version(number: tuple[int, int] | None, absent: str) -> str:
    return f"{number[0]}.{number[1]}" if number else absent
