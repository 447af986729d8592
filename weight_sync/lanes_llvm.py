"""What numba has no word for: 64 elements of an array at once, and bits of a word, as LLVM instructions.

A comparison of 64 lanes becomes one 64-bit mask. The vectors are LLVM's own, so any instruction set will do.
Mind that numba's cache notices a change of the file of the function it compiled, not of this one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from headway.weight_sync.sparse import CLASS_KEYS, CLASSES_MAX

BLOCK, WORDS = 64, 8
SPAN = WORDS * BLOCK
PLANES = (CLASSES_MAX - 1).bit_length()
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


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


@intrinsic
def differ(typing: Any, a: Any, b: Any, at: Any) -> Any:
    """Which of the 64 elements from `at` on differ, as a mask."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (
            _load(context, builder, signature.args[i], args[i], args[2], _vector(signature.args[i])) for i in (0, 1)
        )
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return types.uint64(a, b, types.intp), code


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


@intrinsic
def classify(typing: Any, lanes: Any, at: Any, top: Any, last: Any, masks: Any, upto: Any) -> Any:
    """Which of the 512 elements from `at` on are of each class, as `masks` (uint64 [8, 8]: class, then word).

    A class is (top - key) // CLASS_KEYS within 0 ... `last`. `upto` (int64 [8, 8]) says how many of a class there
    are up to the end of each word, and in its last word how many there were before the call.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(_WORD, WORDS)
        planes = [cgutils.alloca_once(builder, words) for _ in range(PLANES)]
        for word in range(WORDS):
            start = builder.add(args[1], ir.Constant(_WORD, word * BLOCK))
            classes = _classes(context, builder, signature.args[0], args[0], start, args[2], args[3])
            for bit, plane in enumerate(planes):
                has = builder.and_(classes, ir.Constant(classes.type, [1 << bit] * BLOCK))
                mask = builder.bitcast(builder.icmp_unsigned("!=", has, ir.Constant(classes.type, None)), _WORD)
                place = builder.bitcast(plane, _WORD.as_pointer())
                builder.store(mask, builder.gep(place, [ir.Constant(_WORD, word)]))
        held = [builder.load(plane) for plane in planes]
        sides = [(builder.not_(plane), plane) for plane in held]
        rows = [
            builder.bitcast(context.make_array(signature.args[i])(context, builder, args[i]).data, words.as_pointer())
            for i in (4, 5)
        ]
        for c in range(CLASSES_MAX):
            members = sides[0][c & 1]
            for bit in range(1, PLANES):
                members = builder.and_(members, sides[bit][c >> bit & 1])
            mask_at, upto_at = (builder.gep(row, [ir.Constant(_WORD, c)]) for row in rows)
            builder.store(members, mask_at, align=8)
            before = builder.load(
                builder.gep(builder.bitcast(upto_at, _WORD.as_pointer()), [ir.Constant(_WORD, WORDS - 1)])
            )
            count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [words]), "llvm.ctpop.v8i64")
            total = _running(builder, builder.call(count, [members]))
            builder.store(builder.add(total, _splat(builder, before, words)), upto_at, align=8)
        return context.get_dummy_value()

    return types.void(lanes, types.intp, types.int64, types.int64, masks, upto), code


def _classes(context: Any, builder: Any, array_type: Any, lanes: Any, at: Any, top: Any, last: Any) -> Any:
    """The classes of 64 lanes, a byte each."""
    small, vector = ir.IntType(8), _vector(array_type)
    bytes_ = ir.VectorType(small, BLOCK)
    bits = vector.element.width
    values = _load(context, builder, array_type, lanes, at, vector)
    keys = builder.lshr(
        builder.shl(values, ir.Constant(vector, [1] * BLOCK)), ir.Constant(vector, [max(bits - 8, 4)] * BLOCK)
    )
    if bits > 8:
        keys = builder.trunc(keys, bytes_)
    tops, lasts = (_splat(builder, builder.trunc(value, small), bytes_) for value in (top, last))
    none = ir.Constant(bytes_, None)
    below = builder.select(builder.icmp_unsigned(">", tops, keys), builder.sub(tops, keys), none)
    classes = builder.udiv(below, ir.Constant(bytes_, [CLASS_KEYS] * BLOCK))
    return builder.select(builder.icmp_unsigned("<", classes, lasts), classes, lasts)


def _running(builder: Any, words: Any) -> Any:
    """Each word plus all before it."""
    none = ir.Constant(words.type, None)
    step = 1
    while step < WORDS:
        picks = ir.Constant(
            ir.VectorType(ir.IntType(32), WORDS), [i - step + WORDS if i >= step else i for i in range(WORDS)]
        )
        words = builder.add(words, builder.shuffle_vector(none, words, picks))
        step *= 2
    return words


def _row(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """A pointer to eight words from element `at` of an array on."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.VectorType(_WORD, WORDS).as_pointer())


@intrinsic
def upto_rank(typing: Any, words: Any, at: Any, rank: Any) -> Any:
    """How many of the eight words from `at` on are at most `rank`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = builder.load(_row(context, builder, signature.args[0], args[0], args[1]), align=8)
        small = builder.icmp_signed("<=", held, _splat(builder, args[2], held.type))
        return builder.zext(builder.ctpop(builder.bitcast(small, ir.IntType(WORDS))), _WORD)

    return types.int64(words, types.intp, types.int64), code


@intrinsic
def put_run(typing: Any, words: Any, at: Any, first: Any) -> Any:
    """Write `first`, `first` + 1, ... to the eight words from `at` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        run = ir.Constant(ir.VectorType(_WORD, WORDS), list(range(WORDS)))
        values = builder.add(_splat(builder, args[2], run.type), run)
        builder.store(values, _row(context, builder, signature.args[0], args[0], args[1]), align=8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), code


@intrinsic
def put_bits(typing: Any, words: Any, at: Any, mask: Any, first: Any) -> Any:
    """Write `first` plus the number of each of the four lowest bits set to four words from `at` on; the other bits.

    What is written for bits that there are not means nothing. Four at once, since a loop's end cannot be foreseen.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        mask = args[2]
        for i in range(4):
            place = builder.add(args[3], builder.cttz(mask, ir.Constant(ir.IntType(1), 0)))
            builder.store(place, builder.gep(data, [builder.add(args[1], ir.Constant(_WORD, i))]))
            mask = builder.and_(mask, builder.sub(mask, ir.Constant(_WORD, 1)))
        return mask

    return types.uint64(words, types.intp, types.uint64, types.int64), code


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


@intrinsic
def put_word(typing: Any, raw: Any, at: Any, word: Any) -> Any:
    """Write eight bytes from `at` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store(args[2], builder.bitcast(builder.gep(data, [args[1]]), _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(raw, types.intp, types.uint64), code


@intrinsic
def select(typing: Any, word: Any, rank: Any) -> Any:
    """The number of the set bit below which `rank` bits are set, which there is."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.shl(ir.Constant(_WORD, 1), args[1])
        deposit = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORD, [_WORD, _WORD]), "llvm.x86.bmi.pdep.64"
        )
        return builder.cttz(builder.call(deposit, [one, args[0]]), ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64, types.int64), code


HAS_DEPOSIT = "+bmi2" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Whether `select` is an instruction of this processor."""
