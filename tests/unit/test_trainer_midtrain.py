import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.kernels import hf
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, InputError
from headway.schemas.sections import AgentConfig, MidtrainConfig, ModelSection, RunConfig
from headway.schemas.vocab import BOS, encode
from headway.trainer import midtrain
from headway.trainer.corpus import code_windows, draw, read_sessions, stdlib_files

TINY = Config(
    run=RunConfig(seed=3),
    model=ModelSection(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    ),
    agent=AgentConfig(max_session_tokens=64),
    midtrain=MidtrainConfig(
        pretrain_steps=6,
        pretrain_tokens_per_step=256,
        pretrain_bytes=20_000,
        sequence_tokens=32,
        sft_steps=8,
        sft_sessions_per_step=6,
        warmup_steps=2,
        learning_rate=2e-2,
        checkpoint_every=3,
        threads=1,
    ),
)


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    lines = [
        {"segments": [["fix f.py\n>", False], [f"w x*{n}\n", True], ["ok\n>", False], ["s\n", True]]} for n in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(sessions: Path, out: Path, config: Config = TINY) -> list[dict[str, object]]:
    reports: list[dict[str, object]] = []
    midtrain.run_midtrain(config, sessions, out, reports.append)
    return reports


def test_mid_training_learns_and_leaves_a_bf16_model_folder(sessions: Path, tmp_path: Path) -> None:
    reports = run(sessions, tmp_path / "base")
    assert [r["phase"] for r in reports] == ["pretrain"] * 6 + ["sft"] * 8 + ["done"]
    assert [r["step"] for r in reports] == [*range(1, 15), 14]
    losses = [float(r["loss"]) for r in reports[:-1]]  # type: ignore[arg-type]
    assert losses[-1] < losses[6] - 0.5
    model, weights = hf.load(tmp_path / "base")
    assert model.vocab_size == 260
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert not (tmp_path / "base.partial").exists()


CHILD = """
import os, pickle, signal, sys
from pathlib import Path
from headway.schemas.config import Config
from headway.trainer.midtrain import run_midtrain
def report(d):
    if d["step"] == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
run_midtrain(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), report)
"""


@pytest.mark.parametrize("killed_at", [2, 5, 11])
def test_killed_and_started_again_it_ends_with_the_same_bits(sessions: Path, tmp_path: Path, killed_at: int) -> None:
    run(sessions, tmp_path / "whole")
    args = [TINY.model_dump_json(), str(sessions), str(tmp_path / "killed"), str(killed_at)]
    done = subprocess.run([sys.executable, "-P", "-c", CHILD, *args], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -9
    reports = run(sessions, tmp_path / "killed")
    assert reports[0]["step"] == killed_at // 3 * 3 + 1
    assert hf.load(tmp_path / "killed")[0] == hf.load(tmp_path / "whole")[0]
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_finished_folder_is_kept_and_another_recipe_is_refused(sessions: Path, tmp_path: Path) -> None:
    run(sessions, tmp_path / "base")
    assert run(sessions, tmp_path / "base") == [{"phase": "done", "step": 14, "cached": True}]
    other = TINY.model_copy(update={"run": RunConfig(seed=4)})
    with pytest.raises(ConfigError, match="another recipe"):
        run(sessions, tmp_path / "base", other)
    sessions.write_text(sessions.read_text() * 2)
    with pytest.raises(ConfigError, match="another recipe"):
        run(sessions, tmp_path / "base")


def test_only_trained_segments_are_targets(sessions: Path) -> None:
    picked = read_sessions(sessions, 64)[:3]
    batch = midtrain.make_batch(picked)
    width = batch.token_ids_BT.shape[1]
    assert batch.targets_N.tolist() == [t for n in range(3) for t in encode(f"w x*{n}\ns\n")]
    for row, target in zip(batch.rows_N.tolist(), batch.targets_N.tolist(), strict=True):
        assert picked[row // width].token_ids[row % width + 1] == target
    assert batch.token_ids_BT[:, 0].tolist() == [BOS] * 3


def test_a_window_holds_bytes_of_one_file_and_begins_with_bos(tmp_path: Path) -> None:
    for name, size in (("a.py", 25), ("b.py", 9), ("c.py", 31)):
        (tmp_path / name).write_bytes(name[0].encode() * size)
    windows = code_windows([tmp_path / n for n in ("a.py", "b.py", "c.py")], 11, 10_000)
    assert [w.token_ids.tolist() for w in windows] == [[BOS] + [ord(c)] * 10 for c in "aaccc"]
    assert windows[0].trained.tolist() == [False] + [True] * 10
    assert len(code_windows([tmp_path / n for n in ("a.py", "b.py", "c.py")], 11, 30)) == 3
    with pytest.raises(InputError, match="no code"):
        code_windows([tmp_path / "b.py"], 11, 10_000)


def test_the_corpus_is_library_code_in_an_order_made_of_names(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "test/c.py", "pkg/tests/d.py", "site-packages/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert {p.name for p in stdlib_files(tmp_path)} == {"a.py", "b.py"}
    real = stdlib_files()
    assert len(real) > 100
    assert real == stdlib_files()
    assert real != sorted(real)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: not a session"),
        (b'{"segments": [["a"]]}', "line 2: not a session"),
        (b'{"segments": [["a", 1]]}', "line 2: not a session"),
        (b'{"segments": [["a", false]]}', "line 2: 2 tokens, 0 of them trained"),
        (b'{"segments": [["' + b"a" * 64 + b'", true]]}', "line 2: 65 tokens"),
        (b"[" * 100_000, "line 2: not a session"),
    ],
)
def test_a_line_that_is_no_session_is_refused_by_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"segments": [["a", true]]}\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        read_sessions(path, 64)


def test_each_epoch_reads_every_item_once_and_any_step_can_be_asked_for_alone() -> None:
    steps = [draw(10, 4, step, seed=1) for step in range(5)]
    flat = [i for step in steps for i in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert draw(10, 4, 3, seed=1) == steps[3]
    assert draw(10, 4, 3, seed=2) != steps[3]
    assert len(draw(3, 7, 0, seed=1)) == 7
