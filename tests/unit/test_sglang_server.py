"""How `headway up --engine sglang` starts SGLang."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from headway.deploy import sglang_server
from headway.deploy.cli.main import _config
from headway.deploy.cli.options import parser
from headway.deploy.sglang_server import Interpreter
from headway.rollout_agent.client import LOADER
from headway.schemas.config import parse_config
from headway.schemas.errors import ConfigError

CONFIG = parse_config('[engine]\nkind = "sglang"\nnumerics = "replay"\nsglang_args = ["--tp", "2"]', "test")


def test_an_absent_sglang_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_SGLANG", str(tmp_path))
    with pytest.raises(ConfigError, match="make sglang"):
        sglang_server.find()


def test_only_what_make_sglang_built_gets_the_cpus_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_SGLANG", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    host = sglang_server.find()
    (tmp_path / ".finished").touch()
    built = sglang_server.find()
    assert (host.on_cpu, built.on_cpu) == (False, True)
    assert "--device" not in sglang_server.command(CONFIG, host, tmp_path / "a", port=1)
    assert "--device" in sglang_server.command(CONFIG, built, tmp_path / "b", port=1)
    assert str(sglang_server.SHIM) not in sglang_server.environment(host, tmp_path / "a")["PYTHONPATH"]
    assert str(sglang_server.SHIM) in sglang_server.environment(built, tmp_path / "b")["PYTHONPATH"]


def test_an_engine_starts_without_weights_on_loopback_and_takes_the_given_flags(tmp_path: Path) -> None:
    argv = list(
        sglang_server.command(CONFIG, Interpreter(Path("/env/bin/python"), on_cpu=False), tmp_path, port=31_000)
    )
    values = dict(itertools.pairwise(argv))
    assert values["--load-format"] == "dummy"
    assert values["--weight-version"] == "none"
    assert values["--host"] == "127.0.0.1"
    assert argv[-2:] == ["--tp", "2"]
    assert [path.name for path in Path(values["--model-path"]).iterdir()] == ["config.json"]


def test_the_loader_is_one_file_under_its_name_that_imports_nothing_of_ours(tmp_path: Path) -> None:
    path = sglang_server.loader_folder(tmp_path) / Path(*LOADER.split(".")[:-1]).with_suffix(".py")
    assert sglang_server.LOADER == LOADER
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]
    imports = [line for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))]
    assert len(imports) > 5
    assert not any("headway" in line for line in imports)


def test_the_option_chooses_sglang_and_numerics_that_it_can_keep() -> None:
    chosen = _config(parser().parse_args(["up", "--engine", "sglang"])).engine
    assert (chosen.kind, chosen.numerics) == ("sglang", "replay")
    kept = _config(parser().parse_args(["up", "--engine", "sglang", "--set", "engine.numerics=off"])).engine
    assert kept.numerics == "off"
    with pytest.raises(ConfigError, match="cannot be bitwise"):
        _config(parser().parse_args(["up", "--set", "engine.kind=sglang"]))
