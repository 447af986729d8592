"""Every secret of a run, in a folder for each role, so that a process is given its own and no other's.

    <role>/env            HEADWAY_NATS_USER and _PASSWORD; agent and engine also HEADWAY_ENGINE_KEY,
                          agent and relay also HEADWAY_RELAY_TOKEN
    trainer/trainer.key   signs the ledger and the manifests
    trainer/sandbox.pub   what the trainer checks verdicts with
    sandbox/sandbox.key   signs verdicts
    nats/accounts.conf    for nats.conf to include; made from the passwords each time
    nats/leaf.conf        the same for a region's nats-server, where the hub's address is given

A second call makes what is missing and overwrites no secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from headway.deploy.roles import accounts, leaf, roles
from headway.schemas import signing
from headway.schemas.errors import ConfigError

SECRET_BYTES = 24
ENV, ENGINE_KEY, USER, PASSWORD = "env", "HEADWAY_ENGINE_KEY", "HEADWAY_NATS_USER", "HEADWAY_NATS_PASSWORD"
RELAY_TOKEN = "HEADWAY_RELAY_TOKEN"


def create(folder: Path, run: str, hub: str = "") -> None:
    """Make the folder; `hub` is host:port of the server that regions connect to. Raises ConfigError."""
    if hub and not re.fullmatch(r"[A-Za-z0-9.-]+:[0-9]{1,5}", hub):
        raise ConfigError(
            f"--hub {hub[:80]!r} is no address", hint="host:port of the hub's leafnodes, as hub.example:7422"
        )
    names = [role.name for role in roles(run)]
    for name in (*names, "engine", "nats"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name).chmod(0o700)
    for name in ("trainer", "sandbox"):
        signing.create_key(folder / name / f"{name}.key")
    public = signing.public_key(signing.load_key(folder / "sandbox" / "sandbox.key"))
    _write(folder / "trainer" / "sandbox.pub", public)
    engine_key = _secret(folder / "engine", ENGINE_KEY)
    _write_env(folder / "relay", _login("relay") | {RELAY_TOKEN: secrets.token_urlsafe(SECRET_BYTES)})
    relay_token = credentials(folder, "relay")[RELAY_TOKEN]
    for name in names:
        more = {ENGINE_KEY: engine_key, RELAY_TOKEN: relay_token} if name == "agent" else {}
        _write_env(folder / name, _login(name) | more)
    _replace(folder / "nats" / "accounts.conf", auth_block(folder, run))
    if hub:
        _replace(folder / "nats" / "leaf.conf", leaf(run, _passwords(folder, run), hub))


def _replace(conf: Path, text: str) -> None:
    fresh = conf.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    _write(fresh, text.encode())
    fresh.replace(conf)


def _login(name: str) -> dict[str, str]:
    return {USER: name, PASSWORD: secrets.token_urlsafe(SECRET_BYTES)}


def auth_block(folder: Path, run: str) -> str:
    """What nats.conf says about accounts and users. Raises ConfigError."""
    return accounts(run, _passwords(folder, run))


def _passwords(folder: Path, run: str) -> dict[str, str]:
    return {role.name: credentials(folder, role.name)[PASSWORD] for role in roles(run)}


def credentials(folder: Path, role: str) -> dict[str, str]:
    """A role's environment. Raises ConfigError."""
    file = folder / role / ENV
    try:
        return dict(line.split("=", 1) for line in file.read_text().splitlines())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no credentials in {file}", why=str(error)[:200], hint=f"headway keys init --out {folder}"
        ) from None


def _secret(folder: Path, name: str) -> str:
    """The secret of that name in the folder's env, made if there is none."""
    _write_env(folder, {name: secrets.token_urlsafe(SECRET_BYTES)})
    return credentials(folder.parent, folder.name)[name]


def _write_env(folder: Path, lines: dict[str, str]) -> None:
    _write(folder / ENV, "".join(f"{key}={value}\n" for key, value in lines.items()).encode())


def _write(path: Path, data: bytes) -> None:
    """Create with mode 0600; leave a file that exists."""
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
