"""What each section of run.toml may hold, its default, and what a value means.

Units are in the names of keys. What two sections must agree on is `headway.schemas.config`'s to check.
"""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headway.schemas.ids import Id

INT_MAX = (1 << 63) - 1
Positive = Annotated[int, Field(ge=1, le=INT_MAX)]
Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]

WINDOW = r"([01][0-9]:[0-5][0-9]|2[0-3]:[0-5][0-9])-([01][0-9]:[0-5][0-9]|2[0-3]:[0-5][0-9])"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: Id = "demo"
    seed: Count = 1
    steps: Count = 70
    lockstep: bool = False
    """Deterministic mode: max_lag 0, swaps between batches, batches in task order."""


class BusConfig(Section):
    url: str = ""
    """Empty: `headway up` runs an embedded nats-server."""
    sync_always: bool = False
    """Embedded server only: fsync before each acknowledgement (power-loss safety)."""
    max_stream_bytes: Positive = 1 << 30
    """Of each of the six streams; nats-server wants room for all of them in three quarters of the free disk."""
    stall_warning_s: Seconds = 60.0
    """`headway up` says what a run waits for when no step, rollout or swap happened for so long."""


class StoreConfig(Section):
    url: str = ""
    """Empty: the run folder's `store/`. Else any obstore URL such as s3://bucket/prefix."""
    put_attempts: Positive = 5


class RetentionConfig(Section):
    """What the trainer deletes. What resuming, rolling back, serving agents and leases need always stays."""

    versions: Count = 0
    """Weight versions kept behind the head (never fewer than grpo.retain_steps); 0 keeps all."""
    purge: bool = False
    """Also forget messages of TASKS and ROLLOUTS, and large bodies, that no kept checkpoint needs."""
    grace_s: Seconds = 3600.0
    """How long an object was needed by nobody before it is deleted; longer than publishing a version takes."""
    every_s: Seconds = 300.0


class ModelSection(Section):
    """Qwen3-MoE geometry of a model trained from scratch."""

    hidden_size: Positive = 96
    num_hidden_layers: Positive = 3
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    head_dim: Positive = 32
    moe_intermediate_size: Positive = 96
    num_experts: Annotated[int, Field(ge=2, le=1024)] = 8
    num_experts_per_tok: Positive = 2
    max_position_embeddings: Positive = 256
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    rollout_dtype: Literal["bfloat16", "float16", "fp8", "int4"] = "bfloat16"
    """How weights travel and engines hold them: fp8 in blocks of 128 x 128, int4 (experts alone) in groups of 32."""
    base: str = ""
    """A Hugging Face folder to start from; empty: `headway midtrain` makes one."""


class MidtrainConfig(Section):
    pretrain_steps: Count = 20
    pretrain_tokens_per_step: Positive = 8192
    pretrain_bytes: Positive = 4 << 20
    sequence_tokens: Positive = 192
    sft_steps: Count = 600
    sft_sessions_per_step: Positive = 32
    learning_rate: Rate = 5e-3
    warmup_steps: Count = 20
    final_lr_fraction: Fraction = 0.05
    balance_loss: Annotated[float, Field(ge=0)] = 0.01
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    checkpoint_every: Positive = 100
    threads: Positive = 1


class GrpoConfig(Section):
    groups_per_step: Positive = 8
    samples_per_group: Annotated[int, Field(ge=2, le=4096)] = 8
    min_graded: Annotated[int, Field(ge=2)] = 6
    learning_rate: Rate = 4e-4
    warmup_steps: Count = 2
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    mismatch_cap: Annotated[float, Field(ge=1)] = 2.0
    """Upper truncation of the behaviour-to-proximal importance ratio."""
    route_plausibility: Fraction = 0.0
    """Under engine.numerics = replay: a recorded expert that now scores below this fraction of the worst of the
    router's own top k is replaced by the best live one; 0 replays everything."""
    balance_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the routers' load-balance loss in RL; 0: routers learn from the policy loss alone."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.003
    token_budget: Positive = 1024
    """The constant that the sum of token losses of a step is divided by."""
    advantage: Literal["mean", "mean_std", "shuffled"] = "mean"
    """`shuffled` is the control experiment: advantages of a batch are permuted by a seeded shuffle."""
    micro_batch_tokens: Positive = 8192
    checkpoint_every: Positive = 1
    """Steps from one checkpoint to the next; a trainer that resumes between them executes the recorded steps again."""
    retain_steps: Positive = 3
    """Checkpoints kept, the newest."""


class StalenessConfig(Section):
    max_lag: Count = 2
    swap_slack: Count = 1
    stale_policy: Literal["mask", "drop"] = "mask"
    stale_share_max: Fraction = 0.05
    """While more of what steps take in is too old, tasks are issued less far ahead, so that fewer groups overtake
    one of long sessions (docs/SCALING.md). 1: always as far as max_lag allows."""
    swap_mode: Literal["retract", "in_place", "finish"] = "retract"


class TrainerConfig(Section):
    """How the trainer runs here; the bits of a run do not hang on it."""

    ranks: Positive = 1
    """Processes that share micro-batches, masters and publishing, started by torchrun's agent on this machine."""


class DispatchConfig(Section):
    max_in_flight: Positive = 128
    """Sessions issued and not yet ended, over the whole fleet."""
    max_attempts: Positive = 4
    ack_wait_s: Seconds = 30.0


class RegionConfig(Section):
    agents: Positive = 1
    engine_urls: list[str] = []
    """Engines that already run; empty: one local engine an agent."""
    kv_occupancy_max: Rate = 0.9
    """An agent begins no session while running and waiting requests fill more of each of its engines' KV caches."""
    lent_exclusively: bool = False
    """The owner of `engine_urls` knows that their weights are replaced by the run's, for whoever else asks them."""
    yield_above: Annotated[int, Field(ge=-1, le=100_000)] = -1
    """An agent hands its sessions back while one of its engines has more requests of others than that. -1: never."""
    release_memory: bool = False
    """Outside `window`, its engines give the accelerator's memory back, for whoever the machine belongs to."""
    sandboxes: Positive = 1
    relay_url: Annotated[str, Field(pattern=r"^$|^https?://[^/\s]+:[0-9]{1,5}$")] = ""
    """The region's shard cache, as http://host:port; `headway up` starts one on a loopback address. Empty: none."""
    relay_bytes: Positive = 64 << 30
    """Its disk. What was used longest ago is evicted."""
    download_bytes_per_s_max: Count = 0
    """Of weights, by each relay, and by each agent where there is none. 0: no cap."""
    window: Annotated[str, Field(pattern=f"^$|^{WINDOW}$")] = ""
    """Daily hours, as 22:00-06:00, in which the region's agents may work: its machines are borrowed. Empty: always.

    At its end sessions are cut off and saved; agents elsewhere go on with them.
    """
    tz: str = "UTC"
    """Whose wall clock `window` means, as Europe/Berlin."""

    @field_validator("tz")
    @classmethod
    def _known_tz(cls, tz: str) -> str:
        try:
            ZoneInfo(tz)
        except (ValueError, OSError, ZoneInfoNotFoundError):
            raise ValueError("no such time zone; names are those of the IANA database, as Europe/Berlin") from None
        return tz


class AgentConfig(Section):
    max_sessions: Positive = 32
    max_turns: Positive = 6
    max_action_tokens: Positive = 20
    max_session_tokens: Positive = 192
    """The context: no prompt and completion are longer."""
    max_observation_bytes: Annotated[int, Field(ge=64)] = 16 << 10
    """Of one turn's tool output in environments that chat; the middle of a longer one is left out."""
    tool_format: Literal["hermes", "qwen3_coder", "kimi_k2"] = "hermes"
    """How the model writes calls in environments that chat."""
    tokenizer: str = ""
    """A folder with tokenizer.json and a chat template, the same on the trainer and every agent; empty: the byte
    vocabulary."""
    harness: Annotated[str, Field(max_length=200)] = ""
    """module:attribute, an async function of a HarnessTask that drives sessions over OpenAI's protocol
    (docs/HARNESS.md); empty: the environment does."""
    summarise_at_tokens: Count = 0
    """A longer session is asked for a summary and goes on from its task and that alone; 0: never."""
    max_summaries: Annotated[int, Field(ge=1, lt=64)] = 8
    turn_timeout_s: Seconds = 30.0
    session_timeout_s: Seconds = 120.0
    """Of all turns."""
    rollout_timeout_s: Seconds = 150.0
    """Of a session with its box's start and its grade."""
    at_deadline: Literal["retry", "grade"] = "retry"
    """When session_timeout_s is over: another attempt goes on from there, or the workspace is graded as it stands."""
    tool_latency_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    """Added to every tool call: for measuring what asynchrony hides."""
    session_log: bool = False
    """Save sessions after every turn, so that those of a killed agent go on elsewhere, not only those handed back."""


class EngineConfig(Section):
    kind: Literal["local", "sglang"] = "local"
    """What `headway up` starts for its agents; `headway up --engine` sets it."""
    sglang_args: list[str] = []
    """More flags for SGLang, passed through, such as ["--tp", "8"]."""
    slots: Positive = 64
    max_batch: Positive = 64
    prefill_tokens: Positive = 2048
    """Most prompt tokens in one forward."""
    numerics: Literal["bitwise", "replay", "off"] = "bitwise"
    threads: Positive = 1


class SandboxConfig(Section):
    pool_size: Positive = 8
    max_boxes: Positive = 256
    command_timeout_s: Seconds = 5.0
    idle_timeout_s: Seconds = 120.0
    memory_bytes: Positive = 512 << 20
    workspace_bytes: Positive = 8 << 20
    output_bytes: Positive = 16 << 10
    max_processes: Positive = 16


class TasksConfig(Section):
    env: Id = "expr"
    """`expr` and `repo` are ours; any other name needs both sides."""
    agent_side: Annotated[str, Field(max_length=200)] = ""
    """module:attribute, a function of the Config that returns an Environment (docs/ENVIRONMENTS.md); empty: ours."""
    host_side: Annotated[str, Field(max_length=200)] = ""
    """module:attribute, a function of the task set's folder that returns Workspaces; empty: ours."""
    seed: Count = 0
    """Of the task set; independent of the run's seed so that runs share a split."""
    demonstrations: Count = 20_000


class RewardConfig(Section):
    """What counts beside the verdict: pure functions of a recorded rollout (`schemas/rewards.py`)."""

    auxiliary: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=16)] = []
    """module:attribute of each; what it gives is added."""
    length_penalty: Annotated[str, Field(max_length=200)] = ""
    """module:attribute, such as headway.schemas.rewards:concave; what it gives is taken off. Empty: none."""
    length_scale: Weight = 0.1
    length_unit: Annotated[float, Field(gt=0)] = 1000.0
    """The effort at which `concave` begins to flatten."""
    length_curvature: Fraction = 0.5
    sampled_token_weight: Weight = 1.0
    observation_token_weight: Weight = 0.0
    call_weight: Weight = 0.0
    turn_weight: Weight = 0.0


class EvalConfig(Section):
    at: list[Literal["start", "end"]] = ["start", "end"]
    programs: Positive = 128
    samples: Positive = 4
    greedy: bool = True
