"""fuseGNN (ICCAD'20): gather, apply and aggregation of a layer in one kernel.

- ``epochs``: GCN and GAT of two layers on citation graphs beside PyG, on the wall;
- ``attention``: a GAT layer with gradients beside PyG, and what it costs in products;
- ``aggregate``: both gradients of a weighted aggregation in one pass beside two passes;
- ``memory``: peaks of forward and backward beside PyG (figure 12), on a GPU.
"""

from .. import attention, training
from .._table import Benchmark
from ._paper import Claim, Panel, Paper, of

PARTS = ("attention", "aggregate", "memory")
SECTIONS = {"epochs": training.SECTIONS["fuse"]} | {n: attention.SECTIONS[n] for n in PARTS}
PAPER = Paper(
    Benchmark("papers-fusegnn", __doc__, SECTIONS, attention.EXTRA),
    (
        *(
            Claim(
                f"epoch of {model} over PyG, largest",
                *("up to 5.3", "epochs", "over_peer"),
                where=of(model=model),
                average=max,
            )
            for model in ("GCN", "GAT")
        ),
        Claim(
            "memory of a GAT layer over PyG's",
            *("orders of magnitude less", "memory", "share"),
            where=of(kind="gat"),
        ),
    ),
    (
        Panel("epochs", "over_peer", "epoch over PyG, times faster"),
        Panel("attention", "over_pyg", "attention over PyG, times faster"),
        Panel("memory", "share", "peak of memory over PyG's"),
    ),
    {"epochs": ("training", "fuse")} | {name: ("fuse", name) for name in PARTS},
)
