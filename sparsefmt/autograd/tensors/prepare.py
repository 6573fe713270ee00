"""Graphs as the public functions take them, and what they need of a graph made beforehand."""

from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.sgt import check_tile
from ...graph.built import slot
from ...graph.graph import Graph
from ...ops.cbsr.api import checked_order
from ...ops.cbsr.windows import prepare_order
from ...ops.engine.structure import csr_of
from ...ops.tiles.costs import Costs, checked
from ...reorder import Order
from ..engine import tiles as _tiles
from ..engine.memory import out_of_inference
from . import lifetimes
from . import pytree as pytree  # registers graphs as nodes
from .edge_index import as_graph, wrong_graph
from .shared import Shared
from .tensors import GraphTensors, is_eager

#: What the functions take: a graph, or its tensors where a transformation has replaced them; public
#: ones also an ``edge_index``, of which ``as_graph`` makes a graph.
GraphLike: TypeAlias = "Graph | GraphTensors | Tensor | Shared"


def prepare(
    graph: Graph,
    *,
    transposed: bool = True,
    order: Order | None = None,
    tile: tuple[int, int] | None = None,
    costs: Costs | None = None,
) -> None:
    """Make what the functions need of a graph now, rather than at first use.

    Call it before a CUDA graph is captured, and for every new graph that a compiled function will
    get: one that is not prepared makes ``torch.compile`` trace again.

    Parameters
    ----------
    graph : Graph
    transposed : bool
        Whether gradients will be asked for, which read the transpose.
    order : reorder.Order, optional
        Of the rows of the graph, such as ``reorder.community_order(graph.csr)``: what the gradient
        of ``maxk_aggregate`` goes by on a GPU, see ``ops.sspmm``.  No row of any tensor moves.  It
        replaces an earlier one, which stays if this is left out; it does not travel to another
        device, into a copy or to ``graph.transposed``.
    tile : (height, width), optional
        Of condensed tiles, ``graph.sgt(tile)`` and, for gradients, ``graph.transposed.sgt(tile)``:
        ``sddmm`` and sums and means of ``spmm`` go by them to the tensor cores of a GPU, in float32
        rounded as ``ops.spmm`` says.  (64, 16) suits most graphs; heights are 16, 32, 64 and 128.
        Replaces and stays as ``order`` does.  What shares the arrays of the graph, as
        ``graph.with_data`` and ``graph.transposed`` do, shares the tiles.
    costs : ops.Costs, optional
        What decides which entries tensor cores take, of all products with these tiles alike; if
        left out as measured for each kind of product, whatever was given before.

    Raises
    ------
    DtypeError
        If ``graph`` is no Graph, ``order`` no Order or ``costs`` no Costs.
    ShapeError
        If ``order`` has not one place for each row of the graph, or ``tile`` is not two positive
        integers, of at most 65 536 cells.
    DeviceError
        If ``order`` is on another device.
    UnsupportedError
        If ``costs`` are given without ``tile``.

    Notes
    -----
    Synchronises with a GPU when it builds anything, and with what a function is building.  The
    tensors are views, or the formats are views of them: only the transpose takes memory, 2 nnz +
    n_cols + 1 indices, which ``graph.csc`` and ``graph.csc_perm`` share, and on a GPU the cut of
    the work: about nnz / 32 + n_rows / 4 indices, both ways.  Of a graph that is itself a
    ``transposed`` one, ``graph.csr_perm`` takes nnz indices more.

    Not made here are the windows that the gradient of ``maxk_aggregate`` goes by on a GPU, since
    they depend on the width of its features: its first run sorts the entries, and keeps 4 bytes and
    an index of each.  Run a step before the capture of a CUDA graph, and after a new ``order``.
    Nor is the inverse of the transpose's permutation, nnz indices, which the second gradient of
    features and edge values makes of a large graph (``ops.aggregate_backward``) and keeps, nor the
    parts of the columns of one for ``gatv2_aggregate`` and ``dot_aggregate`` (``ops.gatv2``): a
    capture before them goes without, slower.

    **Tiles** take float16 and bfloat16 always, and float32 only while torch allows TF32 in its own
    products, ``torch.set_float32_matmul_precision("high")``; else, and for all that they do not
    take, results are those without tiles, bit by bit.  They do not take float64, max and min,
    float16 with ``col_scale`` (nor the gradient of its features with ``row_scale`` or of a mean),
    few features unless ``costs`` are given, a GPU of compute capability below 8.0, and a graph
    whose windows are too sparse to pay.  Deterministic.  On the CPU tiles are built and not read.

    The first product of each kind (``spmm`` or ``sddmm``, bytes of a value, with edge values or
    without, narrow features or wide) splits the tiles, in a few milliseconds, and keeps about 20
    bytes an entry.  A CUDA graph that is captured before has none: run a step first, and capture
    it again after a new ``tile``.  TC-GNN (ATC'23), sections 3 and 4.
    """
    graph = as_graph(graph, None)
    if not isinstance(graph, Graph):
        raise wrong_graph(graph)
    shape, costs = None if tile is None else check_tile(tile), checked(costs)
    if shape is None and costs is not None:
        raise UnsupportedError("costs are given without tile: they are of tiles, give both.")
    graph._fill("torch", transposed)
    tensors: GraphTensors = graph._slots.torch[graph._flipped]
    if transposed:
        _ = tensors.columns
    tensors.freeze()
    if order is not None:
        order = checked_order(order, graph.csr)
        structure = tensors.rows.structure
        csr = None if structure is None else csr_of(structure)
        if csr is not None:
            prepare_order(csr, order)
    if shape is not None:
        for flipped in (False, True)[: 1 + bool(transposed)]:
            _prepare_tiles(graph, flipped, shape, costs)


def _prepare_tiles(graph: Graph, flipped: bool, tile: tuple[int, int], costs: Costs | None) -> None:
    """Build tiles of the graph, or of its transpose."""
    tiles = (graph.transposed if flipped else graph).sgt(tile)
    side = tensors_of(graph).side(flipped)
    if side.built is not None:
        _tiles.prepare_tiles(side.built, tiles, side.inverse_degree(torch.float32), costs)


def drop_tiles(graph: Graph, tile: tuple[int, int]) -> None:
    """Drop what ``prepare`` has built with this tile."""
    tensors = tensors_of(graph)
    for side in (tensors.rows, tensors.columns):
        if side.built is not None:
            _tiles.drop_tiles(side.built, tensors.device)
    with graph._built.lock:
        for flipped in (False, True):
            graph._built.parts.pop(("sgt", tile, flipped), None)


def _make_tensors(graph: Graph, both: bool = False) -> GraphTensors:
    """Make the tensors of a graph."""
    built = graph._built
    unseen = not graph._flipped and ("csr", False) not in built.parts
    with out_of_inference():  # tensors born there could never take part in training
        if built.edges is not None and unseen and is_eager():
            # Backward runs on a thread of autograd's, where a build takes twice as long.
            return GraphTensors.of_edges(built, both=both or torch.is_grad_enabled())
        return GraphTensors.of_formats(built, graph._flipped)


slot("torch", _make_tensors)


def tensors_of(
    graph: GraphLike, of_columns: Tensor | None = None, of_rows: Tensor | None = None
) -> GraphTensors:
    """Return the tensors of a graph, as ``as_graph`` takes them, for the current stream."""
    if type(graph) is not Graph:
        graph = as_graph(graph, of_columns, of_rows)
        if isinstance(graph, GraphTensors):
            return graph
        if not isinstance(graph, Graph):
            raise wrong_graph(graph)
    at = 1 if graph._flipped else 0  # torch 2.11 traces no bool as an index
    # A tracer must not see what is missing, nor streams: it remembers what it read.  Nor must an
    # export that is not strict, of which ``is_dynamo_compiling`` would not tell.
    traced = torch.compiler.is_compiling()
    if traced or graph._slots.torch[at] is None:
        graph._fill("torch")
    tensors: GraphTensors = graph._slots.torch[at]
    if traced:
        tensors.freeze()
    elif tensors.stream is not None or lifetimes.noted is not None:  # else ``current`` has no task
        tensors.current()
    return tensors


graph_tensors = tensors_of  #: the name in earlier releases, imported with a warning


def has_tiles(graph: GraphLike) -> bool:
    """Return True if tensor cores may take products with it: ``prepare(graph, tile=...)``."""
    built = tensors_of(graph).rows.built
    return built is not None and "tiles" in built.parts
