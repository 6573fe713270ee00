"""What options of public functions refuse."""

import numpy as np

from sparsefmt.errors import DtypeError, ShapeError, UnsupportedError

NUMBER = [(value, "give a number") for value in ("0.2", None, True, 1j, np.ones(1))]
NUMBER += [(10**400, "that a float holds")]
INTEGER = [(1.0, ""), (None, ""), (True, ""), ("1", ""), (np.arange(2), ""), (np.nan, "")]
FLAG = [(1, ""), (None, ""), ("no", ""), (np.ones(1), "")]
WORD = [("first", ""), (None, ""), (0, ""), (["sum"], ""), (np.ones(2), "")]
#: What options of public functions refuse: values, the error, and the text.
OPTIONS = {
    "negative_slope": [(value, DtypeError, text) for value, text in NUMBER],
    "scale": [
        *((value, DtypeError, text) for value, text in NUMBER if value is not None),
        *((value, ShapeError, "give a finite number, or leave") for value in (np.nan, -np.inf)),
    ],
    "dropout": [
        *((value, DtypeError, "give a number") for value, text in NUMBER[:-1]),
        (10**5000, DtypeError, "larger than any"),
        *((value, ShapeError, "give a share from 0 to less than 1") for value in
          (1.0, 2, -0.1, np.nan, np.inf)),
    ],
    "seed": [(value, DtypeError, "give an integer") for value, _ in INTEGER],
    "width": [
        *((value, DtypeError, "give an integer") for value, _ in INTEGER),
        *((value, ShapeError, "give the most entries of a row, 1 or m") for value in (0, -3)),
        (-(10**5000), ShapeError, "less than any int64"),
    ],
    **{
        name: [(value, DtypeError, "give True or False") for value, _ in FLAG]
        for name in ("self_loops", "mean", "rescale")
    },
    **{
        name: [(value, UnsupportedError, 'use "') for value, _ in WORD]
        for name in ("reduce", "strategy", "message", "op", "method")
    },
    "precision": [("fp8", UnsupportedError, 'use "tf32" or "bf16", or leave it out')],
    "costs": [(7, DtypeError, "")],
    "order": [([0], DtypeError, "give a reorder")],
}  # fmt: skip
