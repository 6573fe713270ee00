"""Test accuracy and speed-up over the entries kept of each row, a column of panels a graph."""

from pathlib import Path
from typing import Any

#: Strategy -> colour, of Okabe and Ito, and marker.
STYLES = {"bucket": ("#E69F00", "s"), "fastrand": ("#0072B2", "o"), "random": ("#009E73", "^")}
#: Strategy -> where its points stand beside the others', as a factor.
SHIFTS = {"bucket": 0.94, "fastrand": 1.0, "random": 1.06}
OVER: dict[str, tuple[Any, str]] = {
    "over_torch": ("-", "torch.sparse"),
    "over_full": (":", "all entries, sparsefmt"),
}


def plot(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Accuracy above, with that over all entries as a line; speed-up of the whole model below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    size = (max(3.6 * len(graphs), 7), 7)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, max(len(graphs), 1), squeeze=False, sharex="col")
    for at, graph in enumerate(graphs):
        held = [row for row in rows if row["graph"] == graph]
        _draw_accuracy(panels[0][at], held)
        _draw_speed_up(panels[1][at], held)
        name = f"{graph}, generated" if "alone" in held[0] else graph
        panels[0][at].set_title(f"{name}\nmean degree {held[0]['degree']:.3g}", fontsize=11)
    panels[0][0].set_ylabel("test accuracy, %")
    panels[1][0].set_ylabel("times as fast, whole model")
    if graphs:
        _legend(figure)
    figure.suptitle(f"Two-layer GCNs over samples of each row, float32, {device}")
    figure.savefig(path, dpi=150)
    print(f"  wrote {path}")


def _draw_accuracy(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws of ``random`` as faint points, and a band of the point that may be lost."""
    full = 100 * rows[0]["full_test"]
    axes.axhline(full, color="black", linewidth=1)
    axes.axhspan(full - 1, full, color="black", alpha=0.08, linewidth=0)
    for strategy, (colour, marker) in STYLES.items():
        held = sorted((r for r in rows if r["strategy"] == strategy), key=lambda r: r["sample"])
        x = [row["sample"] * SHIFTS[strategy] for row in held]
        axes.plot(x, [100 * row["accuracy"] for row in held], f"{marker}-", color=colour)
        for at, row in zip(x, held, strict=True):
            draws = [100 * share for share in row.get("draws", ())]
            axes.plot([at] * len(draws), draws, ".", color=colour, alpha=0.35)
    _dress(axes, rows)


def _draw_speed_up(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.axhline(1, color="black", linewidth=1)
    for strategy, (colour, marker) in STYLES.items():
        held = sorted((r for r in rows if r["strategy"] == strategy), key=lambda r: r["sample"])
        x = [row["sample"] for row in held]
        for key, (line, _) in OVER.items():
            axes.plot(x, [row[key] for row in held], marker + line, color=colour, markersize=5)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.4), max(high, 2.5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("S, entries kept of each row")
    _dress(axes, rows)


def _dress(axes: Any, rows: list[dict[str, Any]]) -> None:
    samples = sorted({row["sample"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(samples, [str(width) for width in samples])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [
        Line2D([], [], color=colour, marker=marker, label=name)
        for name, (colour, marker) in STYLES.items()
    ]
    keys += [
        Line2D([], [], color="black", label="accuracy, all entries"),
        Patch(color="black", alpha=0.08, label="within a point of it"),
    ]
    keys += [
        Line2D([], [], color="#666666", linestyle=line, label=f"over {name}")
        for line, name in OVER.values()
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9)
