"""Ids, subjects, versions and run.toml."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError, WireError
from headway.schemas.ids import sampling_seed, train_rollout_id
from headway.schemas.subjects import Subjects
from headway.schemas.version import Version


@given(st.text(max_size=70))
def test_no_id_smuggles_a_dot_a_wildcard_or_a_space_into_a_subject(token: str) -> None:
    try:
        subject = Subjects("demo").beat(token, "x")
    except WireError:
        return
    assert subject.split(".") == ["rl", "demo", "beat", token, "x"]
    assert not set(subject) & set("*> \t\n")


def test_a_subject_of_another_run_is_refused() -> None:
    assert Subjects("demo").parse("rl.demo.weights.0.12") == ("weights", "0", "12")
    with pytest.raises(WireError):
        Subjects("demo").parse("rl.other.weights.0.12")


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_version_reads_back(epoch: int, n: int) -> None:
    assert Version.parse(str(Version(epoch, n))) == Version(epoch, n)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.-1", "1.1.1", "a.b", "١.١", "1.99999999999999999999"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="version"):
        Version.parse(text)


def test_seeds_differ_between_rollouts_and_runs_and_never_between_attempts() -> None:
    seeds = {sampling_seed(run, train_rollout_id(g, s)) for run in range(3) for g in range(50) for s in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert sampling_seed(1, "g0000001s001") == sampling_seed(1, "g0000001s001")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[grpo]\nlearning_rat = 0.1", "did you mean grpo.learning_rate"),
        ("[grpoo]\nlearning_rate = 0.1", "did you mean grpo"),
        ("[regions.east]\nagent = 2", "did you mean regions.east.agents"),
        ("[run]\nseed = 'a'", "run.seed"),
        ("[run]\nname = 'a.b'", "run.name"),
        ("[grpo]\nlearning_rate = nan", "grpo.learning_rate"),
        ("[grpo]\nmin_graded = 99", "no group could ever train"),
        ("[run]\nlockstep = true", "max_lag = 0"),
        ("[staleness]\nmax_lag = 0", "swap_slack"),
        ("[regions]", "nobody would roll out"),
        ("x =", "not TOML"),
    ],
)
def test_a_wrong_run_toml_names_the_key_and_what_to_try(text: str, says: str) -> None:
    if text == "[regions]":
        text = "regions = {}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.toml")
    assert says in str(caught.value)
    assert "run.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what", "why", "hint"),
    [
        ("[dispatch]\nack_wait_ms = 30", "dispatch.ack_wait_ms", "dispatch has no", "dispatch.ack_wait_s?"),
        ("[agent]\nturn_timeout_s = '30s'", "agent.turn_timeout_s = 30s", "valid number", "without a unit"),
        ("[sandbox]\nmemory_bytes = '512MiB'", "sandbox.memory_bytes = 512MiB", "integer", "1 MiB is 1048576"),
        ("[sandbox]\nmemory_bytes = 5e8", "sandbox.memory_bytes", "integer", "bytes, as a whole number"),
        ("[agent]\ntool_latency_ms = -1", "agent.tool_latency_ms = -1", "greater than or equal to 0", "milliseconds"),
        ("[run]\nsteps = '70'", "run.steps = 70", "valid integer", "no quotes; the default is 70"),
        ("[run]\nlockstep = 'yes'", "run.lockstep = yes", "valid boolean", "no quotes; the default is False"),
        ("[grpo]\nlearning_rate = 2", "grpo.learning_rate = 2", "less than or equal to 1", "the default is 0.0004"),
        ("[regions.east]\nagents = 0", "regions.east.agents = 0", "greater than or equal to 1", "the default is 1"),
        ("[engine]\nnumerics = 'exact'", "engine.numerics = exact", "'bitwise', 'replay' or 'off'", "'bitwise'"),
        ("[staleness]\nmax_lag = 0", "settings contradict", "swap_slack is above", ""),
        ("run = 3", "run = 3", "valid dictionary", ""),
    ],
)
def test_a_wrong_type_unit_or_range_says_what_why_and_what_to_try(text: str, what: str, why: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.toml")
    error = caught.value
    assert (what in error.what, why in error.why, hint in error.hint) == (True, True, True), str(error)
    assert "run.toml" in error.what


def test_sections_that_are_local_to_a_host_do_not_change_the_shared_digest() -> None:
    base = Config()
    assert parse_config("[regions.west]\nagents = 3", "x").shared_digest() == base.shared_digest()
    assert parse_config("[grpo]\nclip_low = 0.1", "x").shared_digest() != base.shared_digest()
