"""The program behind ``sparsefmt demo``: one graph through every format, checked, timed and drawn.

It runs on NumPy and numba, and unchanged on CuPy where there is a GPU.  The library does not judge
itself: conversions are compared with the original's triples, sorted by NumPy, and SpMM with a
float64 product by SciPy.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from ..errors import DeviceError
from ..formats.arrays import import_cupy, parse_device
from ..formats.base import Format, FormatName
from ..formats.compressed import COO
from ..generate import power_law
from . import doctor

FORMATS: tuple[FormatName, ...] = ("coo", "csr", "csc", "sgt")
FEATURES = 64
N_NODES, N_EDGES = 20_000, 400_000
SEED = 2024

#: A measurement repeats until it has this many seconds or runs; the first run is not counted.
BUDGET, LEAST, MOST = 0.25, 3, 20

Bits = np.ndarray[Any, Any]
Step = Callable[[str], None]


@dataclass(frozen=True)
class Product:
    """Kernel, time and error of SpMM in one format."""

    kernel: str  #: what ``sparsefmt.ops.explain`` says
    seconds: float  #: median
    error: float  #: max of ``|Y - Y64| / sum |a| |x|``
    verified: bool  #: whether every cell lies within the error bound of float32 sums


@dataclass(frozen=True)
class Reference:
    """SpMM in float64, with the terms of float32's error bound."""

    exact: Bits  #: (n_rows, feat) ``A X``
    magnitude: Bits  #: (n_rows, feat) ``|A| |X|``
    degree: Bits  #: (n_rows, 1) stored entries of each row


@dataclass(frozen=True)
class Outcome:
    """The measurements of the demo."""

    seconds: Mapping[tuple[str, str], float]  #: (from, to) -> median of the conversion
    exact: Mapping[tuple[str, str], bool]  #: (from, to) -> whether it gave the original
    round_trip: bool  #: whether the chain through every format and back gave the original
    nbytes: Mapping[str, int]
    products: Mapping[str, Product]
    features: int = FEATURES

    @property
    def good(self) -> bool:
        """Return True if every check passed."""
        products = all(product.verified for product in self.products.values())
        return products and self.round_trip and all(self.exact.values())

    def exact_from(self, format: str) -> bool:
        """Return True if every conversion out of that format gave the original."""
        return all(exact for (source, _), exact in self.exact.items() if source == format)


def embedded_graph() -> COO:
    """Build the graph of a demo without a file: power law with communities, edges in no order."""
    A = power_law(
        N_NODES, N_EDGES, exponent=2.3, inside=0.6, community=500, seed=SEED, shuffle=False
    )
    rng = np.random.default_rng(SEED)
    shuffled = rng.permutation(A.nnz)
    values = rng.uniform(0.1, 1.0, A.nnz).astype(np.float32)
    return COO(A.row[shuffled], A.col[shuffled], values, shape=A.shape)


def pick_device(choice: str) -> tuple[str, str]:
    """Choose ``(device, description)`` for "auto", "cpu" or "cuda"; auto never fails."""
    cores = f"NumPy and numba on the CPU ({doctor.system()['CPU cores']} cores)"
    if choice == "cpu":
        return "cpu", cores
    if choice == "auto" and not doctor.find_driver().devices:
        return "cpu", cores
    try:
        ordinal = parse_device("cuda")
    except DeviceError as error:
        if choice == "cuda":
            raise
        return "cpu", f"{cores}; a GPU is here, but {error}"
    properties = import_cupy().cuda.runtime.getDeviceProperties(ordinal)
    return f"cuda:{ordinal}", f"CuPy on {properties['name'].decode()}"


def n_steps() -> int:
    """Return how many times ``run`` calls ``step``."""
    return len(FORMATS) ** 2 + 1


def run(A: Format, device: str, *, step: Step = lambda _: None) -> Outcome:
    """Convert, check and time ``A`` on ``device``; call ``step`` with the name of each step."""
    original = triples(A)
    A = A.to(device)
    step("one round through every format")
    chain = A
    for name in (*FORMATS, A.format):
        chain = chain.asformat(name)
    round_trip = same(original, triples(chain))
    forms: dict[str, Format] = {name: A.asformat(name) for name in FORMATS}
    seconds: dict[tuple[str, str], float] = {}
    exact: dict[tuple[str, str], bool] = {}
    for source, target in ((a, b) for a in FORMATS for b in FORMATS if a != b):
        step(f"{source.upper()} -> {target.upper()}")
        seconds[source, target], B = measure(lambda: forms[source].asformat(target), device)  # noqa: B023
        exact[source, target] = same(original, triples(B))
    products = multiply(forms, device, step)
    nbytes = {name: form.nbytes for name, form in forms.items()}
    return Outcome(seconds, exact, round_trip, nbytes, products)


def multiply(forms: Mapping[str, Format], device: str, step: Step) -> dict[str, Product]:
    """Run SpMM in each format, on the same features, and compare it with the same reference."""
    from ..ops import explain

    n_cols = forms["csr"].n_cols
    features = np.random.default_rng(SEED).standard_normal((n_cols, FEATURES), np.float32)
    with np.errstate(over="ignore"):  # a float64 value may have no float32
        forms = {name: form.astype(np.float32) for name, form in forms.items()}
    reference = float64_product(forms["csr"], features)
    X = features if device == "cpu" else import_cupy().asarray(features)
    products = {}
    for name, form in forms.items():
        step(f"{name.upper()} @ X")
        kernel = explain("spmm", form, X).chosen
        seconds, Y = measure(lambda: form @ X, device)  # noqa: B023
        error, verified = compare(Y if device == "cpu" else Y.get(), reference)
        products[name] = Product(kernel.name if kernel else "none", seconds, error, verified)
    return products


# Oracles


def triples(A: Format) -> tuple[Bits, Bits, Bits]:
    """Return rows, columns and the values' bits of all entries, in one order for equal matrices."""
    coo = A.to("cpu").tocoo()
    row, col = coo.row.astype(np.int64), coo.col.astype(np.int64)
    if coo.data is None:
        bits = np.zeros(coo.nnz, np.uint8)
    else:
        bits = coo.data.view(f"u{coo.data.dtype.itemsize}")
    order = np.lexsort((bits, col, row))
    return row[order], col[order], bits[order]


def same(a: tuple[Bits, ...], b: tuple[Bits, ...]) -> bool:
    """Return True if the triples agree, dtypes of the values included."""
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def float64_product(A: Format, X: Bits) -> Reference:
    """Compute ``A X`` by SciPy in float64, and the bound of float32's error."""
    coo = A.to("cpu").tocoo()
    values = np.ones(coo.nnz) if coo.data is None else coo.data.astype(np.float64)
    signed, sizes = (
        scipy.sparse.coo_array((v, (coo.row, coo.col)), shape=coo.shape).tocsr()
        for v in (values, np.abs(values))
    )
    X = X.astype(np.float64)
    degree = np.bincount(coo.row, minlength=coo.n_rows)[:, None]
    return Reference(signed @ X, sizes @ np.abs(X), degree)


def compare(Y: Bits, reference: Reference) -> tuple[float, bool]:
    """Return ``(max relative error, verified)`` of the cells whose sums float32 can hold."""
    if Y.shape != reference.exact.shape:
        return float("inf"), False
    float32 = np.finfo(np.float32)
    finite = reference.magnitude < float32.max
    magnitude = reference.magnitude[finite]
    error = np.abs(Y[finite].astype(np.float64) - reference.exact[finite])
    degree = np.broadcast_to(reference.degree, finite.shape)[finite]
    # tiny: a product below the normal numbers loses digits, or all of them on a GPU.
    bound = (degree + 1) * (float32.eps * magnitude + float32.tiny)
    verified = bool((error <= bound).all())
    counted = magnitude > float32.tiny
    return float((error[counted] / magnitude[counted]).max(initial=0.0)), verified


def measure(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Time ``work`` after a first run; return ``(median seconds, first result)``."""
    result = work()
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < BUDGET and len(times) < MOST):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def _wait(device: str) -> None:
    if device != "cpu":
        import_cupy().cuda.get_current_stream().synchronize()  # synchronize!


def picture(A: Format, outcome: Outcome, title: str, note: str, path: Path) -> None:
    """Write the demo's picture."""
    from .. import plot

    fig = plot.draw_demo(
        A,
        title=title,
        note=note,
        convert_ms={pair: 1e3 * seconds for pair, seconds in outcome.seconds.items()},
        spmm_ms={name: 1e3 * product.seconds for name, product in outcome.products.items()},
        nbytes=outcome.nbytes,
        features=outcome.features,
    )
    plot.save(fig, path)
