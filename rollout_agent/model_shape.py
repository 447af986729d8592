"""What an agent must know of the model: the sizes that replies are checked against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headway.schemas.errors import ConfigError
from headway.schemas.sections import ModelSection
from headway.schemas.vocab import VOCAB_SIZE


def hf_config(section: ModelSection) -> bytes:
    """The `config.json` of the run's model: that of `model.base`, else of the geometry. Raises ConfigError."""
    if section.base:
        path = Path(section.base) / "config.json"
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"model.base: cannot read {path}", why=str(error)) from None
    sizes = section.model_dump(exclude={"base", "compute_dtype", "rollout_dtype"})
    fixed = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": section.moe_intermediate_size,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    return json.dumps({**sizes, **fixed}, sort_keys=True).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`layers` counts all of them, as engines report routes; `layer_map` names those with experts."""

    vocab_size: int
    layers: int
    layer_map: tuple[int, ...]
    experts: int
    top_k: int

    @classmethod
    def from_hf(cls, config: bytes) -> Self:
        """Read a `config.json` (Qwen3-MoE or DeepSeek-V3 layout). Raises ConfigError."""
        try:
            hf: dict[str, Any] = json.loads(config)
            layers, dense = int(hf["num_hidden_layers"]), set(hf.get("mlp_only_layers") or ())
            dense |= set(range(int(hf.get("first_k_dense_replace") or 0)))
            step = int(hf.get("decoder_sparse_step") or 1)
            return cls(
                vocab_size=int(hf["vocab_size"]),
                layers=layers,
                layer_map=tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
                experts=int(hf.get("num_experts") or hf["n_routed_experts"]),
                top_k=int(hf["num_experts_per_tok"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("the model's config.json is not understood", why=repr(error)[:300]) from None
