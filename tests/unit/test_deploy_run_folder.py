"""A run's folder: secrets, continuity, and who may use it."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.sections import RunConfig


def test_a_prepared_folder_keeps_its_secrets_private_and_the_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.prepare(Config())
    before = {path: path.read_bytes() for path in folder.keys.glob("*/*")}
    assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder.keys, *folder.keys.iterdir())} == {0o700}
    folder.prepare(Config())
    assert {path: path.read_bytes() for path in folder.keys.glob("*/*")} == before


def test_the_resolved_config_of_a_run_reads_back_equal(tmp_path: Path) -> None:
    config = parse_config("[regions.east]\n[regions.west]\nagents = 2\n", "t", {"run.seed": 5})
    folder = RunFolder(tmp_path / "r")
    folder.prepare(config)
    assert folder.config() == config


def test_a_changed_shared_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.prepare(Config())
    with pytest.raises(ConfigError) as caught:
        folder.prepare(Config(run=RunConfig(seed=2)))
    assert caught.value.why == "run.seed: 1 -> 2"
    assert folder.config() == Config()


def test_a_changed_local_section_continues(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.prepare(Config())
    changed = parse_config("", "t", {"sandbox.pool_size": 3})
    folder.prepare(changed)
    assert folder.config() == changed


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    program = (
        "import sys; from pathlib import Path; from headway.deploy.run_folder import RunFolder\n"
        f"with RunFolder(Path({str(folder.path)!r})).locked():\n print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UnavailableError, match=f"process {holder.pid} holds it"), folder.locked():
            pass
        holder.kill()
    with folder.locked():
        pass


def test_a_run_is_found_by_name_or_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = RunFolder(tmp_path / "runs" / "r")
    made.prepare(Config())
    assert RunFolder.existing("r") == made
    assert RunFolder.existing(str(made.path)) == made
    with pytest.raises(ConfigError):
        RunFolder.existing("other")


def test_the_wall_time_of_a_run_adds_up_over_restarts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.spend(1.5) == 1.5
    assert RunFolder(tmp_path).spend(2.0) == 3.5
