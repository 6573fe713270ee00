"""A graph's arrays as tensors: built once, zero-copy, with the graph; ``Graph`` as pytree."""

from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import UnsupportedError
from ...formats import primitives
from ...formats.arrays import allocating, finish, on_device_of
from ...formats.compressed import CSC, CSR
from ...formats.coo import COO
from ...formats.sgt import check_tile
from ...graph.graph import Graph, GraphBuilt
from ...interop.torch import from_tensor, to_tensor
from ...ops.cbsr.gradients import checked_order
from ...ops.cbsr.windows import prepare_order
from ...ops.engine.structure import csr_of
from ...ops.tiles.costs import Costs, checked
from ...reorder import Order
from ..engine import tiles as _tiles
from ..engine.memory import on_device, out_of_inference, raw_stream
from . import lifetimes
from .edge_index import as_graph, wrong_graph
from .reports import check_all
from .tensors import GraphTensors, Side

#: What the functions take: a graph, or its tensors where a transformation has replaced them; public
#: ones also an ``edge_index``, of which ``as_graph`` makes a graph.
GraphLike: TypeAlias = "Graph | GraphTensors | Tensor"


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
    _prepare_tensors(graph, transposed)
    _prepare_order(graph)
    _freeze(graph)
    if order is not None:
        order = checked_order(order, graph.csr)
        structure = side_of(graph, False).structure
        csr = None if structure is None else csr_of(structure)
        if csr is not None:
            prepare_order(csr, order)
    if shape is not None:
        _prepare_tiles(graph, shape, transposed, costs)


def _freeze(graph: Graph) -> None:
    """Wait for what is being built, and have all of it as if it came from formats."""
    tensors = _tensors_made(graph)
    if tensors.rows.arrays is None:
        return
    with graph._built.lock:
        _ = graph.csr  # over the same memory
        if tensors.columns is not None:
            _ = graph.csc
        tensors.freeze()


def _prepare_tiles(
    graph: Graph, tile: tuple[int, int], transposed: bool, costs: Costs | None
) -> None:
    for flipped in (False, True) if transposed else (False,):
        tiles = (graph.transposed if flipped else graph).sgt(tile)
        side = side_of(graph, flipped)
        if side.built is not None:
            _tiles.prepare_tiles(side.built, tiles, side.inverse_degree(torch.float32), costs)


def drop_tiles(graph: Graph, tile: tuple[int, int]) -> None:
    """Forget what ``prepare`` has built with this tile."""
    tensors = tensors_of(graph, transposed=True)
    for side in (tensors.rows, cast(Side, tensors.columns)):
        if side.built is not None:
            _tiles.drop_tiles(side.built, tensors.device)
    with graph._built.lock:
        for flipped in (False, True):
            graph._built.found.pop(("sgt", tile, flipped), None)


def _prepare_tensors(graph: Graph, transposed: bool) -> bool:
    built, at = graph._built, 1 if graph._flipped else 0
    # Backward runs on a thread of autograd's, where a build takes twice as long.
    both = transposed or torch.is_grad_enabled()
    # Tensors born in inference mode could never take part in training.
    with built.lock, out_of_inference():
        found: GraphTensors | None = built.tensors[at]
        edges = built.edges
        if found is None and edges is not None and _may_build(graph):
            with on_device(edges.device_number):
                check_all()
                found = built.tensors[at] = GraphTensors.of_edges(edges, both=both)
        if found is None:
            _refuse_capture(graph)
            csr = graph.csr
            values = None if csr.data is None else to_tensor(csr.data)
            sizes = (*graph.shape, graph.nnz)
            found = GraphTensors(Side.of(csr, None), None, values, sizes, ordered=False)
            finish(csr.indptr)  # synchronize!
            built.tensors[at] = found
        if transposed and found.columns is None and _may_go_on(found, built):
            with on_device(found.device.index):
                found.build_columns()
        if transposed and found.columns is None:
            _refuse_capture(graph)
            flipped = graph.csc.T
            columns = Side.of(flipped, graph.csc_perm)
            finish(flipped.indptr)  # synchronize!
            found.columns = columns
    return True


def _may_build(graph: Graph) -> bool:
    """Tell whether a graph can be built of its edges, on the current stream."""
    unseen = not graph._flipped and ("csr", False) not in graph._built.found
    return unseen and _plainly()


def _may_go_on(tensors: GraphTensors, built: GraphBuilt) -> bool:
    """Tell whether the columns can be built of rows that were built so."""
    unseen = tensors.rows.arrays is not None and ("csc", False) not in built.found
    return unseen and _plainly()


def _plainly() -> bool:
    """Tell whether what the current stream does happens now, and is seen by the host alone."""
    return not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


def _refuse_capture(graph: Graph) -> None:
    """Refuse to wait for the rows or columns of a graph where a CUDA graph is captured."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"a graph of shape {graph.shape} would be built in the capture of a CUDA graph, which "
            "cannot wait for it, and whose replays would not build it again: make it before, run a "
            "step with it, and capture one function for each graph, or pad graphs to one."
        )


def _prepare_order(graph: Graph) -> bool:
    tensors = _tensors_made(graph)
    with graph._built.lock, torch.inference_mode(False):
        if not tensors.ordered:
            numbers = graph._csr_numbers
            tensors.order = None if numbers is None else to_tensor(numbers)
            tensors.ordered = True
    return True


def _prepare_traced(graph: Graph, transposed: bool) -> bool:
    """Make the tensors of a graph that a tracer sees, which reads no reports."""
    _prepare_tensors(graph, transposed)
    _freeze(graph)
    return True


# torch.compile runs these methods while it traces, then traces on with what they made.  As methods
# only: of a function's argument it would guard the identity, and compile for each graph anew.
_prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_prepare_order._dynamo_marked_constant = True  # type: ignore[attr-defined]
Graph._prepare_traced = _prepare_traced  # type: ignore[attr-defined]
Graph._prepare_order = _prepare_order  # type: ignore[attr-defined]


def tensors_of(graph: GraphLike, *, transposed: bool = False) -> GraphTensors:
    """Return the tensors of a graph, made if they are missing."""
    if isinstance(graph, GraphTensors):
        return graph
    if isinstance(graph, Tensor):
        raise wrong_graph(graph)
    # A tracer must not see what is missing: it remembers what it read.  Nor must an export that is
    # not strict, of which ``is_dynamo_compiling`` would not tell.
    if torch.compiler.is_compiling():
        graph._prepare_traced(transposed)  # type: ignore[attr-defined]
        return _tensors_made(graph)
    found: GraphTensors | None = graph._built.tensors[1 if graph._flipped else 0]
    if found is None or (transposed and found.columns is None):
        _prepare_tensors(graph, transposed)
        found = _tensors_made(graph)
    building = found.building
    if found.asks_left or (building and not building[-1].is_ahead()):
        found.settle()
    if found.home is not None and raw_stream(found.device.index) != found.home:
        found.lend()
    if lifetimes.noted is not None:
        lifetimes.note(found)
    return found


def _tensors_made(graph: Graph) -> GraphTensors:
    at = 1 if graph._flipped else 0  # torch 2.11 traces no bool as an index
    found: GraphTensors = graph._built.tensors[at]
    return found


def graph_tensors(graph: object) -> GraphTensors:
    """Give the tensors of a graph: zero-copy, built once with it.

    Parameters
    ----------
    graph : Graph
        Or what a tracer has in its place.

    Returns
    -------
    GraphTensors
        ``n_rows``, ``n_cols``, ``nnz`` and ``device``; ``rows.indptr`` (n_rows + 1,) and
        ``rows.indices`` (nnz,), the graph in CSR order; ``csr_values`` (nnz,), its edge values in
        that order, or None; and ``kept(key, make)``, the tensor that ``make()`` gave for ``key``
        when it was asked first: for what depends on the graph alone.

    Raises
    ------
    DtypeError
        If ``graph`` is no Graph.

    Notes
    -----
    What ``make`` computes has no gradient.  Nothing is kept, and ``make`` is called each time,
    where ``torch.compile`` traces or a CUDA graph is captured.
    """
    if not isinstance(graph, (Graph, GraphTensors)):
        raise wrong_graph(graph)
    return tensors_of(graph)


def has_tiles(graph: GraphLike) -> bool:
    """Tell whether tensor cores may take products with the graph: ``prepare(graph, tile=...)``.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    bool
        True for a graph on a GPU that has been prepared with a ``tile``; on the CPU False.

    Raises
    ------
    DtypeError
        If ``graph`` is no Graph.
    """
    built = graph_tensors(graph).rows.built
    return built is not None and "tiles" in built.found


def order_of(graph: GraphLike) -> Tensor | None:
    """Return ``graph.csr_perm``; None where the edges came in CSR order."""
    tensors = tensors_of(graph)
    if isinstance(graph, Graph):
        if torch.compiler.is_compiling():
            graph._prepare_order()  # type: ignore[attr-defined]
        elif not tensors.ordered:
            _prepare_order(graph)
    return tensors.order


def side_of(graph: GraphLike, transposed: bool) -> Side:
    """Return the rows of the graph, or its columns."""
    tensors = tensors_of(graph, transposed=transposed)
    found: Any = tensors.columns if transposed else tensors.rows
    return found  # type: ignore[no-any-return]


def on_rows(op: Any, graph: GraphLike, *args: Any) -> Tensor:
    """Run an op of one structure and one result on the rows of the graph."""
    found: Tensor = op(side_of(graph, False), *args)
    return found


# Graph as a pytree node: its leaves are these tensors

#: Context of a node: n_rows, n_cols, nnz, whether there are values and an order of the user's.
Context: TypeAlias = tuple[int, int, int, bool, bool]

#: By the identity of its first leaf, so that the same leaves give the same graph back.
_sources: WeakValueDictionary[int, Graph] = WeakValueDictionary()


def _flatten(graph: GraphLike) -> tuple[list[Any], Context]:
    tensors = tensors_of(graph, transposed=True)
    rows, columns = tensors.rows, cast(Side, tensors.columns)
    leaves = [rows.indptr, rows.indices, columns.indptr, columns.indices, columns.perm]
    weighted, order = tensors.csr_values is not None, order_of(graph)
    ordered = order is not None
    leaves += [tensors.csr_values] if weighted else []
    if isinstance(graph, Graph):
        _sources[id(rows.indptr)] = graph
    leaves += [order] if ordered else []
    leaves += [*rows.plan, *columns.plan]
    return leaves, (tensors.n_rows, tensors.n_cols, tensors.nnz, weighted, ordered)


def _unflatten(leaves: Any, context: Context) -> GraphLike:
    """Return the graph of these leaves; only its tensors where the leaves are a tracer's."""
    leaves = list(leaves)
    weighted, ordered = context[3:]
    source = _sources.get(id(leaves[0]))
    if source is not None:
        count = 5 + weighted
        both = zip(_flatten(source)[0][:count], leaves[:count], strict=True)
        if all(mine is given for mine, given in both):
            return source
    if all(type(leaf) is Tensor for leaf in leaves):
        return _graph(leaves, context)
    indptr, indices, t_indptr, t_indices, perm = leaves[:5]
    n_rows, n_cols, nnz = context[:3]
    plan = leaves[5 + weighted + ordered :]
    rows = Side(indptr, indices, n_cols, plan[: len(plan) // 2], None)
    columns = Side(t_indptr, t_indices, n_rows, plan[len(plan) // 2 :], perm)
    values = leaves[5] if weighted else None
    order = leaves[5 + weighted] if ordered else None
    return GraphTensors(rows, columns, values, (n_rows, n_cols, nnz), order)


def _graph(leaves: list[Tensor], context: Context) -> Graph:
    n_rows, n_cols, _, weighted, ordered = context
    indptr, indices, t_indptr, t_indices, perm = (from_tensor("leaf", leaf) for leaf in leaves[:5])
    data = from_tensor("leaf", leaves[5].detach()) if weighted else None
    moved = from_tensor("leaf", leaves[5].detach()[leaves[4]]) if weighted else None
    csr = CSR._trusted(indptr=indptr, indices=indices, data=data, shape=(n_rows, n_cols))
    csc = CSC._trusted(indptr=t_indptr, indices=t_indices, data=moved, shape=(n_rows, n_cols))
    structure: COO | CSR = csr
    order = None
    if ordered:  # the edges as the user gave them
        order = from_tensor("leaf", leaves[5 + weighted])
        with on_device_of(order), allocating(f"{len(order)} edges in their order"):
            places = primitives.inverse(order)
            row = primitives.expand(indptr, len(order))[places]
            given = None if data is None else data[places]
            parts = {"row": row, "col": indices[places], "data": given}
            structure = COO._trusted(**parts, shape=(n_rows, n_cols))
    built = GraphBuilt(structure)
    built.found["csr", False] = csr, order
    built.found["csc", False] = csc, perm
    return Graph._on(built, False)


for _node in (Graph, GraphTensors):
    pytree.register_pytree_node(
        _node, _flatten, _unflatten, serialized_type_name=f"sparsefmt.{_node.__name__}"
    )
