"""Ed25519 keys and signatures. A signature covers bytes exactly as they travel."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from headway.schemas.errors import ConfigError, WireError

KEY_BYTES = 32
SIGNATURE_BYTES = 64


def create_key(path: Path) -> None:
    """Write a new private key (32 raw bytes, mode 0600) unless `path` exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate().private_bytes_raw()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key)


def load_key(path: Path) -> bytes:
    """Read a private key. Raises ConfigError naming the path."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"no signing key at {path}", why=str(error), hint="`headway up` makes keys") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(key)} bytes, a signing key has {KEY_BYTES}")
    return key


def public_key(private_key: bytes) -> bytes:
    """The 32-byte public half."""
    return Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def sign(private_key: bytes, payload: bytes) -> bytes:
    """A 64-byte signature."""
    return Ed25519PrivateKey.from_private_bytes(private_key).sign(payload)


def verify(public_key_bytes: bytes, payload: bytes, signature: bytes) -> None:
    """Raise WireError("bad_signature") unless `signature` is the key's over `payload`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_bytes).verify(signature, payload)
    except (InvalidSignature, ValueError):
        raise WireError(
            "bad_signature",
            f"a signature over {len(payload)} bytes does not verify",
            why="the bytes were changed, or another key signed them",
        ) from None
