"""Promise: compiled loops and numpy write the same bytes and read the same ones; numba is never needed."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headway.weight_sync import codec, rice, sparse
from headway.weight_sync.codec import Encoding, decode_chunk, encode_chunk

pytest.importorskip("numba", reason="the extra `fast` is not installed")

from numba import njit

from headway.weight_sync import rice_fast, sparse_fast

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOTH = (sparse, sparse_fast)


@st.composite
def chunks(draw):
    """(old, new) lanes of any width: weights of one or many exponents, changed at any rate by little or much."""
    width = draw(st.sampled_from([1, 2, 4]))
    n = draw(st.one_of(st.integers(1, 700), st.integers(4000, 9000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 1 << 8 * width, n, dtype=np.uint64).astype(f"<u{width}")
    if draw(st.booleans()) and width > 1:
        floats = (rng.normal(0, 1, n) * 2.0 ** -rng.integers(0, 20, n)).astype(np.float32).view("<u4")
        old = (floats >> 8 * (4 - width)).astype(old.dtype)
    rate = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
    by_size = draw(st.booleans())
    rates = np.minimum(rate * 2.0 ** (rng.normal(0, 3, n) if by_size else np.zeros(n)), 1)
    reach = draw(st.sampled_from([1, 2, 9, (1 << 8 * width - 1) - 1]))
    moves = rng.integers(1, reach + 1, n) * rng.choice([-1, 1], n) * (rng.random(n) < rates)
    return old, old + moves.astype(old.dtype)


@MANY
@given(chunks())
def test_sparse_chunks_have_the_same_bytes_and_both_read_them_in_place_and_not(pair):
    old, new = pair
    made = [module.encode(old, new) for module in BOTH]
    assert made[0] == made[1]
    if made[0] is None or made[0][1] == b"":
        assert (made[0] is None) == (np.count_nonzero(old != new) > len(old) * 3 // 10)
        return
    for module in BOTH:
        assert read(module, old, *made[0]).tobytes() == new.tobytes()


def read(module, old, by_exponent, payload):
    """`old` with the changes of a payload, or None when it is none: listed and written, and made in place."""
    found, in_place = module.changes(payload, old, by_exponent), old.copy()
    assert module.apply(payload, in_place, by_exponent) == (found is not None)
    if found is None:
        return None
    assert len(np.unique(found[0])) == len(found[0])
    new = old.copy()
    module.scatter(new, *found)
    assert new.tobytes() == in_place.tobytes()
    return new


@MANY
@given(chunks(), st.integers(2, 8), st.integers(0, 255))
def test_both_read_any_number_of_classes_and_any_top_key_that_a_writer_may_choose(pair, classes, top):
    old, new = pair
    assume(0 < np.count_nonzero(old != new) <= sparse.changes_max(len(old)))
    with (
        mock.patch.object(sparse, "_top", return_value=(top, classes)),
        mock.patch.object(sparse, "TABLE_BITS", -(10**9)),
    ):
        made = sparse.encode(old, new)
    assert made[0]
    for module in BOTH:
        assert read(module, old, *made).tobytes() == new.tobytes()


@MANY
@given(st.integers(1, 2**64 - 1))
def test_set_bits_are_found_by_rank_with_and_without_an_instruction_for_it(word):
    places = [i for i in range(64) if word >> i & 1]
    for select in (sparse_fast._select, sparse_fast._select_by_halves):
        found = SELECTS[select](np.uint64(word), np.empty(len(places), np.int64))
        assert found.tolist() == places


def selecting(select):
    @njit
    def all_places(word, out):
        for rank in range(len(out)):
            out[rank] = select(word, rank)
        return out

    return all_places


SELECTS = {select: selecting(select) for select in (sparse_fast._select, sparse_fast._select_by_halves)}


def list_of(values, group):
    out = np.full(64 + 8 * len(values), 0xA5, np.uint8)
    return out[3 : rice_fast.pack(values, group, out, 3)].tobytes()


def numbers_in(data, n, group):
    raw = np.frombuffer(b"\xff\xff" + data + b"\xff" * 8, np.uint8)
    right, values = rice_fast.unpack(raw, 2, 2 + len(data), n, group)
    return values if right else None


@MANY
@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 500), st.integers(0, 2**31 - 1)), max_size=700),
    st.sampled_from([8, 64, 256]),
)
def test_lists_have_the_same_bytes_and_come_back(numbers, group):
    values = np.array(numbers, np.int64)
    data = rice.pack(values, group)
    assert list_of(values, group) == data
    for unpack in (rice.unpack, numbers_in):
        back = unpack(data, len(values), group)
        assert back is not None
        assert back.tolist() == numbers


@MANY
@given(st.binary(max_size=60), st.integers(0, 80), st.sampled_from([8, 64, 256]))
def test_both_refuse_the_same_malformed_lists(data, n, group):
    ours, theirs = (unpack(data, n, group) for unpack in (rice.unpack, numbers_in))
    assert (ours is None) == (theirs is None)
    assert ours is None or ours.tolist() == theirs.tolist()


@MANY
@given(chunks(), st.data())
def test_both_refuse_the_same_damaged_chunks(pair, data):
    old, new = pair
    made = sparse.encode(old, new)
    assume(made)
    by_exponent, payload = made
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, min(len(damaged), 60) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = [read(module, old, by_exponent, bytes(damaged)) for module in BOTH]
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("share", [None, 0.0, 0.01, 0.5])
def test_whole_chunks_of_every_encoding_have_the_same_bytes_either_way(share, monkeypatch):
    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.02, codec.FAST_FROM_BYTES).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old + ((rng.random(old.shape) < (share or 0)) * rng.choice([-1, 1], old.shape)).astype("<u2")
    base = None if share is None else old.view(np.uint8)
    assert codec._sparse(new.nbytes) is sparse_fast
    fast = encode_chunk(new.view(np.uint8), base, 2)
    monkeypatch.setattr(codec, "_compiled", lambda: sparse)
    assert encode_chunk(new.view(np.uint8), base, 2) == fast
    assert (share == 0.01) == (fast[0] in (Encoding.SPARSE, Encoding.SPARSE_BY_EXPONENT))
    out = old.view(np.uint8).copy()
    decode_chunk(*fast, out, out, 2)
    assert out.tobytes() == new.tobytes()


def test_without_numba_and_for_small_chunks_nothing_is_compiled_or_even_imported():
    code = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "import numpy as np; from headway.weight_sync import codec, sparse\n"
        "a = np.zeros(4096, np.uint8); codec.encode_chunk(a, a + 1, 1); assert 'numba' not in sys.modules\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba' else found(name, *rest)\n"
        "assert codec._sparse(1 << 20) is sparse and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
