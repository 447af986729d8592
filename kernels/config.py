"""The model's shape, read from and written to a Hugging Face `config.json` (Qwen3-MoE, DeepSeek-V3, Kimi-K2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from headway.kernels.rotary import Yarn
from headway.kernels.router import Router

QWEN, DEEPSEEK = "qwen3_moe", ("deepseek_v3", "kimi_k2")
_ARCHITECTURES = {QWEN: "Qwen3MoeForCausalLM"} | dict.fromkeys(DEEPSEEK, "DeepseekV3ForCausalLM")
_QWEN_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_RENAMED = {"num_experts": "n_routed_experts"}  # ours -> DeepSeek's
_SINGLE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DENSE = ("intermediate_size", "first_k_dense_replace", "n_shared_experts", "n_group", "topk_group")
_REQUIRED = {QWEN: (*_SINGLE, "num_key_value_heads")} | dict.fromkeys(DEEPSEEK, (*_SINGLE, *_LATENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a mixture-of-experts decoder. Names are HF's, those of Qwen3-MoE where the two differ.

    The fields after `model_type` are DeepSeek-V3's: latent attention when kv_lora_rank > 0, whose queries have
    qk_nope_head_dim + qk_rope_head_dim columns (head_dim is the latter, as in HF); the first layers dense.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    model_type: str = QWEN
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    intermediate_size: int = 0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.model_type not in _ARCHITECTURES:
            known = ", ".join(map(repr, _ARCHITECTURES))
            raise ValueError(f"model config: model_type {self.model_type!r} is not supported, only {known}")
        optional = set() if self.latent else {*_LATENT, *_DENSE}
        optional |= {"first_k_dense_replace", "n_shared_experts"}
        if not self.first_k_dense_replace:
            optional.add("intermediate_size")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value <= 0 and not (field.name in optional and value == 0):
                raise ValueError(f"model config: {field.name} must be positive, got {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim must be even for rotary positions, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"model config: num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError("model config: first_k_dense_replace leaves no layer with experts")
        size, odd = divmod(self.num_experts, self.n_group)
        if odd or self.topk_group > self.n_group or self.topk_group * size < self.num_experts_per_tok:
            raise ValueError(
                f"model config: {self.topk_group} of {self.n_group} groups of {self.num_experts} experts "
                f"do not offer {self.num_experts_per_tok}"
            )
        if self.n_group > 1 and size < 2:
            raise ValueError("model config: a group of experts needs at least two")

    @property
    def latent(self) -> bool:
        """DeepSeek's multi-head latent attention and router, not Qwen's."""
        return self.model_type in DEEPSEEK

    @property
    def sparse_layers(self) -> range:
        """The layers with experts; the ones before are dense."""
        return range(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def router(self) -> Router:
        return Router(
            top_k=self.num_experts_per_tok,
            normalise=self.norm_topk_prob,
            sigmoid=self.latent,
            groups=self.n_group,
            top_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )

    @property
    def kv_heads(self) -> int:
        """Heads of keys as attention sees them: in latent attention all queries share one."""
        return 1 if self.latent else self.num_key_value_heads

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(heads of keys and values, columns) of a token and layer; latent values are part of the keys."""
        return (1, self.kv_lora_rank + self.qk_rope_head_dim) if self.latent else (2 * self.kv_heads, self.head_dim)

    @property
    def attention_scale(self) -> float:
        if self.latent:
            sharper = self.yarn.softmax_factor if self.yarn is not None else 1.0
            return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5) * sharper
        return float(self.head_dim**-0.5)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`. Raises ValueError for any variant this decoder doesn't compute."""
        kind = hf.get("model_type", QWEN)
        if kind not in _ARCHITECTURES:
            known = ", ".join(map(repr, _ARCHITECTURES))
            raise ValueError(f"model config: model_type {kind!r} is not supported, only {known}")
        missing = [name for name in _REQUIRED[kind] if name not in hf]
        experts = next((hf[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in hf), None)
        if experts is None:
            missing.append(_RENAMED["num_experts"] if kind in DEEPSEEK else "num_experts")
        if missing:
            raise ValueError(f"model config: missing {', '.join(missing)}")
        for name, only in (_QWEN_ONLY if kind == QWEN else _DEEPSEEK_ONLY).items():
            if hf.get(name, only) not in (only, None):
                raise ValueError(f"model config: {name}={hf[name]!r} is not supported, only {only!r}")
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        common = {
            **{name: int(hf[name]) for name in _REQUIRED[kind]},
            "model_type": kind,
            "num_experts": int(experts),
            "norm_topk_prob": bool(hf.get("norm_topk_prob", kind in DEEPSEEK)),
            "rope_theta": float(hf.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            "yarn": Yarn.from_hf(rope, int(hf["max_position_embeddings"])),
            "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
            "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        }
        if kind == QWEN:
            return cls(**common, head_dim=int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]))
        rank = hf.get("q_lora_rank")
        return cls(
            **common,
            **{name: int(hf.get(name) or cls.__dataclass_fields__[name].default) for name in _DENSE},
            num_key_value_heads=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
            head_dim=int(hf["qk_rope_head_dim"]),
            q_lora_rank=None if rank is None else int(rank),
            routed_scaling_factor=float(hf.get("routed_scaling_factor", 1.0)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that stock transformers and SGLang read (dtype is added when saving)."""
        own = {**(_DEEPSEEK_ONLY if self.latent else _QWEN_ONLY), **asdict(self)}
        own.pop("yarn")
        if self.latent:
            own |= {theirs: own.pop(ours) for ours, theirs in _RENAMED.items()} | {"num_nextn_predict_layers": 0}
        else:
            for name in (*_LATENT, *_DENSE, "q_lora_rank", "routed_scaling_factor"):
                del own[name]
            own["intermediate_size"] = self.moe_intermediate_size
        rope = {"rope_type": "default"} if self.yarn is None else self.yarn.to_hf()
        return {
            **own,
            "architectures": [_ARCHITECTURES[self.model_type]],
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every checkpoint tensor, in the order of the layers."""
        d = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for n in range(self.num_hidden_layers):
            p = f"model.layers.{n}."
            shapes[f"{p}input_layernorm.weight"] = (d,)
            shapes |= {f"{p}self_attn.{name}.weight": shape for name, shape in self._attention_shapes().items()}
            shapes[f"{p}post_attention_layernorm.weight"] = (d,)
            if n not in self.sparse_layers:
                shapes |= _mlp_shapes(f"{p}mlp.", d, self.intermediate_size)
                continue
            shapes[f"{p}mlp.gate.weight"] = (self.num_experts, d)
            if self.latent:
                shapes[f"{p}mlp.gate.e_score_correction_bias"] = (self.num_experts,)
            for e in range(self.num_experts):
                shapes |= _mlp_shapes(f"{p}mlp.experts.{e}.", d, self.moe_intermediate_size)
            if self.n_shared_experts:
                shapes |= _mlp_shapes(f"{p}mlp.shared_experts.", d, self.n_shared_experts * self.moe_intermediate_size)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        d, heads = self.hidden_size, self.num_attention_heads
        if not self.latent:
            q, kv = heads * self.head_dim, self.num_key_value_heads * self.head_dim
            norms = {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            return {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q), **norms}
        q, rank = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), self.q_lora_rank
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (q, d)}
        if rank is not None:
            shapes = {"q_a_proj": (rank, d), "q_a_layernorm": (rank,), "q_b_proj": (q, rank)}
        return shapes | {
            "kv_a_proj_with_mqa": (self.kv_lora_rank + self.qk_rope_head_dim, d),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "kv_b_proj": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj": (d, heads * self.v_head_dim),
        }


def _mlp_shapes(prefix: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    named = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
    return {f"{prefix}{name}.weight": shape for name, shape in named.items()}
