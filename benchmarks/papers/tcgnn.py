"""TC-GNN (ATC'23, arXiv 2112.02052): condensed tiles of a graph on tensor cores.

- ``condensed``: tiles with and without condensing (figure 7), and what translation costs beside
  200 products, forward and backward;
- ``epochs``: GCN and AGNN beside PyG;
- ``kernels``: products by tiles beside cuSPARSE and our own by CSR, in TF32 and 16 bits.

The tiles are those of the paper's matrix instruction, as PTX ``mma.sync``: WMMA's header needs
files that the pip packages of CUDA do not carry.
"""

import argparse
import statistics
from collections.abc import Iterator

from sparsefmt.ops import spmm
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _graphs, _harness, tiles, training
from .._table import Benchmark, Limit, Row, Section, some_of
from ._paper import Claim, Panel, Paper, of

GRAPHS = ("citeseer", "cora", "pubmed", "proteins_full", "dd", "amazon_computers", "musae_facebook")
FEAT, EPOCHS, LAYERS = 64, 200, 2


def condensed(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each graph: tiles saved, and translation over 200 epochs of two layers' products."""
    generated = ("artist", "com-amazon", "arxiv", "ddi")
    for name, A in _graphs.loaded(options, generated, cpu=("small",), real=GRAPHS):
        T = A.tosgt(MMA_TILE)
        walls = [
            _harness.wall_ms(lambda A=A: A.tosgt(MMA_TILE), cuda=options.cuda) for _ in range(5)
        ]
        X = _graphs.uniform(A.indptr, (A.n_cols, FEAT))
        calls = {"ms": lambda A=A, X=X: spmm(A, X)}
        row: Row = {"case": name, "tiles": T.tile_count, "saved": T.reduction}
        row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
        row |= {"translation_ms": statistics.median(walls), "density": T.tile_density}
        row["translation"] = row["translation_ms"] / (EPOCHS * LAYERS * 2 * row["ms"])
        yield row


SECTIONS = {
    "condensed": Section(
        condensed,
        (Limit("saved", "median"), Limit("translation", "median", most=0.02)),
    ),
    "epochs": training.SECTIONS["tcgnn"],
    "kernels": tiles.SECTIONS["table"],
}
PAPER = Paper(
    Benchmark("papers-tcgnn", __doc__, SECTIONS, {"dtypes": some_of(tiles.STORAGE)}),
    (
        Claim(
            "tiles saved by condensing, mean",
            "0.67",
            "condensed",
            "saved",
            average=statistics.fmean,
        ),
        Claim(
            "translation over the products of 200 epochs, median",
            *("< 0.02", "condensed", "translation"),
            average=statistics.median,
        ),
        *(
            Claim(
                f"epoch of {model} over DGL (here PyG)",
                *("1.70", "epochs", "over_peer"),
                where=of(model=model),
            )
            for model in ("GCN", "AGNN")
        ),
        Claim("product in TF32 over cuSPARSE", "", "kernels", "over_cusparse", of(dtype="tf32")),
    ),
    (
        Panel("condensed", "saved", "share of tiles saved"),
        Panel("kernels", "over_csr", "tiles over CSR, times faster"),
        Panel("epochs", "over_peer", "epoch over PyG, times faster"),
    ),
)
