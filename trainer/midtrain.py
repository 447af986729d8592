"""Mid-training: next-token prediction on source code, then supervised sessions. Its result is version 0.

One loop over steps 0..P+S: the first P are `pretrain`, the other S are `sft`. What step i reads is a pure
function of (seed, i), the optimizer's state is in the checkpoint, so a killed run that is started again
ends with the same weights, bit for bit, as an undisturbed one.

The forward takes the fast kernels (no order-stability): nothing here is compared with an engine.
Shapes: B sequences, T padded tokens, N predicted tokens.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from headway.bus.failpoints import failpoint
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.hf import save_folder
from headway.kernels.numerics import FAST
from headway.kernels.quant import RolloutDtype, to_rollout
from headway.kernels.router import balance_loss
from headway.kernels.weights import init_weights, prepare, round_through
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError
from headway.schemas.sections import ModelSection
from headway.schemas.vocab import PAD, VOCAB_SIZE
from headway.schemas.wire import digest_of
from headway.trainer.checkpoint import Checkpoint, load_file, save_file
from headway.trainer.corpus import Session, code_windows, draw, read_sessions, stdlib_files
from headway.trainer.learner import COMPUTE_DTYPES
from headway.trainer.optim import AdamW, Schedule, clip_by_global_norm

RECIPE_FILE = "midtrain.digest"
CHECKPOINT_FILE = "midtrain.ckpt"
BASE_DTYPE: RolloutDtype = "bfloat16"  # the result is a plain checkpoint, whatever engines hold later
ADAM_BETA1, ADAM_BETA2 = 0.9, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """token_ids_BT i64 right-padded, lengths_B i64 (inputs only), rows_N flat places in B*T, targets_N i64."""

    token_ids_BT: Tensor
    lengths_B: Tensor
    rows_N: Tensor
    targets_N: Tensor


def model_config(section: ModelSection) -> ModelConfig:
    """The decoder's shape for `[model]`, with the byte-level vocabulary."""
    sizes = section.model_dump(exclude={"base", "compute_dtype", "rollout_dtype"})
    return ModelConfig(vocab_size=VOCAB_SIZE, **sizes)


def run_midtrain(
    config: Config,
    sessions_path: Path,
    out_dir: Path,
    report: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Train from scratch and write `out_dir`: a Hugging Face folder in bf16, version 0 of a run.

    Checkpoints go to `<out_dir>.partial` every `midtrain.checkpoint_every` steps; killed at any moment and
    started again, it goes on from the last. An `out_dir` that the same recipe made is left as it is.

    Raises:
        ConfigError: `out_dir` or its partial state was made by another recipe.
        InputError: the sessions, the corpus or a checkpoint cannot be used.
    """
    positions = config.model.max_position_embeddings
    sessions = read_sessions(sessions_path, positions) if config.midtrain.sft_steps else []
    recipe, partial = _recipe_digest(config, sessions), out_dir.with_name(f"{out_dir.name}.partial")
    if out_dir.exists():
        _same_recipe(out_dir, recipe)
        shutil.rmtree(partial, ignore_errors=True)
        report({"phase": "done", "step": config.midtrain.pretrain_steps + config.midtrain.sft_steps, "cached": True})
        return
    partial.mkdir(parents=True, exist_ok=True)
    if (partial / CHECKPOINT_FILE).exists():
        _same_recipe(partial, recipe)
    (partial / RECIPE_FILE).write_text(recipe)
    with _threads(config.midtrain.threads):
        run = _Midtrain(config, sessions)
        run.train(partial / CHECKPOINT_FILE, report, clock)
    folder = partial / "result"
    save_folder(folder, run.model, to_rollout(run.masters, BASE_DTYPE))
    (folder / RECIPE_FILE).write_text(recipe)
    failpoint("midtrain.rename.before")
    folder.rename(out_dir)
    failpoint("midtrain.rename.after")
    shutil.rmtree(partial)
    report({"phase": "done", "step": run.steps, "cached": False})


class _Midtrain:
    def __init__(self, config: Config, sessions: list[Session]) -> None:
        self.model, self._config, self._seed = model_config(config.model), config.midtrain, config.run.seed
        self.masters = init_weights(self.model, self._seed)
        self._adam = AdamW(self.masters, beta1=ADAM_BETA1, beta2=ADAM_BETA2)
        self._compute_dtype = COMPUTE_DTYPES[config.model.compute_dtype]
        self.steps = self._config.pretrain_steps + self._config.sft_steps
        window = min(self._config.sequence_tokens, config.model.max_position_embeddings)
        windows = (
            code_windows(stdlib_files(), window, self._config.pretrain_bytes) if self._config.pretrain_steps else []
        )
        self._data = {"pretrain": windows, "sft": sessions}
        self._sequences = {
            "pretrain": max(1, self._config.pretrain_tokens_per_step // window),
            "sft": self._config.sft_sessions_per_step,
        }
        settings = self._config
        pretrain = Schedule(peak=settings.learning_rate, warmup_steps=settings.warmup_steps, total_steps=0)
        sft = replace(pretrain, total_steps=settings.sft_steps, final_fraction=settings.final_lr_fraction)
        self._rates = {"pretrain": pretrain, "sft": sft}

    def train(self, checkpoint: Path, report: Callable[[dict[str, Any]], None], clock: Callable[[], float]) -> None:
        for step in range(self._resume(checkpoint), self.steps):
            pretrained = self._config.pretrain_steps
            phase, at = ("pretrain", step) if step < pretrained else ("sft", step - pretrained)
            began_s, data = clock(), self._data[phase]
            batch = make_batch([data[i] for i in draw(len(data), self._sequences[phase], at, self._seed)])
            loss, norm = self._update(batch, self._rates[phase].at(at))
            if (step + 1) % self._config.checkpoint_every == 0 and step + 1 < self.steps:
                counters = {"steps_done": step + 1}
                save_file(Checkpoint(masters=self.masters, moments=self._adam.state(), counters=counters), checkpoint)
            rate = int(batch.lengths_B.sum()) / max(clock() - began_s, 1e-9)
            report({"phase": phase, "step": step + 1, "loss": loss, "grad_norm": norm, "tokens_per_s": rate})

    def _resume(self, checkpoint: Path) -> int:
        if not checkpoint.exists():
            return 0
        found = load_file(checkpoint, self.model.tensor_shapes())
        for name, master in self.masters.items():
            master.copy_(found.masters[name])
        self._adam.load_state(found.moments, found.counters["steps_done"])
        return found.counters["steps_done"]

    def _update(self, batch: Batch, rate: float) -> tuple[float, float]:
        """One AdamW step on mean cross-entropy + balance loss; (cross-entropy in nats a token, gradient norm)."""
        leaves = {name: w.detach().requires_grad_() for name, w in self.masters.items()}
        prepared = prepare(round_through(leaves, BASE_DTYPE), self.model, self._compute_dtype)
        out = forward_full(prepared, self.model, batch.token_ids_BT, batch.lengths_B, FAST)
        hidden_Nd = out.hidden.flatten(0, 1).index_select(0, batch.rows_N)
        logprob_N, _ = token_logprob(prepared, hidden_Nd, batch.targets_N, 1.0, FAST)
        entropy = -logprob_N.mean()
        balance = balance_loss(out.router_scores, self.model.num_experts_per_tok)
        found = torch.autograd.grad(
            entropy + self._config.balance_loss * balance, list(leaves.values()), materialize_grads=True
        )
        grads = dict(zip(leaves, found, strict=True))
        norm = clip_by_global_norm(grads, self._config.clip_norm)
        self._adam.step(grads, rate)
        return float(entropy.detach()), norm


def make_batch(sessions: Sequence[Session]) -> Batch:
    """Whole sequences of which only the trained tokens are predicted."""
    width = max(len(session.token_ids) for session in sessions) - 1
    token_ids = np.full((len(sessions), width), PAD, np.int64)
    rows, targets = [], []
    for b, session in enumerate(sessions):
        token_ids[b, : len(session.token_ids) - 1] = session.token_ids[:-1]
        place = np.flatnonzero(session.trained)
        rows.append(b * width + place - 1)
        targets.append(session.token_ids[place].astype(np.int64))
    return Batch(
        token_ids_BT=torch.from_numpy(token_ids),
        lengths_B=torch.tensor([len(session.token_ids) - 1 for session in sessions]),
        rows_N=torch.from_numpy(np.concatenate(rows)),
        targets_N=torch.from_numpy(np.concatenate(targets)),
    )


def _recipe_digest(config: Config, sessions: list[Session]) -> str:
    """Over everything the resulting weights depend on, except the machine."""
    hasher = hashlib.sha256()
    for session in sessions:
        hasher.update(session.token_ids.tobytes() + session.trained.tobytes())
    sections = [config.model.model_dump(), config.midtrain.model_dump(), config.run.seed]
    return digest_of(msgpack.packb([sections, hasher.digest()]))


def _same_recipe(folder: Path, recipe: str) -> None:
    try:
        found = (folder / RECIPE_FILE).read_text()
    except OSError:
        found = "unknown"
    if found != recipe:
        raise ConfigError(
            f"{folder} was made by another recipe",
            why=f"[model], [midtrain], run.seed or the sessions changed ({found[:12]} there, {recipe[:12]} asked)",
            hint="choose another output folder, or remove this one",
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
