"""An agent gives weights only to an engine that it knows, and that no stranger can give others to."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from headway.rollout_agent import client
from headway.rollout_agent.client import EngineClient, check_address
from headway.rollout_agent.model_shape import ModelShape
from headway.schemas.errors import ConfigError

SHAPE = ModelShape(vocab_size=260, layers=2, layer_map=(0, 1), experts=4, top_k=2)
INFO = {"version": "0.5.23", "device": "cpu", "tp_size": 2, "ep_size": 1, "host": "127.0.0.1"}


class Told(EngineClient):
    """An engine that says `told` of itself."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(None, "http://127.0.0.1:1", SHAPE)  # type: ignore[arg-type]
        self.told = told

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        return self.told


async def test_sglang_tells_its_release_ranks_and_whether_it_takes_sparse_updates() -> None:
    info = await Told(INFO).identify()
    assert (info.kind, info.release, info.tp, info.loader) == ("sglang", "0.5.23", 2, False)
    assert (await Told(INFO | {"custom_weight_loader": [client.LOADER]}).identify()).loader
    assert (await Told({"engine": "headway"}).identify()).kind == "headway"


async def test_an_untested_release_is_warned_about_and_another_series_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await Told(INFO | {"version": "0.5.24"}).identify()
    assert "sglang_untested" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"runs SGLang 0\.6\.0"):
        await Told(INFO | {"version": "0.6.0"}).identify()


async def test_an_engine_open_to_others_without_an_admin_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="without an admin key"):
        await Told(INFO | {"host": "0.0.0.0"}).identify()
    await Told(INFO | {"host": "0.0.0.0", "admin_api_key": "secret"}).identify()


async def test_a_stranger_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither"):
        await Told({"message": "hello"}).identify()


def test_an_engine_elsewhere_needs_a_key() -> None:
    for near in ("http://127.0.0.1:30000", "http://localhost:1", "http://[::1]:30000"):
        check_address(near, "")
    check_address("http://10.0.0.7:30000", "secret")
    for far in ("http://10.0.0.7:30000", "https://engine.example"):
        with pytest.raises(ConfigError, match="no key"):
            check_address(far, "")


@pytest.mark.parametrize(
    "url", ["nonsense", "127.0.0.1:1", "http://[::1", "http://a:99999", "ftp://localhost", "http://:1"]
)
def test_what_is_no_address_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        check_address(url, "secret")


def test_the_call_of_our_loader_carries_one_name_and_an_empty_tensor() -> None:
    allowed: list[str] = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            allowed.append(f"{module}.{name}")
            return super().find_class(module, name)

    ((name, tensor),) = Unpickler(io.BytesIO(client._empty_tensor_called("/a/füller"))).load()
    assert name == "/a/füller"
    assert (tensor.dtype, tensor.numel()) == (torch.uint8, 0)
    assert allowed == ["torch.ByteTensor"]
