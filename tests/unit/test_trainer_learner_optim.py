import numpy as np
import pytest
import torch

from headway.trainer.optim import ADAM_EPS, AdamW, Schedule, clip_by_global_norm


def grads(step: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    return {"b": torch.randn(3, generator=rng), "a": torch.randn(4, 3, generator=rng)}


def test_adamw_equals_the_textbook_and_spares_vectors_the_decay() -> None:
    masters = {"a": torch.ones(4, 3), "b": torch.ones(3)}
    adam = AdamW(masters, beta1=0.9, beta2=0.95, weight_decay=0.1)
    want = {name: w.numpy().astype(np.float64) for name, w in masters.items()}
    m = {name: np.zeros_like(w) for name, w in want.items()}
    v = {name: np.zeros_like(w) for name, w in want.items()}
    for t in range(1, 6):
        adam.step(grads(t), 1e-2)
        for name, grad in grads(t).items():
            g = grad.numpy().astype(np.float64)
            if name == "a":
                want[name] *= 1 - 1e-2 * 0.1
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            want[name] -= 1e-2 * (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.95**t)) + ADAM_EPS)
    for name in want:
        np.testing.assert_allclose(masters[name].numpy(), want[name], rtol=1e-5)


def test_an_optimizer_restored_from_its_state_continues_with_the_same_bits() -> None:
    first = {"a": torch.ones(4, 3), "b": torch.ones(3)}
    adam = AdamW(first, beta1=0.9, beta2=0.95)
    for t in range(3):
        adam.step(grads(t), 1e-2)
    second = {name: w.clone() for name, w in first.items()}
    restored = AdamW(second, beta1=0.9, beta2=0.95)
    restored.load_state(adam.state(), 3)
    for t in range(3, 6):
        adam.step(grads(t), 1e-2)
        restored.step(grads(t), 1e-2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="do not fit"):
        restored.load_state({k: v[:1] for k, v in adam.state().items()}, 3)


def test_the_global_norm_is_clipped_to_the_limit_and_a_small_one_is_left_alone() -> None:
    given = {"a": torch.full((4,), 3.0), "b": torch.full((1,), 8.0)}
    assert clip_by_global_norm(given, 1.0) == pytest.approx(10.0)
    assert clip_by_global_norm(given, 2.0) == pytest.approx(1.0)
    assert float(given["b"][0]) == pytest.approx(0.8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="norm"):
        clip_by_global_norm({"a": torch.tensor([1.0, bad])}, 1.0)


def test_the_rate_warms_up_then_falls_to_its_final_fraction() -> None:
    schedule = Schedule(peak=1.0, warmup_steps=4, total_steps=14, final_fraction=0.1)
    rates = [schedule.at(step) for step in (0, 3, 4, 9, 14, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert Schedule(peak=1.0, warmup_steps=0, total_steps=0).at(50) == 1.0
