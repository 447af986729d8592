"""The micro-batches of a step are fixed units: who computes them, when and how many at a time changes no bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.trainer import learner as learning
from headway.trainer.batching import MicroBatch, micro_batches
from headway.trainer.learner import Learner
from headway.trainer.loss import group_advantages

from .learner_stand import batch, learner

TOKENS = 14
"""A limit at which the batch makes several units."""


def gradient_of(who: Learner, units: list[MicroBatch]) -> dict[str, Tensor]:
    return who._accumulate(units)[0]


def total(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    summed = {name: torch.zeros_like(grad) for name, grad in parts[0].items()}
    for part in parts:
        for name, grad in part.items():
            summed[name] += grad
    return summed


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


def test_units_computed_in_any_order_and_added_in_their_own_give_the_bits_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[dict[str, Tensor]] = []
    norms = learning.squared_norms

    def seen(grads: dict[str, Tensor]) -> dict[str, float]:
        taken.append({name: grad.clone() for name, grad in grads.items()})
        return norms(grads)

    monkeypatch.setattr(learning, "squared_norms", seen)
    who = learner(micro_batch_tokens=TOKENS)
    samples = batch(who.rollout_weights())
    advantages = group_advantages([s.reward for s in samples], [s.group for s in samples], "mean", 0)
    units = [unit for unit in micro_batches(samples, advantages, TOKENS, 2) if unit.learns]
    assert len(units) > 3
    computed: dict[int, dict[str, Tensor]] = {}
    for number in random.Random(1).sample(range(len(units)), len(units)):
        computed[number] = gradient_of(learner(micro_batch_tokens=TOKENS), [units[number]])
    ordered = [computed[number] for number in range(len(units))]
    grouped = gradient_of(learner(micro_batch_tokens=TOKENS), units[:2])  # two by one, the others by others
    result = who.step(samples)
    assert same_bits(total(ordered), taken[0])
    assert same_bits(total([grouped, *ordered[2:]]), taken[0])
    assert not same_bits(total(ordered[::-1]), taken[0]), "the order of addition matters, so it has to be fixed"
    assert [part for part in result.micro_batches if part in {unit.members for unit in units}] == [
        unit.members for unit in units
    ]


def test_the_units_are_a_function_of_the_batch_alone() -> None:
    def members(who: Any) -> Any:
        return who.step(batch(who.rollout_weights())).micro_batches

    first, second = members(learner(micro_batch_tokens=TOKENS)), members(learner(micro_batch_tokens=TOKENS))
    assert first == second
    assert sorted(place for part in first for place in part) == list(range(8))
