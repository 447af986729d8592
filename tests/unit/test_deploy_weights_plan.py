"""The plan's arithmetic, on rates that are round numbers."""

import json
import math
from dataclasses import replace

import pytest

from headway.deploy.cli import main as cli
from headway.deploy.weights_plan import GOODPUT, Rates, Shape, measure, plan
from headway.weight_sync.shard import RAW_BYTES_MAX

RATES = Rates(
    encode=2e9,
    stage=8e9,
    apply=4e9,
    checksum=8e9,
    sha256=1e99,
    copy=8e9,
    delta_fraction=0.01,
    anchor_fraction=0.7,
)
SHAPE = Shape(
    model_bytes=80e9,
    ranks=10,
    rank_cores=2.0,
    rank_up=1e9,
    regions=4,
    region_down=1e9,
    rtt_s=0.1,
    agents=2,
    hosts=5,
    host_cores=4.0,
    lan=1e99,
)


def test_every_stage_is_bytes_over_its_rate_and_round_trips():
    found = plan(SHAPE, RATES)
    assert found.delta_bytes == pytest.approx(0.8e9)
    assert found.origin_egress_bytes == pytest.approx(3.2e9)
    assert found.encode_s == pytest.approx(8e9 / 2e9 / 2 + 8e9 / 8e9 / 2)
    assert found.upload_s == pytest.approx(0.08 + 0.2)
    assert found.published_s == found.encode_s
    assert found.stage_s == pytest.approx(16e9 / 8e9 / 4)
    assert found.apply_s == found.pause_s == pytest.approx(16e9 / 4e9 / 4)
    assert 0.8 + 4 * 0.1 < found.download_s < 0.85 + 14 * 0.1
    shards = math.ceil(80e9 / RAW_BYTES_MAX)
    assert found.served_s == pytest.approx(0.15 + found.download_s + 0.5 / shards + 1.0)
    assert found.snapshot_s == pytest.approx(0.15 + 160.0 / GOODPUT + 1.0)


@pytest.mark.parametrize(
    ("change", "slower"),
    [({"region_down": 1e8}, "download_s"), ({"rtt_s": 0.3}, "announce_s"), ({"host_cores": 1.0}, "pause_s")],
)
def test_less_of_anything_takes_longer(change, slower):
    before, after = plan(SHAPE, RATES), plan(replace(SHAPE, **change), RATES)
    assert getattr(after, slower) > getattr(before, slower)
    assert after.served_s > before.served_s


def test_open_connections_save_two_round_trips_and_the_manifest_of_the_parent_a_third():
    assert plan(SHAPE, RATES).download_s - plan(replace(SHAPE, warm=True), RATES).download_s == pytest.approx(0.3)


def test_rates_are_measured_on_the_codec_that_ships():
    rates = measure(0.01, 4 << 20)
    assert 0.002 < rates.delta_fraction < 0.02
    assert 0.5 < rates.anchor_fraction < 0.9
    assert min(rates.encode, rates.stage, rates.apply, rates.checksum, rates.sha256, rates.copy) > 1e6


def test_the_command_prints_a_plan_and_takes_rates_of_another_machine(tmp_path, capsys):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": {name: getattr(RATES, name) for name in RATES.__dataclass_fields__}}))
    assert cli.main(["weights", "plan", "--params", "4e10", "--rates", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["delta_bytes"] == pytest.approx(0.8e9)
    assert cli.main(["weights", "plan", "--rates", str(file)]) == 0
    assert "100 times smaller" in capsys.readouterr().out
    file.write_text("[]")
    assert cli.main(["weights", "plan", "--rates", str(file)]) == 64
    assert cli.main(["weights", "plan", "--params", "0", "--rates", str(tmp_path / "none")]) == 64
