"""A session that somebody else may go on with: what an agent leaves in the object store when it must give one up."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headway.schemas.ids import Digest, Id
from headway.schemas.messages import COMMANDS_MAX, Command, Task
from headway.schemas.trajectory import Trajectory
from headway.schemas.wire import Model


class SavedSession(Model):
    """The object `<run>/sessions/<rollout>/<tokens>-<attempt>`; the one with the most tokens counts.

    `trajectory` holds every token so far, the last observation included, and no routes: whoever goes on fills the KV
    cache anew, and the routes of that forward are the rollout's. A last turn that holds no stop token was cut off.
    `handed_back` is how many of the task's deliveries ended without a fault, which do not count as failed attempts.
    """

    rollout_id: Id
    task_set: Digest
    task_id: Id
    sampling_seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    trajectory: Trajectory
    commands: Annotated[list[Command], Field(max_length=COMMANDS_MAX)]
    handed_back: Annotated[int, Field(ge=0, lt=1 << 31)]

    @model_validator(mode="after")
    def _no_routes(self) -> SavedSession:
        if self.trajectory.routes.size or self.trajectory.route_spans:
            raise ValueError("a saved session carries no routes")
        return self

    def fits(self, task: Task) -> bool:
        """Whether it is of this very task: the same draw, of the same task, at the same temperature."""
        mine = (self.rollout_id, self.task_set, self.task_id, self.sampling_seed, self.trajectory.temperature)
        return mine == (task.rollout_id, task.task_set, task.task_id, task.sampling_seed, task.temperature or 1.0)
