"""Wall time of training steps, the host's included, beside PyG's.

``python -m benchmarks wallclock [--device cpu|cuda] [--sections changing,captured] [--quick]
[--out FOLDER]``

Sections are ``changing``, a layer on a graph that no step has had before; ``captured``, a whole
step on a small graph as one CUDA graph; ``loader``, a step on sampled neighbours; and
``molecules``, an epoch on batches of small graphs.
"""

import argparse

from .. import _options

SECTIONS = {
    "changing": ("wallclock.changing", "changing"),
    "captured": ("wallclock.captured", "captured"),
    "loader": ("wallclock.loader", "loader"),
    "molecules": ("wallclock.molecules", "molecules"),
}
#: Those that need a GPU.
GPU_ONLY = ("captured",)


def main(argv: list[str]) -> int:
    """Run the sections asked for, by default all that the device can; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks wallclock")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sections", type=_options.some_of(SECTIONS))
    parser.add_argument("--threads", type=_options.positive, default=2, help="on the CPU")
    _options.add_results_options(parser, "few runs of the smallest cases")
    options = _options.parse(parser, argv)
    able = [name for name in SECTIONS if options.device == "cuda" or name not in GPU_ONLY]
    options.sections = options.sections or able
    for name in options.sections:
        if name not in able:
            parser.error(f"section {name} needs a GPU: give --device cuda")
    return _options.run(SECTIONS, options)
