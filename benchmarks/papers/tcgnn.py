"""TC-GNN (ATC'23, arXiv 2112.02052): condensed tiles of a graph on tensor cores.

- ``condensed``: tiles with and without condensing (figure 7), and what translation costs beside
  200 products, forward and backward;
- ``prepared``: a layer of AGNN on graphs with tiles beside the same without;
- ``shapes``: products by tiles of every shape beside that of the default, where tiles pay;
- ``epochs``: GCN and AGNN beside PyG;
- ``kernels``: products by tiles beside cuSPARSE and our own by CSR, in TF32 and 16 bits.

The tiles are those of the paper's matrix instruction, as PTX ``mma.sync``: WMMA's header needs
files that the pip packages of CUDA do not carry.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from sparsefmt import CSR, Graph, autograd, nn
from sparsefmt.ops import spmm
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _baselines, _graphs, _harness, tiles, training
from .._table import Benchmark, Limit, Row, Section, both, some_of
from . import _data
from ._paper import Claim, Panel, Paper, of

GRAPHS = ("citeseer", "cora", "pubmed", "proteins_full", "dd", "amazon_computers", "musae_facebook")
FEAT, EPOCHS, LAYERS = 64, 200, 2
WIDTHS, DTYPES = (32, 128), ("tf32", "bfloat16")
SHAPES = tuple(product((16, 32, 64, 128), (8, 16)))


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


def prepared(options: argparse.Namespace) -> Iterator[Row]:
    """Yield forward and backward of AGNN with tiles beside those without, on every graph."""
    torch.set_float32_matmul_precision("high")
    layer = nn.AGNNConv(add_self_loops=False).to(options.device)
    for name, A in _graphs.loaded(options, tuple(_graphs.PAPERS), cpu=("small",), real=_data.REAL):
        tiled, plain = Graph(A), Graph(CSR(A.indptr.copy(), A.indices.copy(), shape=A.shape))
        autograd.prepare(tiled, tile=MMA_TILE)
        for feat, dtype in product(options.widths or WIDTHS, options.dtypes or DTYPES):
            x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, feat)))
            x = x.to(getattr(torch, tiles.STORAGE[dtype])).requires_grad_()

            def step(graph: Graph, x: Tensor = x) -> None:
                y = layer(x, graph)
                torch.autograd.grad(y, x, y.detach())

            calls = {"ms": partial(step, tiled), "plain_ms": partial(step, plain)}
            row: Row = {"case": f"{name} {feat} {dtype}", "graph": name}
            yield row | _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    torch.set_float32_matmul_precision("highest")


def shapes(options: argparse.Namespace) -> Iterator[Row]:
    """Yield products by tiles of each shape, of graphs that the default's costs give to tiles."""
    for name, A in _graphs.loaded(options, _graphs.TABLE):
        condensed = {shape: A.with_data(None).tosgt(shape) for shape in SHAPES}
        for feat, dtype in product(options.widths or (64, 128), options.dtypes or DTYPES):
            share = tiles.share_of(condensed[MMA_TILE], "spmm", dtype, feat)
            if share == 0:
                continue
            X = _graphs.uniform(A.indptr, (A.n_cols, feat), tiles.STORAGE[dtype])
            calls = {
                "ms" if shape == MMA_TILE else "{}x{}_ms".format(*shape): partial(
                    spmm, T, X, **tiles.precision(dtype)
                )
                for shape, T in condensed.items()
            }
            row: Row = {"case": f"{name} {feat} {dtype}", "graph": name, "share": share}
            row |= _harness.timed(calls, cuda=True, quick=options.quick)
            row["fastest"] = min(calls, key=row.__getitem__)
            yield row | {"of_fastest": row[row["fastest"]] / row["ms"]}


SECTIONS = {
    "condensed": Section(
        condensed,
        (Limit("saved", "median"), Limit("translation", "median", most=0.02)),
    ),
    "prepared": Section(prepared, both("over_plain", None, 0.97)),
    "shapes": Section(shapes, both("of_fastest", None, 0.95), only="cuda"),
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
        Claim("AGNN with tiles over without, worst", "", "prepared", "over_plain", average=min),
        Claim(
            "default tile's share of the fastest, worst", "", "shapes", "of_fastest", average=min
        ),
        Claim("product in TF32 over cuSPARSE", "", "kernels", "over_cusparse", of(dtype="tf32")),
    ),
    (
        Panel("condensed", "saved", "share of tiles saved"),
        Panel("kernels", "over_csr", "tiles over CSR, times faster"),
        Panel("epochs", "over_peer", "epoch over PyG, times faster"),
    ),
    {"epochs": ("training", "tcgnn"), "kernels": ("tcgnn", "table")},
)
