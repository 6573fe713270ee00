"""What ``sparsefmt.optimize`` asks of a graph that ranks share, so that all choose alike."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import gat_aggregate, sddmm
from ..interop.torch import to_tensor
from ..model.layers import edges_with_loops
from ..nn.shared import Shared
from .agreement import on_all_ranks
from .halo import numbered_graph

if TYPE_CHECKING:
    from .graph import DistGraph

T = TypeVar("T")


class Plannable(Shared):
    """The planner's part of a ``DistGraph``."""

    @cached_property
    def busiest(self) -> dict[str, int]:
        """The most that any rank has: sizes by the planner's names, the same on all ranks.

        Of rows "n", entries "nnz", rows that are exchanged "halo", and "own" entries, which are
        multiplied meanwhile.  To be asked for on all ranks at once.
        """
        graph, halo = self._itself, self._itself.halo
        received, sent = len(halo.vertices), sum(halo.sent)
        if halo.gathered is not None:
            received = sent = (halo.gathered.ranks - 1) * halo.gathered.most
        counts = graph.n_local, graph.local.nnz, max(received, sent), graph.rest.nnz
        most = torch.tensor(counts, device=halo.vertices.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=graph.group)
        n, nnz, exchanged, rest = map(int, most.tolist())  # synchronize!
        return {"n": n, "nnz": nnz, "halo": exchanged, "own": max(0, nnz - rest)}

    def agreed(self, facts: Callable[[], Mapping[str, Any]], own: Callable[[], T]) -> T:
        """Check that facts are the same on all ranks, and give what the first one has of its own.

        Raises
        ------
        RankError
            On all ranks, if facts differ or one of the two fails on some; what fails with the same
            words on all ranks is raised as it is.
        """
        graph, device, said = self._itself, self._itself.halo.vertices.device, list[Any]()

        def prepare() -> Any:
            found = facts()
            said.append(own() if graph.rank == 0 else None)
            return found

        on_all_ranks(prepare, graph.group, device, alike=True)
        first = 0 if graph.group is None else dist.get_global_rank(graph.group, 0)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            dist.broadcast_object_list(said, first, group=graph.group)
        return cast(T, said[0])

    @property
    def times_forgotten(self) -> int:
        """How often ``forget`` was called: what was made before of features that stay is old."""
        return self._itself.halo.memory.cleared

    def bytes_between(self, x: Tensor) -> int:
        """Count the bytes of a feature of ``x`` on its way to another rank."""
        narrow = self._itself.halo.exchange_dtype
        return x.itemsize if narrow is None else min(x.itemsize, narrow.itemsize)

    def looped(self, which: str) -> "DistGraph":
        """Add loops to vertices, as ``autograd.adapters.with_loops`` does: of them nothing travels.

        The new graph has the same halo, and nothing of what was built of this one.
        """
        graph = self._itself
        coo = graph.local.structure.tocoo()
        ends = to_tensor(coo.col).long(), to_tensor(coo.row).long()
        (columns, rows), _, _ = edges_with_loops(*ends, graph.n_local, which)
        own = columns < graph.n_sources
        again, busiest = copy(graph), self.busiest
        for kind in type(graph).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, cached_property):
                    vars(again).pop(name, None)
        again.local = numbered_graph(columns, rows, graph.local.shape[1], graph.n_local)
        again.own = numbered_graph(columns[own], rows[own], graph.n_sources, graph.n_local)
        again._is_own = own
        more = {name: busiest[name] + busiest["n"] for name in ("nnz", "own")}
        again.busiest = busiest | more  # at most
        return again

    def scaled_entries(self, row: Tensor | None, col: Tensor | None) -> Tensor:
        """(n_edges,) Multiply the factors of the target and the source of each edge."""
        graph, like = self._itself, row if col is None else col
        assert like is not None  # a rule gives one of them
        row = like.new_ones(graph.n_local) if row is None else row
        away = like.new_ones(graph.local.shape[1]) if col is None else graph.extended(col)
        return sddmm(graph.local, row[:, None], away[:, None])

    def gat_aggregate(self, x: Tensor, el: Tensor, er: Tensor, **options: Any) -> Tensor:
        """(n_local, feat) Aggregate by attention of one head, as ``autograd.gat_aggregate``.

        Features with a gradient travel beside their scores; others by themselves, since they may
        have come already.
        """
        graph = self._itself
        if x.requires_grad:
            both = graph.extended(torch.cat([x, el[:, None].to(x.dtype)], 1))
            x, el = both[:, :-1].contiguous(), both[:, -1]  # kernels would copy it, twice
        else:
            x, el = graph.extended(x), graph.extended(el)
        er = torch.cat([er, er.new_zeros(len(x) - len(er))])
        return gat_aggregate(graph.square, x, el, er, **options)[: graph.n_local]

    @property
    def _itself(self) -> "DistGraph":
        return cast("DistGraph", self)
