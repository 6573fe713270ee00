"""SENSEi (arXiv 2306.15155): the composition of a layer's products, chosen by graph and sizes.

- ``grid``: GCN and GAT, what ``optimize`` chose beside the default composition and the fastest;
- ``samples``: planned on one sample of a graph, measured on another (figure 9);
- ``layers``: GraphSAGE, GIN, SGConv and TAGConv (figure 10).
"""

from dataclasses import replace

from .. import plan
from .._table import Benchmark
from ._paper import Claim, Panel, Paper, of

SECTIONS = {
    "grid": plan.SECTIONS["grid"],
    "samples": replace(plan.SECTIONS["samples"], default=True),
    "layers": plan.SECTIONS["layers"],
}
OVER = "over_default"
PAPER = Paper(
    Benchmark("papers-sensei", __doc__, SECTIONS, plan.EXTRA),
    (
        *(
            Claim(
                f"{model.upper()} {kind} over {baseline}",
                *(theirs, "grid", column),
                where=of(model=model, kind=kind),
            )
            for model, baseline, column, figures in (
                ("gcn", "the default", OVER, ("1.17", "1.04")),
                ("gat", "the default, our layer", "over_own", ("1.5", "1.61")),
            )
            for kind, theirs in zip(("inference", "training"), figures, strict=True)
        ),
        Claim("share of the fastest composition", "", "grid", "of_oracle"),
    ),
    (
        Panel("grid", OVER, "chosen over the default, times faster"),
        Panel("grid", "of_oracle", "share of the fastest composition"),
        Panel("samples", "of_oracle", "share, planned on another sample"),
    ),
    {name: ("plan", name) for name in SECTIONS},
)
