"""How to start SGLang for a run: its interpreter, flags and environment. SGLang is never imported here.

It lives in an environment of its own, found in this order: HEADWAY_SGLANG (a virtual environment), what `make sglang`
built (`build/sglang`), the environment Headway runs in. One that `make sglang` built runs on the CPU, with the
stand-ins of `deploy/sglang/shim`; any other is a host's own and takes its accelerator.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.rollout_agent.model_shape import hf_config
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError

BUILT = Path(__file__).parent.parent / "build" / "sglang"
SHIM = Path(__file__).parent / "sglang" / "shim"
LOADER_FILE = Path(__file__).parent.parent / "weight_sync" / "sglang_loader.py"
LOADER = "headway.weight_sync.sglang_loader.load"
"""What `--custom-weight-loader` and the agent's `load_format` call our loader."""
NO_VERSION = "none"
"""The weight version of an engine that nobody has given weights yet."""
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--mem-fraction-static", "0.2", "--sleep-on-idle"),  # an idle scheduler spins otherwise
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that has SGLang. `on_cpu`: `make sglang` built it."""

    python: Path
    on_cpu: bool


def find() -> Interpreter:
    """Raises ConfigError when there is no SGLang."""
    given = os.environ.get("HEADWAY_SGLANG")
    place = Path(given) if given else BUILT
    if (place / "bin" / "python").exists():
        return Interpreter(place / "bin" / "python", (place / ".finished").exists())
    if not given and importlib.util.find_spec("sglang") is not None:
        return Interpreter(Path(sys.executable), on_cpu=False)
    raise ConfigError(
        "there is no SGLang to start",
        why=f"{place} holds no virtual environment with it",
        hint="`make sglang` builds one for this CPU; on a GPU host set HEADWAY_SGLANG to the environment that has it",
    )


def model_folder(config: Config, folder: Path) -> Path:
    """`folder` with the model's config.json alone: weights come from the run, never from a file of the host's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(hf_config(config.model))
    return folder


def loader_folder(folder: Path) -> Path:
    """`folder` with our loader under its dotted name and nothing else, for SGLang's PYTHONPATH."""
    place = folder / Path(*LOADER.split(".")[:-2])
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(LOADER_FILE, place / LOADER_FILE.name)
    return folder


def command(config: Config, interpreter: Interpreter, folder: Path, *, port: int) -> Sequence[str]:
    """The command line of an engine that serves `NO_VERSION`, random weights, until an agent gives it others.

    It listens on loopback and has no key: SGLang takes keys on its command line alone, for every user to read.
    """
    flags = {
        "--model-path": str(model_folder(config, folder / "model")),
        "--load-format": "dummy",
        "--weight-version": NO_VERSION,
        "--dtype": "bfloat16",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--context-length": str(config.agent.max_session_tokens),
        "--max-running-requests": str(config.engine.max_batch),
        "--max-total-tokens": str(config.engine.slots * config.agent.max_session_tokens),
        "--custom-weight-loader": LOADER,
    }
    return (
        *(str(interpreter.python), "-P", "-m", "sglang.launch_server", "--skip-tokenizer-init"),
        "--enable-return-routed-experts",
        *(part for flag in flags.items() for part in flag),
        *(CPU_FLAGS if interpreter.on_cpu else ()),
        *config.engine.sglang_args,
    )


def environment(interpreter: Interpreter, folder: Path) -> dict[str, str]:
    """What to add to a child's environment."""
    path = [str(loader_folder(folder / "loader")), *([str(SHIM)] if interpreter.on_cpu else [])]
    found = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    return found | ({"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""} if interpreter.on_cpu else {})
