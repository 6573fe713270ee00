"""Checks of what layers take, before torch refuses it in the words of its own products."""

from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..autograd import as_graph, spmm
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..autograd.tensors.shared import Shared
from ..autograd.tensors.tensors import GraphTensors
from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError


def check_flags(**flags: object) -> None:
    """Raise DtypeError with the name of a flag that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise DtypeError(f"{name} is {value!r}: give True or False.")


def check_number(name: str, value: object) -> None:
    """Check for a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} is {value!r}: give a number.")
    try:
        finite = isfinite(value)
    except OverflowError as error:  # its digits may be too many to be shown
        raise ShapeError(
            f"{name} is beyond the range of a float: give a finite number, 0.5 for instance."
        ) from error
    if not finite:
        raise ShapeError(f"{name} is {value!r}: give a finite number.")


def check_share(name: str, value: Any) -> None:
    """Check for a number from 0 to less than 1."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ShapeError(f"{name} is {value!r}: give a share from 0 to less than 1.")


def in_pair(in_channels: Any) -> tuple[int, int]:
    """Return the features of sources and of targets that a layer takes, -1 if ``x`` tells."""
    if not isinstance(in_channels, tuple | list):
        check_in_channels(in_channels)
        return in_channels, in_channels
    if len(in_channels) != 2:
        raise ShapeError(
            f"in_channels is {in_channels!r}: give an integer, or (of sources, of targets)."
        )
    for i, channels in enumerate(in_channels):
        check_in_channels(channels, f"in_channels[{i}]")
    return in_channels[0], in_channels[1]


def check_in_channels(value: object, name: str = "in_channels") -> None:
    """Check for an integer, 1 or more, or -1 for as many as the first features have."""
    if type(value) is not int or value != -1:
        check_counts(", or -1 for those of the first x", **{name: value})


def check_counts(also: str = "", /, **counts: object) -> None:
    """Check for integers, 1 or more, by their names; ``also`` says what else may be given."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise DtypeError(f"{name} is {value!r}: give an integer, 1 or more{also}.")
        if value < 1:
            raise ShapeError(f"{name} is {value}: give 1 or more{also}.")


def check_square(graph: GraphTensors, named: bool) -> None:
    """Check for a square graph, which the user ``named`` by itself or as an ``edge_index``."""
    if graph.n_rows != graph.n_cols:
        raise ShapeError(
            f"{'graph' if named else 'edge_index'} has shape {(graph.n_rows, graph.n_cols)}: a "
            "layer needs as many columns as rows, since a vertex takes part in its own result; "
            "most take (x, x_target) for others."
        )


def takes_rows_too_many(x: Tensor) -> bool:
    """Return True for ``x`` on a GPU: rows without entries cost less there than scores by torch."""
    return x.is_cuda


class Ends(NamedTuple):
    """Features of sources and, if there are some, of targets, and the graph between them.

    ``alike`` tells that they are one tensor, of a square graph's vertices.  ``tensors`` are those
    of the entries here.  Where processes share the graph, ``shared`` is it, and so is ``graph``
    until that of the entries here replaces it.
    """

    graph: GraphLike
    source: Tensor
    target: Tensor | None
    alike: bool
    tensors: GraphTensors
    shared: Shared | None = None

    def along(self, graph: GraphLike) -> "Ends":
        """Return the same features with another graph between them."""
        return self._replace(graph=graph, tensors=tensors_of(graph))

    def gathered(self) -> "Ends":
        """Return the graph of this process's entries, and features of all its sources."""
        if self.shared is None:
            return self
        return self._replace(graph=self.shared.local, source=self.shared.extended(self.source))

    def squared(self) -> "Ends":
        """Add the vertices of other processes to the targets, without entries, on a GPU.

        So an aggregation of one set of vertices serves a graph that processes share.
        """
        if self.shared is None or not self.alike or not takes_rows_too_many(self.source):
            return self
        return self.along(self.shared.square)

    def of_targets(self, x: Tensor) -> Tensor:
        """Return the first rows, those of targets, where processes share the graph; else all."""
        n_targets = self.tensors.n_rows
        return x if self.shared is None or n_targets == len(x) else x[:n_targets]


def ends_of(x: Any, edge_index: GraphLike, size: Any) -> Ends:
    """Check features of one or both ends, and a ``size``, with the graph between them."""
    shared = isinstance(edge_index, Shared) and edge_index.complete is None
    if isinstance(x, Tensor) and size is None and not shared:
        rows = x if x.dim() == 2 else by_vertex(x)
        graph = as_graph(edge_index, rows, name="edge_index")
        return Ends(graph, x, x, True, check_input(x, graph, edge_index))
    pair = isinstance(x, tuple) or (isinstance(x, list) and len(x) == 2)
    if pair and len(x) != 2:
        raise ShapeError(f"x has {len(x)} parts: give (x, x_target), features of both ends.")
    source, target = x if pair else (x, x)
    if shared:
        return _shared_ends(x, cast(Shared, edge_index), size)
    if size is not None:
        _check_size(size, source, target)
    graph = as_graph(edge_index, *map(by_vertex, (source, target)), size=size, name="edge_index")
    tensors = tensors_of(graph)
    sizes = tensors.n_cols, tensors.n_rows
    for what, number, wanted in zip(("sources", "targets"), sizes, size or (), strict=False):
        if wanted is not None and number != wanted:
            raise ShapeError(
                f"size is {tuple(size)} but the graph has {number} {what}: give (n_source, "
                f"n_target), {sizes}."
            )
    if not pair and size is None:
        check_square(tensors, graph is edge_index)
    check_end("x[0]" if pair else "x", source, tensors.n_cols, "columns", tensors)
    if target is not None:
        check_end("x[1]" if pair else "x", target, tensors.n_rows, "rows", tensors)
    return Ends(graph, source, target, source is target, tensors)


def _shared_ends(x: Any, graph: Shared, size: Any) -> Ends:
    """Check features of the vertices that this process has of a graph."""
    pair = not isinstance(x, Tensor)
    if size is not None:
        raise UnsupportedError(
            f"size is {size!r} beside a graph that processes share, which has its own: leave it "
            "out."
        )
    if not pair and not graph.is_square:
        raise ShapeError(
            "x is one tensor but sources of the graph are other vertices than targets: give "
            "(x, x_target), features of both that this process has."
        )
    source, target = x if pair else (x, x)
    names = (("x[0]", source, "sources"), ("x[1]", target, "targets"))
    for name, part, of in names if pair else (("x", source, "sources"),):
        if part is not None or of == "sources":
            static = isinstance(part, Tensor) and part.dim() > 2
            graph.check(name, by_vertex(part).flatten(1) if static else part, of=of)
    return Ends(graph, source, target, source is target, tensors_of(graph.local), graph)


def by_vertex(x: Any) -> Any:
    """Return features with a row for each vertex, which static ones have along axis -2."""
    return x.movedim(-2, 0) if isinstance(x, Tensor) and x.dim() > 2 else x


def refuse_static(x: object, layer: object) -> None:
    """Refuse features (batch, n, feat), which attention layers do not take, nor PyG's."""
    parts = (
        {f"x[{i}]": part for i, part in enumerate(x)} if isinstance(x, tuple | list) else {"x": x}
    )
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.dim() > 2:
            raise ShapeError(
                f"{name} has shape {tuple(part.shape)}: {type(layer).__name__} takes no static "
                "features, as PyG's; give (n, feat), one call for each of them."
            )


def _check_size(size: Any, source: Any, target: Any) -> None:
    """Check for ``(n_source, n_target)``, each an integer or None, beside features of both."""
    if isinstance(size, Tensor):
        raise DtypeError(
            "size is a Tensor: give (n_source, n_target), or edge weights by name, edge_weight=..."
        )
    two = isinstance(size, tuple | list) and len(size) == 2
    if not two or not all(
        n is None or (isinstance(n, Integral) and not isinstance(n, bool)) for n in size
    ):
        raise ShapeError(f"size is {size!r}: give (n_source, n_target), two integers.")
    if any(n is not None and n < 0 for n in size):
        raise ShapeError(f"size is {size!r}: counts cannot be negative.")
    for what, x, wanted in (("sources", source, size[0]), ("targets", target, size[1])):
        if isinstance(x, Tensor) and wanted is not None and by_vertex(x).shape[:1] != (wanted,):
            raise ShapeError(
                f"size is {tuple(size)} but features of {what} have shape {tuple(x.shape)}: give "
                "one row for each of them."
            )


def check_end(
    name: str, x: Any, rows: int, axis: str, graph: GraphTensors, *, sparse: bool = False
) -> None:
    """Check features of an end of a graph, (..., rows, feat); those for a product may be sparse."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} is a {type(x).__name__}: give a torch.Tensor.")
    if x.layout is not torch.strided and not sparse:
        raise UnsupportedError(f"{name} has layout {x.layout}: give a dense tensor.")
    if not x.is_floating_point():
        raise DtypeError(
            f"{name} is {x.dtype}: give floating numbers, {name}.float() for instance."
        )
    if x.device != graph.device:
        raise DeviceError(
            f"{name} is on {x.device} but the graph is on {graph.device}: move one of them."
        )
    if x.dim() < 2 or x.shape[-2] != rows:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)} but the graph has {rows} {axis}: give ({rows}, "
            f"feat), or (batch, {rows}, feat), of graph.shape == {(graph.n_rows, graph.n_cols)}."
        )


def check_input(
    x: Any, graph: GraphLike, edge_index: GraphLike, *, sparse: bool = False
) -> GraphTensors:
    """Check features of one set of vertices, static ones or ``sparse`` too.

    Returns the tensors of the graph, of one that processes share those of the entries here.  An
    error about the graph names what the user gave, ``edge_index``.
    """
    if isinstance(x, tuple):
        refuse_pair(x)
    if isinstance(graph, Shared):
        if not graph.is_square:
            raise ShapeError(
                "sources of the graph are other vertices than targets: make it without "
                "source_bounds, or use a layer that takes (x, x_target)."
            )
        static = isinstance(x, Tensor) and x.dim() > 2
        graph.check("x", by_vertex(x).flatten(1) if static else x)
        return tensors_of(graph.local)
    tensors = tensors_of(graph)
    dense = isinstance(x, Tensor) and x.layout is torch.strided
    if (
        dense
        and x.dim() == 2
        and x.shape[0] == tensors.n_rows == tensors.n_cols
        and x.is_floating_point()
        and x.device == tensors.device
    ):
        return tensors
    check_square(tensors, graph is edge_index)
    if not isinstance(x, Tensor) or (dense and x.dim() < 3):
        spmm(graph, x)  # refuses it
    check_end("x", x, tensors.n_cols, "columns", tensors, sparse=sparse)
    return tensors


def refuse_pair(x: object) -> None:
    """Refuse features of two ends for a layer of one set of vertices."""
    listed = isinstance(x, list) and any(isinstance(part, Tensor) for part in x)
    if isinstance(x, tuple) or listed:
        raise ShapeError(
            f"x is a {type(x).__name__} but the layer takes one set of vertices: give one tensor, "
            "or use SAGEConv or GINConv, which take (x, x_target)."
        )


def check_edge_weight(value: object, graph: GraphTensors, *, exact: bool = False) -> None:
    """Refuse weights of heads, which products take and layers of one weight an edge do not.

    ``exact`` refuses all but a weight for each edge, which products check themselves.
    """
    if exact and not isinstance(value, Tensor):
        raise DtypeError(f"edge_weight is a {type(value).__name__}: give a torch.Tensor.")
    if isinstance(value, Tensor) and (value.dim() != 1 or (exact and len(value) != graph.nnz)):
        raise ShapeError(
            f"edge_weight has shape {tuple(value.shape)} but the graph stores {graph.nnz} entries: "
            f"give ({graph.nnz},), one weight for each edge."
        )


def check_like(name: str, value: Tensor, weight: Tensor) -> None:
    """Check that a tensor has the device and the dtype of a layer's weights."""
    if value.device != weight.device:
        raise DeviceError(
            f"{name} is on {value.device} but the layer's weights are on {weight.device}: move "
            f"one, layer.to({name}.device) for instance."
        )
    if not value.is_floating_point():
        raise DtypeError(
            f"{name} is {value.dtype}: give floating numbers, {name}.to({weight.dtype}) for "
            "instance."
        )
    # Autocast makes one dtype of all but float64, which it leaves as it is.
    cast = torch.is_autocast_enabled(value.device.type)
    if value.dtype != weight.dtype and not (
        cast and value.dtype != torch.float64 and weight.dtype != torch.float64
    ):
        raise DtypeError(
            f"{name} is {value.dtype} but the layer's weights are {weight.dtype}: give both in one "
            f"dtype, layer.to({name}.dtype) for instance."
        )


def as_autocast(x: Tensor) -> Tensor:
    """Cast features as autocast would for a product; it leaves float64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.element_size() == 8:
        return x
    return x.to(torch.get_autocast_dtype(kind))
