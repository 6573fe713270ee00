"""Attention and its gradients in float64 at sampled vertices, by gathers and sums of torch alone.

What an error is measured by is the sum of the magnitudes of the terms of the exact result, since
terms of either sign cancel.  Scores are small here: no maximum is subtracted.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from .._oracle import LIMITS, ROUNDING, SAMPLES, SLACK

#: What a pass may hold at once, in numbers of an entry's features.
BUDGET = 1 << 25
#: Of each kind: its results, and whether they belong to targets (rows) or sources (columns).
SIDES = {
    "gat": {"out": "rows", "h": "cols", "el": "cols", "er": "rows"},
    "gatv2": {"out": "rows", "left": "cols", "right": "rows"},
    "dot": {"out": "rows", "queries": "rows", "keys": "cols", "values": "cols"},
}
#: What is aggregated.
VALUES = {"gat": "h", "gatv2": "left", "dot": "values"}
#: A sum and what its error is measured by.
Sum = tuple[Tensor, Tensor]


def limit(dtype: torch.dtype) -> float:
    """The largest error of a right result: gradients read results as they were rounded before."""
    name = str(dtype).removeprefix("torch.")
    return LIMITS[name] + ROUNDING[name]


def complaint(errors: Mapping[str, float], dtype: torch.dtype) -> str | None:
    """Why results with these errors are refused, by name; None if all are right."""
    most = limit(dtype)
    wrong = [f"{name} {error:.3g}" for name, error in errors.items() if not error <= most]
    return f"errors of {', '.join(wrong)}, at most {most:.3g} is right" if wrong else None


def sampled(places: Tensor, count: int, samples: int = SAMPLES) -> Tensor:
    """The first, the last and the busiest vertex and others at random, ascending."""
    chance = torch.Generator().manual_seed(0)
    some = torch.randint(count, (max(samples - 3, 0),), generator=chance).to(places.device)
    busiest = torch.bincount(places, minlength=count).argmax()
    three = torch.stack([busiest, busiest * 0, busiest * 0 + count - 1])
    found: Tensor = torch.cat([some, three]).unique()
    return found


def worst(found: Tensor, exact: Sum) -> float:
    """The largest error of these rows; infinite where nothing but 0 is right, NaN if any is."""
    value, magnitude = exact
    difference = (found.double() - value).abs()
    if found.dtype == torch.float16:
        difference = (difference - SLACK).clamp(min=0)
    errors = torch.where(difference == 0, 0.0, difference / magnitude)
    return float(errors.max()) if errors.numel() else 0.0


class Exact:
    """One attention over the entries (row, column), in any order, with a gradient of its result.

    Parameters
    ----------
    kind : of ``SIDES``
    rows, cols : (entries,) int64
    inputs : of that kind, by name; ``gatv2`` has ``att`` too
    grad : (n_rows, heads, feat)
    """

    def __init__(
        self,
        kind: str,
        ends: tuple[Tensor, Tensor],
        inputs: Mapping[str, Tensor],
        grad: Tensor,
        *,
        slope: float = 0.2,
    ) -> None:
        self.kind, self.ends, self.grad, self.slope = kind, ends, grad, slope
        self.inputs = {name: tensor.detach() for name, tensor in inputs.items()}
        self.heads, self.feat = grad.shape[1:]
        self.counts = {"rows": len(grad), "cols": len(self.inputs[VALUES[kind]])}
        self.focus: Tensor | None = None

    def _chunks(self, entries: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Spans of all entries, or of these, with their rows and columns."""
        rows, cols = self.ends
        total = len(rows if entries is None else entries)
        step = max(1, BUDGET // (self.heads * self.feat))
        for start in range(0, total, step):
            span = slice(start, min(start + step, total))
            at = span if entries is None else entries[span]
            yield span, rows[at], cols[at]

    def _scores(self, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """(entries, heads), and what went through the leaky ReLU, or anything for ``dot``."""
        x = self.inputs
        if self.kind == "gat":
            z = x["el"][c].double() + x["er"][r].double()
            return self._leaky(z), z
        if self.kind == "gatv2":
            z = x["left"][c].double() + x["right"][r].double()
            return (x["att"].double() * self._leaky(z)).sum(-1), z
        s = (x["queries"][r].double() * x["keys"][c].double()).sum(-1) * self.feat**-0.5
        return s, s

    def _leaky(self, z: Tensor) -> Tensor:
        return torch.where(z > 0, z, self.slope * z)

    def _slopes(self, z: Tensor) -> Tensor:
        return torch.ones_like(z).masked_fill(z <= 0, self.slope)

    @cached_property
    def _rows(self) -> Tensor:
        """(3, n_rows, heads): sums of ``exp(s)``, and that times ``<grad_i, V_j>``, magnitudes too.

        Of the rows of ``focus`` alone if there are any: to pass over all entries takes long.
        """
        shape = (3, self.counts["rows"], self.heads)
        total = self.grad.new_zeros(shape, dtype=torch.float64)
        entries = None
        if self.focus is not None:
            entries = _entries_of(self.ends[0], self.focus, self.counts["rows"])
        for _, r, c in self._chunks(entries):
            e = self._scores(r, c)[0].exp()
            dots, most = self._dots(r, c)
            for into, each in zip(total, (e, e * dots, e * most), strict=True):
                into.index_add_(0, r, each)
        return total

    @property
    def sums(self) -> Tensor:
        """(n_rows, heads) of ``exp(s)``."""
        return self._rows[0]

    @cached_property
    def shares(self) -> Tensor:
        """(2, n_rows, heads): ``D = sum_e P <grad_i, V_j>``, and of magnitudes."""
        return self._rows[1:] / self.sums

    def _dots(self, r: Tensor, c: Tensor) -> Sum:
        """``<grad_i, V_j>`` of each head."""
        terms = self.grad[r].double() * self.inputs[VALUES[self.kind]][c].double()
        return terms.sum(-1), terms.abs().sum(-1)

    def _ds(self, r: Tensor, c: Tensor, s: Tensor) -> Sum:
        """The gradients of these scores."""
        p, (dots, most) = s.exp() / self.sums[r], self._dots(r, c)
        return p * (dots - self.shares[0][r]), p * (most + self.shares[1][r])

    def _terms(self, r: Tensor, c: Tensor) -> dict[str, Sum]:
        """What each of these entries adds to the results, by name."""
        s, z = self._scores(r, c)
        p, ds = s.exp() / self.sums[r], self._ds(r, c, s)
        values = self.inputs[VALUES[self.kind]][c].double() * p[..., None]
        to_values = self.grad[r].double() * p[..., None]
        found: dict[str, Sum] = {"out": (values, values.abs())}
        if self.kind == "gat":
            slopes = self._slopes(z)
            found["h"] = to_values, to_values.abs()
            found["el"] = found["er"] = _scaled(ds, slopes)
        elif self.kind == "gatv2":
            wide = _widened(ds)
            found["right"] = _scaled(wide, self.inputs["att"].double() * self._slopes(z))
            found["left"] = to_values + found["right"][0], to_values.abs() + found["right"][1]
        else:
            wide, scale = _widened(ds), self.feat**-0.5
            found["queries"] = _scaled(wide, self.inputs["keys"][c].double() * scale)
            found["keys"] = _scaled(wide, self.inputs["queries"][r].double() * scale)
            found["values"] = to_values, to_values.abs()
        return found

    def at(self, side: str, vertices: Tensor) -> dict[str, Sum]:
        """The results that belong to these targets or sources, ascending."""
        places = self.ends[0 if side == "rows" else 1]
        entries = _entries_of(places, vertices, self.counts[side])
        names = [name for name, of in SIDES[self.kind].items() if of == side]
        total: dict[str, Sum] = {}
        for span, r, c in self._chunks(entries):
            slots = torch.searchsorted(vertices, places[entries[span]])
            for name, terms in self._terms(r, c).items():
                if name in names:
                    sums = total.setdefault(name, _zeros(terms[0], len(vertices)))
                    for into, each in zip(sums, terms, strict=True):
                        into.index_add_(0, slots, each)
        return total

    def att(self) -> Sum:
        """The gradient of ``att``, to which all entries add."""
        total = _zeros(self.inputs["att"][None].double(), 1)
        for _, r, c in self._chunks():
            s, z = self._scores(r, c)
            through = self._leaky(z)
            for into, ds, factor in zip(
                total, self._ds(r, c, s), (through, through.abs()), strict=True
            ):
                into += torch.einsum("eh,ehf->hf", ds, factor)
        return total

    def errors(self, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Of the result ``out`` and the gradients by name, those that there are."""
        result: dict[str, float] = {}
        chosen = {
            side: sampled(ends, self.counts[side])
            for side, ends in zip(("rows", "cols"), self.ends, strict=True)
        }
        if "att" not in found and "_rows" not in vars(self):
            beside = _entries_of(self.ends[1], chosen["cols"], self.counts["cols"])
            self.focus = torch.cat([chosen["rows"], self.ends[0][beside]]).unique()
        for side, vertices in chosen.items():
            exact = self.at(side, vertices)
            names = [name for name, of in SIDES[self.kind].items() if of == side]
            for name in (name for name in names if name in found):
                rows = found[name].detach()[vertices]
                sums = exact.get(name) or _zeros(rows[:1].double(), len(rows))
                result[name] = worst(rows, sums)
        if "att" in found:
            result["att"] = worst(found["att"].detach()[None], self.att())
        return result


def _entries_of(places: Tensor, vertices: Tensor, count: int) -> Tensor:
    """The numbers of the entries that belong to these of ``count`` vertices."""
    chosen = torch.zeros(count, dtype=torch.bool, device=places.device)
    chosen[vertices] = True
    return chosen[places].nonzero()[:, 0]


def _zeros(like: Tensor, count: int) -> Sum:
    shape = (count, *like.shape[1:])
    return like.new_zeros(shape), like.new_zeros(shape)


def _widened(pair: Sum) -> Sum:
    return pair[0][..., None], pair[1][..., None]


def _scaled(pair: Sum, factor: Tensor) -> Sum:
    return pair[0] * factor, pair[1] * factor.abs()


def product_at(
    ends: tuple[Tensor, Tensor], weights: Tensor, x: Tensor, vertices: Tensor, side: str
) -> Sum:
    """These rows of the product of ``x`` with the matrix of the entries; of its transpose if cols.

    Parameters
    ----------
    ends : two of (entries,) int64
    weights : (entries,)
    x : (n, feat)
    vertices : (count,), ascending
    side : "rows" or "cols"
    """
    places, others = ends if side == "rows" else ends[::-1]
    count = 1 + max(int(places.max()), int(vertices.max()))
    entries = _entries_of(places, vertices, count)
    sums = _zeros(x[:1].double(), len(vertices))
    for part in entries.split(max(1, BUDGET // x.shape[1])):
        terms = weights[part, None].double() * x[others[part]].double()
        slots = torch.searchsorted(vertices, places[part])
        sums[0].index_add_(0, slots, terms)
        sums[1].index_add_(0, slots, terms.abs())
    return sums
