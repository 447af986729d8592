"""The systemd units: accepted without a word, complete, and of one mind with the supervisor of `headway up`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.deploy.children import DRAIN_S, Rank
from headway.deploy.cli.options import SERVICES
from headway.deploy.supervisor import FINAL_CODES

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
COMMON = UNITS / "headway-.service.d" / "common.conf"
RANKS = {
    "trainer": Rank.TRAINER,
    "dispatcher": Rank.DISPATCHER,
    "agent": Rank.AGENT,
    "engine": Rank.ENGINE,
    "sandbox": Rank.SANDBOX,
    "relay": Rank.RELAY,
}


def settings(path: Path) -> dict[str, list[str]]:
    """key -> every value of a unit file."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if re.match(r"[A-Za-z]+=", line):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def unit_of(service: str) -> Path:
    [path] = [*UNITS.glob(f"headway-{service}.service"), *UNITS.glob(f"headway-{service}@.service")]
    return path


def verify(folder: Path) -> str:
    units = sorted(str(path) for path in folder.iterdir() if path.is_file())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units where they would lie, their programs replaced by one that every machine has."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    shutil.copytree(UNITS, tmp_path / "system")
    for path in (tmp_path / "system").glob("*.service"):
        path.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
    return tmp_path / "system"


def test_systemd_has_nothing_to_say_about_the_units(installed: Path) -> None:
    assert verify(installed) == ""


@pytest.mark.parametrize("wrong", ["ProtectSystm=strict", "TimeoutStopSec=soon", "Restart=maybe"])
def test_a_wrong_key_or_value_would_be_seen(installed: Path, wrong: str) -> None:
    with (installed / "headway-trainer.service").open("a") as file:
        file.write(f"\n[Service]\n{wrong}\n")
    assert "headway-trainer.service" in verify(installed)


def test_every_service_has_a_unit_and_the_command_that_it_names() -> None:
    for service in (*SERVICES, "engine"):
        [start] = settings(unit_of(service))["ExecStart"]
        assert start.split()[:2] == ["/opt/headway/bin/headway", service]


def test_what_no_restart_can_mend_is_final_and_the_rest_is_restarted() -> None:
    common = settings(COMMON)
    assert {int(code) for code in common["RestartPreventExitStatus"][0].split()} == FINAL_CODES
    assert common["Restart"] == ["on-failure"]
    assert common["Type"] == ["notify"]
    assert int(common["WatchdogSec"][0]) >= 30


def test_a_drain_has_at_least_the_time_that_the_local_supervisor_gives() -> None:
    for service, rank in RANKS.items():
        assert int(settings(unit_of(service))["TimeoutStopSec"][0]) >= DRAIN_S[rank]
    assert settings(COMMON)["KillMode"] == ["mixed"]


def test_the_drop_in_overrides_nothing_that_a_unit_says() -> None:
    """A drop-in is read after its unit, so a key in both would silently win over the unit."""
    common = settings(COMMON).keys() - {"Environment", "EnvironmentFile", "After", "Wants", "Documentation"}
    for path in UNITS.glob("headway-*.service"):
        assert not common & settings(path).keys(), path.name


def test_the_sandbox_has_a_ceiling_and_keeps_what_its_boxes_need() -> None:
    unit = settings(unit_of("sandbox"))
    assert {"MemoryMax", "TasksMax"} <= unit.keys()
    assert "RestrictNamespaces" not in unit
    assert unit["ProtectKernelTunables"] == ["no"]
