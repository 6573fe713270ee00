"""``torchrun -m sparsefmt.distributed.train DIR``: train on a folder of parts, a rank a process.

Without torchrun one process has all parts.  Exit codes: 0, done; 1, a rank failed or is gone; 2,
bad options or input, or ranks that differ.
"""

import os
import sys
from collections.abc import Sequence

from ..errors import SparseFmtError
from .job.options import Options, parser

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a training with these arguments, by default ``sys.argv``'s; return the exit code."""
    line = parser()
    options = vars(line.parse_args(arguments))
    if options["resume"] and options["checkpoint"] is None:
        line.error("--resume goes on from a checkpoint: give --checkpoint FILE too")
    folder, device, timeout = (options.pop(name) for name in ("folder", "device", "timeout"))
    # Pages of its C++ frames, where a rank is gone, would bury the sentence that names it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from .job.launch import run

        run(folder, device, timeout, Options(**options))
    except (SparseFmtError, MemoryError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        what = getattr(error, "strerror", None) or error
        print("sparsefmt: error:", " ".join(f"{where}{what}".split()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


if __name__ == "__main__":
    sys.exit(main())
