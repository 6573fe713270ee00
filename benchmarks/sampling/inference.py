"""A trained GCN in the ways it can be run: over all entries, over samples, by torch.sparse."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array, is_cupy, namespace
from sparsefmt.ops import sample, scale, spmm, spmm_sampled

from .. import _baselines, _cusparse, _graphs, _harness, _oracle
from .._baselines import Call
from ..cbsr.training import worst
from ..tiles.training import Product, normalised
from .labelled import GCN, Labelled, Recipe, predict

#: Largest error of logits, relative to their norm, from the model in float64 by torch.sparse.
LIMIT = 1e-4
SEED = 0  #: of the aggregation alone; a model draws others


@dataclass
class Trained:
    """A model, with the graph that it was trained on."""

    data: Labelled
    recipe: Recipe
    model: GCN

    @property
    def A(self) -> CSR:
        """The graph, without values."""
        found: CSR = self.data.graph.csr
        return found

    @cached_property
    def B(self) -> CSR:
        """``D^-1/2 (A + I) D^-1/2``."""
        return normalised(self.A)

    def over(self, width: int, strategy: str) -> Module:
        """The model over samples."""
        found = deepcopy(self.model)
        layers: list[Any] = [found.first, found.second]
        for layer in layers:
            layer.sample, layer.strategy = width, strategy
        return found

    def by_torch(self) -> Module:
        """The model with torch.sparse's products."""
        there = _baselines.torch_csr(self.B)
        return self._with_product(lambda h: there @ h, torch.float32)

    def exact(self, of: Callable[[CSR], CSR] = lambda A: A) -> Module:
        """The model in float64 over the graph that ``of`` makes of the whole one.

        Sums of rows are multiplied by the entries they had over those they have; loops stay.
        """
        kept = of(self.A)
        shares = self.A.lengths / kept.lengths.clip(1)
        degrees, xp = self.B.lengths.astype(np.float64), namespace(self.A.indptr)
        root = 1 / xp.sqrt(degrees)
        own = _baselines.tensor((degrees - self.A.lengths) / degrees)[:, None]
        there = _baselines.torch_csr(scale(kept, row=root * shares, col=root))
        return self._with_product(lambda h: there @ h + own * h, torch.float64)

    def _with_product(self, product: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Module:
        found = GCN(partial(Product, product=product), self.data, self.recipe)
        found.load_state_dict(self.model.state_dict())
        return found.to(self.data.x.device, dtype).eval()

    def error(self, model: Module, exact: Module) -> float:
        """Of the logits."""
        x = self.data.x.double()
        with torch.no_grad():
            return worst([predict(model, self.data).double()], [exact(x, None)])

    def call(self, model: Module) -> Call:
        """One inference of the whole model."""
        return lambda: predict(model, self.data)


class Aggregation:
    """``diag(s) A diag(s) X`` at the width of the hidden layer: whole, sampled, by cuSPARSE."""

    def __init__(self, trained: Trained) -> None:
        A, feat = trained.A, trained.recipe.hidden
        xp = namespace(A.indptr)
        self.A, self.X = A, _graphs.uniform(A.indptr, (A.n_cols, feat))
        self.Y = xp.empty((A.n_rows, feat), np.float32)
        self.s = (1 / xp.sqrt(trained.B.lengths)).astype(np.float32)
        self.scales = {"row_scale": self.s, "col_scale": self.s}

    def full(self) -> Array:
        """Over all entries."""
        return spmm(self.A, self.X, out=self.Y, **self.scales)

    def over(self, width: int, strategy: str) -> Call:
        """Over samples, as a layer does it."""
        how: dict[str, Any] = {"strategy": strategy, "seed": SEED, "rescale": True}
        return partial(spmm_sampled, self.A, self.X, width, out=self.Y, **how, **self.scales)

    def cusparse(self) -> Call:
        """The best algorithm of cuSPARSE."""
        W = scale(self.A, row=self.s, col=self.s)
        return _cusparse.best_spmm(W, self.X, namespace(self.Y).empty_like(self.Y))[1]

    def complaint(self, width: int, strategy: str) -> str | None:
        """Why the product over samples is wrong, from a poisoned output; None if it is right."""
        B = sample(self.A, width, strategy=strategy, seed=SEED)
        shares = (self.A.lengths / B.lengths.clip(1)).astype(np.float32)
        W = scale(B, row=self.s * shares, col=self.s)
        if is_cupy(self.Y):
            _harness.poison(self.Y)
        else:
            self.Y.fill(np.nan)
        self.over(width, strategy)()
        return _oracle.complaint(_oracle.spmm_error(W, self.X, self.Y), np.float32)


def complaint(error: float) -> dict[str, Any]:
    """What is wrong with logits of that error, if anything."""
    right = error <= LIMIT
    return {} if right else {"wrong": f"logits differ by {error:.3g}, at most {LIMIT:g} is right"}
