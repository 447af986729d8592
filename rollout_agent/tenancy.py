"""Engines that answer others, too: an agent yields while those need them, and comes back once they have been quiet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.rollout_agent.rotation import Rotation
from headway.schemas.errors import ConfigError
from headway.schemas.sections import RegionConfig

QUIET_S = 15.0
"""How long the others' requests must have been half of the bound or fewer, so that an agent does not come and go."""


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """`above` requests of others at one engine are too many."""

    above: int
    rotation: Rotation
    clock: Callable[[], float]
    _busy: bool = False
    _needed_s: float = 0.0
    """When more than half of the bound were there last."""

    @classmethod
    def of(cls, region: RegionConfig | None, rotation: Rotation, clock: Callable[[], float]) -> Tenancy | None:
        """The region's; None where its engines are the run's alone."""
        if region is None or region.yield_above < 0:
            return None
        return cls(above=region.yield_above, rotation=rotation, clock=clock)

    def yields(self) -> bool:
        """Whether the engines are the others' now. Raises ConfigError for an engine that does not say its load."""
        for place in self.rotation.places:
            if place.readings and place.load is None:
                raise ConfigError(
                    f"{place.engine.url} does not say how many requests it has",
                    why="regions.<name>.yield_above is set, and it has no /v1/loads",
                    hint="a newer engine, or an engine of the run's own",
                )
        most = max(place.user_requests for place in self.rotation.places)
        if most > self.above:
            self._busy = True
        if most > self.above // 2:
            self._needed_s = self.clock()
        self._busy = self._busy and self.clock() - self._needed_s < QUIET_S
        return self._busy
