"""Folders written here are read by stock transformers, and the other way round, with equal logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, logits
from headway.kernels.hf import load, save_folder
from headway.kernels.router import balance_loss
from headway.kernels.weights import init_weights, prepare

transformers = pytest.importorskip("transformers")
IDS = torch.randint(67, (3, 50), generator=torch.Generator().manual_seed(1))
FULL = torch.tensor([50, 50, 50])


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


def _our_logits(config, weights):
    prepared = prepare(weights, config, torch.float32)
    out = forward_full(prepared, config, IDS, FULL)
    return logits(prepared, out.hidden.flatten(0, 1)).view(3, 50, -1), out


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"norm_topk_prob": False, "rope_theta": 1e6}])
def test_what_we_write_transformers_reads_with_equal_logits_and_gradients(tmp_path, make_model, changes):
    model = make_model(**changes)
    save_folder(tmp_path, model.config, model.weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = theirs(IDS, output_router_logits=True)
    masters = {name: w.requires_grad_() for name, w in model.weights.items()}
    ours, out = _our_logits(model.config, masters)
    torch.testing.assert_close(ours, expected.logits, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(balance_loss(out.router_scores, 2), expected.aux_loss, rtol=1e-5, atol=1e-6)

    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * direction).sum().backward()
    (expected.logits * direction).sum().backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    _, gradients = load(tmp_path / "gradients")
    for name, expected_gradient in gradients.items():
        off = (masters[name].grad - expected_gradient).norm()
        assert off <= 1e-4 * expected_gradient.norm(), name


def test_what_transformers_writes_in_shards_we_read(tmp_path):
    hf = transformers.Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=400,
    )
    theirs = transformers.Qwen3MoeForCausalLM(hf)
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, weights = load(tmp_path)
    assert config.num_experts == 5
    assert not config.norm_topk_prob
    with torch.no_grad():
        torch.testing.assert_close(_our_logits(config, weights)[0], theirs(IDS).logits, rtol=1e-4, atol=2e-5)


def test_saving_is_deterministic_and_round_trips(tmp_path, make_model):
    model = make_model()
    half = {name: w.bfloat16() for name, w in model.weights.items()}
    save_folder(tmp_path / "a", model.config, half)
    save_folder(tmp_path / "b", model.config, dict(reversed(half.items())))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    config, weights = load(tmp_path / "a")
    assert config == model.config
    assert all(torch.equal(weights[name], w) for name, w in half.items())


def test_a_folder_that_does_not_fit_is_refused_naming_the_first_tensor(tmp_path, make_model):
    model = make_model()
    save_folder(tmp_path, model.config, model.weights)
    file = tmp_path / "model.safetensors"
    good, name = load_file(file), "model.layers.1.mlp.experts.3.up_proj.weight"
    for broken, message in (
        ({k: v for k, v in good.items() if k != name}, rf"{name} is missing"),
        (good | {name: torch.zeros(2, 2)}, rf"{name} has shape \[2, 2\], config asks for \[40, 48\]"),
        (good | {"extra": torch.zeros(1)}, "extra is not part"),
        (good | {name: good[name].half()}, rf"{name} is torch.float16"),
    ):
        save_file(broken, file)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a readable safetensors"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has neither"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="not a file of that folder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_experts_per_tok": 9}, "exceeds"),
        ({"hidden_size": 0}, "must be positive"),
    ],
)
def test_configs_this_decoder_does_not_compute_are_refused(make_model, change, message):
    hf = make_model().config.to_hf()
    assert ModelConfig.from_hf(hf) == make_model().config
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf | change)
    with pytest.raises(ValueError, match="missing vocab_size"):
        ModelConfig.from_hf({k: v for k, v in hf.items() if k != "vocab_size"})


def test_initial_weights_follow_the_seed(make_model):
    config = make_model().config
    a, b, c = init_weights(config, 3), init_weights(config, 3), init_weights(config, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    up = a["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert up.std() == pytest.approx(up.shape[1] ** -0.5, rel=0.1)
