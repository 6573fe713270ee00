"""What results are held against: float64 sums over stored entries, for sampled rows or entries.

Gathers and sums of torch alone, on the device of the arrays; nothing is shared with the library.
Products are of numbers in [0, 1), so that no terms cancel: their error is relative to each value.
Half the distance of float16's subnormals is no error.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from sparsefmt import CBSR, CSR
from sparsefmt.formats.arrays import Array

from . import _baselines

#: Rounding of the stored result alone, relative.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Largest relative error; bfloat16's own rounding is more than a thousandth and comes on top.
LIMITS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3 + ROUNDING["bfloat16"]}
SAMPLES = 200
#: Rows that are sorted at once, and numbers of float64 that a pass holds.
CHUNK, BUDGET = 1 << 15, 1 << 25
#: Half the distance of float16's subnormals.
SLACK = 2.0**-25


def complaint(error: float, dtype: Any, *, in_turn: int = 0) -> str | None:
    """Return why a result of this error is refused; None if it is right.

    Of so many terms that atomics add to a float32 one after the other, each addition rounds: the
    error grows like the root of their number.
    """
    rounding = np.finfo(np.float32).eps * in_turn**0.5
    return over(error, max(LIMITS[np.dtype(dtype).name], rounding))


def over(error: float, limit: float) -> str | None:
    """Return why an error is refused; None up to the limit."""
    return None if error <= limit else f"relative error {error:.3g}, at most {limit:.3g} is right"


def refused(reason: str | None) -> dict[str, str]:
    """Return the part of a row that says why its result is refused, if it is."""
    return {"wrong": reason} if reason else {}


def judged(error: float, limit: float) -> dict[str, Any]:
    """Return the part of a row with its error, and why it is refused, if it is beyond the limit."""
    return {"error": error} | refused(over(error, limit))


def rounded(error: float, dtype: Any) -> dict[str, Any]:
    """Return the part of a row with the error of a result of that dtype, likewise."""
    return {"error": error} | refused(complaint(error, dtype))


def worst(result: Tensor, exact: Tensor) -> float:
    """Return the largest error relative to each value; NaN if any is."""
    difference = (result.double() - exact).abs()
    if result.dtype == torch.float16:
        difference = (difference - SLACK).clamp(min=0)
    errors = torch.where(difference == 0, 0.0, difference / exact.abs())
    return float(errors.max()) if errors.numel() else 0.0


def norm_error(results: Any, exact: Any) -> float:
    """Return the largest norm of a tensor's errors, relative to that of the exact one."""
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(results, exact, strict=True)
    ]
    errors = [(a - b).norm() / b.norm().clamp(min=1e-300) for a, b in pairs]
    return float(torch.stack(errors).max())  # NaN if any is


# Products


def sampled(places: Tensor, count: int, samples: int = SAMPLES) -> Tensor:
    """Return the first, the last and the busiest vertex and others at random, ascending."""
    chance = torch.Generator().manual_seed(0)
    some = torch.randint(count, (max(samples - 3, 0),), generator=chance).to(places.device)
    busiest = torch.bincount(places, minlength=count).argmax()
    return torch.cat([some, torch.stack([busiest, busiest * 0, busiest * 0 + count - 1])]).unique()


def spmm_error(A: CSR, X: Array, Y: Array, *, columns: Array | None = None) -> float:
    """Return the largest relative error of ``Y`` in sampled rows; NaN if any is NaN.

    ``Y`` is the whole product, or has in each row what ``columns``, of its shape, says.
    """
    rows, cols = _baselines.ends_of(A)
    chosen = sampled(rows, A.n_rows)
    entries, x = _entries_of(rows, chosen, A.n_rows), _baselines.tensor(X)
    exact = torch.zeros(len(chosen), x.shape[1], dtype=torch.float64, device=x.device)
    for part in entries.split(max(1, BUDGET // max(x.shape[1], 1))):
        terms = x[cols[part]].double()
        if A.data is not None:
            terms *= _baselines.tensor(A.data)[part, None].double()
        exact.index_add_(0, torch.searchsorted(chosen, rows[part]), terms)
    if columns is not None:
        exact = exact.gather(1, _baselines.tensor(columns)[chosen].long())
    return worst(_baselines.tensor(Y)[chosen], exact)


def sddmm_error(A: CSR, X: Array, Y: Array, result: Array) -> float:
    """Return the largest relative error of ``result`` at sampled entries."""
    if A.nnz == 0:
        return 0.0
    rows, cols = _baselines.ends_of(A)
    some = torch.randint(A.nnz, (50 * SAMPLES,), generator=torch.Generator().manual_seed(0))
    entries = torch.cat([some, torch.tensor([0, A.nnz - 1])]).unique().to(rows.device)
    x, y = _baselines.tensor(X)[rows[entries]], _baselines.tensor(Y)[cols[entries]]
    return worst(_baselines.tensor(result)[entries], (x.double() * y.double()).sum(1))


def softmax_error(A: CSR, scores: Array, result: Array) -> float:
    """Return the largest relative error of probabilities in sampled rows; scores (nnz, heads)."""
    rows, _ = _baselines.ends_of(A)
    chosen = sampled(rows, A.n_rows)
    entries = _entries_of(rows, chosen, A.n_rows)
    powers = _baselines.tensor(scores)[entries].double().exp()
    slots = torch.searchsorted(chosen, rows[entries])
    sums = powers.new_zeros(len(chosen), powers.shape[1]).index_add_(0, slots, powers)
    return worst(_baselines.tensor(result)[entries], powers / sums[slots])


def wrong_maxk_rows(X: Array, S: CBSR) -> int:
    """Count rows of ``S`` that are not the first ``k`` of ``X`` by torch's stable sort, NaN first.

    All are compared, bit by bit.
    """
    wrong = 0
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[X.itemsize]
    chunks = (_baselines.tensor(array).split(CHUNK) for array in (X, S.indices, S.data))
    for x, columns, values in zip(*chunks, strict=True):
        ordered = torch.sort(x + 0, dim=1, descending=True, stable=True).indices  # -0 + 0 is 0
        exact = ordered[:, : S.k].sort(dim=1).values
        same = (columns == exact) & (values.view(bits) == x.gather(1, exact).view(bits))
        wrong += len(x) - int(same.all(1).sum())
    return wrong


def _entries_of(places: Tensor, vertices: Tensor, count: int) -> Tensor:
    """Return the numbers of the entries that belong to these of ``count`` vertices."""
    chosen = torch.zeros(count, dtype=torch.bool, device=places.device)
    chosen[vertices] = True
    return chosen[places].nonzero()[:, 0]


# Attention

SLOPE = 0.2
Inputs = Mapping[str, Tensor]
#: Of each kind: what belongs to rows, and what to columns; what is aggregated comes last.
SIDES = {
    "gat": (("er",), ("el", "h")),
    "gatv2": (("right",), ("left",)),
    "dot": (("queries",), ("keys", "values")),
}
#: (entries, heads) of each kind, of inputs by name and of the entries' rows and columns.
SCORES: dict[str, Callable[[Inputs, Tensor, Tensor], Tensor]] = {
    "gat": lambda x, r, c: leaky_relu(x["el"][c] + x["er"][r], SLOPE),
    "gatv2": lambda x, r, c: (leaky_relu(x["left"][c] + x["right"][r], SLOPE) * x["att"]).sum(-1),
    "dot": lambda x, r, c: (x["queries"][r] * x["keys"][c]).sum(-1) * x["keys"].shape[-1] ** -0.5,
}
#: Gradients read the result as it was rounded, and terms cancel: times the error of a product.
CANCELS = 4.0
#: Largest error of the gradient of ``att``, to which all entries add.
ATT_LIMIT = 1e-3


class Attention:
    """Attention over entries (row, column) and its gradients in float64, at sampled vertices.

    Scores are small here: no maximum is subtracted.
    """

    def __init__(
        self, kind: str, ends: tuple[Tensor, Tensor], inputs: Inputs, grad: Tensor
    ) -> None:
        self.kind, self.ends, self.grad = kind, ends, grad
        self.inputs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        self.values = self.inputs[SIDES[kind][1][-1]]

    def _chunks(self, entries: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows and columns of all entries, or of these, a part at a time."""
        rows, cols = self.ends if entries is None else (end[entries] for end in self.ends)
        step = max(1, BUDGET // self.grad[0].numel())
        yield from zip(rows.split(step), cols.split(step), strict=True)

    def errors(self, results: Inputs) -> dict[str, float]:
        """Return the error of ``out`` and of the gradients by name, relative to the largest."""
        rows, cols = self.ends
        n, m = len(self.grad), len(self.values)
        for x in self.inputs.values():
            x.grad = None
        targets, sources = sampled(rows, n), sampled(cols, m)
        # Rows whose sums are needed, and entries that add to what is compared.
        near = torch.cat([targets, rows[_entries_of(cols, sources, m)]]).unique()
        everything = "att" in self.inputs
        sums, shares, out = self._sums(None if everything else _entries_of(rows, near, n))
        chosen = torch.cat([_entries_of(rows, targets, n), _entries_of(cols, sources, m)]).unique()
        for r, c in self._chunks(None if everything else chosen):
            s = SCORES[self.kind](self.inputs, r, c)
            p = (s.exp() / sums[r]).detach()
            dots = (self.grad[r].double() * self.values[c]).sum(-1)
            ds = (p * (dots - shares[r])).detach()
            ((s * ds).sum() + (p * dots).sum()).backward()
        exact = {"out": out} | {name: x.grad for name, x in self.inputs.items()}
        places: dict[str, Any] = {"out": targets, "att": slice(None)}
        for side, vertices in zip(SIDES[self.kind], (targets, sources), strict=True):
            places |= dict.fromkeys(side, vertices)
        pairs = {name: (results[name][places[name]], x[places[name]]) for name, x in exact.items()}
        return {
            name: float((result.double() - x).abs().max() / x.abs().max())
            for name, (result, x) in pairs.items()
        }

    @torch.no_grad()
    def _sums(self, entries: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each row sums of ``exp(s)``, of ``P <grad, V>``, and the result."""
        sums = self.grad.new_zeros(self.grad.shape[:2], dtype=torch.float64)
        out = self.grad.new_zeros(self.grad.shape, dtype=torch.float64)
        for r, c in self._chunks(entries):
            e = SCORES[self.kind](self.inputs, r, c).exp()
            sums.index_add_(0, r, e)
            out.index_add_(0, r, self.values[c] * e[..., None])
        out /= sums.clamp(min=1e-300)[..., None]
        shares = (self.grad.double() * out).sum(-1)
        return sums, shares, out

    def complaint(self, results: Inputs) -> tuple[float, str | None]:
        """Return the largest error, and why results are refused."""
        name = str(self.grad.dtype).removeprefix("torch.")
        errors, most = self.errors(results), LIMITS[name] + ROUNDING[name]
        limits = {"out": most, "att": max(CANCELS * most, ATT_LIMIT)}
        reasons = [over(error, limits.get(one, CANCELS * most)) for one, error in errors.items()]
        return max(errors.values()), next((f"{one}: {errors}" for one in reasons if one), None)
