"""DeepSeek-V3's layout: latent attention, dense first layers, shared experts, sigmoid router with groups."""

import dataclasses

import pytest
import torch

from headway.kernels import selftest
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, logits
from headway.kernels.hf import load, save_folder
from headway.kernels.numerics import FAST
from headway.kernels.rotary import Yarn
from headway.kernels.weights import init_weights, prepare

SMALL = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=67,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=400,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=40,
    first_k_dense_replace=1,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
YARN = Yarn(factor=4.0, original_max_position_embeddings=100, mscale=1.0, mscale_all_dim=0.7)
VARIANTS = {
    "deepseek": {},
    "plain queries, one group, stretched positions": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "yarn": YARN,
    },
}
IDS = torch.randint(67, (3, 150), generator=torch.Generator().manual_seed(1))
FULL = torch.tensor([150, 150, 150])


def _model(changes):
    config = dataclasses.replace(SMALL, **changes)
    rng = torch.Generator().manual_seed(5)
    weights = {}
    for name, w in init_weights(config, 0).items():
        w = w + 0.2 * torch.randn(w.shape, generator=rng) if w.dim() == 1 else w
        weights[name] = w.bfloat16().float()
    return config, weights


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config, weights = _model(changes)
    save_folder(tmp_path, config, weights)
    assert load(tmp_path)[0] == config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    expected = theirs(IDS).logits
    masters = {name: w.requires_grad_() for name, w in weights.items()}
    prepared = prepare(masters, config, torch.float32)
    out = forward_full(prepared, config, IDS, FULL)
    ours = logits(prepared, out.hidden.flatten(0, 1)).view(3, 150, -1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=5e-5)
    assert out.routes.shape == (3, 150, 2, 3)

    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * direction).sum().backward()
    (expected * direction).sum().backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    _, gradients = load(tmp_path / "gradients")
    for name, expected_gradient in gradients.items():
        if not name.endswith("e_score_correction_bias"):
            off = (masters[name].grad - expected_gradient).norm()
            assert off <= 2e-4 * expected_gradient.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_serving_gives_the_bits_of_a_full_forward(changes, dtype, make_batch, serve):
    config, weights = _model(changes)
    prepared = prepare(weights, config, dtype)
    ids, lengths = make_batch(config, [1, 5, 16, 17, 33, 70, 140])
    with torch.no_grad():
        full = forward_full(prepared, config, ids, lengths)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        part = serve(prepared, config, ids, lengths, dtype, selftest.INVARIANT, 0)
        assert torch.equal(full.hidden[real], part.hidden[real])
        assert torch.equal(full.routes[real], part.routes[real])
        naive = serve(prepared, config, ids, lengths, dtype, FAST, 0)
    assert not torch.equal(full.hidden[real], naive.hidden[real])


def test_the_self_test_covers_latent_attention():
    assert selftest.refusal(SMALL) is None
    assert selftest.refusal(SMALL, numerics=FAST) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "plain 'yarn'"),
        ({"n_group": 3}, "of 3 groups of 8 experts"),
        ({"n_group": 8, "topk_group": 8}, "at least two"),
        ({"first_k_dense_replace": 3}, "no layer with experts"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be positive"),
    ],
)
def test_variants_that_are_not_computed_are_refused(change, message):
    hf = SMALL.to_hf()
    assert ModelConfig.from_hf(hf) == SMALL
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**hf, **change})


def test_kimi_k2_reads_the_older_way_to_write_stretched_positions():
    hf = {**SMALL.to_hf(), "model_type": "kimi_k2", "rope_theta": 50_000.0}
    del hf["rope_parameters"]
    hf["rope_scaling"] = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
    hf["rope_scaling"] |= {"original_max_position_embeddings": 100, "beta_fast": 32.0, "beta_slow": 1.0}
    config = ModelConfig.from_hf(hf)
    assert (config.yarn, config.rope_theta, config.model_type) == (YARN, 50_000.0, "kimi_k2")
    assert ModelConfig.from_hf(config.to_hf()) == config
