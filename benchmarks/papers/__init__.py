"""What each paper claims for its users, measured: ``python -m benchmarks papers maxk``."""
from importlib import import_module
NAMES = ("maxk",)
def main(argv):
    names = [argv[0]] if argv and argv[0] in NAMES else NAMES
    rest = argv[1:] if names != NAMES else argv
    return max(import_module(f"benchmarks.papers.{name}").PAPER(rest) for name in names)
BENCHMARKS = {"papers": main}
