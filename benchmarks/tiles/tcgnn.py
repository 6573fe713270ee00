"""SGT and its products on matrix units: SpMM, SDDMM and training by tiles.

``python -m benchmarks tcgnn [--sections table,sddmm] [--graphs reddit,path.npz]
[--widths 64,128] [--dtypes tf32,float16] [--data FOLDER] [--quick] [--out FOLDER]``

All sections need a GPU; ``tf32`` is float32 storage with ``precision="tf32"``.  They are

- ``table``: SpMM by tiles, with values and without, against cuSPARSE's best and this library's
  SpMM by CSR;
- ``sddmm``: SDDMM by tiles against cuSPARSE and CSR;
- ``models``: epochs of GCN and AGNN beside PyG and torch.sparse: its Fig. 6;
- ``width``: SpMM in TF32 over widths: its Fig. 10.

Real graphs are read from the ``.npz`` files of ``--data``, by default ``$SPARSEFMT_DATA`` or else
``../shared/data`` beside the checkout; those that are missing are skipped with a line.  Every
product is checked in float64 with the operands as they are stored, before any rounding to TF32,
and every model against another library's.  Medians of 20 runs after 5, of 10 after 3 where one
takes over 50 ms.
"""

import argparse
import os
from pathlib import Path

from .. import _options

DTYPES = ("tf32", "float16", "bfloat16")
SECTIONS = {
    "table": ("tiles.spmm", "table"),
    "sddmm": ("tiles.sddmm", "table"),
    "models": ("tiles.training", "models"),
    "width": ("tiles.spmm", "width"),
}
#: What ``python -m benchmarks`` does not mend by ``--device cpu``.
NEEDS_GPU = True
ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    return _options.run(SECTIONS, parse(argv))


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ``graphs``, ``widths`` and ``dtypes`` are None where a section decides."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tcgnn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _options.add_options(parser)
    every, sections = tuple(SECTIONS), "of " + ", ".join(SECTIONS)
    split = _options.some_of(SECTIONS)
    parser.add_argument("--sections", type=split, default=every, help=sections)
    dtypes = "of " + ", ".join(DTYPES)
    parser.add_argument("--dtypes", type=_options.some_of(DTYPES), help=dtypes)
    data = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the real graphs")
    options = _options.parse(parser, argv)
    if options.device == "cpu":
        parser.error("matrix units are a GPU's: every section needs one")
    return options
