"""The `headway` command as a user meets it: what it prints and with which code it exits."""

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgpack
import numpy as np
import pytest
import structlog

from headway.deploy.cli import main as cli
from headway.deploy.cli.decode import decode
from headway.deploy.cli.options import parser
from headway.deploy.record import selection_of
from headway.schemas.config import Config, load_config
from headway.schemas.errors import ConfigError, InputError
from headway.schemas.ledger import CHAIN_START, Open, Record, seal_record
from headway.schemas.messages import (
    BUS_MESSAGES,
    Applied,
    Dead,
    Event,
    Rollout,
    Signed,
    Stamp,
    Task,
    TrainerStamp,
    Verdict,
    WeightsAnnounced,
)
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import Message, pack

DIGEST = "ab" * 32
V1 = Version(0, 1)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- config ----------------------------------------------------------------------------------------------


def test_config_check_accepts_a_valid_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nname = 'mine'\n")
    code, out, err = run(capsys, "config", "check", "--config", str(tmp_path / "run.toml"))
    assert (code, err) == (0, "")
    assert "valid; run mine" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run\n", "is not TOML"),
        ("[run]\nseeed = 1\n", "did you mean run.seed?"),
        ("[grpo]\nlearning_rate = 'big'\n", "grpo.learning_rate = big"),
        ("[staleness]\nmax_lag = 0\nswap_slack = 1\n", "staleness.swap_slack is above"),
        ("[run]\nseed = 99999999999999999999\n", "run.seed = 99999999999999999999"),
        ("[model]\nnum_attention_heads = 3\n", "a multiple of model.num_key_value_heads"),
        ("[model]\nhead_dim = 33\n", "model.head_dim must be even"),
        ("[model]\nnum_experts_per_tok = 9\n", "is above model.num_experts"),
        ("[model]\nrope_theta = -1.0\n", "model.rope_theta = -1.0"),
        (f"a = {'[' * 50_000}", "is not TOML"),
    ],
)
def test_a_bad_config_is_one_clear_block_and_exit_code_64(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    code, out, err = run(capsys, "config", "check", "--config", str(tmp_path / "run.toml"))
    assert (code, out) == (64, "")
    assert err.startswith("headway: ")
    assert expected in err
    assert "Traceback" not in err


def test_a_missing_config_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "up", "--config", str(tmp_path / "none.toml"))
    assert code == 64
    assert str(tmp_path / "none.toml") in err
    assert "  try: without --config" in err


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("run.seed=7", ("run", "seed"), 7),
        ("grpo.learning_rate=1e-4", ("grpo", "learning_rate"), 1e-4),
        ("run.lockstep=false", ("run", "lockstep"), False),
        ("run.name=other", ("run", "name"), "other"),
        ('run.name="quoted"', ("run", "name"), "quoted"),
        ('eval.at=["end"]', ("eval", "at"), ["end"]),
        ("regions.east.agents=2", ("regions", "east", "agents"), 2),
    ],
)
def test_set_overrides_by_toml_value_and_show_reads_back(
    capsys: pytest.CaptureFixture[str], item: str, key: tuple[str, ...], value: object
) -> None:
    code, out, _ = run(capsys, "config", "show", "--set", item)
    found = tomllib.loads(out)
    for part in key:
        found = found[part]
    assert (code, found) == (0, value)


@pytest.mark.parametrize("item", ["seed=7", "run.seed", "run.seed=1\n[bus]", "run.seed=[", "run.seed=7 # x\nurl=1"])
def test_a_malformed_set_is_refused(capsys: pytest.CaptureFixture[str], item: str) -> None:
    code, _, err = run(capsys, "config", "show", "--set", item)
    assert code == 64
    assert "--set" in err


def test_shown_config_is_a_file_that_means_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    odd = 'store.url="s3://b\\\\x/\\u007f\\"é"'
    _, out, _ = run(capsys, "config", "show", "--set", odd, "--set", "regions.east.engine_urls=['http://e:1']")
    (tmp_path / "run.toml").write_text(out)
    again = load_config(tmp_path / "run.toml")
    assert again.store.url == 's3://b\\x/\x7f"é'
    assert again.regions["east"].engine_urls == ["http://e:1"]
    assert again.grpo == Config().grpo


def test_show_origin_names_file_set_and_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nname = 'mine'\n")
    _, out, _ = run(capsys, "config", "show", "--origin", "--config", str(file), "--set", "run.seed=3")
    assert f'name = "mine"  # {file}' in out
    assert "seed = 3  # --set" in out
    assert "steps = 70  # default" in out


# -- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("fly",), ("engine",), ("engine", "--port", "x"), ("config",), ("tasks", "build", "nothing")]
)
def test_a_wrong_command_line_is_exit_code_64(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 64
    assert "--help" in err


@pytest.mark.parametrize("command", ["audit", "eval", "export", "summary"])
def test_an_unknown_run_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, command, "nowhere")
    assert code == 64
    assert "there is no run 'nowhere'" in err


def test_eval_of_a_folder_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "run.toml").write_text("")
    code, _, err = run(capsys, "eval", "demo", "--base", str(tmp_path / "none"))
    assert code == 64
    assert "is no model" in err


def test_a_service_without_a_bus_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "headway.deploy.cli.main", "dispatcher", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={}, timeout=60, check=False)
    assert done.returncode == 64
    assert "no NATS address" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["check", "show"])
def test_a_reader_that_has_enough_ends_a_command_quietly(verb: str) -> None:
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "headway.deploy.cli.main", "config", verb]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(written)
    assert (done.returncode, done.stderr) == (141, "")


def test_mid_training_without_sessions_names_what_makes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "midtrain", "--run-dir", str(tmp_path))
    assert code == 65
    assert "`headway tasks build`" in err


def test_the_name_of_an_engine_is_in_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_engine(*_: object, **__: object) -> int:
        bound.update(structlog.contextvars.get_contextvars())
        return 0

    bound: dict[str, object] = {}
    monkeypatch.setattr("headway.rollout_agent.engine.service.run_engine", run_engine)
    monkeypatch.setattr("headway.bus.service.configure_logging", lambda: None)
    with structlog.contextvars.bound_contextvars(service="", instance=""):
        assert cli.main(["engine", "--port", "0", "--name", "engine-7"]) == 0
    assert bound == {"service": "engine", "instance": "engine-7"}


def test_light_commands_never_import_torch() -> None:
    program = (
        "import sys; from headway.deploy.cli import main; import headway.deploy.commands; "
        "assert main.main(['config', 'check']) == 0; assert 'torch' not in sys.modules, 'torch'; "
        "assert 'matplotlib' not in sys.modules, 'matplotlib'"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_error_blocks_escape_what_a_terminal_would_act_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "config", "check", "--config", "a\x1b[31m\u202e.toml")
    assert code == 64
    assert "\x1b" not in err
    assert "\u202e" not in err


# -- decode ----------------------------------------------------------------------------------------------


def every_message() -> list[Message]:
    key = b"\x01" * 32
    trajectory = Trajectory(
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 1, 1, 0], np.uint8),
        logprobs=np.array([0, -1, -2, 0], np.float32),
        spans=[Span(start=1, end=3, version=V1)],
        routes=np.zeros((3, 1, 2), np.uint8),
        route_spans=[Span(start=0, end=3, version=V1)],
        layer_map=[0],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
    )
    verdict = Verdict(
        run="r", rollout_id="g0s0", attempt="a", task_id="t", host="h", workspace_digest=DIGEST, reward=1.0, parts={}
    )
    record = Record(prev=CHAIN_START, term=1, index=0, body=Open(instance="trainer", environment={"torch": "2"}))
    return [
        Task(
            rollout_id="g0s0", purpose="train", env="expr", task_set=DIGEST, task_id="t", group=0, sample=0,
            temperature=1.0, sampling_seed=1, groups_issued=1, eval_blocks_issued=0, last_of_unit=True,
        ),
        Rollout(
            rollout_id="g0s0", attempt="a", purpose="train", outcome="ok", terminal=True, group=0, sample=0,
            task_id="t", task_seq=1, delivery=1, region="east", agent="a", reward=1.0, trajectory=trajectory,
            verdict=Signed.seal(key, pack(verdict)),
        ),
        Stamp(rollout_id="g0s0", attempt="a", spans=[Span(start=1, end=3, version=V1)], tokens=2, head=V1),
        TrainerStamp(
            rollout_id="g0s0", version=V1, outcome="trained", lag_min=0, lag_max=1, tokens_trained=2, tokens_masked=0
        ),
        WeightsAnnounced(
            version=V1, parent=None, manifest=DIGEST, root=DIGEST, delta_bytes=1, full_bytes=2, changed_fraction=0.5
        ),
        Applied(
            region="east", agent="a", version=V1, root=DIGEST, fetched_bytes=1, fetch_ms=1.0, stage_ms=1.0,
            pause_ms=1.0, in_flight=0,
        ),
        Event(service="trainer", instance="t", name="step", fields={"step": 1}),
        Dead(reason="invalid", detail="d", subject="s", stream_seq=1, original_headers={}, body=b"\xff\x00"),
        seal_record(record, V1, key),
    ]  # fmt: skip


@pytest.mark.parametrize("message", every_message(), ids=lambda message: message.KIND)
def test_every_kind_of_message_decodes_to_json_with_its_fields(message: Message) -> None:
    shown = json.loads(decode(io.BytesIO(pack(message))))
    assert set(shown) == set(type(message).model_fields)
    if isinstance(message, Rollout):
        assert shown["trajectory"]["token_ids"] == "int32[4] [0 1 2 3]"
        assert shown["verdict"]["payload"]["reward"] == 1.0


def test_the_decode_examples_cover_every_kind_of_the_bus() -> None:
    assert {type(message) for message in every_message()} >= set(BUS_MESSAGES.values())


NESTED = b"\x91" * 1000 + b"\x90"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81", NESTED, msgpack.packb({"a": 1}) + b"x"])
def test_decode_refuses_what_is_no_body(body: bytes) -> None:
    with pytest.raises(InputError):
        decode(io.BytesIO(body))


def test_decode_shows_odd_values_without_passing_control_characters_on() -> None:
    odd = {"text": "\x1b[2J\x9b", "ext": msgpack.ExtType(3, b"x"), 5: msgpack.Timestamp(1), "inf": float("inf")}
    shown = decode(io.BytesIO(msgpack.packb(odd)))
    assert shown.isascii()
    assert "\x1b" not in shown


def test_decode_reads_standard_input_and_exits_65_for_garbage() -> None:
    command = [sys.executable, "-P", "-m", "headway.deploy.cli.main", "decode"]
    good = subprocess.run(command, input=msgpack.packb({"a": 1}), capture_output=True, timeout=60, check=False)
    assert (good.returncode, json.loads(good.stdout)) == (0, {"a": 1})
    bad = subprocess.run(command, input=b"\xc1", capture_output=True, timeout=60, check=False)
    assert bad.returncode == 65
    assert b"no message body" in bad.stderr


# -- drain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0)])
def test_a_drains_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parser().parse_args(["drain", "demo", "agent", "--within", text]).within == seconds


@pytest.mark.parametrize("text", ["0s", "-1", "soon", "5d", "1e3", ""])
def test_a_drain_within_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "drain", "demo", "agent", f"--within={text}")
    assert code == 64
    assert "is no time, such as 90s or 5m" in error


def test_a_hub_without_a_port_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "keys", "init", "--out", str(tmp_path / "keys"), "--hub", "nats://hub")
    assert code == 64
    assert "host:port" in error


# -- what cannot be meant --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engine", "--port", "65536"), "65536 is no port"),
        (("engine", "--port", "-1"), "'-1' is no count"),
        (("tasks", "build", "expr", "--sessions", "-5"), "'-5' is no count"),
        (("tasks", "build", "expr", "--seed", "1e3"), "'1e3' is no count"),
        (("weights", "plan", "--params", "nan"), "is not above 0"),
        (("weights", "plan", "--params", "1e400"), "is above 1e+100"),
        (("weights", "plan", "--changed", "1.5"), "--changed 1.5"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (64, "")
    assert expected in err


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "x"])
def test_rates_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, rate: object) -> None:
    _, out, _ = run(capsys, "weights", "plan", "--json", "--params", "1e9")
    found = json.loads(out)
    found["rates"]["encode"] = rate
    (tmp_path / "rates.json").write_text(json.dumps(found))
    code, _, err = run(capsys, "weights", "plan", "--rates", str(tmp_path / "rates.json"))
    assert code == 64
    assert "holds no rates" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--kind", "rollouts"), "no message is of that kind"), (("--steps", "1..99999999999999999999"), "is empty")],
)
def test_a_selection_that_can_select_nothing_is_refused(options: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError, match=r"--(kind|steps)") as refused:
        selection_of(parser().parse_args(["record", "demo", *options]))
    assert expected in str(refused.value)


@pytest.mark.parametrize("words", [("keys", "init"), ("tasks", "build", "repo")])
def test_a_folder_that_is_a_file_is_an_error_for_a_person(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    code, _, err = run(capsys, *words, "--out", str(tmp_path / "file"))
    assert code == 69
    assert str(tmp_path / "file") in err
    assert "try: another path" in err
