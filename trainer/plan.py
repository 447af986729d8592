"""Which tasks a run consists of: pure functions of its configuration and its task set."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from headway.schemas.config import Config
from headway.schemas.errors import ConfigError
from headway.schemas.ids import eval_rollout_id, sampling_seed, train_rollout_id
from headway.schemas.messages import Task
from headway.schemas.version import Version
from headway.schemas.wire import digest_of

TRAIN_FILE, HELDOUT_FILE = "train.jsonl", "heldout.jsonl"
TRAIN_TEMPERATURE = 1.0
EPOCHS_CACHED = 2


@functools.lru_cache(EPOCHS_CACHED)
def _epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The ids of the training and held-out tasks, and the digest that names the set."""

    digest: str
    train: tuple[str, ...]
    heldout: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> TaskSet:
        """Read the two JSONL files that `headway tasks build` wrote. Raises ConfigError."""
        try:
            found = cls.parse(*((folder / name).read_bytes() for name in (TRAIN_FILE, HELDOUT_FILE)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"no task set in {folder}", why=repr(error)[:200], hint="`headway tasks build expr` makes one"
            ) from None
        for name, ids in ((TRAIN_FILE, found.train), (HELDOUT_FILE, found.heldout)):
            if not ids:
                raise ConfigError(f"{folder / name} holds no task", hint="build the task set again")
        return found

    @classmethod
    def parse(cls, train: bytes, heldout: bytes) -> TaskSet:
        """From the contents of the two files. Raises ValueError, KeyError, TypeError."""
        ids = (tuple(json.loads(line)["id"] for line in part.splitlines()) for part in (train, heldout))
        return cls(digest=digest_of(train + heldout), **dict(zip(("train", "heldout"), ids, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to issue, as pure functions of the configuration."""

    config: Config
    tasks: TaskSet

    def task_of(self, group: int) -> str:
        """The training task of a group: every epoch visits all of them once, in its own seeded order."""
        size = len(self.tasks.train)
        return self.tasks.train[_epoch_order(self.config.run.seed, group // size, size)[group % size]]

    def group(self, group: int, eval_blocks: int) -> list[Task]:
        """The tasks of training group `group`: one program, `samples_per_group` samples."""
        task_id = self.task_of(group)
        ids = [train_rollout_id(group, sample) for sample in range(self.config.grpo.samples_per_group)]
        return [
            self._task(
                rollout_id, task_id, "train", group, sample, TRAIN_TEMPERATURE, None,
                group + 1, eval_blocks, sample + 1 == len(ids),
            )
            for sample, rollout_id in enumerate(ids)
        ]  # fmt: skip

    def eval_block(self, block: int, pinned: Version, groups: int) -> list[Task]:
        """The tasks of evaluation block `block`: sampled at T = 1, then greedy if configured."""
        plan = self.config.eval
        programs = self.tasks.heldout[: plan.programs]
        wanted = [(p, s, TRAIN_TEMPERATURE) for p in programs for s in range(plan.samples)]
        wanted += [(p, 0, 0.0) for p in programs] if plan.greedy else []
        return [
            self._task(
                eval_rollout_id(block, index), program, "eval", block, sample, temperature, pinned,
                groups, block + 1, index + 1 == len(wanted),
            )
            for index, (program, sample, temperature) in enumerate(wanted)
        ]  # fmt: skip

    def _task(
        self, rollout_id: str, task_id: str, purpose: str, group: int, sample: int, temperature: float,
        pinned: Version | None, groups_issued: int, eval_blocks_issued: int, last: bool,
    ) -> Task:  # fmt: skip
        return Task(
            rollout_id=rollout_id,
            purpose="eval" if purpose == "eval" else "train",
            env=self.config.tasks.env,
            task_set=self.tasks.digest,
            task_id=task_id,
            group=group,
            sample=sample,
            temperature=temperature,
            sampling_seed=sampling_seed(self.config.run.seed, rollout_id),
            pinned=pinned,
            groups_issued=groups_issued,
            eval_blocks_issued=eval_blocks_issued,
            last_of_unit=last,
        )
