"""An agent whose configuration is not the one that the run began with does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.schemas.config import parse_config
from headway.schemas.errors import ConfigError

from .agent_stand import CONFIG


async def test_an_agent_with_another_config_refuses_to_start(make_stand: Any) -> None:
    stand = await make_stand()
    other = parse_config(CONFIG.replace("max_sessions = 8", "max_sessions = 9"), "test")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with stand.agent(config=other) as service:
            await stand.ended(service)
    assert caught.group_contains(ConfigError, match=r"differs from the one the run began with")


async def test_an_agent_with_another_chat_template_refuses_to_start(make_stand: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    stand = await make_stand(agent__tokenizer=str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with stand.agent() as service:
            await stand.ended(service)
    assert caught.group_contains(ConfigError, match=r"not the one that the run began with")
