"""Which disagreements are one agent's and which are systemic: a function of the batch and the ledger's counters."""

import pytest

from headway.schemas.errors import PromiseViolated
from headway.schemas.ledger import AGENTS_MAX, DISAGREED_MAX, Counters, Drop
from headway.schemas.messages import Rollout
from headway.trainer.agreement import Disagreement
from headway.trainer.groups import Batch, Decided
from headway.trainer.quarantine import REFUSED_WINDOWS, Quarantine, require_somebody


def rollout(number: int, agent: str) -> Rollout:
    return Rollout.model_construct(rollout_id=f"r{number}", region="east", agent=agent)


def batch(agents: list[str]) -> Batch[Rollout]:
    members = [Decided(seq=n + 1, rollout_id=f"r{n}", payload=rollout(n, agent)) for n, agent in enumerate(agents)]
    return Batch(groups=((0, tuple(members)),), drops=(), void_groups=())


def found(*bad: int, good: tuple[int, ...] = ()) -> Disagreement:
    return Disagreement({f"r{n}": "token 3" for n in bad}, frozenset(f"r{n}" for n in good), len(bad))


def drop(number: int, reason: str) -> Drop:
    return Drop.model_validate({"rollout_id": f"r{number}", "seq": number + 1, "reason": reason})


def test_a_rollout_is_set_aside_until_the_ledger_holds_it_and_then_counts() -> None:
    quarantine, before = Quarantine(), Counters(disagreed={"east/b": 1})
    quarantine.add(batch(["a", "b"]), found(0, good=(1,)), before)
    assert quarantine.reason(rollout(0, "a"), before) == "disagreed"
    assert quarantine.reason(rollout(9, "a"), before) is None
    drops = [drop(0, "disagreed"), drop(5, "stale")]
    assert quarantine.recorded(before, drops[1:]) == {"east/b": 1}
    assert quarantine.recorded(before, drops) == {"east/a": 1, "east/b": 1}
    quarantine.settle(drops)
    assert quarantine.reason(rollout(0, "a"), before) is None


def test_an_agent_is_refused_with_the_first_rollout_past_the_limit() -> None:
    for already, reason in ((DISAGREED_MAX - 1, None), (DISAGREED_MAX, "refused_agent")):
        quarantine, before = Quarantine(), Counters(disagreed={"east/a": already})
        quarantine.add(batch(["a", "b"]), found(0, good=(1,)), before)
        assert quarantine.reason(rollout(9, "a"), before) == reason
        assert quarantine.reason(rollout(1, "b"), before) is None


@pytest.mark.parametrize(
    ("agents", "bad", "good", "already", "systemic"),
    [
        ("ab", (0, 1), (), 0, "2 agents disagree with the trainer and 0 agree: east/a, east/b"),
        ("abcd", (0, 1), (2, 3), 0, "2 agents disagree with the trainer and 2 agree"),
        ("abcde", (0, 1), (2, 3, 4), 0, None),
        ("ab", (0,), (), 99, None),
        ("aa", (0,), (1,), DISAGREED_MAX - 1, None),
        ("aa", (0,), (1,), DISAGREED_MAX, "rollouts of the only agent"),
        ("aaaa", (0, 1, 2, 3), (), 0, "rollouts of the only agent"),
    ],
)
def test_what_is_systemic_is_never_trained_around(
    agents: str, bad: tuple[int, ...], good: tuple[int, ...], already: int, systemic: str | None
) -> None:
    quarantine, before = Quarantine(), Counters(disagreed={"east/a": already} if already else {})
    if systemic is None:
        quarantine.add(batch(list(agents)), found(*bad, good=good), before)
    else:
        with pytest.raises(PromiseViolated, match=systemic):
            quarantine.add(batch(list(agents)), found(*bad, good=good), before)


def test_a_run_whose_agents_are_all_refused_ends() -> None:
    drops = [drop(0, "refused_agent"), drop(1, "group_incomplete")]
    require_somebody(drops, REFUSED_WINDOWS * 6, 6, ["east/a"])
    require_somebody([*drops, drop(2, "infra_failed")], 99, 6, ["east/a"])
    require_somebody(drops[1:], 99, 6, ["east/a"])
    with pytest.raises(PromiseViolated, match=r"13 groups in a row .*east/a"):
        require_somebody(drops, REFUSED_WINDOWS * 6 + 1, 6, ["east/a"])


def test_a_record_counts_as_many_agents_as_it_holds_and_forgets_those_with_the_fewest() -> None:
    many = {f"east/{n:04}": 1 for n in range(AGENTS_MAX - 1)}
    before = Counters(disagreed={**many, "west/refused": DISAGREED_MAX + 1})
    quarantine = Quarantine()
    quarantine.note("r0", "east/0500")
    quarantine.note("r1", "north/new")
    drops = [drop(0, "disagreed"), drop(1, "disagreed")]
    recorded = quarantine.recorded(before, drops)
    after = Counters(disagreed=recorded)
    assert len(recorded) == AGENTS_MAX
    assert after.refuses("west/refused")
    assert (recorded["east/0500"], "north/new" in recorded) == (2, False)
    assert list(recorded) == sorted(recorded)
