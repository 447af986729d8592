"""What a rollout is worth beside its verdict: auxiliary rewards and a length penalty, of a run's own choosing.

total = the verdict as the sandbox signed it + each auxiliary reward, in order - the length penalty. The agent records
the total and each part; whoever reads a rollout computes them again, and the trainer refuses one that says anything
else. So the functions must be pure: of the recorded rollout and the configuration, with no clock, no randomness and
no file. A penalty never changes what was signed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.schemas.errors import ConfigError
from headway.schemas.messages import Command, Verdict
from headway.schemas.plugs import load
from headway.schemas.sections import RewardConfig
from headway.schemas.trajectory import Trajectory

VERDICT, LENGTH = "verdict", "length_penalty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A graded rollout, as recorded."""

    trajectory: Trajectory
    commands: Sequence[Command]
    reward: float
    """Of the verdict, as signed."""
    parts: Mapping[str, float]
    """Of the verdict."""

    @classmethod
    def of(cls, trajectory: Trajectory, commands: Sequence[Command], verdict: Verdict) -> Facts:
        return cls(trajectory=trajectory, commands=commands, reward=verdict.reward, parts=verdict.parts)

    @property
    def sampled_tokens(self) -> int:
        return int(self.trajectory.loss_mask.sum())

    @property
    def observation_tokens(self) -> int:
        """Everything that was not sampled, the first prompt included."""
        return len(self.trajectory.token_ids) - self.sampled_tokens


RewardFunction = Callable[[Facts, RewardConfig], float]


def effort(facts: Facts, config: RewardConfig) -> float:
    """What a session took: its tokens, calls and turns, weighted."""
    return (
        config.sampled_token_weight * facts.sampled_tokens
        + config.observation_token_weight * facts.observation_tokens
        + config.call_weight * len(facts.commands)
        + config.turn_weight * facts.trajectory.turns
    )


def concave(facts: Facts, config: RewardConfig) -> float:
    """A length penalty that grows ever more slowly: scale * ((1 + x)^(1 - q) - 1) / (1 - q), x = effort / unit.

    The first steps cost most, so short tasks are pressed to be short and long ones may take their time; q = 0 is
    proportional, q = 1 logarithmic.
    """
    x, q = effort(facts, config) / config.length_unit, config.length_curvature
    grown = math.log1p(x) if q == 1.0 else ((1.0 + x) ** (1.0 - q) - 1.0) / (1.0 - q)
    return config.length_scale * grown


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout's total and what it is made of; no parts where nothing but the verdict counts."""

    total: float
    parts: dict[str, float]


class Scoring:
    """The configured functions, tried once when a service starts."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._auxiliary = {spec: load(spec, "reward.auxiliary") for spec in config.auxiliary}
        self._length = load(config.length_penalty, "reward.length_penalty") if config.length_penalty else None

    def __bool__(self) -> bool:
        return bool(self._auxiliary) or self._length is not None

    def score(self, facts: Facts) -> Scored:
        """Raises ConfigError when a function fails or gives no finite number."""
        if not self:
            return Scored(total=facts.reward, parts={})
        parts = {VERDICT: facts.reward}
        for spec, function in self._auxiliary.items():
            parts[spec] = self._call(spec, function, facts)
        if self._length is not None:
            penalty = self._call(self._config.length_penalty, self._length, facts)
            if penalty < 0:
                raise ConfigError(f"{self._config.length_penalty} gave {penalty}", why="a penalty is never below 0")
            parts[LENGTH] = -penalty
        total = 0.0
        for value in parts.values():
            total += value
        return Scored(total=total, parts=parts)

    def _call(self, spec: str, function: RewardFunction, facts: Facts) -> float:
        try:
            value = float(function(facts, self._config))
        except Exception as error:  # the function is not ours
            raise ConfigError(f"reward function {spec} failed", why=repr(error)[:300]) from None
        if not math.isfinite(value):
            raise ConfigError(f"reward function {spec} gave {value}", why="a reward is a finite number")
        return value
