"""The picture of plans: every tree of each layer, its cost by primitive, and what beats it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from ..plan.planner import Plan
from ..plan.rules import bare
from ..plot import INK, STYLE

#: Okabe and Ito's colours; kinds beyond them share grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
OTHERS = "#999999"
#: Trees beyond the fastest so many are counted, not drawn.
MOST = 30


def draw(plans: Sequence[Plan]) -> Figure:
    """Draw a panel for each layer: a bar for each tree, the fastest on top."""
    parts = [c.parts for plan in plans for c in plan.candidates]
    kinds = list(dict.fromkeys(kind for part in parts for kind in part if part[kind]))
    colours = dict(zip(kinds, (*COLOURS, *[OTHERS] * len(kinds)), strict=False))
    rows = [min(len(p.candidates), MOST) for p in plans]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    fig = Figure(figsize=(12, 1.6 + 0.3 * sum(rows) + 0.9 * len(plans)), layout=layout)
    FigureCanvasAgg(fig)
    panels = fig.subplots(len(plans), 1, squeeze=False, height_ratios=[n + 2 for n in rows])
    for number, (axes, plan) in enumerate(zip(panels[:, 0], plans, strict=True), 1):
        _panel(axes, plan, colours, f"Layer {number}: {plan.expression}")
    keys = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    fig.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK)
    return fig


def _panel(axes: Axes, plan: Plan, colours: dict[str, str], title: str) -> None:
    found = sorted(plan.candidates, key=lambda candidate: candidate.predicted)
    numbers = {c.tree: f"#{number}" for number, c in enumerate(plan.candidates, 1)}
    shown = found[:MOST]
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
        once = f", {1e3 * candidate.once:.3g} ms once" if candidate.once else ""
        note = f" {end:.3g} ms{once}, {'chosen' if chosen else text}"
        weight = "bold" if chosen else "normal"
        alpha = 1.0 if candidate.promoted else 0.6
        axes.text(end, y, note, va="center", fontsize=8.5, color=INK, weight=weight, alpha=alpha)
    _dress(axes, title, len(found) - len(shown), left.max(initial=0.0))
    labels = [f"{bare(candidate.tree)}  {numbers[candidate.tree]}" for candidate in shown]
    axes.set_yticks(place, labels, fontsize=8.5)


def _dress(axes: Axes, title: str, left_out: int, longest: float) -> None:
    style: dict[str, Any] = STYLE
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    more = f"; {left_out} slower trees are not drawn" if left_out else ""
    axes.set_xlabel(f"predicted time of a run (ms){more}", **style)
    axes.set_xlim(0, max(longest, 1e-9) * 1.45)
    axes.margins(y=0.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
