"""A run goes on with the chat template, tokenizer and tool format that it began with, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.schemas import chat
from headway.schemas.chat import chat_digest, require_same_chat
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError


def folder(path: Path, **changed: str) -> Path:
    """A model's folder; a file that is changed to "" is not there."""
    files = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"} | changed
    path.mkdir()
    for name, text in files.items():
        if text:
            (path / name).write_text(text)
    return path


def config(path: Path | str, **agent: Any) -> Config:
    given = {"tokenizer": str(path), **agent}
    return parse_config("", "test", {f"agent.{key}": value for key, value in given.items()})


def another_template(path: Path) -> Config:
    return config(folder(path, **{"chat_template.jinja": "{{ messages }} "}))


def another_tokenizer(path: Path) -> Config:
    return config(folder(path, **{"tokenizer.json": '{"model": 1}'}))


def another_end(path: Path) -> Config:
    return config(folder(path, **{"generation_config.json": '{"eos_token_id": 1}'}))


def no_template_file(path: Path) -> Config:
    return config(folder(path, **{"chat_template.jinja": ""}))


def another_format(path: Path) -> Config:
    return config(folder(path), tool_format="kimi_k2")


def no_tokenizer(path: Path) -> Config:
    return config("")


@pytest.mark.parametrize(
    "other", [another_template, another_tokenizer, another_end, no_template_file, another_format, no_tokenizer]
)
def test_a_run_does_not_go_on_with(other: Callable[[Path], Config], tmp_path: Path) -> None:
    recorded = chat_digest(config(folder(tmp_path / "run")))
    with pytest.raises(ConfigError, match="not the one that the run began with"):
        require_same_chat(recorded, other(tmp_path / "here"))


def test_it_goes_on_with_the_same_files_elsewhere_and_where_nothing_was_recorded(tmp_path: Path) -> None:
    here = config(folder(tmp_path / "here"))
    require_same_chat(chat_digest(config(folder(tmp_path / "run"))), here)
    require_same_chat("", here)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        chat_digest(config(tmp_path / "nowhere"))


def test_the_byte_vocabulary_has_a_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = chat_digest(config(""))
    monkeypatch.setattr(chat, "PLAIN_TEMPLATE", "{{ messages }}")
    with pytest.raises(ConfigError, match="the byte vocabulary"):
        require_same_chat(recorded, config(""))
