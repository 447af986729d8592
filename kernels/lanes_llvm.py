"""What numba has no word for: 16 floats at once, fused multiply-add, and powers of two, as LLVM instructions.

A product here is a chain of fused multiply-adds along the inner width, from first to last, started at zero: what a
BLAS computes for many rows and inner widths of up to a few hundred. `compiled.py` proves that before it relies on it.
Mind that numba's cache notices a change of the file of the function it compiled, not of this one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headway.kernels.numerics import LANES

PANEL = 2 * LANES
"""Columns of a packed weight that lie together: [columns / PANEL, inner, PANEL]."""
_UNROLL = 4
_FLOAT, _WORD, _INT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)

outer = njit(nogil=True, cache=True, error_model="numpy")
inner = njit(nogil=True, cache=True, error_model="numpy", no_cpython_wrapper=True)
"""For functions that only compiled ones call."""


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _at(builder: Any, base: Any, *offsets: Any) -> Any:
    for offset in offsets:
        base = builder.gep(base, [offset])
    return base


def _vector_at(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, _VECTOR.as_pointer())


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, LANES), None))


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _product(rows: int, panels: int) -> Any:
    """An intrinsic that computes `rows` rows of x times `panels` panels of w, all sums in registers."""

    @intrinsic
    def product(
        typing: Any, x: Any, x_at: Any, x_width: Any, which: Any, first: Any, w: Any, at: Any, k: Any,
        out: Any, o: Any, o_width: Any,
    ) -> Any:  # fmt: skip
        """Rows which[first ..] of x, x_width apart, times the panels from element `at` of w on, inner width k, a
        multiple of 4; written from element `o` of out on, one row after another, o_width apart."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, x_at, x_width, _, first, _, at, k, _, o, o_width = args
            x, which, w, out = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 5, 8))
            wide = builder.mul(k, _word(PANEL))
            row_at = [
                _at(builder, x, x_at, builder.mul(builder.load(_at(builder, which, first, _word(r))), x_width))
                for r in range(rows)
            ]
            w_at = [_at(builder, w, at, builder.mul(wide, _word(p))) for p in range(panels)]
            kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
            fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
            before = builder.block
            loop, done = builder.append_basic_block("along"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(_WORD)
            step.add_incoming(_word(0), before)
            sums = [[[builder.phi(_VECTOR) for _ in range(2)] for _ in range(panels)] for _ in range(rows)]
            now = sums
            for n in range(_UNROLL):
                place = builder.add(step, _word(n))
                column = builder.mul(place, _word(PANEL))
                right = [
                    [
                        builder.load(_vector_at(builder, _at(builder, start, column, _word(half * LANES))), align=4)
                        for half in range(2)
                    ]
                    for start in w_at
                ]
                now = [
                    [
                        [builder.call(fma, [left, right[p][half], now[r][p][half]]) for half in range(2)]
                        for p in range(panels)
                    ]
                    for r in range(rows)
                    for left in [_splat(builder, builder.load(_at(builder, row_at[r], place)))]
                ]
            following = builder.add(step, _word(_UNROLL))
            step.add_incoming(following, loop)
            for r in range(rows):
                for p in range(panels):
                    for half in range(2):
                        sums[r][p][half].add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
                        sums[r][p][half].add_incoming(now[r][p][half], loop)
            builder.cbranch(builder.icmp_signed("<", following, k), loop, done)
            builder.position_at_end(done)
            for r in range(rows):
                start = _at(builder, out, o, builder.mul(o_width, _word(r)))
                for p in range(panels):
                    for half in range(2):
                        target = _at(builder, start, _word(p * PANEL + half * LANES))
                        builder.store(now[r][p][half], _vector_at(builder, target), align=4)
            return context.get_dummy_value()

        size = types.intp
        return types.void(x, size, size, which, size, w, size, size, out, size, size), code

    return product


product_8x1, product_4x1, product_2x1, product_1x4, product_1x1 = (
    _product(rows, panels) for rows, panels in ((8, 1), (4, 1), (2, 1), (1, 4), (1, 1))
)


@intrinsic
def transpose(typing: Any, x: Any, at: Any, width: Any, out: Any, o: Any) -> Any:
    """LANES rows of as many floats, `width` apart, from element `at` of x on, as columns: the rows of `out` that they
    make lie PANEL apart, from element `o` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, width, _, o = args
        x, out = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3))
        rows = [
            builder.load(_vector_at(builder, _at(builder, x, at, builder.mul(width, _word(row)))), align=4)
            for row in range(LANES)
        ]
        size = LANES // 2
        while size:  # blocks of size x size change places across the diagonal
            for i in (i for i in range(LANES) if not i & size):
                pair = rows[i], rows[i + size]
                for row, shift in ((i, 0), (i + size, size)):
                    take = [lane + shift + (LANES - size if lane & size else 0) for lane in range(LANES)]
                    mask = ir.Constant(ir.VectorType(_INT, LANES), take)
                    rows[row] = builder.shuffle_vector(*pair, mask)
            size //= 2
        for row, vector in enumerate(rows):
            builder.store(vector, _vector_at(builder, _at(builder, out, o, _word(row * PANEL))), align=4)
        return context.get_dummy_value()

    size = types.intp
    return types.void(x, size, size, out, size), code


@intrinsic
def accumulate(typing: Any, scalar: Any, w: Any, at: Any, out: Any, o: Any) -> Any:
    """Add scalar times LANES floats, from element `at` of w on, to those from element `o` of out on: rounded twice."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scalar, _, at, _, o = args
        w, out = (_data(context, builder, signature.args[i], args[i]) for i in (1, 3))
        target = _vector_at(builder, _at(builder, out, o))
        product = builder.fmul(_splat(builder, scalar), builder.load(_vector_at(builder, _at(builder, w, at)), align=4))
        builder.store(builder.fadd(builder.load(target, align=4), product), target, align=4)
        return context.get_dummy_value()

    size = types.intp
    return types.void(types.float32, w, size, out, size), code


@intrinsic
def apart(typing: Any) -> Any:
    """Compile the function that says so once, and not again into each of its callers: that takes long."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


def _unary(name: str) -> Any:
    @intrinsic
    def op(typing: Any, x: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = builder.module.declare_intrinsic(name, [_FLOAT], ir.FunctionType(_FLOAT, [_FLOAT]))
            return builder.call(function, list(args))

        return types.float32(types.float32), code

    return op


nearest = _unary("llvm.rint")


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma", [_FLOAT], kind), list(args))

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def two_to(typing: Any, power: Any) -> Any:
    """2 ** power (i32) for normal results."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(_INT, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(_INT, 23)), _FLOAT)

    return types.float32(types.int32), code
