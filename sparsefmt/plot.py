"""Pictures of a graph: its entries, its degrees, its tiles before and after condensing, and plans.

Figures are drawn with Matplotlib's objects and its Agg canvas: no window, no global state.  Colours
are Okabe and Ito's, and cividis: both keep their order for colour-blind readers and in grey.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .errors import UnsupportedError
from .formats.base import Format
from .formats.compressed import COO
from .io.bounded import check_regular, writing
from .plan.rules import text_of
from .stats import TILES, Tile, summarize

if TYPE_CHECKING:
    from .plan.planner import Plan

#: Suffixes of pictures: none is that of a graph's file.
SUFFIXES = (".png", ".pdf", ".svg")
#: How files of these types begin, an SVG behind its XML declaration and comments.
_BEGINNING = re.compile(
    rb"\x89PNG\r\n\x1a\n|%PDF-|"
    rb"(\xef\xbb\xbf)?\s*(<\?xml((?!\?>).)*\?>\s*)?(<!--((?!-->).)*-->\s*)*<(!DOCTYPE\s+)?svg\b",
    re.DOTALL,
)

BEFORE, AFTER, INK = "#999999", "#0072B2", "#333333"
ACCENT = "#D55E00"
DENSITY = "cividis_r"
#: Cells of the density image along each axis.  About one per two pixels of the panel at 150 dpi.
MAX_CELLS = 360
#: Okabe and Ito's colours; kinds of primitives beyond them share grey.
KIND_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
#: Trees of a plan beyond the fastest so many are counted, not drawn.
MOST_TREES = 30
STYLE = {"fontsize": 10, "color": INK}


def draw(
    A: Format, *, title: str = "", tile: Tile = (16, 8), tiles: Sequence[Tile] = TILES
) -> Figure:
    """Draw spy plot, degree distribution and tile density before and after condensing.

    Parameters
    ----------
    A : Format
        Any format, on any device; the picture is made on the CPU.
    title : str
        Printed as it is.
    tile : (height, width)
        Tile shape whose distribution is shown.
    tiles : sequence of (height, width)
        Tile shapes whose mean density is compared.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    Condensing is TC-GNN's sparse graph translation (section 3); compare its figure 7.
    """
    coo = A.to("cpu").tocoo()
    fig, axes = _figure(title, _facts(coo))
    draw_spy(axes[0][0], coo)
    draw_degrees(axes[0][1], coo)
    draw_tile_histogram(axes[1][0], coo, tile)
    draw_tile_density(axes[1][1], coo, tiles)
    return fig


def save(fig: Figure, path: Path) -> None:
    """Write the figure to a file; the suffix picks the type.

    The file appears, or changes, only once it is complete.

    Raises
    ------
    UnsupportedError
        If the suffix is none of ``.png``, ``.pdf`` and ``.svg``, or the path is that of a device,
        pipe or socket.
    FileFormatError
        If no file can have this name.
    OSError
        As the operating system reports it.
    """
    check_suffix(path)
    check_regular(path)
    picture = io.BytesIO()  # Matplotlib does not survive a disk that refuses half of a PDF
    with warnings.catch_warnings():
        # A file name in a script that the font lacks: boxes in the title are no reason to stop.
        warnings.filterwarnings("ignore", message=".*Glyph", category=UserWarning)
        fig.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    with writing(path) as stream:
        stream.write(picture.getbuffer())


def check_suffix(path: Path) -> None:
    """Raise unless the picture can be written under that name."""
    if path.suffix.lower() not in SUFFIXES:
        raise UnsupportedError(f"{path} is no picture's name: end it in {', '.join(SUFFIXES)}.")


def is_picture(path: Path) -> bool:
    """Return True if a file begins as PNG, PDF or SVG does."""
    with path.open("rb") as raw:
        return bool(_BEGINNING.match(raw.read(4096)))


def _figure(title: str, facts: str) -> tuple[Figure, Any]:
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    fig = Figure(figsize=(12, 9.6), layout=layout, facecolor="white")
    FigureCanvasAgg(fig)
    heading = title if len(title) <= 60 else f"{title[:28]} ... {title[-28:]}"
    text = fig.suptitle(f"{heading}\n{facts}" if heading else facts, fontsize=13, color=INK)
    text.set_parse_math(False)
    return fig, fig.subplots(2, 2)


def _facts(A: Format) -> str:
    return f"{A.n_rows:,} x {A.n_cols:,}, {A.nnz:,} stored entries"


def _dress(
    axes: Axes, title: str, x: str, y: str, *, grid: str = "both", A: Format | None = None
) -> bool:
    """Write the titles and draw a grid; return False if ``A`` has no entries, and write so."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.set_xlabel(x, **STYLE)  # type: ignore[arg-type]
    axes.set_ylabel(y, **STYLE)  # type: ignore[arg-type]
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)  # type: ignore[arg-type]
    for side in ("top", "right"):
        axes.spines[side].set_visible(grid == "")
    if A is None or A.nnz:
        return True
    axes.text(0.5, 0.5, "no stored entries", transform=axes.transAxes, ha="center", color=INK)
    axes.set(xticks=[], yticks=[])
    return False


# Entries


@dataclass(frozen=True)
class DensityImage:
    """Stored entries counted on a grid of at most ``MAX_CELLS`` cells along each axis."""

    counts: np.ndarray[Any, Any]  #: (cells down, cells across)
    rows_per_cell: float
    cols_per_cell: float


def density_image(A: COO, max_cells: int = MAX_CELLS) -> DensityImage:
    """Count the entries of ``A`` in each cell of a grid."""
    down, across = (min(max(size, 1), max_cells) for size in A.shape)
    cell = A.row.astype(np.int64) * down // max(A.n_rows, 1)
    cell *= across
    cell += A.col.astype(np.int64) * across // max(A.n_cols, 1)
    counts = np.bincount(cell, minlength=down * across).reshape(down, across)
    return DensityImage(counts, A.n_rows / down, A.n_cols / across)


def draw_spy(axes: Axes, A: COO) -> None:
    """Draw the pattern: one cell per entry for a small matrix, else a density image."""
    if not _dress(
        axes, "Stored entries", "source vertex (column)", "target vertex (row)", grid="", A=A
    ):
        return
    image = density_image(A)
    counts = np.ma.masked_equal(image.counts, 0)
    most = int(counts.max())
    shown = axes.imshow(
        counts,
        cmap=DENSITY,
        norm=LogNorm(1, max(most, 2)),
        extent=(0, A.n_cols, A.n_rows, 0),
        aspect="equal" if 0.5 <= A.n_rows / A.n_cols <= 2 else "auto",
        interpolation="nearest",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if most == 1:
        axes.set_xlabel("source vertex (column); each mark is one stored entry", **STYLE)  # type: ignore[arg-type]
        shown.set_norm(LogNorm(0.1, 1))
        return
    size = f"{_short(image.rows_per_cell)} x {_short(image.cols_per_cell)}"
    bar = axes.figure.colorbar(shown, ax=axes, fraction=0.046, pad=0.02)
    bar.set_label(f"stored entries per cell of {size} vertices", **STYLE)  # type: ignore[arg-type]
    bar.locator = LogLocator(subs=(1, 2, 5) if most < 1000 else (1,))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


# Degrees


def survival(degrees: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ``(d, share)``: each degree that occurs, and the share of vertices that reach it."""
    d, count = np.unique(degrees, return_counts=True)
    return d, np.cumsum(count[::-1])[::-1] / max(len(degrees), 1)


def draw_degrees(axes: Axes, A: COO) -> None:
    """Draw the complementary cumulative distribution of in- and out-degree on log axes."""
    if not _dress(
        axes, "Degree distribution", "degree d", "share of vertices with degree >= d", A=A
    ):
        return
    degrees_in = np.bincount(A.row, minlength=A.n_rows)
    degrees_out = np.bincount(A.col, minlength=A.n_cols)
    same = np.array_equal(np.sort(degrees_in), np.sort(degrees_out))
    if same:
        _draw_survival(axes, "in-degree = out-degree", degrees_in, color=AFTER, marker="o")
    else:
        _draw_survival(axes, "in-degree", degrees_in, color=AFTER, marker="o")
        _draw_survival(axes, "out-degree", degrees_out, color=ACCENT, marker="^", linestyle="--")
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(0.8, max(degrees_in.max() * 1.4, degrees_out.max() * 1.4, 12))
    axes.set_ylim(min(0.15 / max(A.shape), 0.05), 2)  # room for the legend below all points
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=INK)


def _draw_survival(axes: Axes, name: str, degrees: np.ndarray[Any, Any], **style: Any) -> None:
    d, share = survival(degrees)
    label = f"{name}: mean {degrees.mean():.3g}, max {degrees.max():,}"
    if d[0] == 0:  # no place on a log axis
        label += f", {np.count_nonzero(degrees == 0):,} of degree 0"
        d, share = d[1:], share[1:]
    axes.plot(d, share, label=label, markersize=3.5, linewidth=1.2, **style)


# Tiles


def uncondensed_tiles(A: COO, tile: Tile) -> np.ndarray[Any, Any]:
    """Count the entries of each tile that holds any, when columns are not condensed."""
    height, width = tile
    blocks = -(-A.n_cols // width)
    key = A.row.astype(np.int64) // height * blocks + A.col // width
    return np.unique(key, return_counts=True)[1]


def condensed_tiles(A: COO, tile: Tile) -> np.ndarray[Any, Any]:
    """Count the entries of each tile after condensing."""
    entries: np.ndarray[Any, Any] = np.diff(A.tosgt(tile).tile_ptr)
    return entries


def draw_tile_histogram(axes: Axes, A: COO, tile: Tile) -> None:
    """Draw how many tiles hold how many entries, before and after condensing."""
    cells = tile[0] * tile[1]
    title = f"Entries per tile of {tile[0]} x {tile[1]} = {cells} cells"
    if not _dress(axes, title, "stored entries in the tile", "tiles", grid="y", A=A):
        return
    before, after = uncondensed_tiles(A, tile), condensed_tiles(A, tile)
    most = int(max(before.max(), after.max(), 2))
    # Powers of two: 1, 2, 3-4, 5-8, ...
    edges = [0, *(2**i for i in range((most - 1).bit_length() + 1))]
    labels = [f"{a + 1}" if a + 1 == b else f"{a + 1}-{b}" for a, b in pairwise(edges)]
    place = np.arange(len(labels))
    for shift, entries, colour, name in (
        (-0.2, before, BEFORE, "before"),
        (0.2, after, AFTER, "after"),
    ):
        count = np.histogram(entries, bins=np.array(edges) + 0.5)[0]
        label = f"{name} condensing: {len(entries):,} tiles, {entries.mean():.3g} entries each"
        axes.bar(place + shift, count, 0.4, color=colour, label=label)
    axes.set_xticks(place, labels, fontsize=9 if len(labels) < 9 else 7)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(y=0.18)
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)


def draw_tile_density(axes: Axes, A: COO, tiles: Sequence[Tile]) -> None:
    """Draw the mean tile density for each tile shape, before and after condensing."""
    title = "Mean tile density before and after condensing"
    if not _dress(axes, title, "filled cells of a tile (%)", "", grid="x", A=A):
        return
    place = np.arange(len(tiles))[::-1]
    most = 0.0
    for y, stats in zip(place, summarize(A, tiles=tiles).tiles, strict=True):
        after = 100 * stats.density
        before = after * stats.tile_count / stats.dense_tile_count
        most = max(most, before, after)
        note = f" {after:.3g}% ({stats.reduction:.0%} of the tiles saved)"
        for shift, value, colour, text in (
            (0.2, before, BEFORE, f" {before:.3g}%"),
            (-0.2, after, AFTER, note),
        ):
            axes.barh(y + shift, value, 0.38, color=colour)
            axes.text(value, y + shift, text, va="center", fontsize=9, color=INK)
    axes.set_yticks(place, [f"{height} x {width}" for height, width in tiles])
    axes.set_xlim(0, most * 1.8)
    axes.set_ylim(-0.6, len(tiles) - 0.1)
    keys = [Patch(color=BEFORE, label="before"), Patch(color=AFTER, label="after")]
    axes.legend(handles=keys, loc="upper right", frameon=False, fontsize=9, ncols=2, labelcolor=INK)


# The demo's picture


def draw_demo(
    A: Format,
    *,
    title: str,
    note: str = "",
    convert_ms: Mapping[tuple[str, str], float],
    spmm_ms: Mapping[str, float],
    nbytes: Mapping[str, int],
    features: int,
) -> Figure:
    """Draw the graph, the time of each conversion and of SpMM, and the bytes of each format.

    Parameters
    ----------
    A : Format
    title, note : str
    convert_ms : mapping of (from, to) to milliseconds
    spmm_ms : mapping of format to milliseconds
    nbytes : mapping of format to bytes
    features : int
        Columns of the float32 ``X`` that SpMM was timed with.
    """
    coo = A.to("cpu").tocoo()
    fig, axes = _figure(title, f"{_facts(coo)}\n{note}".strip())
    draw_spy(axes[0][0], coo)
    _draw_conversions(axes[0][1], convert_ms)
    product = f"SpMM: A @ X, {features} float32 features"
    _draw_bars(axes[1][0], product, "time (ms)", spmm_ms)
    mib = {name: size / 2**20 for name, size in nbytes.items()}
    _draw_bars(axes[1][1], "Memory of each format", "MiB", mib)
    return fig


def _draw_conversions(axes: Axes, times: Mapping[tuple[str, str], float]) -> None:
    _dress(axes, "Conversion time (ms)", "to", "from", grid="")
    names = list(dict.fromkeys(source for source, _ in times))
    grid = np.array([[times.get((a, b), np.nan) for b in names] for a in names])
    low, high = np.nanmin(grid), np.nanmax(grid)
    norm = LogNorm(max(low, 1e-4), max(high, low * 1.01, 2e-4))
    axes.imshow(np.ma.masked_invalid(grid), cmap=DENSITY, norm=norm, aspect="auto")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            known = np.isfinite(value)
            dark = known and norm(max(value, 1e-4)) > 0.4
            text = f"{value:.3g}" if known else "-"
            axes.text(j, i, text, ha="center", va="center", color="white" if dark else INK)
    labels = [name.upper() for name in names]
    axes.set_xticks(range(len(names)), labels)
    axes.set_yticks(range(len(names)), labels)
    axes.tick_params(length=0)


def _draw_bars(axes: Axes, title: str, unit: str, values: Mapping[str, float]) -> None:
    _dress(axes, title, unit, "", grid="x")
    place = np.arange(len(values))[::-1]
    sizes = list(values.values())
    axes.barh(place, sizes, 0.55, color=AFTER)
    for y, size in zip(place, sizes, strict=True):
        axes.text(size, y, f" {size:.3g}", va="center", fontsize=10, color=INK)
    axes.set_yticks(place, [name.upper() for name in values])
    axes.set_xlim(0, max([*sizes, 1e-9]) * 1.15)


# The picture of plans


def draw_plans(plans: Sequence["Plan"]) -> Figure:
    """Draw a panel for the plan of each layer: a bar for each tree, the fastest on top."""
    parts = [c.parts for plan in plans for c in plan.candidates]
    kinds = list(dict.fromkeys(kind for part in parts for kind in part if part[kind]))
    colours = dict(zip(kinds, (*KIND_COLOURS, *[BEFORE] * len(kinds)), strict=False))
    rows = [min(len(p.candidates), MOST_TREES) for p in plans]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    fig = Figure(figsize=(12, 1.6 + 0.3 * sum(rows) + 0.9 * len(plans)), layout=layout)
    FigureCanvasAgg(fig)
    panels = fig.subplots(len(plans), 1, squeeze=False, height_ratios=[n + 2 for n in rows])
    for number, (axes, plan) in enumerate(zip(panels[:, 0], plans, strict=True), 1):
        _draw_plan(axes, plan, colours, f"Layer {number}: {plan.expression}")
    keys = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    fig.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK)
    return fig


def _draw_plan(axes: Axes, plan: "Plan", colours: dict[str, str], title: str) -> None:
    ranked = sorted(plan.candidates, key=lambda candidate: candidate.predicted)
    numbers = {c.tree: f"#{number}" for number, c in enumerate(plan.candidates, 1)}
    shown = ranked[:MOST_TREES]
    place = np.arange(len(shown))[::-1]
    left = np.zeros(len(shown))
    for kind, colour in colours.items():
        widths = np.array([1e3 * candidate.parts.get(kind, 0.0) for candidate in shown])
        axes.barh(place, widths, 0.7, left=left, color=colour)
        left += widths
    for y, end, candidate in zip(place, left, shown, strict=True):
        beaters = dict.fromkeys(numbers[tree] for tree in candidate.verdict.beaten_by if tree)
        text = "promoted" if candidate.promoted else f"beaten by {' or '.join(beaters)}"
        chosen = candidate is plan.chosen
        first = f", {1e3 * candidate.once:.3g} ms once" if candidate.once else ""
        note = f" {end:.3g} ms{first}, {'chosen' if chosen else text}"
        weight = "bold" if chosen else "normal"
        alpha = 1.0 if candidate.promoted else 0.6
        axes.text(end, y, note, va="center", fontsize=8.5, color=INK, weight=weight, alpha=alpha)
    more = f"; {len(ranked) - len(shown)} slower trees are not drawn" if ranked[MOST_TREES:] else ""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.set_xlabel(f"predicted time of a run (ms){more}", **STYLE)  # type: ignore[arg-type]
    axes.set_xlim(0, max(left.max(initial=0.0), 1e-9) * 1.45)
    axes.margins(y=0.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    labels = [f"{text_of(candidate.tree)}  {numbers[candidate.tree]}" for candidate in shown]
    axes.set_yticks(place, labels, fontsize=8.5)
