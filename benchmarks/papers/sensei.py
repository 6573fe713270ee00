"""SENSEi (arXiv 2306.15155): the composition of a layer's products, chosen by graph and sizes.

- ``grid``: GCN and GAT, what ``optimize`` chose beside the default composition and the fastest;
- ``samples``: planned on one sample of a graph, measured on another (figure 9);
- ``layers``: GraphSAGE, GIN, SGConv and TAGConv (figure 10).
"""

from collections.abc import Callable
from dataclasses import replace

from .. import plan
from .._table import Benchmark, Row
from ._paper import Claim, Panel, Paper


def of(model: str, kind: str) -> Callable[[Row], bool]:
    """Return the test of a row for a model in inference or training."""
    return lambda row: (row["model"], row["kind"]) == (model, kind)


SECTIONS = {
    "grid": plan.SECTIONS["grid"],
    "samples": replace(plan.SECTIONS["samples"], default=True),
    "layers": plan.SECTIONS["layers"],
}
OVER = "over_default"
PAPER = Paper(
    Benchmark("papers-sensei", __doc__, SECTIONS, plan.EXTRA),
    (
        Claim("GCN inference over the default", "1.17", "grid", OVER, of("gcn", "inference")),
        Claim("GCN training over the default", "1.04", "grid", OVER, of("gcn", "training")),
        Claim(
            "GAT inference over the default, our layer",
            "1.5",
            "grid",
            "over_own",
            of("gat", "inference"),
        ),
        Claim(
            "GAT training over the default, our layer",
            "1.61",
            "grid",
            "over_own",
            of("gat", "training"),
        ),
        Claim("share of the fastest composition", "", "grid", "of_oracle"),
    ),
    (
        Panel("grid", OVER, "chosen over the default, times faster"),
        Panel("grid", "of_oracle", "share of the fastest composition"),
        Panel("samples", "of_oracle", "share, planned on another sample"),
    ),
)
