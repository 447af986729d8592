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

BLOCK, WORDS, SPANS = 64, 8, 4
SPAN = WORDS * BLOCK
GROUP = SPANS * SPAN
PLANES = (CLASSES_MAX - 1).bit_length()
_WORD, _I32 = ir.IntType(64), ir.IntType(32)

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
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, vector.count), None))


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
    """Ask the second cache for the 128 bytes from element `at` on, which may lie beyond the end.

    In the first they would drive out what is being worked on: chunks lie at like places of their pages.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        raw = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flags = [ir.Constant(_I32, value) for value in (0, 2, 1)]
        kind = ir.FunctionType(ir.VoidType(), [raw.type, *(flag.type for flag in flags)])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [raw.type], kind)
        for line in (0, 64):
            builder.call(prefetch, [builder.gep(raw, [ir.Constant(_WORD, line)]), *flags])
        return context.get_dummy_value()

    return types.void(lanes, types.intp), code


@intrinsic
def classify(typing: Any, lanes: Any, at: Any, top: Any, last: Any, planes: Any, start: Any) -> Any:
    """Of which class the 512 elements from `at` on are: (top - key) // CLASS_KEYS within 0 ... `last`.

    As 24 words of `planes` (uint64) from `start` on: the lowest bits of the classes, 64 a word, then the next, then the
    highest. Whoever needs vectors of them reads these back: to put one together from masks takes longer.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = _word_pointer(context, builder, signature.args[4], args[4], args[5])
        most = builder.add(builder.mul(args[3], ir.Constant(_WORD, CLASS_KEYS)), ir.Constant(_WORD, CLASS_KEYS - 1))
        for word in range(WORDS):
            first = builder.add(args[1], ir.Constant(_WORD, word * BLOCK))
            steps = _steps(context, builder, signature.args[0], args[0], first, args[2], most)
            for bit in range(PLANES):
                has = builder.and_(steps, ir.Constant(steps.type, [CLASS_KEYS << bit] * BLOCK))
                mask = builder.icmp_unsigned("!=", has, ir.Constant(steps.type, None))
                _store(builder, builder.bitcast(mask, _WORD), into, bit * WORDS + word)
        return context.get_dummy_value()

    return types.void(lanes, types.intp, types.int64, types.int64, planes, types.intp), code


@intrinsic
def count(typing: Any, planes: Any, span: Any, masks: Any, upto: Any, totals: Any) -> Any:
    """Which of the group's `span` of 512 elements, whose classes `planes` has, are of each: `masks[span, class, word]`.

    And how many of a class there are from the group's beginning to the end of each word, as uint16
    `upto[span, class // 4, word, class % 4]`, and to the end of the span, `totals[1 + span, class]`.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(_WORD, WORDS)
        at_plane, at_mask, at_upto, at_totals = (
            _word_pointer(context, builder, signature.args[i], args[i], builder.mul(args[1], ir.Constant(_WORD, step)))
            for i, step in ((0, PLANES * WORDS), (2, CLASSES_MAX * WORDS), (3, 2 * WORDS), (4, 2))
        )
        held = [_at(builder, at_plane, bit * WORDS, words) for bit in range(PLANES)]
        sides = [(builder.not_(plane), plane) for plane in held]
        ctpop = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [words]), "llvm.ctpop.v8i64")
        packed = [ir.Constant(words, None)] * 2  # four classes a word, 16 bits each
        for c in range(CLASSES_MAX):
            members = sides[0][c & 1]
            for bit in range(1, PLANES):
                members = builder.and_(members, sides[bit][c >> bit & 1])
            _store(builder, members, at_mask, c * WORDS)
            shift = ir.Constant(words, [16 * (c % 4)] * WORDS)
            packed[c // 4] = builder.or_(packed[c // 4], builder.shl(builder.call(ctpop, [members]), shift))
        for half in (0, 1):
            before = _splat(builder, _at(builder, at_totals, half, _WORD), words)
            sums = builder.add(_running(builder, packed[half]), before)
            _store(builder, builder.extract_element(sums, ir.Constant(_I32, WORDS - 1)), at_totals, 2 + half)
            _store(builder, sums, at_upto, half * WORDS)
        return context.get_dummy_value()

    return types.void(planes, types.intp, masks, upto, totals), code


def _steps(context: Any, builder: Any, array_type: Any, lanes: Any, at: Any, top: Any, most: Any) -> Any:
    """How far the keys of 64 lanes are below `top`, within 0 ... `most`, a byte each: CLASS_KEYS are a class."""
    small, vector = ir.IntType(8), _vector(array_type)
    bytes_, size = ir.VectorType(small, BLOCK), vector.element.width // 8
    shifted = builder.shl(_load(context, builder, array_type, lanes, at, vector), ir.Constant(vector, [1] * BLOCK))
    if size == 1:
        keys = builder.lshr(shifted, ir.Constant(vector, [4] * BLOCK))
    else:  # the byte on top, which one instruction picks from two vectors
        raw = builder.bitcast(shifted, ir.VectorType(small, BLOCK * size))
        tops = ir.Constant(ir.VectorType(_I32, BLOCK), [size * i + size - 1 for i in range(BLOCK)])
        keys = builder.shuffle_vector(raw, raw, tops)
    tops, mosts = (_splat(builder, builder.trunc(value, small), bytes_) for value in (top, most))
    below = builder.select(builder.icmp_unsigned(">", tops, keys), builder.sub(tops, keys), ir.Constant(bytes_, None))
    return builder.select(builder.icmp_unsigned("<", below, mosts), below, mosts)


def _running(builder: Any, words: Any) -> Any:
    """Each word plus all before it."""
    none = ir.Constant(words.type, None)
    step = 1
    while step < WORDS:
        picks = ir.Constant(ir.VectorType(_I32, WORDS), [i - step + WORDS if i >= step else i for i in range(WORDS)])
        words = builder.add(words, builder.shuffle_vector(none, words, picks))
        step *= 2
    return words


def _word_pointer(context: Any, builder: Any, array_type: Any, array: Any, word: Any) -> Any:
    """A pointer to the 64-bit word number `word` of an array of whatever."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, _WORD.as_pointer()), [word])


def _at(builder: Any, words: Any, at: int, what: Any) -> Any:
    """`what` (an LLVM type) from the word `at` on, at any alignment."""
    place = builder.gep(words, [ir.Constant(_WORD, at)])
    return builder.load(builder.bitcast(place, what.as_pointer()), align=8)


def _store(builder: Any, value: Any, words: Any, at: int) -> None:
    """Write a word or a vector of them from the word `at` on, at any alignment."""
    place = builder.gep(words, [ir.Constant(_WORD, at)])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=8)


@intrinsic
def upto_rank(typing: Any, counts: Any, at: Any, picks: Any, rank: Any) -> Any:
    """How many of 32 counts (uint16), from number `at` on, are at most `rank`, of those for which `picks` has a bit."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(16)
        held = _load(context, builder, signature.args[0], args[0], args[1], ir.VectorType(number, 32))
        small = builder.icmp_unsigned("<=", held, _splat(builder, builder.trunc(args[3], number), held.type))
        picked = builder.and_(builder.bitcast(small, _I32), builder.trunc(args[2], _I32))
        return builder.zext(builder.ctpop(picked), _WORD)

    return types.int64(counts, types.intp, types.int64, types.int64), code


@intrinsic
def put_below(typing: Any, into: Any, at: Any, words: Any, start: Any, bound: Any) -> Any:
    """Copy eight words of `words`, from `start` on, to `into`, from `at` on; how many are below `bound`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = _load(context, builder, signature.args[2], args[2], args[3], ir.VectorType(_WORD, WORDS))
        _store(builder, held, _word_pointer(context, builder, signature.args[0], args[0], args[1]), 0)
        small = builder.icmp_signed("<", held, _splat(builder, args[4], held.type))
        return builder.zext(builder.ctpop(builder.bitcast(small, ir.IntType(WORDS))), _WORD)

    return types.int64(into, types.intp, words, types.intp, types.int64), code


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
