"""Fused tensors of every rank, against plain concatenation, slicing and stacking of whole checkpoint tensors."""

import json

import numpy as np
import pytest

from headway.kernels.config import ModelConfig
from headway.schemas.errors import ConfigError, WireError
from headway.schemas.manifest import TensorEntry
from headway.weight_sync.layouts import EMBED, HEAD, Layout, Rank, fuse, placements

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 150,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "moe_intermediate_size": 8,
    "intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "mlp_only_layers": [1],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
RANKS = [Rank(tp=tp, rank=r, ep=ep) for tp, ep in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)) for r in range(tp)]


def layout(config, **changes):
    return Layout.from_hf(json.dumps({**config, **changes}).encode())


def model(made, dtype=np.uint16):
    """name -> random array of the checkpoint's shape."""
    rng = np.random.default_rng(7)
    return {name: rng.integers(1, 1 << 16, shape).astype(dtype) for name, shape in made.sources.items()}


def engine(made, rank, arrays):
    """Fused name -> array, by the table."""
    raw = {name: a.reshape(-1).view(np.uint8) for name, a in arrays.items()}
    width = next(iter(arrays.values())).itemsize
    return {
        name: fuse(t, raw, made.sources, width).view(f"<u{width}").reshape(t.shape)
        for name, t in made.fused(rank).items()
    }


def part(array, rank, of, axis=0):
    return np.split(array, of, axis)[rank]


def experts(w, p, rank, count):
    """The oracle for experts: whole ones are dealt to expert groups, each then cut within its group."""
    cut = rank.tp // rank.ep
    group, member = divmod(rank.rank, cut)
    mine = range(group * count // rank.ep, (group + 1) * count // rank.ep)
    gate_up = [np.concatenate([part(w[f"{p}{e}.{x}_proj.weight"], member, cut) for x in ("gate", "up")]) for e in mine]
    return {
        f"{p}w13_weight": np.stack(gate_up),
        f"{p}w2_weight": np.stack([part(w[f"{p}{e}.down_proj.weight"], member, cut, 1) for e in mine]),
    }


def mlp(w, p, rank):
    gate_up = [part(w[f"{p}{x}_proj.weight"], rank.rank, rank.tp) for x in ("gate", "up")]
    return {
        f"{p}gate_up_proj.weight": np.concatenate(gate_up),
        f"{p}down_proj.weight": part(w[f"{p}down_proj.weight"], rank.rank, rank.tp, 1),
    }


def vocabulary(array, rank, unit):
    rows = -(-len(array) // unit) * unit
    padded = np.zeros((rows, array.shape[1]), array.dtype)
    padded[: len(array)] = array
    return part(padded, rank.rank, rank.tp)


def whole(w, names):
    return {name: w[name] for name in names}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_qwen3_moe_is_fused_as_concatenation_would(rank):
    made = layout(QWEN)
    w = model(made)
    expected = {name: vocabulary(w[name], rank, 64 * (rank.tp if 192 % rank.tp else 1)) for name in (EMBED, HEAD)}
    expected |= whole(w, ["model.norm.weight"])
    for n in range(3):
        p = f"model.layers.{n}."
        a, cut = f"{p}self_attn.", rank.tp
        q, k, v = (w[f"{a}{x}_proj.weight"] for x in "qkv")
        if cut > 2:  # two key/value heads for four ranks: each of them on two
            k, v = (np.repeat(x.reshape(2, 6, 16), cut // 2, 0).reshape(-1, 16) for x in (k, v))
        expected[f"{a}qkv_proj.weight"] = np.concatenate([part(x, rank.rank, cut) for x in (q, k, v)])
        expected[f"{a}o_proj.weight"] = part(w[f"{a}o_proj.weight"], rank.rank, cut, 1)
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        expected |= whole(w, [f"{p}{x}.weight" for x in norms])
        if n == 1:
            expected |= mlp(w, f"{p}mlp.", rank)
        else:
            expected |= whole(w, [f"{p}mlp.gate.weight"]) | experts(w, f"{p}mlp.experts.", rank, 4)
    same(engine(made, rank, w), expected)


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_deepseek_v3_is_fused_as_concatenation_would(rank):
    made = layout(DEEPSEEK)
    w = model(made)
    expected = {name: part(w[name], rank.rank, rank.tp) for name in (EMBED, HEAD)}
    expected |= whole(w, ["model.norm.weight"])
    for n in range(3):
        p = f"model.layers.{n}."
        a = f"{p}self_attn."
        down = [w[f"{a}q_a_proj.weight"], w[f"{a}kv_a_proj_with_mqa.weight"]]
        expected[f"{a}fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(down)
        for x in ("q_b_proj", "kv_b_proj"):
            expected[f"{a}{x}.weight"] = part(w[f"{a}{x}.weight"], rank.rank, rank.tp)
        expected[f"{a}o_proj.weight"] = part(w[f"{a}o_proj.weight"], rank.rank, rank.tp, 1)
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
        expected |= whole(w, [f"{p}{x}.weight" for x in norms])
        if n == 0:
            expected |= mlp(w, f"{p}mlp.", rank)
        else:
            expected |= whole(w, [f"{p}mlp.gate.weight", f"{p}mlp.gate.e_score_correction_bias"])
            expected |= experts(w, f"{p}mlp.experts.", rank, 4) | mlp(w, f"{p}mlp.shared_experts.", rank)
    same(engine(made, rank, w), expected)


def test_without_a_low_rank_query_the_projections_stay_apart():
    made = layout(DEEPSEEK, q_lora_rank=None)
    attention = {name.removeprefix("model.layers.0.self_attn.") for name in made.fused() if ".0.self_attn." in name}
    assert attention == {
        f"{x}.weight" for x in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    }


def test_scales_of_fp8_blocks_are_fused_and_cut_like_their_weights():
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512, "q_lora_rank": 256}
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 136}
    made = layout(
        {**DEEPSEEK, **sizes, **heads}, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    w = model(made, np.uint32)
    p = "model.layers.1."
    assert made.sources[f"{p}self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (2, 2)  # 200 rows, the last block cut
    assert f"{p}mlp.gate.weight_scale_inv" not in made.sources
    for rank in (Rank(), Rank(tp=2, rank=1)):
        found = engine(made, rank, w)
        down = [w[f"{p}self_attn.{x}.weight_scale_inv"] for x in ("q_a_proj", "kv_a_proj_with_mqa")]
        name = f"{p}self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"
        np.testing.assert_array_equal(found[name], np.concatenate(down))
        gate_up = [
            [part(w[f"{p}mlp.experts.{e}.{x}_proj.weight_scale_inv"], rank.rank, rank.tp) for x in ("gate", "up")]
            for e in range(4)
        ]
        np.testing.assert_array_equal(
            found[f"{p}mlp.experts.w13_weight_scale_inv"], np.stack([np.concatenate(x) for x in gate_up])
        )
    with pytest.raises(ConfigError, match="a block would be split"):
        made.fused(Rank(tp=4, rank=1))


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
def test_every_checkpoint_element_is_on_some_rank_and_every_loader_finds_its_place(config):
    made = layout(config)
    w = {name: np.zeros(shape, bool) for name, shape in made.sources.items()}
    for r in range(4):
        table = made.fused(Rank(tp=4, rank=r, ep=2))
        for source, places in placements(table).items():
            for name, piece in places:
                assert piece in table[name].pieces
                w[source][tuple(slice(*x) for x in piece.take)] = True
    assert all(seen.all() for seen in w.values())


def test_the_checkpoint_is_the_one_that_the_decoder_reads():
    hf = {**QWEN, "mlp_only_layers": [], "tie_word_embeddings": True}
    assert layout(hf).sources == ModelConfig.from_hf(hf).tensor_shapes()
    assert layout(QWEN, mlp_only_layers=[]).sources.keys() - layout(hf).sources.keys() == {HEAD}


def table(made, drop=(), **shapes):
    found = {**{n: s for n, s in made.sources.items() if n not in drop}, **shapes}
    return [TensorEntry(name=n, dtype="BF16", shape=s, xxh3="ab" * 16) for n, s in found.items()]


def test_an_unknown_missing_misshapen_or_tied_tensor_is_refused_by_name():
    made = layout(QWEN)
    made.check(table(made))
    norm, mtp = "model.norm.weight", "model.layers.3.eh_proj.weight"
    for entries, named in (
        (table(made, **{mtp: (4, 4)}), mtp),
        (table(made, drop=[norm]), norm),
        (table(made, **{norm: (17,)}), norm),
        (table(made, drop=[HEAD]), HEAD),
        ([e.model_copy(update={"alias": EMBED}) if e.name == HEAD else e for e in table(made)], HEAD),
    ):
        with pytest.raises(WireError, match=named) as error:
            made.check(entries)
        assert error.value.reason == "layout_changed"


def test_a_tied_head_is_one_tensor_in_the_checkpoint_and_in_the_engine():
    made = layout(QWEN, tie_word_embeddings=True)
    head = TensorEntry(name=HEAD, dtype="BF16", shape=made.sources[EMBED], xxh3="ab" * 16, alias=EMBED)
    made.check(table(made))
    made.check([*table(made), head])
    assert HEAD not in made.fused()
    with pytest.raises(WireError, match=HEAD):
        made.check([*table(made), head.model_copy(update={"alias": None})])


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"hidden_size": "many"},
        {"num_hidden_layers": 1 << 40},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "awq"}},
    ],
)
def test_configs_that_are_not_understood_are_refused(change):
    with pytest.raises(ConfigError):
        layout(QWEN, **change)
    with pytest.raises(ConfigError):
        Layout.from_hf(b"[]")


def test_ranks_that_cannot_share_evenly_are_refused():
    with pytest.raises(ConfigError, match="cannot share evenly"):
        layout(QWEN).fused(Rank(tp=3))
    with pytest.raises(ConfigError, match="4 experts"):
        layout(QWEN).fused(Rank(tp=8, ep=8))
    for wrong in ({"tp": 2, "rank": 2}, {"tp": 4, "ep": 3}):
        with pytest.raises(ConfigError):
            Rank(**wrong)
