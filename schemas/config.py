"""run.toml: all sections of a run (`headway.schemas.sections`), strictly read, and what they must agree on.

Unknown keys are errors with a suggestion. Addresses, secrets and instance names come from `HEADWAY_*` environment
variables, never from here.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Self

import msgpack
from pydantic import Field, ValidationError, model_validator

from headway.schemas.errors import ConfigError
from headway.schemas.ids import Id
from headway.schemas.sections import (
    AgentConfig,
    BusConfig,
    DispatchConfig,
    EngineConfig,
    EvalConfig,
    GrpoConfig,
    MidtrainConfig,
    ModelSection,
    RegionConfig,
    RetentionConfig,
    RewardConfig,
    RunConfig,
    SandboxConfig,
    Section,
    StalenessConfig,
    StoreConfig,
    TasksConfig,
    TrainerConfig,
)
from headway.schemas.trajectory import TOKENS_MAX
from headway.schemas.wire import digest_of

OUR_ENVIRONMENTS = ("expr", "repo")
LOCAL_SECTIONS = ("regions", "bus", "store", "retention", "sandbox", "trainer")
"""Sections that may differ between services; everything else must equal the genesis."""


class Config(Section):
    """One run."""

    run: RunConfig = RunConfig()
    bus: BusConfig = BusConfig()
    store: StoreConfig = StoreConfig()
    retention: RetentionConfig = RetentionConfig()
    model: ModelSection = ModelSection()
    midtrain: MidtrainConfig = MidtrainConfig()
    grpo: GrpoConfig = GrpoConfig()
    trainer: TrainerConfig = TrainerConfig()
    staleness: StalenessConfig = StalenessConfig()
    dispatch: DispatchConfig = DispatchConfig()
    regions: dict[Id, RegionConfig] = Field(default_factory=lambda: {"local": RegionConfig()})
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    tasks: TasksConfig = TasksConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.grpo.min_graded > self.grpo.samples_per_group:
            raise ValueError("grpo.min_graded is above grpo.samples_per_group: no group could ever train")
        if self.run.lockstep and (self.staleness.max_lag or self.staleness.swap_slack):
            raise ValueError("run.lockstep needs staleness.max_lag = 0 and staleness.swap_slack = 0")
        if self.run.lockstep and (self.engine.numerics != "bitwise" or self.staleness.swap_mode == "in_place"):
            raise ValueError("run.lockstep needs engine.numerics = bitwise and a swap_mode that keeps no KV")
        if self.engine.kind == "sglang" and self.engine.numerics == "bitwise":
            raise ValueError("engine.kind = sglang cannot be bitwise: set engine.numerics = replay")
        odd = self.model.hidden_size % 32 or self.model.moe_intermediate_size % 32
        if self.model.rollout_dtype == "int4" and odd and not self.model.base:
            raise ValueError(
                "model.rollout_dtype = int4 needs hidden_size and moe_intermediate_size in multiples of 32"
            )
        if not self.model.base:
            self._check_model()
        if len(set(self.eval.at)) != len(self.eval.at):
            raise ValueError("eval.at names a moment twice")
        if self.staleness.swap_slack > self.staleness.max_lag:
            raise ValueError("staleness.swap_slack is above staleness.max_lag: fresh sessions could be stale")
        if self.agent.max_session_tokens > self.model.max_position_embeddings:
            raise ValueError("agent.max_session_tokens is above model.max_position_embeddings")
        self._check_session()
        for name, region in self.regions.items():
            if region.yield_above >= 0 and not (region.engine_urls and region.lent_exclusively):
                raise ValueError(
                    f"regions.{name}.yield_above needs engine_urls and lent_exclusively = true: an agent writes the "
                    "run's weights into its engines, and the others who ask them would be answered by these"
                )
            if region.release_memory and (not region.window or region.yield_above >= 0):
                raise ValueError(
                    f"regions.{name}.release_memory needs window, and no yield_above: others' requests would be refused"
                )
        if not self.regions:
            raise ValueError("regions is empty: nobody would roll out")
        return self

    def _check_model(self) -> None:
        model = self.model
        if model.num_attention_heads % model.num_key_value_heads:
            raise ValueError("model.num_attention_heads must be a multiple of model.num_key_value_heads")
        if model.head_dim % 2:
            raise ValueError("model.head_dim must be even: positions turn pairs of its numbers")
        if model.num_experts_per_tok > model.num_experts:
            raise ValueError("model.num_experts_per_tok is above model.num_experts")

    def _check_session(self) -> None:
        agent, tasks = self.agent, self.tasks
        if (
            not self.sandbox.command_timeout_s
            < agent.turn_timeout_s
            < agent.session_timeout_s
            < agent.rollout_timeout_s
        ):
            raise ValueError(
                "deadlines must nest: sandbox.command_timeout_s < agent.turn_timeout_s < agent.session_timeout_s "
                "< agent.rollout_timeout_s"
            )
        if self.run.lockstep and agent.at_deadline == "grade":
            raise ValueError("run.lockstep needs agent.at_deadline = retry: no clock may decide a reward")
        most = agent.max_session_tokens - 2 * (agent.max_observation_bytes + agent.max_action_tokens)
        if agent.summarise_at_tokens > max(most, 0):
            raise ValueError(
                f"agent.summarise_at_tokens is above {most}: agent.max_session_tokens must leave room for two more "
                "answers (max_action_tokens) and what tools show (max_observation_bytes), or no summary would fit"
            )
        if agent.summarise_at_tokens and agent.harness:
            raise ValueError("agent.summarise_at_tokens is for environments: a harness (agent.harness) has its own way")
        if agent.summarise_at_tokens and (agent.max_summaries + 1) * agent.max_session_tokens > TOKENS_MAX:
            raise ValueError(
                f"agent.max_summaries + 1 segments of agent.max_session_tokens are above {TOKENS_MAX}, the most that a "
                "trajectory holds: lower agent.max_summaries"
            )
        if tasks.env not in OUR_ENVIRONMENTS and not (tasks.agent_side and tasks.host_side):
            raise ValueError(
                f"tasks.env = {tasks.env} is none of {', '.join(OUR_ENVIRONMENTS)}, so it needs tasks.agent_side and "
                "tasks.host_side"
            )

    def shared(self) -> dict[str, Any]:
        """What every service of the run must agree on, as plain values."""
        return {key: value for key, value in self.model_dump().items() if key not in LOCAL_SECTIONS}

    def shared_digest(self) -> str:
        """SHA-256 over the canonical bytes of `shared()`."""
        return digest_of(msgpack.packb(self.shared()))


def parse_config(text: str, origin: str, overrides: dict[str, Any] | None = None) -> Config:
    """Validate TOML text. `overrides` maps dotted keys to values and wins over the file.

    Raises:
        ConfigError: naming the key, the value, `origin` and, for an unknown key, the closest known one.
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin} is not TOML", why=str(error)) from None
    for dotted, value in (overrides or {}).items():
        node = raw
        *sections, leaf = dotted.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{dotted} (--set): {section!r} is no section")
        node[leaf] = value
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, origin) from None


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read and validate a run.toml. Raises ConfigError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}", why=str(error), hint="without --config every setting has its default"
        ) from None
    return parse_config(text, str(path), overrides)


def _explain(error: ValidationError, origin: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], _known_keys(path[:-1]), n=1)
        hint = f"did you mean {'.'.join([*path[:-1], close[0]])}?" if close else "`headway config show` lists the keys"
        section = ".".join(path[:-1]) or "run.toml"
        return ConfigError(f"{where} ({origin}): unknown key", why=f"{section} has no {path[-1]!r}", hint=hint)
    if not path:
        return ConfigError(f"{origin}: settings contradict", why=first["msg"].removeprefix("Value error, "))
    return ConfigError(
        f"{where} = {str(first.get('input'))[:80]} ({origin})", why=first["msg"], hint=_value_hint(path, first["type"])
    )


_UNITS = {
    "_s": "seconds, as a number without a unit",
    "_ms": "milliseconds, as a number without a unit",
    "_bytes": "bytes, as a whole number without a unit (1 MiB is 1048576)",
    "_tokens": "tokens, as a whole number",
}


def _value_hint(path: list[str], kind: str) -> str:
    """The key's unit, the usual mistake, and its default."""
    unit = next((text for suffix, text in _UNITS.items() if path[-1].endswith(suffix)), "")
    quotes = "TOML numbers and booleans have no quotes" if kind in ("int_type", "float_type", "bool_type") else ""
    node: Any = Config().model_dump()
    for part in path:
        node = node.get(part, RegionConfig().model_dump()) if isinstance(node, dict) else None
    default = "" if node is None or isinstance(node, dict) else f"the default is {node!r}"
    return "; ".join(text for text in (unit, quotes, default) if text)


def _known_keys(path: list[str]) -> list[str]:
    model: Any = Config
    for part in path:
        if model is RegionConfig or not hasattr(model, "model_fields"):
            break
        model = RegionConfig if part == "regions" else model.model_fields[part].annotation
    return list(getattr(model, "model_fields", RegionConfig.model_fields))
