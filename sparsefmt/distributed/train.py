"""``torchrun -m sparsefmt.distributed.train``: train a layer on a partitioned graph."""

import sys

from .job.train import main as main

if __name__ == "__main__":
    sys.exit(main())
