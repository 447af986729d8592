"""The run as containers. Needs a Docker engine that answers, Compose, and the image that deploy/Dockerfile makes."""

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = os.environ.get("HEADWAY_IMAGE", "headway")
STEPS = 10
ENGINE_S_MAX, UP_S_MAX, STEP_S_MAX, STOP_S_MAX = 10.0, 420.0, 240.0, 120.0
CONFIG = f"""
[run]
name = "demo"
steps = {STEPS}
[model]
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
moe_intermediate_size = 64
num_experts = 4
[midtrain]
pretrain_steps = 0
sft_steps = 150
sft_sessions_per_step = 32
[tasks]
demonstrations = 4000
[grpo]
groups_per_step = 4
samples_per_group = 4
min_graded = 2
[eval]
at = []
[regions.east]
[regions.west]
"""
HEAD = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"


def answer(*command: str, timeout_s: float = ENGINE_S_MAX) -> str | None:
    """Standard output; None when the command fails, is not there, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def find_compose() -> list[str]:
    """The compose command. Skips when there is nothing to run containers with."""
    if answer("docker", "info") is None:
        pytest.skip(f"no Docker engine answered within {ENGINE_S_MAX:g} s")
    if answer("docker", "image", "inspect", IMAGE) is None:
        pytest.skip(f"there is no image {IMAGE}: docker build -f deploy/Dockerfile -t {IMAGE} .")
    if answer("docker", "compose", "version") is not None:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.skip("neither docker compose nor docker-compose is installed")
    return ["docker-compose"]


class Project:
    """A compose project of its own name, in the folder of compose.yaml."""

    def __init__(self, compose: list[str], config: Path) -> None:
        self.name = f"headway-test-{secrets.token_hex(3)}"
        self._compose = [*compose, "-p", self.name]
        self._env = {**os.environ, "HEADWAY_RUN_TOML": str(config), "HEADWAY_IMAGE": IMAGE}

    def __call__(self, *arguments: str, timeout_s: float) -> str:
        command = [*self._compose, *arguments]
        done = subprocess.run(
            command, cwd=DEPLOY, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    def containers(self) -> dict[str, str]:
        """Container by service, stopped ones too."""
        label = "com.docker.compose"
        wanted = ("docker", "ps", "-a", "--filter", f"label={label}.project={self.name}")
        rows = answer(*wanted, "--format", f'{{{{.Label "{label}.service"}}}} {{{{.ID}}}}') or ""
        return dict(row.split() for row in rows.splitlines())

    def step(self) -> int:
        """The newest step by the trainer's metrics, -1 while it does not answer."""
        found = re.search(
            r"headway_head_step\{.*} (\d+)", answer("docker", "exec", self.trainer, "python", "-c", HEAD) or ""
        )
        return int(found[1]) if found else -1

    @property
    def trainer(self) -> str:
        return self.containers()["trainer"]

    def inspect(self, container: str, field: str) -> str:
        return (answer("docker", "inspect", "-f", f"{{{{{field}}}}}", container) or "").strip()

    def until(self, true: Callable[[], bool], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < end_s, self("logs", "--tail", "5", timeout_s=60)
            time.sleep(0.5)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    project = Project(find_compose(), config)
    yield project
    project("down", "-v", "-t", "5", timeout_s=STOP_S_MAX)


@pytest.mark.slow
def test_a_run_in_containers_survives_its_trainer_and_stops_cleanly(project: Project) -> None:
    project("up", "-d", timeout_s=UP_S_MAX)
    project.until(lambda: project.step() >= 3, STEP_S_MAX)
    victim = project.inspect(project.trainer, ".State.Pid")
    killer = ("docker", "run", "--rm", "--pid", "host", "--user", "root", "--entrypoint", "/bin/sh", IMAGE, "-c")
    assert answer(*killer, f"kill -9 {victim}") is not None
    project.until(lambda: project.step() == STEPS, STEP_S_MAX)
    assert project.inspect(project.trainer, ".RestartCount") == "1"

    report = json.loads(project("run", "--rm", "cli", "headway", "audit", "/var/lib/headway", timeout_s=60))
    assert report["violations"] == []
    assert (report["versions"], report["terms"], report["pending"], report["lost"]) == (STEPS + 1, 2, 0, 0)

    project("stop", timeout_s=STOP_S_MAX)
    codes = {name: project.inspect(found, ".State.ExitCode") for name, found in project.containers().items()}
    assert set(codes.values()) == {"0"}, codes
