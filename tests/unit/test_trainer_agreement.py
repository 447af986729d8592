"""The figures that say how far sampler and trainer are apart, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from headway.deploy import tokens
from headway.kernels.decoder import Output
from headway.trainer.agreement import GAP_NATS_MAX, Agreement, mismatch
from headway.trainer.batching import MicroBatch


def test_differences_ratios_and_effective_sample_size() -> None:
    recorded = torch.tensor([-1.0, -2.0, -3.0, -0.5])
    current = torch.tensor([-1.0, -2.0 + math.log(3), -3.0, -0.5 - math.log(4)])
    found = mismatch(current, recorded)
    ratios = [1, 3, 1, 0.25]
    assert found["tokens"] == 4
    assert found["diff_max"] == pytest.approx(math.log(4), rel=1e-6)
    assert found["diff_mean"] == pytest.approx((math.log(3) + math.log(4)) / 4, rel=1e-6)
    assert found["k1"] == pytest.approx((math.log(4) - math.log(3)) / 4, rel=1e-5)
    assert found["k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4, rel=1e-6)
    assert found["equal_fraction"] == 0.5
    assert found["extreme_fraction"] == 0.5
    assert found["ess"] == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)), rel=1e-6)


def test_no_token_gives_the_best_values_and_absurd_ones_stay_finite() -> None:
    none = torch.zeros(0)
    assert mismatch(none, none) == {
        "tokens": 0.0, "diff_mean": 0.0, "diff_max": 0.0, "k1": 0.0, "k3": 0.0,
        "equal_fraction": 1.0, "extreme_fraction": 0.0, "ess": 1.0,
    }  # fmt: skip
    wild = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-3e38, -2.0]))
    assert all(math.isfinite(value) for value in wild.values())
    assert wild["k3"] == pytest.approx(math.exp(GAP_NATS_MAX) / 2, rel=1e-6)


def micro(recorded: Tensor, lag: list[int]) -> MicroBatch:
    """One rollout; token n + 1 is sampled from row n."""
    n = len(lag)
    zeros = torch.zeros(n)
    return MicroBatch(
        learns=True, token_ids_BT=torch.zeros(1, n, dtype=torch.int64), lengths_B=torch.tensor([n]),
        routes_BTLk=recorded[None], rows_N=torch.arange(n), targets_N=torch.zeros(n, dtype=torch.int64),
        behaviour_N=zeros, advantage_N=zeros, temperature_N=zeros, lag_N=torch.tensor(lag),
        swapped_N=torch.zeros(n, dtype=torch.bool), sample_N=torch.zeros(n, dtype=torch.int64),
        place_N=torch.arange(1, n + 1), members=(0,),
    )  # fmt: skip


def test_flips_are_counted_by_layer_by_lag_and_apart_from_mere_order() -> None:
    live = torch.tensor([[0, 1], [2, 3]]).repeat(6, 1, 1)  # [N = 6, L = 2, k = 2]
    recorded = live.clone()
    recorded[0, 0] = torch.tensor([1, 0])  # the order alone
    recorded[1, 1] = torch.tensor([2, 1])  # another set in layer 1
    recorded[2, 0] = -1  # not recorded
    recorded[5, 0] = torch.tensor([0, 3])
    used = recorded.clone()
    used[2, 0] = live[2, 0]  # fell back
    used[1, 1] = live[1, 1]  # the filter took the live one
    out = Output(hidden=torch.zeros(1), routes=used[None], live=live[None], router_scores=())
    agreement = Agreement(exact=False, replay=True)
    agreement.add(micro(recorded, [0, 0, 0, 0, 1, 1]), torch.zeros(6), out)
    found = agreement.metrics()
    assert found["lag0_flipped_fraction"] == 1 / 4
    assert found["lag0_order_only_fraction"] == 1 / 4
    assert found["lag0_flipped_fraction_layer_0"] == 0.0
    assert found["lag0_flipped_fraction_layer_1"] == 1 / 4
    assert found["lag0_fallback_fraction"] == 1 / 8
    assert found["lag0_filtered_fraction"] == 1 / 8
    assert found["lag0_filtered_fraction_layer_1"] == 1 / 4
    assert found["stale_flipped_fraction"] == found["stale_flipped_fraction_layer_0"] == 1 / 2
    assert found["stale_order_only_fraction"] == found["stale_fallback_fraction"] == 0.0
    assert found["unrouted_tokens"] == 1
    assert (found["lag0_tokens"], found["stale_tokens"]) == (4, 2)


def test_inspect_says_which_layers_of_a_token_flipped() -> None:
    live = torch.tensor([[0, 1], [2, 3]]).repeat(4, 1, 1)
    recorded = live.clone()
    recorded[1] = torch.tensor([[0, 2], [3, 2]])
    recorded[2, 1] = -1
    assert tokens._routes(micro(recorded, [0, 0, 0, 0]), live[None]) == [
        (0, "agree"),
        (1, "layer 0: [0, 2] now [0, 1]; 1 in another order"),
        (0, "1 not recorded"),
        (0, "agree"),
    ]
