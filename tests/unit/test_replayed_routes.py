"""Routes on their way from an engine's reply to the trainer's forward: refused, or each row exactly in its place."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full
from headway.kernels.weights import init_weights, prepare
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.replies import Sampling, read_completion
from headway.rollout_agent.session import Recorder
from headway.schemas.errors import WireError
from headway.schemas.routes import check, from_engine
from headway.schemas.trajectory import Trajectory
from headway.schemas.wire import pack, unpack
from headway.trainer.batching import Sample, micro_batches

E, K = 300, 2
LAYER_MAP = (1, 3)
SHAPE = ModelShape(vocab_size=260, layers=4, layer_map=LAYER_MAP, experts=E, top_k=K)
MODEL = ModelConfig(
    vocab_size=260,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=E,
    num_experts_per_tok=K,
    max_position_embeddings=64,
)
TURNS = [[(4, 3)], [(6, 2), (3, 5)], [(3, 1), (1, 1), (2, 7)], [(9, 4)]]
"""Of each rollout: (observed, sampled) tokens of each turn."""


def pattern(rows: int, rollout: int) -> np.ndarray[Any, Any]:
    """int32 [rows, 4 layers, 2]: the expert names rollout, row, layer and column; dense layers hold rubbish."""
    row, layer, column = np.meshgrid(np.arange(rows), np.arange(4), np.arange(K), indexing="ij")
    ids = (rollout * 60 + row * 2 + layer // 2 * 29) % (E - 1) + column
    return np.where(np.isin(layer, LAYER_MAP), ids, 7777).astype("<i4")


def recorded(turns: list[tuple[int, int]], rollout: int) -> Trajectory:
    """What an agent makes of an engine's replies, each with all rows so far; through the codec and back."""
    recorder = Recorder(ids=[256])
    for observed, sampled in turns:
        recorder.observe(b"x" * observed)
        rows = len(recorder.ids) + sampled - 1
        ids = [65 + n for n in range(sampled)]
        meta = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(recorder.ids),
            "completion_tokens": sampled,
            "weight_version": "0.5",
            "weight_versions": [{"version": "0.5", "start": 0, "end": sampled}],
            "output_token_logprobs": [[-1.0, t, None] for t in ids],
            "routed_experts": base64.b64encode(pattern(rows, rollout).tobytes()).decode(),
        }
        sampling = Sampling(max_new_tokens=sampled, temperature=1.0, seed=1, stop_ids=(10,))
        prompt = list(recorder.ids)
        reply = {"output_ids": ids, "meta_info": meta}
        recorder.add(prompt, read_completion(reply, prompt, sampling, SHAPE))
    return unpack(Trajectory, pack(recorder.trajectory(SHAPE, 1.0, "submitted")))


def forced(samples: list[Sample], tokens_max: int) -> dict[int, np.ndarray[Any, Any]]:
    """The experts that the trainer's forward used, by rollout; [T - 1, L, k]."""
    prepared, found = prepare(init_weights(MODEL, 0), MODEL, torch.float32), {}
    for micro in micro_batches(samples, np.ones(len(samples), np.float32), tokens_max):
        with torch.no_grad():
            out = forward_full(prepared, MODEL, micro.token_ids_BT, micro.lengths_B, routes=micro.routes_BTLk)
        for i in micro.sample_N.unique().tolist():
            row = int(micro.rows_N[micro.sample_N == i][0]) // micro.token_ids_BT.shape[1]
            found[i] = out.routes[row, : int(micro.lengths_B[row])].numpy()
    return found


def samples_of(turns: list[list[tuple[int, int]]]) -> list[Sample]:
    made = [recorded(one, n) for n, one in enumerate(turns)]
    return [
        Sample(rollout_id=f"r{n}", group=0, reward=0.0, trajectory=t, span_lags=(0,) * len(t.spans))
        for n, t in enumerate(made)
    ]


@pytest.mark.parametrize("tokens_max", [1, 24, 500])
def test_every_row_lands_in_its_place_through_turns_codec_packing_and_micro_batches(tokens_max: int) -> None:
    samples = samples_of(TURNS)
    assert {s.trajectory.routes.dtype for s in samples} == {np.dtype(np.uint16)}
    found = forced(samples, tokens_max)
    for n, sample in enumerate(samples):
        expected = pattern(len(sample.trajectory.token_ids) - 1, n)[:, list(LAYER_MAP)]
        assert np.array_equal(found[n], expected), f"rollout {n}"
        assert not np.array_equal(found[n][1:], expected[:-1]), "the pattern would show a slip by one row"
        assert not np.array_equal(found[n], pattern(len(expected), n)[:, [0, 1]] % E), "or by one layer"


def test_routes_of_the_wrong_number_of_layers_or_columns_never_reach_the_forward() -> None:
    raw = pattern(9, 0)
    with pytest.raises(ValueError, match=r"outside 0\.\.299"):
        from_engine(raw, [0, 2], E, K)  # a layer map that is shifted by the dense layer
    with pytest.raises(ValueError, match="3 experts a token are due"):
        from_engine(raw, list(LAYER_MAP), E, 3)


def routed(rows: int = 20, layers: int = 3, experts: int = 8, k: int = 2, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((rows, layers, experts)).argsort(axis=2)[:, :, :k].astype(np.uint8)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 255), st.integers(1, 4), st.data())
def test_whatever_a_router_chooses_is_accepted(rows: int, layers: int, experts: int, k: int, data: Any) -> None:
    k = min(k, experts)
    routes = routed(rows, layers, experts, k, seed=rows)
    if rows:  # a row of a layer that nobody recorded
        routes[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, layers - 1))] = 255
    check(routes, experts, k)


def at(place: Any, value: Any) -> Callable[[np.ndarray[Any, Any]], None]:
    def change(routes: np.ndarray[Any, Any]) -> None:
        routes[place] = value

    return change


LIES = {
    "row 3 of layer 1 has an expert outside 0..7": at((3, 1, 0), 8),
    "row 3 of layer 1 misses some of its experts": at((3, 1, 0), 255),
    "row 4 of layer 2 names an expert twice": at((4, 2), 5),
    "row 0 of layer 1 names an expert twice (20 such rows)": at((slice(None), 1), 0),
}


@pytest.mark.parametrize("why", LIES)
def test_what_no_router_could_choose_is_refused(why: str) -> None:
    routes = routed()
    LIES[why](routes)
    with pytest.raises(ValueError) as caught:
        check(routes, 8, 2)
    assert str(caught.value).startswith(why)


def test_a_layer_of_zeros_is_padding_even_with_one_expert_a_token() -> None:
    routes = routed(k=1)
    check(routes, 8, 1)
    routes[:, 2] = 0
    with pytest.raises(ValueError, match="layer 2: every row says expert 0"):
        check(routes, 8, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"route_spans": [{"start": 0, "end": 5, "version": "0.5"}]}, "do not cover every row"),
        (
            {
                "route_spans": [
                    {"start": 0, "end": 5, "version": "0.5"},
                    {"start": 4, "end": 7, "version": "0.5"},
                ]
            },
            "overlaps or goes back",
        ),
        ({"layer_map": [1, 2, 3]}, "routes are"),
    ],
)
def test_gaps_overlaps_and_other_layers_have_a_reason_of_their_own(change: dict[str, Any], why: str) -> None:
    import msgpack

    body = msgpack.unpackb(pack(recorded(TURNS[0], 0)))
    unpack(Trajectory, msgpack.packb(body))
    with pytest.raises(WireError, match=why) as caught:
        unpack(Trajectory, msgpack.packb(body | change))
    assert caught.value.reason == "bad_routes"
