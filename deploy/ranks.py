"""`headway trainer` on several ranks: torchrun's agent keeps them, here or wherever torchrun was called.

The ranks of one machine speak over loopback. When one ends, the agent ends the others and this process, so that whoever
supervises it starts all of them again; nothing is restarted here. A rank outlives neither the agent nor the signal that
the agent passes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError

DRAIN_S = 55
"""Below what the supervisor and the systemd unit grant the trainer."""
LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
MODULE = "headway.deploy.cli.main"


def run(config: Config, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Start the ranks that `config` asks for, each with `arguments`, or be the one that `environ` says; the exit code.

    None when this process is rank 0, or the only one, and has the trainer's service to run. Raises UnavailableError.
    """
    if "RANK" not in environ:
        return launch(config.trainer.ranks, arguments) if config.trainer.ranks > 1 else None
    if "TORCHELASTIC_RUN_ID" in environ:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if environ["RANK"] == "0":
        return None
    from headway.trainer.follower import run_follower

    run_follower(config)


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """`headway` with `arguments` as that many processes under torchrun's agent, until the first one ends.

    Returns what the rank ended with that knows why, 0 after a drain. Raises UnavailableError when none says.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        shutdown_timeout=DRAIN_S,
    )
    try:
        elastic_launch(settings, sys.executable)("-P", "-m", MODULE, *arguments)
    except SignalException:
        return 0
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        for code in codes.values():
            if code > 0 and code != UnavailableError.exit_code:
                return code
        raise UnavailableError(
            f"ranks of the trainer ended: {', '.join(f'rank {rank} with {code}' for rank, code in codes.items())}",
            why="killed, or without a service they need",
            hint="their log is above; all ranks start again together",
        ) from None
    return 0
