"""What every rank of a trainer begins with: the base model and a learner of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from headway.bus.service import Settings
from headway.kernels import hf
from headway.kernels.config import ModelConfig
from headway.kernels.selftest import refusal
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, InputError
from headway.trainer.learner import Learner
from headway.trainer.mesh import Mesh
from headway.trainer.reexecute import make_learner


def base_folder(config: Config, settings: Settings) -> Path:
    """Where the base model lies."""
    return Path(config.model.base or settings.run_dir / "base")


def load_base(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Raises InputError."""
    try:
        return hf.load(folder)
    except (ValueError, OSError) as error:
        raise InputError(
            f"no usable model in {folder}", why=str(error)[:300], hint="`headway midtrain` makes one"
        ) from None


def begin(config: Config, model: ModelConfig, weights: Mapping[str, torch.Tensor], mesh: Mesh) -> Learner:
    """The rank's learner. Raises ConfigError when the machine cannot compute bit for bit, and is to."""
    dtype = getattr(torch, config.model.compute_dtype)
    if config.engine.numerics == "bitwise" and (broken := refusal(model, dtype)):
        raise ConfigError(f"this machine cannot compute bit for bit: {broken}", hint="set engine.numerics to replay")
    return make_learner(config, model, weights, mesh=mesh)
