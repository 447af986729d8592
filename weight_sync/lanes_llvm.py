"""What numba has no word for: 64 elements of an array at once, and bits of a word, as LLVM instructions.

A comparison of 64 lanes becomes one 64-bit mask. The vectors are LLVM's own, so any instruction set will do.
Mind that numba's cache notices a change of the file of the function it compiled, not of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from headway.weight_sync.sparse import CLASSES_MAX

BLOCK, WORDS = 64, 4
SPAN = WORDS * BLOCK
_WORD = ir.IntType(64)

outer = njit(nogil=True, cache=True, error_model="numpy")
inner = njit(nogil=True, cache=True, error_model="numpy", no_cpython_wrapper=True)
"""For functions that only compiled ones call."""


def _load(context: Any, builder: Any, array_type: Any, array: Any, at: Any, what: Any) -> Any:
    """`what` (an LLVM type) from element `at` of an array, at any alignment."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.bitcast(builder.gep(data, [at]), what.as_pointer()), align=1)


def _vector(array_type: Any) -> Any:
    return ir.VectorType(ir.IntType(array_type.dtype.bitwidth), BLOCK)


def _magnitude(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """64 lanes of the first argument, from the second one on, without their signs."""
    vector = _vector(signature.args[0])
    lanes = _load(context, builder, signature.args[0], args[0], args[1], vector)
    most = ir.Constant(vector.element, (1 << (vector.element.width - 1)) - 1)
    return builder.and_(lanes, _splat(builder, most, vector))


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), None))


@intrinsic
def differ(typing: Any, a: Any, b: Any, at: Any) -> Any:
    """Which of the 64 elements from `at` on differ, as a mask."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (
            _load(context, builder, signature.args[i], args[i], args[2], _vector(signature.args[i])) for i in (0, 1)
        )
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return types.uint64(a, b, types.intp), code


def _is_member(context: Any, builder: Any, signature: Any, args: Any, at: Any) -> Any:
    """Mask of the 64 elements from `at` on with floors[c + 1] <= magnitude < floors[c]; args: lanes, _, floors, c."""
    magnitude = _magnitude(context, builder, signature, (args[0], at))
    element = magnitude.type.element
    upper = _load(context, builder, signature.args[2], args[2], args[3], element)
    following = builder.add(args[3], ir.Constant(_WORD, 1))
    lower = _load(context, builder, signature.args[2], args[2], following, element)
    above = builder.sub(magnitude, _splat(builder, lower, magnitude.type))
    hit = builder.icmp_unsigned("<", above, _splat(builder, builder.sub(upper, lower), magnitude.type))
    return builder.bitcast(hit, _WORD)


@intrinsic
def members(typing: Any, lanes: Any, at: Any, floors: Any, c: Any) -> Any:
    """Which of the 64 elements from `at` on are of class `c`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _is_member(context, builder, signature, args, args[1])

    return types.uint64(lanes, types.intp, floors, types.intp), code


@intrinsic
def prefetch(typing: Any, lanes: Any, at: Any) -> Any:
    """Ask for the 128 bytes from element `at` on, which may lie beyond the end."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        raw = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flags = [ir.Constant(ir.IntType(32), value) for value in (0, 3, 1)]
        kind = ir.FunctionType(ir.VoidType(), [raw.type, *(flag.type for flag in flags)])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [raw.type], kind)
        for line in (0, 64):
            builder.call(prefetch, [builder.gep(raw, [ir.Constant(_WORD, line)]), *flags])
        return context.get_dummy_value()

    return types.void(lanes, types.intp), code


def _hits(context: Any, builder: Any, signature: Any, args: Any, starts: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    magnitudes = [_magnitude(context, builder, signature, (args[0], start)) for start in starts]
    for i in range(1, CLASSES_MAX):
        place = ir.Constant(_WORD, i)
        floor = _load(context, builder, signature.args[2], args[2], place, magnitudes[0].type.element)
        least = _splat(builder, floor, magnitudes[0].type)
        found = [builder.icmp_unsigned(">=", magnitude, least) for magnitude in magnitudes]
        yield i, [builder.bitcast(hit, _WORD) for hit in found]


@intrinsic
def count_reach(typing: Any, lanes: Any, at: Any, floors: Any, reached: Any) -> Any:
    """Add to `reached` (int32 [9]) how many of the 64 elements from `at` on reach each of the floors 1 ... 7."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals = context.make_array(signature.args[3])(context, builder, args[3]).data
        for i, (word,) in _hits(context, builder, signature, args, [args[1]]):
            ones = builder.trunc(builder.ctpop(word), ir.IntType(32))
            total = builder.gep(totals, [ir.Constant(_WORD, i)])
            builder.store(builder.add(builder.load(total), ones), total)
        return context.get_dummy_value()

    return types.void(lanes, types.intp, floors, reached), code


@intrinsic
def note_reach(typing: Any, lanes: Any, at: Any, floors: Any, words: Any, reached: Any) -> Any:
    """For the 256 elements from `at` on: how many reach each of the floors 1 ... 7, and which (words uint64 [9, 4])."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masks = context.make_array(signature.args[3])(context, builder, args[3]).data
        totals = context.make_array(signature.args[4])(context, builder, args[4]).data
        starts = [builder.add(args[1], ir.Constant(_WORD, block * BLOCK)) for block in range(WORDS)]
        for i, found in _hits(context, builder, signature, args, starts):
            total = ir.Constant(_WORD, 0)
            for block, word in enumerate(found):
                builder.store(word, builder.gep(masks, [ir.Constant(_WORD, i * WORDS + block)]))
                total = builder.add(total, builder.ctpop(word))
            builder.store(builder.trunc(total, ir.IntType(32)), builder.gep(totals, [ir.Constant(_WORD, i)]))
        return context.get_dummy_value()

    return types.void(lanes, types.intp, floors, words, reached), code


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """How many bits are set."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), code


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The number of the lowest bit set; 64 when there is none."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), code


@intrinsic
def word_at(typing: Any, raw: Any, at: Any) -> Any:
    """Eight bytes from `at` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, signature.args[0], args[0], args[1], _WORD)

    return types.uint64(raw, types.intp), code
