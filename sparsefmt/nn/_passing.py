"""Options of PyG's ``MessagePassing``, which each of its layers has: taken, or refused by name."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, TypedDict, cast

import torch
from torch import Tensor
from torch.nn import Module

from ..autograd import as_graph, sampled_aggregate
from ..autograd.cbsr import Largest, features_to_keep, keep_largest
from ..autograd.sampling import checked_strategy, sample_width
from ..autograd.tensors.edge_index import turned
from ..autograd.tensors.prepare import GraphLike
from ..errors import DtypeError, ShapeError, UnsupportedError
from ._inputs import Ends, by_vertex, check_counts, check_share, ends_of, refuse_static

_PYG = "torch_geometric.nn.conv.message_passing"
FORWARD, REVERSED = "source_to_target", "target_to_source"
#: Reductions of a layer, of which most have one.
SUM, MEAN = ("sum",), ("mean",)
#: Reductions of ``spmm`` by the names that PyG knows them by.
REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}


class Direction(TypedDict, total=False):
    """Keyword arguments of ``Passing`` but for the aggregation."""

    aggr_kwargs: dict[str, Any] | None
    flow: str
    node_dim: int
    decomposed_layers: int


class PassingOptions(Direction, total=False):
    """Keyword arguments of ``Passing``."""

    aggr: Any


class Passing(Module):
    """A layer that passes messages along edges, which kernels make and sum up in one pass.

    ``_reductions`` are those of the kernels; none where ``aggr_module`` is PyG's module.  Where PyG
    is loaded its ``MessagePassing`` is a base of this class, so that ``to_hetero`` and other tools
    of PyG take our layers for what they are; nothing of it is called.
    """

    #: Reductions that the layer has.
    _reductions_known: ClassVar[tuple[str, ...]] = SUM
    #: Whether it takes several at once, and the others that PyG has.
    _takes_all: ClassVar[bool] = False
    _node_dim: ClassVar[int] = -2
    #: Whether results have heads: features may not be static then, and the graph is that here.
    _has_heads: ClassVar[bool] = False
    #: Options that PyG's ``repr`` shows beside the widths.
    _shown: ClassVar[tuple[str, ...]] = ()
    decomposed_layers: int = 1  # PyG's is a property
    _plan: Any = None  #: of ``optimize``: computes a layer, or returns None

    def __init__(
        self,
        aggr: Any = "add",
        *,
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = FORWARD,
        node_dim: int | None = None,
        decomposed_layers: int = 1,
        **unknown: Any,
    ) -> None:
        join_pyg()
        Module.__init__(self)  # PyG's would look for messages
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {next(iter(unknown))!r}."
            )
        self.aggr = [str(item) for item in aggr] if isinstance(aggr, list | tuple) else str(aggr)
        self._reductions = self._checked(aggr, aggr_kwargs)
        self._is_word = isinstance(aggr, str) and aggr in REDUCTIONS
        check_flow(flow)
        check_counts(decomposed_layers=decomposed_layers)
        if node_dim not in (None, self._node_dim):
            raise UnsupportedError(
                f"node_dim is {node_dim!r}: {type(self).__name__} has vertices along axis "
                f"{self._node_dim} of its features; give x.movedim({node_dim!r}, "
                f"{self._node_dim}), and leave node_dim out."
            )
        self.flow, self.node_dim = flow, self._node_dim
        self.decomposed_layers = decomposed_layers

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass with a step of PyG's layers, or with MessagePassing before a layer."""
        super().__init_subclass__(**options)
        if any(base.__module__ == _PYG for base in cls.__mro__[: cls.__mro__.index(Passing)]):
            _join_for(cls)
        for name in _STEPS:
            if name in vars(cls):
                raise UnsupportedError(f"{cls.__name__} defines {name}(): {_NO_STEPS}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse steps and an aggregation that no layer here would take."""
        if name in _STEPS or (name == "aggr_module" and self.__dict__.get("_reductions")):
            raise UnsupportedError(f"{type(self).__name__}.{name} is set: {_NO_STEPS}")
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        """Add PyG's base class if PyG is loaded, then read a pickled state."""
        join_pyg()
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    @property
    def explain(self) -> bool | None:
        """Return False, or None as PyG's layers have by default; True is refused."""
        return cast("bool | None", self.__dict__.get("_explain"))

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        if explain:
            raise UnsupportedError(f"{type(self).__name__}.explain is {explain!r}: {_NO_STEPS}")
        self.__dict__["_explain"] = explain

    def _checked(self, aggr: Any, aggr_kwargs: Any) -> tuple[str, ...]:
        """Check an aggregation, and return its reductions in order."""
        check_aggr_kwargs(aggr_kwargs)
        words, kind = ", ".join(map(repr, self._reductions_known)), type(self).__name__
        several = isinstance(aggr, list | tuple)
        reductions = tuple(map(_reduction, aggr if several else [aggr]))
        known = reductions and all(word in self._reductions_known for word in reductions)
        if self._takes_all and reductions and aggr is not None and not (known and not aggr_kwargs):
            self.aggr_module = module_of(aggr, aggr_kwargs, f"one of {words}")
            return ()
        if several and not self._takes_all:
            raise UnsupportedError(
                f"aggr is {aggr!r}: {kind} has one aggregation; give one of {words}."
            )
        if not known:
            raise UnsupportedError(
                f"aggr is {aggr!r}: {kind} has no kernel for it; give one of {words}, or keep "
                "PyG's layer."
            )
        if aggr_kwargs:
            raise UnsupportedError(
                f"aggr_kwargs is {aggr_kwargs!r}: {words} take no arguments; leave it out."
            )
        return cast("tuple[str, ...]", reductions)

    def __repr__(self) -> str:
        """Show PyG's ``repr``, and behind it our own options where they are set."""
        widths = "channels", "in_channels", "out_channels"
        shown = [str(vars(self)[name]) for name in widths if name in vars(self)]
        shown += [f"{name}={getattr(self, name)}" for name in self._shown]
        options = {name: getattr(self, name, None) for name in ("k", "sample", "training_sample")}
        shown += [f"{name}={value}" for name, value in options.items() if value is not None]
        if options["k"] is not None and vars(self).get("maxk_on") == "mapped":
            shown.append("maxk_on='mapped'")
        shown += [] if options["sample"] is None else [f"strategy={vars(self)['strategy']!r}"]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _between(self, x: Any, edge_index: GraphLike, size: Any = None) -> Ends:
        """Check features of one or both ends, and the graph along which messages flow."""
        if self._has_heads and not (isinstance(x, Tensor) and x.dim() <= 2):
            refuse_static(x, self)
        ends = ends_of(x, edge_index, size)
        if self._has_heads and ends.shared is not None:
            if not ends.shared.is_square and getattr(self, "add_self_loops", False):
                raise UnsupportedError(
                    "add_self_loops is True beside a graph that processes share, whose sources are "
                    "other vertices than its targets: give add_self_loops=False."
                )
            ends = ends._replace(graph=ends.shared.local)
        if ends.graph is not edge_index:
            graph = self._valued(ends.graph, edge_index)
            ends = ends if graph is ends.graph else ends.along(graph)
        if self.flow == FORWARD:
            return ends
        if not ends.alike:
            raise UnsupportedError(
                f"flow is {self.flow!r} beside features of two ends: give (x_target, x) and "
                "edge_index.flip(0), and leave flow out."
            )
        return ends.along(self._turned(ends.graph, edge_index))

    def _valued(self, graph: GraphLike, edge_index: object) -> GraphLike:
        """Return the graph of ``edge_index`` with the values that PyG reads here.

        It drops those of a SparseTensor, and of torch's sparse tensors but for a single word.
        """
        if isinstance(edge_index, Tensor) and (self._is_word or edge_index.layout is torch.strided):
            return graph
        valued: Any = graph
        return cast(GraphLike, valued.with_data(None)) if valued.weighted else graph

    def _turned(self, graph: GraphLike, edge_index: Any) -> GraphLike:
        """Return the graph of ``edge_index`` along which messages flow."""
        if self.flow == FORWARD:
            return graph
        check_flow(self.flow)
        return cast(GraphLike, turned(graph, edge_index))


def join_pyg() -> None:
    """Set PyG's ``MessagePassing``, if it is loaded, as the base class of ``Passing``.

    PyG's tools ask for an instance of it.  It is not imported here: whoever asks has done so.
    """
    base = getattr(sys.modules.get(_PYG), "MessagePassing", None)
    if base is not None and base not in Passing.__bases__:
        Passing.__bases__ = (base,)


def _join_for(cls: type) -> None:
    """Add PyG's base class now, for a class with ``MessagePassing`` and one of our layers as bases.

    A class whose bases have no order would make every layer's constructor fail.
    """
    try:
        join_pyg()
    except TypeError as error:
        # A class that is refused lives on until it is collected; so its bases must have an order.
        cls.__bases__ = tuple(base for base in cls.__bases__ if issubclass(base, Passing))
        raise UnsupportedError(
            f"{cls.__name__} names PyG's MessagePassing before a layer of sparsefmt, which is one: "
            "leave it out."
        ) from error


def _reduction(aggr: object) -> str | None:
    """Return the reduction of ``spmm`` that an aggregation is, by its name or as PyG's module."""
    if isinstance(aggr, Module) and type(aggr).__module__ != "torch_geometric.nn.aggr.basic":
        return None
    word = str(aggr).lower().removesuffix("()").replace("_", "").removesuffix("aggregation")
    return REDUCTIONS.get(word)


def check_flow(flow: object) -> None:
    """Check for one of the two directions."""
    if flow not in (FORWARD, REVERSED):
        raise ShapeError(f"flow is {flow!r}: give {FORWARD!r} or {REVERSED!r}.")


#: What PyG's layers are made of, and ours are not.
_STEPS = (
    *("propagate", "message", "aggregate", "message_and_aggregate", "update", "edge_update"),
    *("edge_updater", "explain_message"),
)
_NO_STEPS = (
    "messages are made and summed up inside one kernel, which calls nothing; write it with "
    "autograd.message_aggregate, or keep PyG's layer."
)
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_HOOKS = tuple(f"register_{step}_forward{pre}_hook" for step in _HOOKED for pre in ("", "_pre"))


_NO_SCRIPT = "TorchScript cannot compile it; use torch.compile or nn.capture."


def _refusing(name: str, why: str) -> Callable[..., Any]:
    """Return a method that raises UnsupportedError."""

    def refuse(self: Passing, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{type(self).__name__}.{name}: {why}")

    refuse.__name__ = name
    refuse.__doc__ = "Refuse what only PyG's layers can do."
    return refuse


for _name, _why in {**dict.fromkeys((*_STEPS, *_HOOKS), _NO_STEPS), "jittable": _NO_SCRIPT}.items():
    setattr(Passing, _name, _refusing(_name, _why))


def module_of(aggr: Any, aggr_kwargs: dict[str, Any] | None, mend: str) -> Module:
    """Build PyG's module of an aggregation; ``mend`` says what else may be given."""
    where = f"aggr is {aggr!r}, which no kernel computes: give {mend}, or "
    kinds = str, getattr(sys.modules.get("torch_geometric.nn.aggr"), "Aggregation", str)
    for item in aggr if isinstance(aggr, list | tuple) else [aggr]:
        if not isinstance(item, kinds):
            raise DtypeError(
                f"aggr is {aggr!r}: give {mend}, a module of torch_geometric.nn.aggr, or a list "
                "of them."
            )
    try:
        resolver = import_module("torch_geometric.nn.resolver")
    except ImportError as error:
        raise UnsupportedError(f"{where}pip install torch-geometric.") from error
    try:
        made: Module = resolver.aggregation_resolver(aggr, **(aggr_kwargs or {}))
    except ValueError as error:
        raise UnsupportedError(f"{where}an aggregation that PyG has: {error}") from error
    except TypeError as error:
        raise UnsupportedError(
            f"aggr_kwargs is {aggr_kwargs!r}, which PyG's aggregation {aggr!r} does not take: "
            f"{error}; give arguments of its constructor."
        ) from error
    return made


def check_aggr_kwargs(value: object) -> None:
    """Check for a dict, or None."""
    if value is not None and not isinstance(value, dict):
        raise DtypeError(
            f"aggr_kwargs is {value!r}: give a dict of arguments of PyG's aggregation, "
            "{'p': 2.0} for instance, or leave it out."
        )


class PartOptions(Direction, total=False):
    """Keyword arguments of ``Convolution`` but for the aggregation: ours, and PyG's."""

    k: int | None
    maxk_on: str
    dropout: float
    sample: int | None
    training_sample: int | None
    strategy: str


class Options(PartOptions, total=False):
    """Keyword arguments of ``Convolution``."""

    aggr: Any


class Convolution(Passing):
    """A layer that keeps ``k`` features of each row, or goes over a sample of each row.

    ``widths`` are features of the input and mapped ones, -1 if not known; the others are as for
    ``GCNConv``.
    """

    #: Reductions of samples and of what MaxK keeps.
    _of_parts: ClassVar[tuple[tuple[str, ...], ...]] = (SUM,)
    #: Whose features MaxK may choose: of the layer's input, or of what its weights make of them.
    _maxk_on_known: ClassVar[tuple[str, ...]] = ("input", "mapped")
    #: Of layers pickled before there was a choice.
    maxk_on: str = "mapped"
    dropout: float = 0.0
    #: Options with which ``optimize`` plans the layer.
    _defaults: ClassVar[dict[str, Any]] = {"k": None, "flow": FORWARD, "_reductions": SUM}

    def __init__(
        self,
        widths: tuple[int, int] = (-1, -1),
        aggr: Any = "add",
        *,
        k: int | None = None,
        maxk_on: str = "input",
        dropout: float = 0.0,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
        **passing: Any,
    ) -> None:
        super().__init__(aggr, **passing)
        parts = (k, sample, training_sample)
        if parts != (None,) * 3 and self._reductions not in self._of_parts:
            raise UnsupportedError(
                f"aggr is {aggr!r} beside k or a sample: no kernel reduces parts of rows so; give "
                f"{' or '.join(repr(word) for (word,) in self._of_parts)}, or leave them out."
            )
        if maxk_on not in self._maxk_on_known:
            words = " or ".join(map(repr, self._maxk_on_known))
            raise UnsupportedError(f"maxk_on is {maxk_on!r}: give {words}.")
        check_share("dropout", dropout)
        if dropout and k is None:
            raise UnsupportedError(
                f"dropout is {dropout!r} and k is None: it drops features that MaxK keeps; give k, "
                "or use torch.nn.Dropout."
            )
        feat = widths[maxk_on == "mapped"]
        self.k = None if k is None else features_to_keep(k, feat if feat > 0 else None)
        self.maxk_on, self.dropout = maxk_on, dropout
        self.sample = _sample_width("sample", sample, self.k)
        self.training_sample = _sample_width("training_sample", training_sample, self.k)
        self.strategy = checked_strategy(strategy)

    def _width(self) -> int | None:
        """Return how many entries of each row to go over now; None for all."""
        name = "training_sample" if self.training else "sample"
        width = self.__dict__[name]
        return None if width is None else _sample_width(name, width, self.k)

    def _has_defaults(self) -> bool:
        """Return True if all options with which no plan computes the layer are unset."""
        sampled = self.training_sample if self.training else self.sample
        if sampled is not None:
            return False
        return all([getattr(self, name) == value for name, value in self._defaults.items()])

    def _graph(self, x: Tensor, edge_index: GraphLike) -> GraphLike:
        """Return the graph among the vertices of ``x``, with the values that count."""
        vertices = x if x.dim() == 2 else by_vertex(x)
        graph: GraphLike = as_graph(edge_index, vertices, name="edge_index")
        return graph if graph is edge_index else self._valued(graph, edge_index)

    def _check_no_batch(self, x: Tensor) -> None:
        """Refuse features (..., n, feat) where MaxK is to choose."""
        if x.dim() > 2 and self.k is not None:
            raise UnsupportedError(
                f"x has shape {tuple(x.shape)} and k is {self.k}: MaxK chooses from the row of one "
                "vertex; give x[i] in turn, or leave k out."
            )

    def _largest(self, x: Tensor) -> Largest:
        """Keep the ``k`` largest features of each row; while it trains, drop a share of them."""
        return keep_largest(x, cast(int, self.k), self.dropout if self.training else 0.0)

    def _aggregate(
        self,
        graph: GraphLike,
        x: Tensor,
        width: int,
        edge_weight: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Aggregate a sample of each row, drawn anew at each call while it trains."""
        strategy = "random" if self.training else self.strategy
        return sampled_aggregate(graph, x, width, edge_weight, strategy=strategy, **options)


def _sample_width(name: str, width: int | None, k: int | None) -> int | None:
    """Check how many entries of a row to sample, beside what MaxK keeps."""
    if width is None:
        return None
    width = sample_width(name, width)
    if k is not None:
        raise UnsupportedError(
            f"{name} is {width} and k is {k}: no kernel samples rows of what MaxK keeps, use one "
            "of them."
        )
    return width


def joined(*parts: Tensor) -> Tensor:
    """Join tensors by rows, of any dtype: autocast takes no 2-byte floats but its own."""
    with torch.autocast(parts[0].device.type, enabled=False):
        return torch.cat(parts)


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias in the dtype of ``y``, which autocast may have narrowed."""
    return y if bias is None else y + bias.to(y.dtype)
