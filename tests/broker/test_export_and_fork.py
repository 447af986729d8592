"""Versions leave a run as Hugging Face folders, and new runs begin from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.deploy import commands
from headway.deploy.cli import main as cli
from headway.deploy.export import committed, export
from headway.deploy.settings import to_toml
from headway.kernels import hf
from headway.schemas.errors import ConfigError, WireError
from headway.schemas.version import Version
from headway.weight_sync import torch_apply
from headway.weight_sync.mirror import HostMirror

Make = Callable[..., Any]


async def trained(run: Any, steps: int) -> Any:
    """The history of a run after its steps."""

    def answer(task: Any, head: Version) -> Any:
        return run.graded(task, float(task.sampling_seed % 2), head)

    async with run.dispatcher(), run.trainer(), run.agent(answer):
        return await run.wait_for_step(steps)


def root_in(folder: Path) -> str:
    return torch_apply.root(hf.load(folder)[1])


@pytest.fixture
async def folder(make_run: Make, nats_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps in a folder that commands find."""
    monkeypatch.setenv("HEADWAY_NATS_URL", nats_process.settings.url)
    monkeypatch.setenv("HEADWAY_NATS_TOKEN", nats_process.settings.token)
    run = make_run(steps=3)
    await trained(run, 3)
    (tmp_path / "run.toml").write_text(to_toml(run.config))
    return tmp_path


async def test_every_version_of_a_run_is_exported_bit_for_bit(make_run: Make, tmp_path: Path) -> None:
    run = make_run(steps=3)
    await trained(run, 3)
    history = await committed(run.bus)
    config_json = (tmp_path / "base" / "config.json").read_bytes()
    for version, root in history.roots.items():
        out = tmp_path / "out" / str(version)
        assert await export(run.bus, history, version, config_json, out) == root
        assert root_in(out) == root
    assert len(set(history.roots.values())) == 4
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["0.0", "0.1", "0.2", "0.3"]


async def test_a_damaged_shard_leaves_no_folder_and_a_taken_one_is_kept(make_run: Make, tmp_path: Path) -> None:
    run = make_run(steps=1)
    await trained(run, 1)
    history = await committed(run.bus)
    config_json = (tmp_path / "base" / "config.json").read_bytes()
    for shard in (tmp_path / "store" / "test" / "weights").glob("*.shard"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"\xff\xff")
    with pytest.raises(WireError):
        await export(run.bus, history, Version(0, 1), config_json, tmp_path / "out" / "m")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ConfigError, match="never overwrites"):
        await export(run.bus, history, Version(0, 1), config_json, tmp_path / "out")


async def test_an_export_that_is_cut_off_leaves_no_folder(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps=1)
    await trained(run, 1)

    def cut_off(mirror: Any, folder: Path, config_json: bytes, *_: Any, **__: Any) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(config_json)
        raise OSError("cut off")

    monkeypatch.setattr(HostMirror, "stage_partial_checkpoint", cut_off)
    with pytest.raises(OSError, match="cut off"):
        await export(run.bus, await committed(run.bus), Version(0, 1), b"{}", tmp_path / "out" / "m")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_exports_the_head_or_the_version_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(folder)]) == 0
    assert f"version 0.3 of {folder.name}: {folder / 'versions' / '0.3'}" in capsys.readouterr().out
    assert cli.main(["export", str(folder), "--version", "0.1", "--out", str(folder / "m")]) == 0
    assert json.loads((folder / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert root_in(folder / "m") != root_in(folder / "versions" / "0.3")
    assert cli.main(["export", str(folder), "--version", "0.9"]) == 64
    assert "has no version 0.9" in capsys.readouterr().err
    assert cli.main(["export", str(folder), "--version", "nine"]) == 64
    assert "not a version such as 0.12" in capsys.readouterr().err


def test_a_fork_begins_from_the_head_under_a_changed_config(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(commands, "up", lambda config, path, say: begun.append((config, path)) or 0)
    changed = ["up", "--config", str(folder / "run.toml"), "--run-dir", str(folder), "--set", "grpo.clip_low=0.1"]
    assert cli.main([*changed, "--fork", "second"]) == 0
    assert "begins from version 0.3" in capsys.readouterr().out
    config, path = begun[0]
    assert (config.run.name, config.grpo.clip_low, path) == ("second", 0.1, folder.parent / "second")
    assert Path(config.model.base) == path / "base"
    cli.main(["export", str(folder)])
    assert root_in(path / "base") == root_in(folder / "versions" / "0.3")
    assert cli.main([*changed, "--fork", "second"]) == 0
    assert begun[1] == begun[0]
    assert cli.main([*changed[:3], "--run-dir", str(folder / "none"), "--fork", "third"]) == 64
    assert cli.main([*changed, "--fork", "../x"]) == 65


def test_an_evaluation_is_of_the_last_committed_version_unless_another_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(commands, "up", lambda config, path, say: begun.append(config) or 0)
    assert cli.main(["eval", str(folder)]) == 0
    assert cli.main(["eval", str(folder), "--version", "0.1"]) == 0
    assert [config.model.base for config in begun] == [str(folder / "versions" / name) for name in ("0.3", "0.1")]
    assert [config.run.name for config in begun] == ["test-eval-0-3", "test-eval-0-1"]


def test_a_dry_run_shows_everything_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["up", "--dry-run", "--run-dir", str(tmp_path / "r"), "--set", "regions.east.agents=2"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for expected in ("would begin", "would start nats", "would run midtrain", "would start east-agent-1", "agents = 2"):
        assert expected in shown
    assert not (tmp_path / "r").exists()
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.toml").write_text("[run]\nseed = 9\n")
    assert cli.main(arguments) == 64
    assert "--fork" in capsys.readouterr().err
