"""runs/<run>/: where everything of a run on one machine lies, who may use it, and whether it may go on."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.bus.failpoints import failpoint
from headway.deploy import keys
from headway.deploy.settings import differences, to_toml
from headway.schemas import signing
from headway.schemas.config import Config, load_config
from headway.schemas.errors import ConfigError, UnavailableError

LOGIN = ("HEADWAY_NATS_USER", "HEADWAY_NATS_PASSWORD", "HEADWAY_NATS_TOKEN")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run. Absolute, so that children find them from anywhere."""

    path: Path

    @classmethod
    def of(cls, config: Config, run_dir: Path | None) -> RunFolder:
        return cls((run_dir or Path("runs") / config.run.name).absolute())

    @classmethod
    def existing(cls, run: str) -> RunFolder:
        """The folder of a run given by name or by path. Raises ConfigError."""
        for path in (Path("runs") / run, Path(run)):
            if (path / "run.toml").is_file():
                return cls(path.absolute())
        raise ConfigError(
            f"there is no run {run!r}", why="neither it nor runs/ holds a run.toml by that name", hint="ls runs"
        )

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def url_file(self) -> Path:
        """Holds the address of the embedded server while it runs."""
        return self.nats / "url"

    def config(self) -> Config:
        return load_config(self.config_file)

    def store_url(self, config: Config) -> str:
        return os.environ.get("HEADWAY_STORE_URL") or config.store.url or str(self.path / "store")

    def token(self) -> str:
        """The bus token of a run made before there were roles, else empty."""
        file = self.keys / "nats.token"
        return file.read_text().strip() if file.exists() else ""

    def environment(self, role: str, config: Config) -> dict[str, str]:
        """A role's keys and its login on the bus: this process's own where the environment has one, else the run's.

        A server that the run does not embed has its own users, so the run's are none of its.
        """
        folder = self.keys if self.token() else self.keys / role
        login = {name: os.environ[name] for name in LOGIN if os.environ.get(name)}
        if not login and not (config.bus.url or os.environ.get("HEADWAY_NATS_URL")):
            token = self.token()
            made = self.keys.exists()  # not yet for a dry run
            login = {"HEADWAY_NATS_TOKEN": token} if token else keys.credentials(self.keys, role) if made else {}
        return {"HEADWAY_KEYS_DIR": str(folder), **login}

    def auth_block(self, run: str) -> str:
        """What the embedded server's configuration says about users; empty where a token does."""
        return "" if self.token() else keys.auth_block(self.keys, run)

    def trainer_public_key(self) -> bytes | None:
        """What ledger signatures are checked with; None where this machine does not hold the trainer's keys."""
        for file in (self.keys / "trainer" / "trainer.key", self.keys / "trainer.key"):
            if file.exists():
                return signing.public_key(signing.load_key(file))
        return None

    def prepare(self, config: Config) -> None:
        """Make the folder and its secrets, and write the resolved config.

        Raises ConfigError when the run exists with another shared config.
        """
        self.check_same(config)
        for folder in (self.path, self.keys, self.logs, self.nats, self.tasks):
            folder.mkdir(parents=True, exist_ok=True)
        self.keys.chmod(0o700)
        if not self.token():
            keys.create(self.keys, config.run.name)
        fresh = self.config_file.with_suffix(".new")
        fresh.write_text(to_toml(config))
        failpoint("config.rename.before")
        fresh.replace(self.config_file)
        failpoint("config.rename.after")

    def spend(self, wall_s: float) -> float:
        """Add `wall_s` to the time that all `headway up` of this run took, and return the sum."""
        file = self.path / "wall_s"
        total_s = wall_s + (float(file.read_text()) if file.exists() else 0.0)
        file.write_text(f"{total_s:.3f}\n")
        return total_s

    def check_same(self, config: Config) -> None:
        """Raise ConfigError when the run exists with another shared config."""
        if not self.config_file.exists():
            return
        before = self.config()
        if before.shared_digest() != config.shared_digest():
            raise ConfigError(
                f"run {config.run.name!r} exists with another config",
                why="\n".join(differences(before.shared(), config.shared())),
                hint="take the old values, another name (--set run.name=NAME), or --fork NAME to go on under that name",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run. Raises UnavailableError when another process does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UnavailableError(
                    f"run folder {self.path} is in use",
                    why=f"process {file.read(20).strip() or '?'} holds it",
                    hint="stop that one first, or start under another name (--set run.name=...)",
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
