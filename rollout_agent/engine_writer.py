"""Bringing one engine to a version: made ready while it serves, then pause, write, prove, continue.

Invariants: what is written was checked against the model's layout first, because SGLang dies of a tensor that
does not fit; an engine continues only after its own checksums were those of the version; a write that failed
is followed by a full checkpoint, never by another guess at what the engine holds.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

from headway.rollout_agent.client import EngineClient, EngineInfo, EngineTrouble
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.manifest import Manifest
from headway.weight_sync.changes import write_changes
from headway.weight_sync.layouts import Layout, Rank
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.scatter import Written, read_results, write_scatter
from headway.weight_sync.serving_sums import Kind, ServingSums
from headway.weight_sync.staged import StagedUpdate

Way = Literal["disk", "full", "sparse"]
log = structlog.get_logger()


class Unproven(InputError):
    """An engine holds other bytes than the manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A write, ready to be made. `sums` are the checksums due: a root, or each rank's, by our loader or by SGLang."""

    manifest: Manifest
    way: Way
    folder: Path
    ranks: int
    sums: str | list[dict[str, str]]


@dataclass(slots=True, kw_only=True, eq=False)
class EngineWriter:
    """One engine. `holds` is the root it has proven to hold, None when that is not known."""

    engine: EngineClient
    model_config: bytes
    scratch: Path
    clock: Callable[[], float]
    holds: str | None = None
    info: EngineInfo | None = None
    _sparse: bool = False
    """Our loader has found the live model to be of this layout."""
    _layout: Layout | None = None
    _sums: ServingSums = field(default_factory=ServingSums)

    async def meet(self) -> None:
        """Learn who the engine is. Raises ConfigError for one that may not be used, EngineTrouble."""
        self.info, self._sparse = await self.engine.identify(), False
        if self.info.kind == "sglang":
            self._layout, self._sums = Layout.from_hf(self.model_config), ServingSums(self.info.device)

    async def prepare(self, mirror: HostMirror, staged: StagedUpdate | None, *, full: bool = False) -> Plan:
        """Make ready the write of `staged` (None: of the mirror's version) while the engine serves.

        Raises WireError("layout_changed") for weights of another model, UnavailableError when the disk is full.
        """
        if self.info is None:
            await self.meet()
        full = full or staged is None or self.holds is None or self.holds != staged.base_root
        plan = await asyncio.to_thread(self._plan, mirror, staged, full)
        if self.info is not None and self.info.kind == "headway":
            await self.engine.prepare(plan.folder, plan.manifest.version)
        return plan

    async def write(self, plan: Plan, *, in_place: bool = False) -> float:
        """Pause, write, prove, continue; returns the pause in ms.

        Raises EngineTrouble, InputError; then `holds` is None and the engine stays paused.
        """
        started_s, version = self.clock(), plan.manifest.version
        self.holds = None
        await self.engine.pause("in_place" if in_place else "retract")
        if plan.way == "sparse":
            await self.engine.update_sparse(plan.folder, version, flush=not in_place, ranks=plan.ranks)
            await self._prove(plan, read_results(plan.folder, plan.ranks))
        else:
            if await self.engine.update(plan.folder, version, flush=not in_place) != plan.sums:
                await self._prove(plan)
        await self._go_on(plan)
        return (self.clock() - started_s) * 1e3

    async def adopt(self, mirror: HostMirror) -> bool:
        """Take over an engine that provably holds the mirror's version already; whether it does and could be."""
        manifest = mirror.head
        if manifest is None:
            return False
        try:
            await self.meet()
            sums = await asyncio.to_thread(self._due, "full", mirror, manifest, None)
            plan = Plan(manifest=manifest, way="full", folder=self.scratch, ranks=0, sums=sums)
            await self._prove(plan)
            await self._go_on(plan)
        except (Unproven, EngineTrouble) as error:
            log.info("engine_not_adopted", url=self.engine.url, why=str(error)[:400])
            return False
        return True

    async def allow_sparse(self, mirror: HostMirror) -> None:
        """Have our loader compare the live model with the layout, once the engine serves the mirror's version.

        It writes nothing. Until it has agreed, updates go by disk.
        """
        if self.info is None or not self.info.loader or self._sparse or mirror.head is None or self._layout is None:
            return
        folder, ranks = self.scratch / "check", [self._layout.fused(rank) for rank in self._ranks()]
        await asyncio.to_thread(write_scatter, folder, ranks, mirror.head, mirror.tensors, {})
        try:
            await self.engine.update_sparse(folder, mirror.head.version, flush=False, ranks=len(ranks))
            results = read_results(folder, len(ranks))
            self._sparse = self._kind("sparse") == "stock" or all(rank.sums is not None for rank in results)
        except InputError as error:
            log.warning("sparse_updates_off", url=self.engine.url, why=str(error)[:400])

    async def _prove(self, plan: Plan, written: Sequence[Written] = ()) -> None:
        """Compare what the engine holds with the version: by the sums of `written`, else by the engine's own."""
        told = [rank.sums or {} for rank in written] if self._kind(plan.way) == "ours" else None
        found = told if told is not None else await self.engine.checksums()
        if found != plan.sums:
            raise Unproven(
                f"{self.engine.url} holds other bytes than {plan.manifest.version}", why=_difference(plan.sums, found)
            )

    def _kind(self, way: Way) -> Kind:
        """Whose checksums prove a write: our loader's where it hashes faster than SGLang, in host memory."""
        return "ours" if way == "sparse" and self.info is not None and self.info.device == "cpu" else "stock"

    async def _go_on(self, plan: Plan) -> None:
        if self.info is not None and self.info.kind == "sglang":
            self.engine.salt = str(plan.manifest.version)
        await self.engine.resume()
        self.holds = plan.manifest.root

    # In a worker thread

    def _plan(self, mirror: HostMirror, staged: StagedUpdate | None, full: bool) -> Plan:
        manifest = staged.manifest if staged is not None else mirror.head
        if manifest is None:
            raise UnavailableError(f"there are no weights for {self.engine.url} yet")
        if self._layout is not None:
            self._layout.check(manifest.tensors)
        way: Way = "full" if full else "sparse" if self._sparse else "disk"
        sums = self._due(way, mirror, manifest, staged)
        if way == "sparse" and staged is not None and self._layout is not None:
            folder, ranks = self.scratch / "sparse", [self._layout.fused(rank) for rank in self._ranks()]
            write_scatter(folder, ranks, manifest, mirror.tensors, mirror.fresh(staged))
            return Plan(manifest=manifest, way=way, folder=folder, ranks=len(ranks), sums=sums)
        folder = self.scratch / "checkpoint"
        if not full and staged is not None and self._layout is None:  # our engine makes the tensors itself
            write_changes(folder, staged, mirror.fresh(staged))
            return Plan(manifest=manifest, way=way, folder=folder, ranks=0, sums=sums)
        shutil.rmtree(folder, ignore_errors=True)
        mirror.stage_partial_checkpoint(folder, self.model_config, staged, full=full)
        return Plan(manifest=manifest, way=way, folder=folder, ranks=0, sums=sums)

    def _due(
        self, way: Way, mirror: HostMirror, manifest: Manifest, staged: StagedUpdate | None
    ) -> str | list[dict[str, str]]:
        if self._layout is None or self.info is None:
            return manifest.root
        tensors = mirror.tensors if staged is None else mirror.after(staged)
        ranks = [self._layout.fused(rank) for rank in self._ranks()]
        return [self._sums.of(self._kind(way), rank, manifest, tensors) for rank in ranks]

    def _ranks(self) -> list[Rank]:
        assert self.info is not None
        return [Rank(tp=self.info.tp, rank=rank, ep=self.info.ep) for rank in range(self.info.tp)]


def _difference(due: str | list[dict[str, str]], found: str | list[dict[str, str]]) -> str:
    if isinstance(due, str) or isinstance(found, str):
        return f"root {str(found)[:64]}, {str(due)[:64]} is due"
    for rank, (wanted, held) in enumerate(zip(due, found, strict=False)):
        wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        if wrong:
            return f"{len(wrong)} fused tensors of rank {rank} differ, such as {wrong[0]}"
    return f"{len(found)} ranks, {len(due)} are due"
