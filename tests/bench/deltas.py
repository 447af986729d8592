"""Sizes and CPU times of weight deltas against memcpy, XOR + zstd-1, indices + values, and ARCv3.

    python -P tests/bench/deltas.py [--mib 1024] [--slow-mib 128] [--rounds 3] [--real STEPS] [--changed 0.01 ...]

Synthetic: bf16 weights whose fp32 masters are N(0, 0.02); a step adds lr x clip(0.42 x N(0, 1), +-1) to each
with lr such that the given share of the bf16 roundings changes. Real: a small mixture-of-experts decoder trained
on Python source for STEPS steps, then continued at 1e-6 and 3e-6; the last of its steps (sizes only).

One thread, chunks of 1 MiB, shards of 64 MiB. Encoding starts from two bf16 arrays and includes the XXH3-128 of the
new bytes and the SHA-256 of what is stored; decoding ends with the new bytes in place of the old. Rates are raw bytes
per CPU second in rounds in which coders alternate. What is compared is compared within a round, and the median over
rounds is given: with memcpy over the same bytes once before and once after, with another coder by bytes a second.
Slow coders (ARCv3, numpy alone) see the first `--slow-mib` only, in tensors of 16 MiB. Flat entropy: H(p) + p x
H(differences among changed) an element, over all elements.
ARCv3 needs the extra `bench`; it is left out where that is missing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headway.weight_sync import sparse
from headway.weight_sync.codec import U8

sys.path.insert(0, str(Path(__file__).parent / "lib"))

from delta_coders import Coder, Span, arc_decode_seconds, coders

TENSOR_BYTES = 16 << 20
BLOCK = 1 << 24
SEED = 0


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def block(number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Masters and the step at lr = 1, float32 [size]."""
    rng = np.random.default_rng([SEED, number])
    masters = 0.02 * rng.standard_normal(size, np.float32)
    return masters, np.clip(np.float32(0.42) * rng.standard_normal(size, np.float32), -1, 1)


def synthetic(nbytes: int, share: float) -> tuple[U8, U8, float]:
    """(parent, new, lr)."""
    masters, step = block(0, 1 << 22)
    low, high = 1e-9, 1e-3
    for _ in range(24):
        lr = (low * high) ** 0.5
        moved = np.mean(bf16(masters + np.float32(lr) * step) != bf16(masters))
        low, high = (lr, high) if moved < share else (low, lr)
    n = nbytes // 2
    old, new = np.empty(n, "<u2"), np.empty(n, "<u2")
    for number, at in enumerate(range(0, n, BLOCK)):
        masters, step = block(number, min(BLOCK, n - at))
        old[at : at + BLOCK], new[at : at + BLOCK] = bf16(masters), bf16(masters + np.float32(lr) * step)
    return old.view(np.uint8), new.view(np.uint8), lr


def entropy_bytes(old: U8, new: U8) -> tuple[float, float, float]:
    """(share changed, flat entropy, entropy given the exponent of the parent), the latter two in bytes in all."""
    a, b = old.view("<u2"), new.view("<u2")
    elements, counts = np.zeros(256), np.zeros((256, 1 << 16))
    for at in range(0, len(a), BLOCK):
        x, y = a[at : at + BLOCK], b[at : at + BLOCK]
        elements += np.bincount(sparse.keys(x), minlength=256)
        where = np.flatnonzero(x != y)
        moves = (y[where] - x[where]).astype(np.int64)
        counts += np.bincount(sparse.keys(x[where]).astype(np.int64) << 16 | moves, minlength=1 << 24).reshape(256, -1)

    def bits(n: float, moved: np.ndarray) -> float:
        parts = np.append(moved[moved > 0], n - moved.sum())
        return float(-(parts[parts > 0] * np.log2(parts[parts > 0] / n)).sum())

    by_key = sum(bits(n, moved) for n, moved in zip(elements, counts, strict=True) if n)
    return counts.sum() / len(a), bits(len(a), counts.sum(0)) / 8, by_key / 8


def measure(old: U8, new: U8, tensor_spans: list[Span], slow_bytes: int, rounds: int) -> list[Coder]:
    """Sizes, and each coder's rates with those of memcpy around them, round by round."""
    made = coders()
    served = old.copy()
    np.copyto(served, old)
    for coder in made:  # compiles, warms up
        with coder.within():
            payload, _ = coder.encode(old, new, tensor_spans[:1])
            if coder.decode is None:
                arc_decode_seconds(payload, old, new, tensor_spans[:1])
            else:
                coder.decode(payload, old.copy(), tensor_spans[:1])
    for _ in range(rounds):
        for coder in made:
            spans = [span for span in tensor_spans if span[1] <= slow_bytes] if coder.slow else tensor_spans
            spans = spans or tensor_spans[:1]
            end = spans[-1][1]
            coder.nbytes = sum(b - a for a, b in spans)
            copies = [copy_seconds(served[:end], old[:end])]
            with coder.within():
                began = time.process_time()
                payload, coder.size = coder.encode(old, new, spans)
                encode_s = time.process_time() - began
                copies.append(copy_seconds(served[:end], old[:end]))
                if coder.decode is None:
                    decode_s = arc_decode_seconds(payload, old, new, spans)
                else:
                    began = time.process_time()
                    coder.decode(payload, served[:end], spans)
                    decode_s = time.process_time() - began
                    assert all(np.array_equal(served[a:b], new[a:b]) for a, b in spans), coder.name
            copies.append(copy_seconds(served[:end], old[:end]))
            for rates, over, took, around in (
                (coder.encode_gb_s, coder.encode_over_memcpy, encode_s, copies[:2]),
                (coder.decode_gb_s, coder.decode_over_memcpy, decode_s, copies[1:]),
            ):
                rates.append(coder.nbytes / took / 1e9)
                over.append(coder.nbytes / end * statistics.mean(around) / took)
    return made


def copy_seconds(to: U8, source: U8) -> float:
    """CPU seconds; leaves `to` equal to `source`."""
    began = time.process_time()
    np.copyto(to, source)
    return max(time.process_time() - began, 1e-9)


def real_steps(steps: int, rates: tuple[float, ...] = (1e-6, 3e-6)) -> Iterator[tuple[str, U8, U8, list[Span]]]:
    """(name, parent, new, tensors) of the last of five steps at each rate, from the same trained weights."""
    import torch

    from headway.schemas.config import Config
    from headway.trainer.corpus import draw
    from headway.trainer.midtrain import _Midtrain, make_batch

    torch.manual_seed(0)
    config = Config.model_validate(
        {
            "run": {"name": "bench"},
            "model": {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3},
            "midtrain": {"pretrain_steps": steps, "sft_steps": 0, "pretrain_tokens_per_step": 512},
        }
    )
    run = _Midtrain(config, [])

    def step(number: int, rate: float) -> None:
        windows = run._data["pretrain"]
        run._update(make_batch([windows[i] for i in draw(len(windows), run._sequences["pretrain"], number, 0)]), rate)

    def weights() -> tuple[U8, list[Span]]:
        raw = [run.masters[name].to(torch.bfloat16).view(-1).view(torch.uint8).numpy() for name in sorted(run.masters)]
        ends = np.cumsum([len(part) for part in raw]).tolist()
        return np.concatenate(raw), list(zip([0, *ends[:-1]], ends, strict=True))

    for number in range(steps):
        step(number, run._rates["pretrain"].at(number))
    masters = {name: w.clone() for name, w in run.masters.items()}
    moments = copy.deepcopy(run._adam.state())
    for rate in rates:
        for name, w in run.masters.items():
            w.copy_(masters[name])
        run._adam.load_state(copy.deepcopy(moments), steps)
        for number in range(steps, steps + 4):
            step(number, rate)
        old, spans = weights()
        step(steps + 4, rate)
        yield f"real, lr {rate:g}", old, weights()[0], spans


def report(what: str, old: U8, new: U8, made: list[Coder]) -> dict[str, float]:
    share, flat, by_key = entropy_bytes(old, new)
    print(
        f"\n{what}: {len(old) >> 20} MiB, {share:.2%} changed, flat entropy {len(old) / flat:.0f} times smaller "
        f"(given the exponent {by_key / flat:.2f} of it)"
    )
    print(
        f"{'coder':<16}{'times smaller':>14}{'of entropy':>11}{'enc+hash GB/s':>15}{'of memcpy':>10}"
        f"{'dec+apply GB/s':>16}{'of memcpy':>10}"
    )
    figures = {"changed": share, "entropy_given_exponent_over_flat": by_key / flat}
    for coder in made:
        relative = coder.size / coder.nbytes * len(old) / flat
        speeds = [
            statistics.median(values)
            for values in (coder.encode_gb_s, coder.encode_over_memcpy, coder.decode_gb_s, coder.decode_over_memcpy)
        ]
        print(
            f"{coder.name:<16}{coder.nbytes / coder.size:>14.1f}{relative:>11.3f}{speeds[0]:>15.2f}{speeds[1]:>10.3f}"
            f"{speeds[2]:>16.2f}{speeds[3]:>10.3f}"
        )
        figures[f"{coder.name}: size over flat entropy"] = relative
        figures[f"{coder.name}: encode over memcpy"], figures[f"{coder.name}: decode over memcpy"] = (
            speeds[1],
            speeds[3],
        )
        for other in made if coder.name in ("ours", "ours, flat") else ():
            for what, ours, theirs in (
                ("encode", coder.encode_gb_s, other.encode_gb_s),
                ("decode", coder.decode_gb_s, other.decode_gb_s),
            ):
                ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                figures[f"{coder.name}: {what} over {other.name}"] = ratio
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--slow-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changed", type=float, nargs="*", default=[0.0025, 0.01, 0.023])
    parser.add_argument("--real", type=int, default=40, metavar="STEPS")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for share in args.changed:
        old, new, lr = synthetic(args.mib << 20, share)
        spans = [(at, min(at + TENSOR_BYTES, len(old))) for at in range(0, len(old), TENSOR_BYTES)]
        name = f"{share:.2%} changed"
        found[name] = report(
            f"synthetic, lr {lr:.3g}", old, new, measure(old, new, spans, args.slow_mib << 20, args.rounds)
        )
    for name, old, new, spans in real_steps(args.real) if args.real else ():
        found[name] = report(name, old, new, measure(old, new, spans, len(old), 1))
    rounded = {name: {what: round(value, 4) for what, value in figures.items()} for name, figures in found.items()}
    load = [round(one, 1) for one in os.getloadavg()]
    print(json.dumps({"name": "deltas", "figures": rounded, "targets": targets(found), "load": load}))


def targets(found: dict[str, dict[str, float]]) -> dict[str, list[Any]]:
    """name -> [value, ">=", asked, met]"""
    asked: dict[str, tuple[float, float]] = {}
    one = found.get("1.00% changed", {})

    def smaller(figures: dict[str, float], than: str, goal: float, name: str) -> None:
        what = "size over flat entropy"
        if f"{than}: {what}" in figures:
            asked[name] = figures[f"{than}: {what}"] / figures[f"ours: {what}"], goal

    if one:
        asked["1%: flat entropy over flat size"] = (1 / one["ours, flat: size over flat entropy"], 1 / 1.08)
        asked["1%: flat entropy over size"] = (1 / one["ours: size over flat entropy"], 1 / 0.80)
        for kind in ("ours", "ours, flat"):
            asked[f"1%: {kind}, encode over memcpy"] = (one[f"{kind}: encode over memcpy"], 0.30)
            asked[f"1%: {kind}, decode over memcpy"] = (one[f"{kind}: decode over memcpy"], 0.50)
            for what, other, goal in (
                ("encode", "arc_v3", 20),
                ("decode", "arc_v3", 5),
                ("encode", "xor + zstd-1", 1.5),
            ):
                if f"{kind}: {what} over {other}" in one:
                    asked[f"1%: {kind}, {what} over {other}"] = one[f"{kind}: {what} over {other}"], goal
        smaller(one, "xor + zstd-1", 2.5, "1%: times smaller than XOR + zstd-1")
        smaller(one, "arc_v3", 1 / 0.75, "1%: times smaller than ARCv3")
    for name, figures in found.items():
        if name.startswith("real"):
            smaller(figures, "arc_v3", 1 / 0.8, f"{name}: times smaller than ARCv3")
    return {name: [round(value, 3), ">=", round(goal, 3), value >= goal] for name, (value, goal) in asked.items()}


if __name__ == "__main__":
    main()
