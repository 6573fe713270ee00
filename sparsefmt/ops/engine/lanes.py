"""SIMD lanes for numba: a run of features that stays in vector registers through a loop.

LLVM keeps an accumulator array in memory; a value of vector type it keeps in registers.  ``lanes``
makes such a value, the other functions take one and say so; all are called in compiled code only.
A register has 16 to 64 bytes, and LLVM spreads a wider run over several.

numba's cache looks at the file of a compiled loop only: after a change here, touch those files.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, models, register_model

# What numba and llvmlite hand to those who build code; neither has types of its own.
Context: TypeAlias = Any  #: of types, or of the code for a processor
Signature: TypeAlias = Any
Kind: TypeAlias = Any  #: a type of values
Builder: TypeAlias = ir.IRBuilder
Values: TypeAlias = Sequence[ir.Value]

_CACHE_LINE = 64


class Lanes(types.Type):
    """``width`` values of a scalar type, side by side."""

    def __init__(self, scalar: Any, width: int) -> None:
        super().__init__(name=f"Lanes({scalar}, {width})")
        self.scalar, self.width = scalar, width


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Context, lanes: Lanes) -> None:
        scalar = manager.lookup(lanes.scalar).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(scalar, lanes.width))  # type: ignore[no-untyped-call]


def operation(function: Callable[..., Any]) -> Any:
    """Make an operation of compiled code, whose literal arguments it knows while it is built."""
    return intrinsic(prefer_literal=True)(function)


@operation
def lanes(typing: Context, array: Kind, nbytes: Kind, value: Kind) -> Any:
    """Return ``value`` in each of as many lanes of the array's dtype as ``nbytes`` hold."""
    kind = Lanes(array.dtype, nbytes.literal_value // (array.dtype.bitwidth // 8))
    return kind(array, nbytes, value), _in_every_lane


@operation
def lanes_beside(typing: Context, run: Kind, array: Kind, value: Kind) -> Any:
    """Return ``value`` of the array's dtype in each of as many lanes as ``run`` has."""
    return Lanes(array.dtype, run.width)(run, array, value), _in_every_lane


def _in_every_lane(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
    """Build lanes of the third argument."""
    kind = signature.return_type
    scalar = context.cast(builder, args[2], signature.args[2], kind.scalar)
    return splat(builder, scalar, kind.width)


@operation
def width_of(typing: Context, run: Kind) -> Any:
    """Return the number of lanes."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return ir.Constant(ir.IntType(64), run.width)

    return types.int64(run), build


@operation
def load(typing: Context, run: Kind, array: Kind, at: Kind, count: Kind) -> Any:
    """Return ``array[at], array[at + 1], ...`` in the first ``count`` lanes, at any alignment.

    The others keep what ``run``, of the same dtype, has there; their memory is not read.
    """
    kind = Lanes(array.dtype, run.width)

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        address = _address(context, builder, signature, args, kind)
        vector = context.get_value_type(kind)
        mask = _below(builder, args[3], kind.width)
        function = _llvm(
            builder, "masked.load", (vector, address.type), vector,
            (address.type, ir.IntType(32), mask.type, vector),
        )  # fmt: skip
        align = ir.IntType(32)(array.dtype.bitwidth // 8)
        return builder.call(function, (address, align, mask, args[0]))

    return kind(run, array, at, count), build


@operation
def store(typing: Context, run: Kind, array: Kind, at: Kind, count: Kind) -> Any:
    """Write the first ``count`` lanes: ``array[at + k] = run[k]``."""
    kind = Lanes(array.dtype, run.width)

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        address = _address(context, builder, signature, args, kind)
        mask = _below(builder, args[3], kind.width)
        function = _llvm(
            builder, "masked.store", (args[0].type, address.type), ir.VoidType(),
            (args[0].type, address.type, ir.IntType(32), mask.type),
        )  # fmt: skip
        align = ir.IntType(32)(array.dtype.bitwidth // 8)
        builder.call(function, (args[0], address, align, mask))
        return context.get_dummy_value()

    return types.void(run, array, at, count), build


@operation
def prefetch(typing: Context, run: Kind, array: Kind, at: Kind) -> Any:
    """Ask for the cache lines that ``load(run, array, at)`` will read."""
    kind = Lanes(array.dtype, run.width)
    itemsize = array.dtype.bitwidth // 8

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        for first in range(0, run.width, _CACHE_LINE // itemsize):
            place = builder.add(args[2], ir.Constant(args[2].type, first))
            address = _address(context, builder, signature, (*args[:2], place), kind)
            number = ir.IntType(32)
            function = _llvm(
                builder, "prefetch", (address.type,), ir.VoidType(), (address.type, *[number] * 3)
            )
            builder.call(function, (address, number(0), number(3), number(1)))  # read, keep, data
        return context.get_dummy_value()

    return types.void(run, array, at), build


@operation
def add_product(typing: Context, sums: Kind, factor: Kind, run: Kind) -> Any:
    """Compute ``sums + factor * run``, fused where it can be; the factor is lanes or one value."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        vector, factors = args[0].type, _as_lanes(context, builder, args[1], factor, sums)
        function = _llvm(builder, "fmuladd", (vector,), vector, (vector,) * 3)
        return builder.call(function, (factors, args[2], args[0]))

    return sums(sums, factor, run), build


@operation
def total(typing: Context, run: Kind) -> Any:
    """Return the sum of all lanes."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        scalar = args[0].type.element
        function = _llvm(builder, "vector.reduce.fadd", args[:1], scalar, (scalar, args[0].type))
        zero = ir.Constant(scalar, 0.0)
        return builder.call(function, (zero, args[0]), fastmath=("reassoc",))

    return run.scalar(run), build


@operation
def paired(typing: Context, first: Kind, second: Kind) -> Any:
    """Return the lanes of both, side by side."""
    kind = Lanes(first.scalar, 2 * first.width)

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.shuffle_vector(*args, _places(0, kind.width))

    return kind(first, second), build


@operation
def halves(typing: Context, run: Kind) -> Any:
    """Return the first and the second half of the lanes."""
    count = run.width // 2
    kind = types.UniTuple(Lanes(run.scalar, count), 2)  # type: ignore[no-untyped-call]

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        places = _places(0, count), _places(count, count)
        parts = [builder.shuffle_vector(args[0], args[0], place) for place in places]
        return context.make_tuple(builder, kind, parts)

    return kind(run), build


@operation
def largest(typing: Context, run: Kind) -> Any:
    """Return the largest of all lanes; NaN only where there is nothing else."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        scalar = args[0].type.element
        function = _llvm(builder, "vector.reduce.fmax", args, scalar, (args[0].type,))
        return builder.call(function, args)

    return run.scalar(run), build


@operation
def product(typing: Context, run: Kind, factor: Kind) -> Any:
    """Return ``run * factor``; the factor is lanes or one value."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.fmul(args[0], _as_lanes(context, builder, args[1], factor, run))

    return run(run, factor), build


@operation
def divided(typing: Context, run: Kind, divisor: Kind) -> Any:
    """Return ``run / divisor``; the divisor is lanes or one value."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.fdiv(args[0], _as_lanes(context, builder, args[1], divisor, run))

    return run(run, divisor), build


@operation
def greater(typing: Context, run: Kind, best: Kind) -> Any:
    """Compare lanes: ``run`` is larger than ``best``; NaN is larger than all numbers."""
    kind = Lanes(types.boolean, run.width)

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        larger = builder.fcmp_unordered(">", args[0], args[1])
        return builder.and_(larger, builder.fcmp_ordered("ord", args[1], args[1]))

    return kind(run, best), build


@operation
def equal(typing: Context, run: Kind, value: Kind) -> Any:
    """Compare lanes of integers: ``run`` is ``value``."""
    kind = Lanes(types.boolean, run.width)

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.icmp_signed("==", args[0], _as_lanes(context, builder, args[1], value, run))

    return kind(run, value), build


@operation
def where(typing: Context, mask: Kind, run: Kind, otherwise: Kind) -> Any:
    """Return ``run`` in the lanes of the mask, ``other`` elsewhere."""

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return builder.select(*args)

    return otherwise(mask, run, otherwise), build


@operation
def exp(typing: Context, run: Kind) -> Any:
    """Compute ``e^x`` for ``x <= 0`` within 2 units in the last place; 0 where it is subnormal.

    ``x = n ln 2 + r``, so that ``e^x = 2^n e^r`` with ``|r| <= ln 2 / 2`` and a Taylor series.
    """

    def build(context: Context, builder: Builder, signature: Signature, args: Values) -> Any:
        return _exp(builder, args[0], *_EXP[run.scalar.bitwidth])

    return run(run), build


#: By bits of a value: bits of its mantissa, bias of its exponent, least argument, terms.
_EXP = {32: (23, 127, -87.33, 8), 64: (52, 1023, -708.39, 14)}
#: ln 2 in two parts: products of the first with small integers are exact in float32.
_LN2 = 0.693359375, math.log(2) - 0.693359375


def _exp(builder: Builder, x: Any, mantissa: int, bias: int, least: float, terms: int) -> Any:
    vector = x.type
    integers = ir.VectorType(ir.IntType(32 if mantissa == 23 else 64), vector.count)

    def all_of(value: Any, kind: Any = vector) -> Any:
        return ir.Constant(kind, [kind.element(value)] * kind.count)

    def fused(a: Any, b: Any, c: Any) -> Any:
        return builder.call(_llvm(builder, "fmuladd", (vector,), vector, (vector,) * 3), (a, b, c))

    tiny = builder.fcmp_ordered("<", x, all_of(least))
    x = builder.select(tiny, all_of(least), x)
    # Adding 1.5 * 2^mantissa leaves the nearest integer n in the low bits; NaN goes through.
    magic = all_of(1.5 * 2.0**mantissa)
    shifted = fused(x, all_of(1 / math.log(2)), magic)
    n = builder.fsub(shifted, magic)
    for part in _LN2:
        x = fused(n, all_of(-part), x)
    series = all_of(1 / math.factorial(terms - 1))
    for k in reversed(range(terms - 1)):
        series = fused(series, x, all_of(1 / math.factorial(k)))
    bits = builder.shl(builder.bitcast(shifted, integers), all_of(mantissa, integers))
    power = builder.add(bits, all_of(bias << mantissa, integers))
    result = builder.fmul(series, builder.bitcast(power, vector))
    return builder.select(tiny, all_of(0.0), result)


def _as_lanes(context: Context, builder: Builder, value: Any, kind: Any, run: Lanes) -> Any:
    """Return ``value`` if it is lanes, else in as many lanes as ``run`` has."""
    if isinstance(kind, Lanes):
        return value
    return splat(builder, context.cast(builder, value, kind, run.scalar), run.width)


def splat(builder: Builder, scalar: Any, width: int) -> Any:
    """Return ``scalar`` in every lane."""
    vector, lane = ir.VectorType(scalar.type, width), ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, lane(0))
    places = ir.Constant(ir.VectorType(lane, width), [0] * width)
    return builder.shuffle_vector(first, first, places)


def _places(first: int, count: int) -> Any:
    """Return the numbers of ``count`` lanes from the first on."""
    return ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(first, first + count)))


def _below(builder: Builder, count: Any, width: int) -> Any:
    """Return the mask of the first ``count`` lanes."""
    places = ir.Constant(ir.VectorType(count.type, width), list(range(width)))
    return builder.icmp_signed("<", places, splat(builder, count, width))


def _address(
    context: Context, builder: Builder, signature: Signature, args: Values, kind: Lanes
) -> Any:
    """Return the address of the lanes in the second argument, an array, at the third."""
    array = context.make_array(signature.args[1])(context, builder, args[1])
    start = builder.gep(array.data, [args[2]])
    return builder.bitcast(start, context.get_value_type(kind).as_pointer())


def _llvm(builder: Builder, name: str, overloads: Any, result: Any, args: Values) -> Any:
    """Return the declaration of an LLVM intrinsic for these types."""
    suffix = ".".join(_mangled(getattr(item, "type", item)) for item in overloads)
    declared = ir.FunctionType(result, args)
    return builder.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), declared)


def _mangled(kind: Any) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{kind.element.intrinsic_name}"
    if isinstance(kind, ir.PointerType):
        return "p0" if kind.is_opaque else f"p0{_mangled(kind.pointee)}"
    name: str = kind.intrinsic_name
    return name
