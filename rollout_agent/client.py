"""A client of one engine, ours or SGLang. What it answers is checked in `replies`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import ipaddress
import json
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import structlog

from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.replies import Completion, Load, Sampling, read_completion, read_load
from headway.schemas.errors import ConfigError, InputError, UnavailableError, WireError
from headway.schemas.version import Version

REPLY_BYTES_MAX = 64 << 20
LARGE_BYTES = 1 << 20
"""Replies above it hold the routes of long sessions. A thread reads them: it takes a tenth of a second."""
CONTROL_TIMEOUT_S = 30.0
UPDATE_TIMEOUT_S = 600.0
PROBE_TIMEOUT_S = 20.0
HEALTH_TIMEOUT_S = 10.0
"""How long an engine may take to say what it serves before it counts as hung."""
SGLANG_TESTED = ("0.5.23",)
"""What the contract suite ran against. Others of the same 0.x series are warned about, further ones refused."""
LOADER = "headway.weight_sync.sglang_loader.load"
"""Our custom weight loader, as `--custom-weight-loader` and `load_format` name it."""
log = structlog.get_logger()


class EngineTrouble(UnavailableError):
    """The engine cannot be reached, is busy, restarted, or failed: nobody's fault but the infrastructure's."""


class EngineBusy(EngineTrouble):
    """The engine says that it cannot take a request now (503)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Who answers. `tp` and `ep` ways of tensor and expert parallelism; `loader`: it takes sparse updates."""

    kind: Literal["headway", "sglang"]
    release: str
    device: str = "cpu"
    tp: int = 1
    ep: int = 1
    loader: bool = False


class EngineClient:
    """One engine at `url`. `http` outlives it. `salt` keeps prefix caches of different weights apart."""

    def __init__(self, http: aiohttp.ClientSession, url: str, shape: ModelShape, *, key: str = "") -> None:
        self.url, self._http, self._shape = url.rstrip("/"), http, shape
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.salt = ""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float, routes_from: int = 0
    ) -> Completion:
        """Sample a continuation of `prompt`; its routes are those of the rows from `routes_from` on.

        Raises EngineTrouble, WireError("bad_engine_reply"), InputError (the engine refused the request).
        """
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self._shape.vocab_size:  # SGLang dies of such an id
            raise InputError(f"a prompt that is empty or has an id outside 0..{self._shape.vocab_size - 1}")
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "sampling_seed": sampling.seed,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": False,  # SGLang would ignore stop_token_ids with it
            },
            "return_logprob": True,
            "return_routed_experts": True,
            **({"routed_experts_start_len": routes_from} if routes_from else {}),
            "rid": rid,
            **({"cache_salt": self.salt} if self.salt else {}),
        }
        reply = await self._call("/generate", body, timeout_s)
        large = 4 * (len(prompt) - routes_from) * self._shape.layers * self._shape.top_k > LARGE_BYTES
        read = functools.partial(read_completion, reply, prompt, sampling, self._shape, routes_from)
        try:
            return await asyncio.to_thread(read) if large else read()
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise WireError(
                "bad_engine_reply", f"{self.url}: a reply that cannot be trusted", why=str(error)[:300]
            ) from None

    async def served(self) -> str | None:
        """The version the engine says it serves; None when it has no weights. Raises EngineTrouble."""
        reply = await self._call("/model_info", None, HEALTH_TIMEOUT_S)  # SGLang is not /ready while paused
        version = reply.get("weight_version")
        return str(version)[:128] if version is not None else None

    async def load(self) -> Load | None:
        """How full it is; None where it does not say. Raises EngineTrouble, WireError("bad_engine_reply")."""
        try:
            reply = await self._call("/v1/loads?include=core", None, HEALTH_TIMEOUT_S)
        except InputError:
            return None
        try:
            return read_load(reply)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError("bad_engine_reply", f"{self.url}: no loads", why=repr(error)[:200]) from None

    async def pause(self, mode: str) -> None:
        await self._call("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        """End a request; its answer then carries what it has."""
        await self._call("/abort_request", {"rid": rid}, CONTROL_TIMEOUT_S)

    async def release_memory(self) -> None:
        """Give weights and KV cache up; it must have no requests. Raises InputError where it cannot, EngineTrouble."""
        await self._call("/release_memory_occupation", {}, UPDATE_TIMEOUT_S)

    async def resume_memory(self) -> None:
        """Take the memory again; what is in it is nothing. Raises InputError, EngineTrouble."""
        await self._call("/resume_memory_occupation", {}, UPDATE_TIMEOUT_S)

    async def resume(self) -> None:
        await self._call("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def identify(self) -> EngineInfo:
        """Who answers at the address. Raises ConfigError for one that may not be used, EngineTrouble."""
        found = await self._call("/server_info", None, CONTROL_TIMEOUT_S)
        if found.get("engine") == "headway":
            return EngineInfo(kind="headway", release="")
        try:
            info = EngineInfo(
                kind="sglang",
                release=str(found["version"])[:40],
                device=str(found["device"])[:20],
                tp=int(found["tp_size"]),
                ep=int(found["ep_size"]),
                loader=LOADER in (found.get("custom_weight_loader") or ()),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.url} is neither Headway's engine nor SGLang", why=repr(error)[:200]) from None
        self._check_release(info)
        if not is_loopback(str(found.get("host"))) and not found.get("admin_api_key"):
            raise ConfigError(
                f"{self.url} listens on {str(found.get('host'))[:60]} without an admin key",
                why="whoever reaches it can replace the weights",
                hint="start SGLang with --admin-api-key and set HEADWAY_ENGINE_KEY, or let it listen on 127.0.0.1",
            )
        return info

    def _check_release(self, info: EngineInfo) -> None:
        if info.release in SGLANG_TESTED:
            return
        tested = ", ".join(SGLANG_TESTED)
        if info.release.rsplit(".", 1)[0] not in {known.rsplit(".", 1)[0] for known in SGLANG_TESTED}:
            raise ConfigError(f"{self.url} runs SGLang {info.release}", why=f"Headway was tested with {tested}")
        log.warning("sglang_untested", url=self.url, release=info.release, tested=tested)

    async def probe(self) -> None:
        """Have one token sampled: an engine may answer questions while its model hangs. Raises EngineTrouble."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        await self._call("/generate", body, PROBE_TIMEOUT_S)

    async def prepare(self, folder: Path, version: Version) -> None:
        """Let our engine read and hash what `update` will ask for, while it serves. Raises EngineTrouble."""
        body = {"model_path": str(folder), "weight_version": str(version)}
        with contextlib.suppress(InputError):  # `update` will be refused too, and its refusal is acted upon
            await self._call("/prepare_weights_from_disk", body, UPDATE_TIMEOUT_S)

    async def update(self, folder: Path, version: Version, *, flush: bool) -> str | None:
        """Load a full or partial checkpoint; the root that our engine proved while it prepared it, if it did.

        Raises InputError when the engine refuses it, EngineTrouble.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush, "load_format": "auto"}
        root = (await self._demand("/update_weights_from_disk", body, f"refused {version}")).get("root")
        return root if isinstance(root, str) else None

    async def update_sparse(self, folder: Path, version: Version, *, flush: bool, ranks: int) -> None:
        """Have our loader take what was staged in `folder`. Whether it did, each rank's result says.

        Without a pause, each of the three calls waits for the running requests. Raises InputError when the engine
        refuses one, EngineTrouble.
        """
        payload = base64.b64encode(_empty_tensor_called(str(folder))).decode()
        body = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": LOADER,
            "weight_version": str(version),
            "flush_cache": flush,
        }
        try:
            await self._demand("/begin_weight_update", {}, "refused to begin an update")
        except InputError:  # an agent that was killed left one open
            await self._demand("/end_weight_update", {}, "refused to end an update")
            await self._demand("/begin_weight_update", {}, "refused to begin an update")
        try:
            await self._demand("/update_weights_from_tensor", body, f"refused {version}")
        finally:
            await self._demand("/end_weight_update", {}, "refused to end an update")

    async def _demand(self, path: str, body: dict[str, Any], refusal: str) -> dict[str, Any]:
        reply = await self._call(path, body, UPDATE_TIMEOUT_S)
        if reply.get("success") is not True:
            raise InputError(f"{self.url} {refusal}", why=str(reply.get("message"))[:300])
        return reply

    async def checksums(self) -> str | list[dict[str, str]]:
        """What the engine holds by its own account: the root, or (SGLang) each rank's fused tensors by checksum.

        Raises EngineTrouble, InputError, WireError("bad_engine_reply").
        """
        reply = await self._call("/weights_checker", {"action": "checksum"}, UPDATE_TIMEOUT_S)
        root = reply.get("root")
        if isinstance(root, str):
            return root
        try:
            ranks = sorted(reply["ranks"], key=lambda rank: int(rank["parallelism_info"][0]["rank"]))
            return [{str(name): str(value) for name, value in rank["checksums"].items()} for rank in ranks]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise WireError("bad_engine_reply", f"{self.url}: no checksums", why=repr(error)[:200]) from None

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, self.url + path, json=body, headers=self._headers) as response,
            ):
                data = await _bounded(response)
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineTrouble(
                f"{self.url}{path} failed", why=repr(error)[:200], hint="is the engine running? see its log"
            ) from None
        try:
            reply = await asyncio.to_thread(json.loads, data) if len(data) > LARGE_BYTES else json.loads(data)
        except (ValueError, RecursionError):
            reply = {"message": data[:200].decode("utf-8", "replace")}
        if status in (400, 401, 404, 405, 413, 422):
            raise InputError(f"{self.url}{path} refused the request", why=str(reply)[:300])
        if status == 503:
            raise EngineBusy(f"{self.url}{path} can take nothing now", why=str(reply)[:300])
        if status != 200 or not isinstance(reply, dict):
            raise EngineTrouble(f"{self.url}{path} answered {status}", why=str(reply)[:300])
        return reply


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(url: str, key: str) -> None:
    """Raise ConfigError for what is no address, or when an engine elsewhere would take weights without a key."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError("it has no http:// or no host")
    except ValueError as error:
        raise ConfigError(
            f"engine {url!r} is no address", why=str(error), hint="http://host:port, several with commas between them"
        ) from None
    if not key and not is_loopback(host):
        raise ConfigError(
            f"engine {url} is on another machine, and there is no key",
            why="whoever reaches it can replace the weights",
            hint="set HEADWAY_ENGINE_KEY to the engine's admin key",
        )


def _empty_tensor_called(name: str) -> bytes:
    """A pickle of [(name, torch.ByteTensor())], opcode by opcode: SGLang reads names and tensors as nothing else."""
    text = name.encode()
    return b"\x80\x02](X" + len(text).to_bytes(4, "little") + text + b"ctorch\nByteTensor\n)R\x86e."


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > REPLY_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"a reply above {REPLY_BYTES_MAX} bytes")
    return bytes(data)
