"""Names of runs, regions, agents, groups and rollouts, and the seed that a rollout samples with."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated

from pydantic import StringConstraints

from headway.schemas.errors import WireError

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def check_id(value: str) -> str:
    """Return `value` when it is a legal id, else raise WireError("bad_id")."""
    if not ID_PATTERN.fullmatch(value):
        raise WireError(
            "bad_id",
            f"{value[:80]!r} is not an id",
            why="ids become parts of subjects and object keys",
            hint="use 1 to 64 of letters, digits, '_' and '-'",
        )
    return value


Id = Annotated[str, StringConstraints(pattern=f"^{ID_PATTERN.pattern}$")]
Digest = Annotated[str, StringConstraints(pattern=f"^{DIGEST_PATTERN.pattern}$")]


def train_rollout_id(group: int, sample: int) -> str:
    """The id of sample `sample` of training group `group`; the same for every attempt at it."""
    return f"g{group:07d}s{sample:03d}"


def eval_rollout_id(block: int, index: int) -> str:
    """The id of rollout `index` of evaluation block `block` (one block a pinned version)."""
    return f"e{block:03d}r{index:06d}"


def attempt_nonce() -> str:
    """A fresh name for one attempt at a rollout; two agents that hold one task never share it."""
    return secrets.token_hex(8)


def sampling_seed(run_seed: int, rollout_id: str) -> int:
    """The 63-bit seed of a rollout's per-token randomness: a pure function of the run's seed and the id."""
    return _seed(f"{run_seed}/{rollout_id}")


def segment_seed(rollout_seed: int, segment: int) -> int:
    """The seed of a rollout's segment: positions begin again in each, and its draws must not repeat those before."""
    return _seed(f"{rollout_seed}/segment/{segment}") if segment else rollout_seed


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
