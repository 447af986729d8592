"""Drawing is a pure function of logits, seed and position, and follows the distribution."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.rollout_agent.engine.sampling import draw, uniforms

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 1 << 20)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=8))
def test_a_uniform_number_depends_on_nothing_but_seed_and_position(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([s for s, _ in pairs], [p for _, p in pairs])
    alone = [uniforms([s], [p])[0] for s, p in pairs]
    assert together.tolist() == alone
    assert all(0 <= u < 1 for u in alone)


def test_the_numbers_of_a_run_stay_the_same_for_ever() -> None:
    """Recordings replay only while this function is what it was."""
    assert uniforms([0, 1, 2**63 - 1], [0, 17, 191]).tolist() == [
        0.8833108082136426,
        0.5011552057123483,
        0.05669880914559411,
    ]


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = uniforms([s for s in range(200) for _ in range(200)], [p for _ in range(200) for p in range(200)])
    grid = grid.reshape(200, 200)
    assert abs(grid.mean() - 0.5) < 0.01
    assert abs(grid.var() - 1 / 12) < 0.005
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, -torch.inf])
    n = 20_000
    ids = draw(logits.expand(n, 5).contiguous(), [0.5] * n, list(range(n)), [7] * n)
    counts = torch.bincount(ids, minlength=5)
    expected = torch.softmax(logits / 0.5, -1) * n
    assert counts[4] == 0, "a token without probability was drawn"
    chi2 = ((counts[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert chi2 < 16.3  # 99.9 % of 3 degrees of freedom


def test_temperature_zero_is_greedy_in_any_company() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 0.0]])
    assert draw(logits, [0.0, 0.0], [1, 2], [0, 0]).tolist() == [1, 0]
    assert draw(logits, [0.0, 1.0], [1, 2], [0, 0])[0] == 1
