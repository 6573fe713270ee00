"""Wall time of training steps, the host's included, beside PyG's.

``python -m benchmarks wallclock [--device cpu|cuda] [--sections changing,captured] [--quick]
[--out FOLDER]``

Sections are ``changing``, a layer on a graph that no step has had before; ``eager``, steps on a
small graph beside the same model without any; ``captured``, such a step as one CUDA graph;
``loader``, a step on sampled neighbours; ``molecules``, an epoch on batches of small graphs;
``first_step``, the first step of a process; and ``small``, a product of 34 vertices on the CPU.
"""

import argparse

from .. import _options

NAMES = ("changing", "eager", "captured", "loader", "molecules", "first_step", "small")
SECTIONS = {name: (f"wallclock.{name}", name) for name in NAMES}
#: Sections of one device alone.
ONLY = {"cpu": ("small",), "cuda": ("eager", "captured")}


def main(argv: list[str]) -> int:
    """Run the sections asked for, by default all that the device can; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks wallclock")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sections", type=_options.some_of(SECTIONS))
    parser.add_argument("--threads", type=_options.positive, default=2, help="on the CPU")
    _options.add_results_options(parser, "few runs of the smallest cases")
    options = _options.parse(parser, argv)
    other = {"cpu": "cuda", "cuda": "cpu"}[options.device]
    options.sections = options.sections or [name for name in NAMES if name not in ONLY[other]]
    for name in options.sections:
        if name in ONLY[other]:
            parser.error(f"section {name} needs --device {other}")
    return _options.run(SECTIONS, options)
