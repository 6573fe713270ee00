"""MaxK, SpGEMM and SSpMM: selection, products against SpMM, and training with them.

``python -m benchmarks maxk [--device cpu|cuda] [--sections selection,products]
[--graphs reddit,path.npz] [--k 8,32] [--quick] [--out FOLDER]``

The sections are

- ``selection``: ``maxk`` of 232 965 x 256 features against torch.topk and a copy;
- ``products``: SpGEMM and SSpMM at width 256 against cuSPARSE's best SpMM (on the CPU torch.sparse)
  and this library's, over graphs and k: Fig. 8 and Table 4 of MaxK-GNN, with a plot;
- ``halves``: both products in float16 and bfloat16 against float32, on reddit;
- ``rounded``: SSpMM of a float32 gradient that may be rounded to bfloat16 beside the exact one;
- ``training``: epochs of a 3-layer GraphSAGE with MaxK and with ReLU, on reddit;
- ``memory``: peak of a layer's forward and backward beside that of ReLU and SpMM, on reddit.

All run unless ``--sections`` says otherwise; ``halves``, ``rounded`` and ``memory`` need a GPU.
Selections are compared with a stable sort in every row, products with float64 sums in sampled ones,
models with torch.sparse.  Medians of 20 runs after 5, of 10 after 3 where one takes over 50 ms.
"""

import argparse

from .. import _baselines, _options

SECTIONS = {
    "selection": ("cbsr.selection", "selection"),
    "products": ("cbsr.products", "products"),
    "halves": ("cbsr.products", "halves"),
    "rounded": ("cbsr.products", "rounded"),
    "training": ("cbsr.training", "training"),
    "memory": ("cbsr.training", "memory"),
}
ON_GPU = {"halves", "rounded", "memory"}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    options = parse(argv)
    on_cpu = options.device == "cpu"
    options.facts = {"threads": _baselines.use_threads(options.threads)} if on_cpu else {}
    return _options.run(SECTIONS, options)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ``graphs`` and ``k`` are None where a section decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks maxk")
    _options.add_options(parser)
    sections = "of " + ", ".join(SECTIONS)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS), help=sections)
    parser.add_argument("--k", type=_options.widths, help="features kept of 256, such as 8,32")
    options = _options.parse(parser, argv)
    if options.widths or max(options.k or (1,)) > 256:
        parser.error("the width is 256, and k at most that")
    here = [name for name in SECTIONS if options.device == "cuda" or name not in ON_GPU]
    if options.sections is None:
        options.sections = here
    elsewhere = [name for name in options.sections if name not in here]
    if elsewhere:
        parser.error(f"{elsewhere[0]} needs a GPU")
    return options
