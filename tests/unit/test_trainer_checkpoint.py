import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from headway.schemas.errors import InputError
from headway.schemas.wire import digest_of
from headway.trainer import checkpoint as ck

SHAPES = {"w": (3, 2), "norm": (2,)}


def state(seed: int = 0, order: tuple[str, ...] = ("w", "norm")) -> ck.Checkpoint:
    def make(kind: int) -> dict[str, torch.Tensor]:
        return {n: torch.full(SHAPES[n], seed + kind + 0.5).cumsum(0) for n in order}

    moments = {f"{kind}/{n}": t for i, kind in enumerate(ck.MOMENTS) for n, t in make(i + 1).items()}
    return ck.Checkpoint(masters=make(0), moments=moments, counters={"steps_done": 7, "a": 1})


def test_a_state_survives_the_round_trip_bit_for_bit() -> None:
    back = ck.from_bytes(ck.to_bytes(state()), SHAPES)
    assert back.counters == {"steps_done": 7, "a": 1}
    for mine, theirs in ((state().masters, back.masters), (state().moments, back.moments)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_the_same_state_has_the_same_digest_in_whatever_order_it_is_given() -> None:
    digest = digest_of(ck.to_bytes(state()))
    assert digest == digest_of(ck.to_bytes(state(order=("norm", "w"))))
    assert digest != digest_of(ck.to_bytes(state(seed=1)))
    assert digest == "c471350b3da4de0a2d8437c6ee677b79be9eac2e58888b55e9490bfee76630ab"


def test_the_bytes_are_those_that_safetensors_writes() -> None:
    shapes = {"wä/long.name": (3, 5), "b": (), "a": (1, 2, 3), "empty": (0, 4)}
    masters = {name: torch.rand(shape) for name, shape in shapes.items()}
    moments = {f"{kind}/{name}": torch.rand(shape) for kind in ck.MOMENTS for name, shape in shapes.items()}
    for counter in (1, 12, 123, 1234):  # headers of every length modulo 8
        given = ck.Checkpoint(masters=masters, moments=moments, counters={"steps_done": counter})
        note = json.dumps({"format": 1, "counters": {"steps_done": counter}}, sort_keys=True)
        tensors = {f"master/{name}": tensor for name, tensor in masters.items()} | moments
        assert ck.to_bytes(given) == save(tensors, metadata={"headway": note})


def test_bytes_that_are_no_whole_checkpoint_are_refused() -> None:
    good = ck.to_bytes(state())
    tensors = load(good)
    note = {"headway": json.dumps({"format": 1, "counters": {"steps_done": 7}})}
    bad = {
        "truncated": good[:-1],
        "empty": b"",
        "random": b"\xff" * 64,
        "no note": save(tensors),
        "newer format": save(tensors, {"headway": json.dumps({"format": 2, "counters": {}})}),
        "bad counter": save(tensors, {"headway": json.dumps({"format": 1, "counters": {"steps_done": -1}})}),
        "missing": save({k: v for k, v in tensors.items() if k != "exp_avg/w"}, note),
        "surplus": save(tensors | {"master/extra": torch.ones(1)}, note),
        "misshapen": save(tensors | {"master/w": torch.ones(2, 3)}, note),
        "half": save(tensors | {"master/w": torch.ones(3, 2, dtype=torch.bfloat16)}, note),
        "nan": save(tensors | {"exp_avg_sq/w": torch.full((3, 2), float("nan"))}, note),
    }
    assert ck.from_bytes(save(tensors, note), SHAPES).counters == {"steps_done": 7}
    for data in bad.values():
        with pytest.raises(InputError, match="cannot be used"):
            ck.from_bytes(data, SHAPES)


def test_a_broken_state_is_not_written() -> None:
    broken = state()
    broken.masters["w"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="master/w holds NaN or infinity"):
        ck.to_bytes(broken)


def test_a_file_holds_the_old_state_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.ckpt"
    ck.save_file(state(), path)
    old = path.read_bytes()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ck.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        ck.save_file(state(seed=1), path)
    assert path.read_bytes() == old
    monkeypatch.undo()
    ck.save_file(state(seed=1), path)
    assert ck.load_file(path, SHAPES).masters["w"].equal(state(seed=1).masters["w"])
    with pytest.raises(InputError, match="cannot read"):
        ck.load_file(tmp_path / "none", SHAPES)
