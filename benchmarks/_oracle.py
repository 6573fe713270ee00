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


def worst(result: Tensor, exact: Tensor, size: Tensor | None = None) -> float:
    """Return the largest error relative to each value, or each ``size``; NaN if any is."""
    difference = (result.double() - exact).abs()
    if result.dtype == torch.float16:
        difference = (difference - SLACK).clamp(min=0)
    errors = torch.where(difference == 0, 0.0, difference / (exact.abs() if size is None else size))
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
ALL = slice(None)


def pair(terms: Tensor) -> Tensor:
    """Return terms, and their magnitudes."""
    return torch.stack([terms, terms.abs()])


class Attention:
    """Attention over entries (row, column) and its gradients in float64, at sampled vertices.

    An error is relative to the sum of the magnitudes of the terms of the exact result, since terms
    of either sign cancel.  Scores are small here: no maximum is subtracted.
    """

    def __init__(
        self, kind: str, ends: tuple[Tensor, Tensor], inputs: Inputs, grad: Tensor
    ) -> None:
        self.kind, self.ends, self.grad = kind, ends, grad
        self.inputs = {
            name: x.detach()[None] if name == "att" else x.detach() for name, x in inputs.items()
        }
        self.of_rows, self.of_cols = SIDES[kind]
        self.value = self.of_cols[-1]

    def _chunks(self, entries: Tensor | None) -> Iterator[tuple[dict[str, Tensor], Inputs]]:
        """Yield places and inputs of all entries, or of these, by name, a part at a time."""
        rows, cols = self.ends if entries is None else (end[entries] for end in self.ends)
        step = max(1, BUDGET // self.grad[0].numel())
        for r, c in zip(rows.split(step), cols.split(step), strict=True):
            places = dict.fromkeys(("out", *self.of_rows), r) | dict.fromkeys(self.of_cols, c)
            places["att"] = torch.zeros_like(r)
            yield places, {name: x[places[name]].double() for name, x in self.inputs.items()}

    def _dots(self, r: Tensor, x: Inputs) -> Tensor:
        """Return ``<grad, V>`` of each head, and of magnitudes."""
        return pair(self.grad[r] * x[self.value].detach()).sum(-1)

    def _sums(self, entries: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return of each row the sum of ``exp(s)``, and of ``P <grad, V>`` with its magnitudes."""
        total = self.grad.new_zeros(3, *self.grad.shape[:2], dtype=torch.float64)
        for places, x in self._chunks(entries):
            r, e = places["out"], SCORES[self.kind](x, ALL, ALL).exp()
            total.index_add_(1, r, torch.stack([e, *e * self._dots(r, x)]))
        return total[0], total[1:] / total[0]

    def _terms(self, r: Tensor, x: Inputs, sums: Tensor, shares: Tensor) -> dict[str, Tensor]:
        """Return what each of these entries adds to the results, with magnitudes, by name."""
        inputs = {name: part.requires_grad_() for name, part in x.items()}
        s = SCORES[self.kind](inputs, ALL, ALL)
        slopes = torch.autograd.grad(s.sum(), [*inputs.values()], allow_unused=True)
        p, (dots, most) = s.detach().exp() / sums[r], self._dots(r, x)
        ds = torch.stack([p * (dots - shares[0][r]), p * (most + shares[1][r])])
        terms = {
            name: pair(slope) * (ds if slope.dim() == 2 else ds[..., None])
            for name, slope in zip(inputs, slopes, strict=True)
            if slope is not None
        }
        terms["out"] = pair(x[self.value].detach() * p[..., None])
        terms[self.value] = terms.get(self.value, 0) + pair(self.grad[r] * p[..., None])
        return terms

    def errors(self, results: Inputs) -> dict[str, float]:
        """Return the error of ``out`` and of the gradients by name."""
        (rows, cols), n, m = self.ends, len(self.grad), len(self.inputs[self.value])
        targets, sources = sampled(rows, n), sampled(cols, m)
        near = entries = None  # to ``att`` all entries add
        if "att" not in self.inputs:
            of_sources = _entries_of(cols, sources, m)
            entries = torch.cat([_entries_of(rows, targets, n), of_sources]).unique()
            near = _entries_of(rows, rows[entries].unique(), n)
        sums = self._sums(near)
        chosen = dict.fromkeys(("out", *self.of_rows), (targets, n))
        chosen |= dict.fromkeys(self.of_cols, (sources, m)) | {"att": (targets[:1] * 0, 1)}
        total = {
            name: x.new_zeros(2, len(chosen[name][0]), *x.shape[1:], dtype=torch.float64)
            for name, x in ({"out": self.grad} | self.inputs).items()
        }
        for places, x in self._chunks(entries):
            for name, terms in self._terms(places["out"], x, *sums).items():
                if name == "att":
                    total[name] += terms.sum(1, keepdim=True)
                    continue
                slots = places[name].new_full(chosen[name][1:], -1)
                slots[chosen[name][0]] = torch.arange(len(chosen[name][0]), device=slots.device)
                slots = slots[places[name]]
                total[name].index_add_(1, slots[slots >= 0], terms[:, slots >= 0])
        return {
            name: worst((results[name][None] if name == "att" else results[name])[at], *total[name])
            for name, (at, _) in chosen.items()
            if name in results
        }

    def complaint(self, results: Inputs) -> tuple[float, str | None]:
        """Return the largest error, and why results are refused: they are rounded once more."""
        dtype = str(self.grad.dtype).removeprefix("torch.")
        errors, most = self.errors(results), LIMITS[dtype] + ROUNDING[dtype]
        reasons = {name: over(error, most) for name, error in errors.items()}
        wrong = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
        return max(errors.values()), "; ".join(wrong) or None
