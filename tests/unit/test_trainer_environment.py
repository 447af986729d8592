"""Promise: what bits depend on is named when it changed, and the code's own changes of arithmetic are part of it."""

from headway.kernels.numerics import ARITHMETIC
from headway.trainer import environment
from headway.trainer.reexecute import environment_changes


def test_a_run_from_before_the_arithmetic_changed_was_on_another_environment() -> None:
    here = environment.describe()
    before = {key: value for key, value in here.items() if key != "arithmetic"}
    assert environment_changes(here, here) == []
    assert environment_changes(before, here) == [f"arithmetic 1 -> {ARITHMETIC}"]
    assert environment_changes({}, here) == []


def test_another_commit_or_number_of_ranks_is_no_other_environment() -> None:
    here = environment.describe()
    assert environment_changes(here | {"mesh": "2"}, here) == []
    assert environment_changes(here | {"commit": "another", "code": "another"}, here) == []
    assert environment_changes(here | {"threads": "99"}, here) == [f"threads 99 -> {here['threads']}"]
