"""The library ops ``torch.ops.sparsefmt.*``, one for each row of the table of operations.

An op takes flat tensors and checks nothing: the public functions check what users give.  A
structure is ``indptr, indices, n_cols, plan``, where ``plan`` is empty on the CPU and holds the
four arrays of ``CSR.chunks`` on a GPU.  Edge values are in the order of the graph's CSR; ``perm``
tells, for each entry of a transposed structure, its number in that order, so that no permuted copy
is made.  Ops with two structures take those of the graph and of its transpose.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, is_autocast_enabled
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.overrides import has_torch_function

from ...formats.compressed import CSR
from ...ops.engine import table
from ...ops.engine.call import call
from ...ops.engine.structure import Sizes, Structure, structure_at
from ...ops.engine.table import Op
from . import kernels as _kernels  # adds rows to the table
from .memory import NAMES, as_numpy, dtype_of

_library: Any = torch.library.Library("sparsefmt", "DEF")  # type: ignore[no-untyped-call]

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_TRANSPOSED = "Tensor t_indptr, Tensor t_indices, Tensor[] t_plan, Tensor perm"
Kernel: TypeAlias = Callable[..., Any]

_HEADS = ("", _STRUCTURE, f"{_STRUCTURE}, {_TRANSPOSED}")
_COUNTS = (0, 4, 8)  # tensors of the structures, as a schema has them

# Autocast: float64 stays, as in torch


def autocast_dtype(kind: str, *, narrow: bool) -> torch.dtype:
    """Return the dtype that autocast on this kind of device casts products or softmax to."""
    return torch.get_autocast_dtype(kind) if narrow else torch.float32


def cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    """Cast floating tensors of that kind of device, but not float64, as autocast would."""
    if (
        not isinstance(value, Tensor)
        or value.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or value.device.type != kind
    ):
        return value
    return value.to(dtype)


def narrowed(kind: str, *values: Any) -> tuple[Any, ...]:
    """Cast the operands of a product as autocast would, if it is at work on that kind of device."""
    if not torch.is_autocast_enabled(kind):
        return values
    dtype = autocast_dtype(kind, narrow=True)
    return tuple(cast(value, kind, dtype) for value in values)


# From a row to a library op


def define(schema: str, on_cpu: Kernel, on_cuda: Kernel, fake: Kernel) -> None:
    """Define a library op of that schema, its kernels and the shapes of its results."""
    name = _library.define(schema).split("::")[-1]
    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"sparsefmt::{name}", fake, lib=_library)


def define_autocast(name: str, make: Callable[[Any, str], Any]) -> None:
    """Register ``make(op, kind of device)`` as what is called while autocast is at work."""
    op = getattr(torch.ops.sparsefmt, name).default
    for kind, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(name, make(op, kind), key)


def schema_of(op: Op) -> str:
    """Return the schema of a row, as torch writes it."""
    results = "Tensor" if op.returns == 1 else f"({', '.join(['Tensor'] * op.returns)})"
    heads = filter(None, [_HEADS[op.structures]])
    arguments = ", ".join((*heads, *(arg.schema for arg in op.arguments)))
    return f"{op.name}({arguments}) -> {results}"


def _structure(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor]) -> Structure:
    """Return the structure on a GPU that these tensors hold."""
    _, slot, cut, long = plan
    return structure_at(
        *(indptr.shape[0] - 1, n_cols, indices.shape[0], NAMES[indices.dtype]),
        *(array.data_ptr() for array in (indptr, indices, *plan)),
        *(slot.shape[0] - 1, cut.shape[0], long.shape[0]),
    )


def _csr(indptr: Tensor, indices: Tensor, n_cols: int, _: list[Tensor]) -> CSR:
    """Return the structure on the CPU that these tensors hold."""
    shape = indptr.shape[0] - 1, n_cols
    arrays = {"indptr": indptr.numpy(), "indices": indices.numpy()}
    return _kernels.OfTensors._trusted(**arrays, data=None, shape=shape)


def _sizes(indptr: Tensor, indices: Tensor, n_cols: int, _: list[Tensor]) -> Sizes:
    return Sizes(indptr.shape[0] - 1, n_cols, indices.shape[0], NAMES[indices.dtype])


def _with_structures(op: Op, make: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a library op as the row takes them."""
    if op.structures == 0:
        return None, *args
    rows = make(*args[:4])
    if op.structures == 1:
        return rows, *args[4:]
    t_indptr, t_indices, t_plan, perm = args[4:8]
    n_cols = args[0].shape[0] - 1
    return rows, make(t_indptr, t_indices, n_cols, t_plan), perm, *args[8:]


def _on_cuda(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        options = {"indptr": args[0]} if op.takes_indptr else {}
        return call(op, *_with_structures(op, _structure, args), **options)

    return kernel


def _on_cpu(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        inputs = _with_structures(op, _csr, args)
        shapes = op.results(*inputs)
        arrays = [as_numpy(arg) if isinstance(arg, Tensor) else arg for arg in inputs[1:]]
        result = call(op, inputs[0], *arrays)
        results = (result,) if op.returns == 1 else result
        tensors = [
            torch.from_numpy(array).to(like.dtype if isinstance(like, Tensor) else dtype_of(like))
            for array, (_, like) in zip(results, shapes, strict=True)
        ]
        return tensors[0] if op.returns == 1 else tuple(tensors)

    return kernel


def _fake(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        inputs = (*args[_COUNTS[op.structures] :], *args)
        like = next(arg for arg in inputs if isinstance(arg, Tensor))
        shapes = op.results(*_with_structures(op, _sizes, args))
        results = tuple(like.new_empty(shape, dtype=dtype_of(of)) for shape, of in shapes)
        return results[0] if op.returns == 1 else results

    return kernel


def _autocast(op: Op) -> Callable[[Any, str], Any]:
    """Return what autocast calls in the place of a library op."""

    def make(library_op: Any, kind: str) -> Any:
        names = [argument.name for argument in library_op._schema.arguments]
        narrow = ["*" in (op.narrowed or ()) or name in (op.narrowed or ()) for name in names]
        place = names.index("own") if "own" in names else len(names)

        def kernel(*args: Any) -> Any:
            dtypes = (autocast_dtype(kind, narrow=is_narrow) for is_narrow in narrow)
            with torch.autocast(kind, enabled=False):
                if args[place : place + 1] not in ((), (None,)):  # layers have cast what they add
                    return library_op(*args)
                pairs = zip(args, dtypes, strict=False)
                return library_op(*(cast(arg, kind, dtype) for arg, dtype in pairs))

        return kernel

    return make


def _register() -> None:
    for op in filter(lambda op: op.library, table.operations()):
        define(schema_of(op), _on_cpu(op), _on_cuda(op), _fake(op))
        if op.narrowed is not None:
            define_autocast(op.name, _autocast(op))


_register()

# The ops as the functions of this layer call them

_C: Any = torch._C
#: Whether a tensor is one of ``torch.func.functionalize``, which has no memory of its own.
is_functional: Any = torch._is_functional_tensor
_local_keys = _C._dispatch_tls_local_include_set
_backend = _C.DispatchKeySet(_C.DispatchKey.BackendSelect)
_in_place = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
#: What a thread adds to the keys of each call if nothing watches it: in inference mode, and else.
_EAGER_KEYS = _backend.raw_repr(), (_backend | _in_place).raw_repr()
_OPTIONS = type(None), str, int, float, bool


class LibraryOp:
    """A library op, called with ``Side``s in the place of its structures.

    The dispatcher takes 12 to 15 µs to reach a kernel written in Python: where it would do nothing
    else, the CUDA kernel is called directly.
    """

    def __init__(self, name: str) -> None:
        self.row = table.find(name)
        self.library: Any = getattr(torch.ops.sparsefmt, name).default

    def __call__(self, *args: Any) -> Any:
        """Call the kernel directly, or the library op."""
        row, count = self.row, self.row.structures
        rows, arrays = args[0] if count else None, args[count:]
        on_gpu = arrays[0].is_cuda if rows is None else rows.structure is not None
        if on_gpu and direct(arrays):
            if rows is None:
                return call(row, None, *arrays)
            if count == 2:
                T = args[1].structure
                return call(row, rows.structure, T, T.perm or args[1].perm, *arrays)
            if row.takes_indptr:
                return call(row, rows.structure, *arrays, indptr=rows.indptr)
            return call(row, rows.structure, *arrays)
        structures: list[Any] = []
        if rows is not None:
            structures += rows.indptr, rows.indices, rows.n_cols, rows.plan
        for side in args[1:count]:
            structures += side.indptr, side.indices, side.plan, side.perm
        return self.library(*structures, *arrays)


def direct(args: tuple[Any, ...]) -> bool:
    """Return True if a kernel may be called with these arguments without torch's dispatcher.

    Not while a compiler or tracer, a profiler, autocast, a mode or a transform is at work (they add
    to the keys of the thread), nor for a subclass, a negation that torch has put off, zeros without
    memory, or what ``torch.func.functionalize`` has left.  Torch has no question that an
    ``ExecutionTraceObserver`` would answer.
    """
    if (
        is_compiling()
        or profiler._is_profiler_enabled
        or is_autocast_enabled()  # of CUDA
        or has_torch_function(args)
        or _local_keys().raw_repr() not in _EAGER_KEYS
    ):
        return False
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.is_neg() or arg._is_zerotensor() or is_functional(arg):
                return False
        elif kind not in _OPTIONS:
            return False
    return True
