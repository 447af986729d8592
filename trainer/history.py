"""What a ledger says, folded into the state that a trainer, dispatcher or auditor continues from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.bus.ledger import Link
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, PromiseViolated
from headway.schemas.ledger import Counters, Drops, Fork, Genesis, Open, Step
from headway.schemas.version import Version
from headway.trainer.groups import Lineage, settled_groups


@dataclass(slots=True, kw_only=True)
class History:
    """Fold links with `add`. `head` is the newest committed version; manifests are bound to versions here."""

    genesis: Genesis | None = None
    lineage: Lineage = field(default_factory=lambda: Lineage(Version(0, 0)))
    term: int = 0
    cursor: int = 0
    pool: list[int] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    settled: set[int] = field(default_factory=set)
    last_step: Step | None = None
    last_step_lineage: Lineage | None = None
    """The line that `last_step` trained on."""
    abandoned: list[Version] = field(default_factory=list)
    """The head that each fork left behind."""
    line_groups: dict[Version, int] = field(default_factory=dict)
    """How many groups were trained on the way to a version; counters.trained_groups counts abandoned ones too."""
    checkpoints: dict[Version, str] = field(default_factory=dict)
    """Of every version of which one was made; the store keeps the newest alone."""
    first_seqs: dict[Version, int] = field(default_factory=dict)
    """The earliest sequence of ROLLOUTS that each step settled."""
    manifests: dict[Version, str] = field(default_factory=dict)
    roots: dict[Version, str] = field(default_factory=dict)

    @property
    def head(self) -> Version:
        return self.lineage.head

    @property
    def unproductive_groups(self) -> int:
        """Groups that were settled and do not count towards the head's n."""
        return self.counters.void_groups + self.counters.trained_groups - self.line_groups.get(self.head, 0)

    def ends_abandoned(self, steps: int) -> int:
        """How many lines were left at or past step `steps`."""
        return sum(1 for head in self.abandoned if head.n >= steps)

    def extend(self, links: Iterable[Link]) -> None:
        for link in links:
            self.add(link)

    def add(self, link: Link) -> None:
        """Take the next link. Raises PromiseViolated when it contradicts what came before (P2, P3)."""
        self.term = link.record.term
        match link.record.body:
            case Genesis() as genesis:
                self.genesis = genesis
                self._bind(Version(0, 0), genesis.base_manifest, genesis.base_root)
            case Open():
                pass
            case Step() as step:
                self._add_step(step)
            case Drops() as drops:
                self._settle([drop.rollout_id for drop in drops.drops])
                self.cursor, self.pool, self.counters = drops.cursor, drops.pool, drops.counters
            case Fork() as fork:
                self._add_fork(fork)

    def _add_step(self, step: Step) -> None:
        expected = self.lineage.advance()
        if step.version != expected.head or step.parent != self.head:
            raise PromiseViolated(f"version {step.version} from {step.parent} follows {self.head}")
        self._settle([c.rollout_id for c in step.consumed] + [d.rollout_id for d in step.drops])
        trained = step.counters.trained_groups - self.counters.trained_groups
        self.line_groups[step.version] = self.line_groups.get(step.parent, 0) + trained
        self.last_step_lineage, self.lineage = self.lineage, expected
        self.cursor, self.pool, self.counters = step.cursor, step.pool, step.counters
        self.last_step = step
        if step.checkpoint is not None:
            self.checkpoints[step.version] = step.checkpoint
        self.first_seqs[step.version] = min((end.seq for end in (*step.consumed, *step.drops)), default=step.cursor + 1)
        self._bind(step.version, step.manifest, step.root)

    def _add_fork(self, fork: Fork) -> None:
        base, head = fork.base, self.head
        expected = (Version(head.epoch + 1, base.n), self.checkpoints.get(base), self.roots.get(base))
        if not self.lineage.is_ancestor(base) or (fork.version, fork.checkpoint, fork.root) != expected:
            raise PromiseViolated(f"version {fork.version} cannot fork from {base} at {head}")
        self.abandoned.append(head)
        self.line_groups[fork.version] = self.line_groups.get(base, 0)
        self.lineage = self.lineage.fork(fork.version, base)
        self.checkpoints[fork.version] = fork.checkpoint
        self._bind(fork.version, fork.manifest, fork.root)

    def _settle(self, rollout_ids: list[str]) -> None:
        groups = settled_groups(rollout_ids)
        if again := groups & self.settled:
            raise PromiseViolated(f"group {min(again)} is settled twice in the ledger")
        if len(set(rollout_ids)) != len(rollout_ids):
            raise PromiseViolated("a record settles one rollout twice")
        self.settled |= groups

    def _bind(self, version: Version, manifest: str, root: str) -> None:
        if version in self.manifests:
            raise PromiseViolated(f"version {version} is bound twice")
        self.manifests[version], self.roots[version] = manifest, root


def require_same_config(genesis: Genesis, config: Config) -> None:
    """Raises ConfigError naming the first shared section in which `config` differs from the run's genesis."""
    if genesis.config_digest == config.shared_digest():
        return
    mine, theirs = config.shared(), genesis.config
    for section in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(section), theirs.get(section)
        if a == b:
            continue
        keys = sorted(k for k in {**(a or {}), **(b or {})} if (a or {}).get(k) != (b or {}).get(k))
        key = keys[0] if keys else "?"
        raise ConfigError(
            f"{section}.{key} = {(a or {}).get(key)!r} here, {(b or {}).get(key)!r} in the genesis of {genesis.run}",
            why="all services of a run share one configuration",
            hint="use the run's own run.toml, or give the run another name",
        )
