import random

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.schemas.errors import WireError
from headway.weight_sync import codec, sparse
from headway.weight_sync.codec import Encoding, decode_chunk, encode_chunk

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def u8(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def round_trip(new: np.ndarray, base: np.ndarray | None, width: int) -> Encoding:
    encoding, payload = encode_chunk(new, base, width)
    out = np.full(len(new), 0xA5, np.uint8)
    decode_chunk(int(encoding), payload, base, out, width)
    assert out.tobytes() == new.tobytes()
    assert encode_chunk(new, base, width) == (encoding, payload)
    return encoding


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")


def perturbed(base: np.ndarray, fraction: float, seed: int, spread: int = 1) -> np.ndarray:
    """`base` (unsigned lanes) with a fraction of elements moved by up to `spread` integers."""
    rng = np.random.default_rng(seed)
    step = rng.integers(1, spread + 1, base.shape) * rng.choice([-1, 1], base.shape)
    step[rng.random(base.shape) >= fraction] = 0
    return base + step.astype(base.dtype)


@QUICK
@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([1, 2, 4]))
def test_any_bytes_come_back_whatever_their_size_and_width(old, new, width):
    n = min(len(old), len(new))
    round_trip(u8(new[:n]), u8(old[:n]), width)
    round_trip(u8(new), None, width)


def step(weights: np.ndarray, size: float) -> np.ndarray:
    """bf16 weights after masters a fraction of a unit away moved by N(0, `size`)."""
    rng = np.random.default_rng(3)
    masters = (weights.astype(np.uint32) << 16).view(np.float32) * (1 + rng.uniform(0, 2**-9, weights.shape))
    base = bf16(masters)
    return weights + (bf16(masters + rng.normal(0, size, weights.shape)) - base)


SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80, 0x7FFF]


@QUICK
@given(st.lists(st.tuples(st.sampled_from(SPECIAL), st.sampled_from(SPECIAL)), max_size=200))
def test_signed_zeros_nan_payloads_and_infinities_survive(pairs):
    old = np.array([a for a, _ in pairs], "<u2").view(np.uint8)
    new = np.array([b for _, b in pairs], "<u2").view(np.uint8)
    round_trip(new, old, 2)
    round_trip(new, old, 1)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("fraction", [0.0, 0.0005, 0.01, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("spread", [1, 3, 200, 1 << 15])
def test_every_density_and_spread_is_lossless(width, fraction, spread):
    rng = np.random.default_rng(7)
    lanes = rng.integers(0, 1 << (8 * width), 20_001, dtype=np.uint64).astype(f"<u{width}")
    new = perturbed(lanes, fraction, 8, min(spread, (1 << (8 * width - 1)) - 1))
    round_trip(new.view(np.uint8), lanes.view(np.uint8), width)


def test_each_encoding_is_chosen_where_it_is_smallest():
    weights = bf16(np.random.default_rng(0).normal(0, 0.05, 1 << 16))
    noise = np.random.default_rng(1).integers(0, 256, 1 << 16).astype(np.uint8)
    raw = weights.view(np.uint8)
    assert round_trip(raw, raw, 2) is Encoding.UNCHANGED
    assert round_trip(noise, None, 1) is Encoding.STORED
    assert round_trip(np.zeros(4096, np.uint8), None, 2) is Encoding.ZSTD
    assert round_trip(raw, None, 2) is Encoding.PLANES
    assert round_trip(perturbed(weights, 0.01, 2).view(np.uint8), raw, 2) is Encoding.SPARSE
    assert round_trip(step(weights, 1e-6).view(np.uint8), raw, 2) is Encoding.SPARSE_BY_EXPONENT
    assert round_trip(perturbed(weights, 0.4, 2).view(np.uint8), raw, 2) is Encoding.DENSE_BY_EXPONENT
    assert round_trip(perturbed(weights[:999], 0.4, 2).view(np.uint8), raw[:1998], 2) is Encoding.DENSE
    assert round_trip(noise, noise[::-1].copy(), 2) is Encoding.STORED


@pytest.mark.parametrize(
    ("lane", "key"),
    [(np.uint16(0xBF80), 127), (np.uint32(0xBF800000), 127), (np.uint8(0xB8), 7), (np.uint16(0x0080), 1)],
)
def test_elements_are_sorted_by_the_exponent_that_format_md_names(lane, key):
    assert sparse.keys(np.array([lane])).tolist() == [key]


def test_a_step_of_the_demo_learning_rate_takes_less_than_an_eighth_and_half_of_xor():
    rng = np.random.default_rng(3)
    masters = rng.normal(0, 0.06, 1 << 19).astype(np.float32)
    old, new = bf16(masters), bf16(masters + rng.normal(0, 6e-5, 1 << 19).astype(np.float32))
    assert 0.25 < np.mean(old != new) < 0.4
    _, payload = encode_chunk(new.view(np.uint8), old.view(np.uint8), 2)
    xor = len(zstandard.compress((old ^ new).tobytes(), 1))
    assert len(payload) < old.nbytes / 8
    assert len(payload) < xor / 2


def refuses(encoding, payload, base, out, width) -> bool:
    """Whether decoding raises the typed error; any other error fails the test."""
    try:
        decode_chunk(encoding, payload, base, out, width)
    except WireError as error:
        return error.reason == "bad_chunk"
    return False


def damaged(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    kind = rng.randrange(4)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += rng.randbytes(rng.randint(1, 9))
    else:
        start = rng.randrange(min(len(data), 24))
        data[start : start + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x7f"])
    return bytes(data)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.4])
def test_damaged_payloads_raise_the_typed_error_or_decode_to_the_right_size(fraction):
    weights = bf16(np.random.default_rng(0).normal(0, 0.05, 6000))
    base = weights.view(np.uint8)
    encoding, payload = encode_chunk(perturbed(weights, fraction, 5, 9).view(np.uint8), base, 2)
    rng, refused = random.Random(1), 0
    for _ in range(400):
        out = np.zeros(len(base), np.uint8)
        refused += refuses(rng.choice([int(encoding), *range(9)]), damaged(payload, rng), base, out, 2)
    assert refused > 300


@QUICK
@given(st.binary(max_size=200), st.integers(-1, 9), st.sampled_from([1, 2, 4]))
def test_arbitrary_payloads_never_crash(payload, encoding, width):
    base, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    refuses(encoding, payload, base, out, width)


def test_a_bomb_is_refused_before_it_is_inflated(monkeypatch):
    bomb = zstandard.compress(bytes(1 << 26), 1)
    inflated = []
    real = zstandard.ZstdDecompressor

    class Watched:
        def decompress(self, *args, **kwargs):
            inflated.append(args)
            return real().decompress(*args, **kwargs)

    monkeypatch.setattr(codec.zstandard, "ZstdDecompressor", Watched)
    with pytest.raises(WireError):
        decode_chunk(Encoding.ZSTD, bomb, None, np.zeros(64, np.uint8), 2)
    assert inflated == []


def test_a_difference_without_its_parent_is_refused():
    weights = bf16(np.random.default_rng(0).normal(0, 0.05, 600))
    encoding, payload = encode_chunk(perturbed(weights, 0.1, 5).view(np.uint8), weights.view(np.uint8), 2)
    for base in (None, np.zeros(8, np.uint8)):
        with pytest.raises(WireError, match="parent"):
            decode_chunk(encoding, payload, base, np.zeros(weights.nbytes, np.uint8), 2)


def test_oversized_chunks_are_refused_on_both_sides():
    with pytest.raises(ValueError):
        encode_chunk(np.zeros(8, np.uint8), np.zeros(4, np.uint8), 2)
    with pytest.raises(ValueError):
        encode_chunk(np.zeros(8, np.uint8), None, 3)
    with pytest.raises(WireError):
        decode_chunk(Encoding.STORED, b"12", None, np.zeros(3, np.uint8), 2)
