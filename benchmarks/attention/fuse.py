"""Fused attention and aggregation with both gradients: GAT, GATv2, dot products, GAS and GAR.

``python -m benchmarks fuse [--device cpu|cuda] [--sections attention,memory]
[--graphs reddit,path.npz] [--widths 64,256] [--kinds gat] [--dtypes float32,bfloat16]
[--data FOLDER] [--quick] [--out FOLDER]``

The sections are

- ``aggregate``: the gradients of features and edge values in one pass against cuSPARSE's best SpMM
  with the transpose and its SDDMM;
- ``attention``: forward and backward of each kind beside cuSPARSE's best SpMM and PyG;
- ``memory``: its peak beside PyG's, and that nothing of the size of the edges is allocated;
- ``layers``: one layer of GCN and GAT beside PyG, its structure kept and anew: Table 3 of fuseGNN;
- ``training``: steps of two-layer models beside PyG;
- ``launches``: kernels of one layer;
- ``cpu``: GAT beside PyG on the CPU.

On a GPU all run but ``cpu``, on the CPU only that unless ``--sections`` says otherwise; ``memory``,
``launches`` and ``aggregate`` need a GPU.  Real graphs are read from the
``.npz`` files of ``--data``, by default ``$SPARSEFMT_DATA`` or else ``../shared/data`` beside the
checkout; those that are missing are skipped with a line.  Results are checked in float64 at sampled
vertices.
Medians of 20 runs after 5, of 10 after 3 where one takes over 50 ms.
"""

import argparse
import os
from pathlib import Path

from .. import _baselines, _options

SECTIONS = {
    "aggregate": ("matmul.aggregate", "aggregate"),
    "attention": ("attention.table", "attention"),
    "memory": ("attention.memory", "memory"),
    "layers": ("attention.layers", "layers"),
    "training": ("attention.training", "training"),
    "launches": ("attention.launches", "launches"),
    "cpu": ("attention.cpu", "cpu"),
}
ON_GPU = {"aggregate", "memory", "launches"}
KINDS = ("gat", "gatv2", "dot")
DTYPES = ("float32", "float16", "bfloat16")
ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    options = parse(argv)
    on_cpu = options.device == "cpu"
    options.facts = {"threads": _baselines.use_threads(options.threads)} if on_cpu else {}
    return _options.run(SECTIONS, options)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ``graphs``, ``widths``, ``kinds`` and ``dtypes`` are None by default."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _options.add_options(parser)
    for name, known in (("sections", SECTIONS), ("kinds", KINDS), ("dtypes", DTYPES)):
        split = _options.some_of(known)
        parser.add_argument(f"--{name}", type=split, help="of " + ", ".join(known))
    data = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the real graphs")
    options = _options.parse(parser, argv)
    on_cpu = options.device == "cpu"
    if options.sections is None:
        options.sections = tuple(name for name in SECTIONS if (name == "cpu") == on_cpu)
    for name in options.sections:
        if on_cpu and name in ON_GPU:
            parser.error(f"{name} needs a GPU")
        if not on_cpu and name == "cpu":
            parser.error("cpu is measured with --device cpu")
    return options
