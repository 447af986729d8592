"""A recording comes from anywhere, so reading one calls nothing that it names, unless whoever reads it says so."""

from pathlib import Path

import pytest

from headway.deploy import sources
from headway.deploy.cli.main import main
from headway.schemas.config import Config
from headway.schemas.sections import RewardConfig

RECORDING = str(Path(__file__).parents[1] / "golden" / "expr.hwr")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch):
    """Has every recording name these reward functions."""

    def name(**rewards: object) -> None:
        async def recorded(bus: object) -> Config:
            return Config(reward=RewardConfig(**rewards))

        monkeypatch.setattr(sources, "_recorded_config", recorded)

    return name


@pytest.mark.parametrize(
    "words", [["audit", "--from", RECORDING], ["replay", "check", RECORDING], ["replay", RECORDING]]
)
@pytest.mark.parametrize("rewards", [{"auxiliary": ["os:abort"]}, {"length_penalty": "os:abort"}])
def test_code_that_a_recording_names_is_refused(named, words, rewards, capsys: pytest.CaptureFixture[str]) -> None:
    named(**rewards)
    assert main(words) == 65
    assert "os:abort" in capsys.readouterr().err


def test_it_is_taken_when_it_is_allowed_and_ours_always(named) -> None:
    named(auxiliary=["os:abort"])
    assert main(["audit", "--from", RECORDING, "--allow-code"]) == 0
    named(length_penalty="headway.schemas.rewards:concave")
    assert main(["audit", "--from", RECORDING]) == 0
