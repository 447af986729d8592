"""An engine's reply is hostile until every number in it fits."""

from __future__ import annotations

import base64
import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.rollout_agent import client as clients
from headway.rollout_agent.client import EngineClient
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.replies import Completion, Sampling, read_completion
from headway.schemas.trajectory import Span
from headway.schemas.version import Version

SHAPE = ModelShape(vocab_size=260, layers=3, layer_map=(1, 2), experts=4, top_k=2)
PROMPT = [256, 65, 66]
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, seed=1, stop_ids=(10, 257))
ROWS = len(PROMPT) + 3 - 1


def encoded(routes: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def reply() -> dict[str, Any]:
    routes = np.arange(ROWS * 6).reshape(ROWS, 3, 2) % 4
    return {
        "output_ids": [114, 32, 10],
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": 10},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "weight_version": "0.5",
            "weight_versions": [{"version": "0.4", "start": 0, "end": 1}, {"version": "0.5", "start": 1, "end": 3}],
            "output_token_logprobs": [[-0.5, 114, None], [-1.25, 32, None], [0.0, 10, None]],
            "routed_experts": encoded(routes),
            "routed_experts_versions": [{"version": "0.5", "start": 0, "end": ROWS}],
        },
    }


def test_a_good_reply_is_read_whole() -> None:
    found = read_completion(reply(), PROMPT, SAMPLING, SHAPE)
    assert found.token_ids == [114, 32, 10]
    assert found.logprobs.tolist() == [-0.5, -1.25, 0.0]
    assert found.spans == [
        Span(start=0, end=1, version=Version(0, 4)),
        Span(start=1, end=3, version=Version(0, 5)),
    ]
    assert found.routes is not None
    assert found.routes.dtype == np.uint8
    assert found.routes.shape == (ROWS, 2, 2), "dense layers carry no routes"
    assert found.routes[0].tolist() == [[2, 3], [0, 1]]
    assert (found.stop, found.cached_tokens) == ("stop", 2)


def partial(start: int) -> dict[str, Any]:
    """The good reply to a request for the rows from `start` on."""
    body = reply()
    rows = np.arange(ROWS * 6).reshape(ROWS, 3, 2) % 4
    body["meta_info"] |= {
        "routed_experts": encoded(rows[start:]),
        "routed_experts_versions": [{"version": "0.5", "start": start, "end": ROWS}],
    }
    return body


@pytest.mark.parametrize("told", [True, False])
def test_the_rows_from_a_place_on_are_those_of_the_whole_reply(told: bool) -> None:
    whole, body = read_completion(reply(), PROMPT, SAMPLING, SHAPE), partial(2)
    if not told:
        del body["meta_info"]["routed_experts_versions"]
    found = read_completion(body, PROMPT, SAMPLING, SHAPE, 2)
    assert found.routes is not None
    assert whole.routes is not None
    assert found.routes.tolist() == whole.routes[2:].tolist()
    assert (found.route_spans[0].start, found.route_spans[-1].end) == (2, ROWS)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_rows_from_another_place_than_asked_for_are_refused(start: int) -> None:
    with pytest.raises(ValueError, match="bytes of routes"):
        read_completion(partial(start), PROMPT, SAMPLING, SHAPE, 2)


def test_versions_of_other_rows_than_asked_for_are_refused() -> None:
    body = partial(2)
    body["meta_info"]["routed_experts_versions"] = [{"version": "0.5", "start": 1, "end": ROWS - 1}]
    with pytest.raises(ValueError, match="do not cover 2 to"):
        read_completion(body, PROMPT, SAMPLING, SHAPE, 2)


def test_rows_without_versions_are_of_the_weights_that_wrote_their_tokens() -> None:
    """SGLang tells no versions of rows: kept KV keeps its rows, a retracted request computes all of them again."""
    body = reply()
    del body["meta_info"]["routed_experts_versions"]
    kept = read_completion(body, PROMPT, SAMPLING, SHAPE)
    assert kept.route_spans == [
        Span(start=0, end=3, version=Version(0, 4)),
        Span(start=3, end=ROWS, version=Version(0, 5)),
    ]
    body["meta_info"]["num_retractions"] = 1
    again = read_completion(body, PROMPT, SAMPLING, SHAPE)
    assert again.route_spans == [Span(start=0, end=ROWS, version=Version(0, 5))]


def test_missing_rows_become_the_sentinel() -> None:
    body = reply()
    body["meta_info"]["routed_experts"] = encoded(np.full((ROWS, 3, 2), -1))
    found = read_completion(body, PROMPT, SAMPLING, SHAPE)
    assert found.routes is not None
    assert (found.routes == 255).all()


def test_an_engine_without_route_capture_is_accepted() -> None:
    body = reply()
    del body["meta_info"]["routed_experts"]
    assert read_completion(body, PROMPT, SAMPLING, SHAPE).routes is None


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one place of a reply."""

    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


META = "meta_info"
LIES = {
    "an id outside the vocabulary": at("output_ids", 0, value=260),
    "a negative id": at("output_ids", 0, value=-1),
    "a float id": at("output_ids", 0, value=114.0),
    "more tokens than asked for": at("output_ids", value=[1, 2, 3, 4, 5]),
    "no list": at("output_ids", value="abc"),
    "another prompt": at(META, "prompt_tokens", value=4),
    "another count": at(META, "completion_tokens", value=2),
    "a version gap": at(META, "weight_versions", 0, "end", value=0),
    "spans that overlap": at(META, "weight_versions", 1, "start", value=0),
    "spans past the end": at(META, "weight_versions", 1, "end", value=4),
    "spans that end early": at(META, "weight_versions", value=[{"version": "0.4", "start": 0, "end": 2}]),
    "no version": at(META, "weight_versions", 0, "version", value="default"),
    "no spans": at(META, "weight_versions", value=None),
    "NaN": at(META, "output_token_logprobs", 0, 0, value=math.nan),
    "minus infinity": at(META, "output_token_logprobs", 0, 0, value=-math.inf),
    "a positive log-probability": at(META, "output_token_logprobs", 0, 0, value=0.5),
    "a log-probability that is text": at(META, "output_token_logprobs", 0, 0, value="-1"),
    "log-probabilities of other ids": at(META, "output_token_logprobs", 0, 1, value=115),
    "too few log-probabilities": at(META, "output_token_logprobs", value=[[-0.5, 114, None]]),
    "routes of another shape": at(META, "routed_experts", value=encoded(np.zeros((ROWS + 1, 3, 2)))),
    "routes that are no base64": at(META, "routed_experts", value="?" * 160),
    "an expert that does not exist": at(META, "routed_experts", value=encoded(np.full((ROWS, 3, 2), 4))),
    "an expert named twice": at(META, "routed_experts", value=encoded(np.full((ROWS, 3, 2), 3))),
    "half a row": at(META, "routed_experts", value=encoded(np.tile([1, -1], (ROWS, 3, 1)))),
    "row versions with a gap": at(META, "routed_experts_versions", 0, "end", value=ROWS - 1),
    "a stop without a stop token": at("output_ids", value=[114, 32, 33]),
    "a length that is shorter": at(META, "finish_reason", value={"type": "length", "length": 3}),
    "an unknown reason": at(META, "finish_reason", value={"type": "matched"}),
    "no reason": at(META, "finish_reason", value=None),
    "no meta": at(META, value=[]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_reply_that_lies_is_refused(lie: Callable[[dict[str, Any]], None]) -> None:
    body = copy.deepcopy(reply())
    lie(body)
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_completion(body, PROMPT, SAMPLING, SHAPE)


def test_a_token_after_the_stop_token_is_refused() -> None:
    body = reply()
    body["output_ids"] = [10, 32, 10]
    body["meta_info"]["output_token_logprobs"][0][1] = 10
    with pytest.raises(ValueError, match="stop tokens"):
        read_completion(body, PROMPT, SAMPLING, SHAPE)


async def test_a_large_reply_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    long = ModelShape(vocab_size=260, layers=90, layer_map=tuple(range(90)), experts=4, top_k=2)
    prompt = [65] * 2000
    routes = np.tile([0, 1], (len(prompt) + 2, 90, 1))
    body = reply()
    body["meta_info"] |= {"prompt_tokens": len(prompt), "routed_experts": encoded(routes)}
    body["meta_info"]["routed_experts_versions"] = [{"version": "0.5", "start": 0, "end": len(routes)}]
    where = list[str]()

    class Told(EngineClient):
        async def _call(self, path: str, asked: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
            return body

    def read(*args: Any) -> Completion:
        where.append(threading.current_thread().name)
        return read_completion(*args)

    monkeypatch.setattr(clients, "read_completion", read)
    found = await Told(None, "http://127.0.0.1:1", long).generate(prompt, SAMPLING, rid="r", timeout_s=1)  # type: ignore[arg-type]
    assert found.routes is not None
    assert where[0] != threading.main_thread().name
