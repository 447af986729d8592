"""A recording comes from anywhere, so reading one calls nothing that it names, unless whoever reads it says so."""

from pathlib import Path

import pytest

from headway.deploy import sources
from headway.deploy.cli.main import main
from headway.schemas.config import Config
from headway.schemas.errors import InputError
from headway.schemas.sections import BusConfig, RewardConfig, StoreConfig

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


def test_where_a_recording_would_have_things_put_is_left_to_who_reads_it(tmp_path: Path) -> None:
    foreign = Config(store=StoreConfig(url=str(tmp_path / "home")), bus=BusConfig(url="nats://elsewhere:4222"))
    found = sources._shared({**foreign.model_dump(), "run": {"name": "golden"}})
    assert (found.run.name, found.store, found.bus) == ("golden", StoreConfig(), BusConfig())


def test_a_recorded_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="configuration"):
        sources._shared({"grpo": {"seeed": 1}})
