"""Where checkpoint tensors lie inside the fused, sliced tensors of a serving engine: tables, no weights.

Stock engines (SGLang, vLLM) keep q, k and v in one tensor, gate and up in another and all experts of a layer
in two, and every rank of a tensor- or expert-parallel group holds a part. A `Layout` says for the Qwen3-MoE and
DeepSeek-V3 (also Kimi-K2) layouts which block of which checkpoint tensor is which block of which fused one, so
that a loader scatters, and a checker predicts, without the engine's own code. What engines do to weights after
loading (shuffles for a kernel, shared experts fused into the routed ones, attention groups smaller than `tp`)
is not described: start SGLang with `--disable-shared-experts-fusion` and without data-parallel attention.
Layers of multi-token prediction belong to a draft model and are refused as unknown.

Legend: d hidden, H query heads, K key/value heads, D head width, f an expert's width, E experts, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.schemas.errors import ConfigError, WireError
from headway.schemas.manifest import TENSORS_MAX, TensorEntry
from headway.weight_sync.codec import U8

Shape = tuple[int, ...]
Range = tuple[int, int]
VOCAB_ROWS = 64
"""Engines pad the vocabulary to a multiple of it, so that ranks get equal parts."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of `tp` processes of an engine; expert groups of `ep` ways divide them, the rest slices each expert."""

    tp: int = 1
    rank: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.tp and self.ep >= 1 and self.tp % self.ep == 0):
            raise ConfigError(f"rank {self.rank} of tp {self.tp} with ep {self.ep}", why="ep divides tp, 0 ≤ rank < tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Block `take` of checkpoint tensor `source` is, in C order, block `put` of a fused tensor.

    Half-open ranges, one a dimension; `put` has a first one of length 1 more where the fused tensor stacks experts.
    """

    source: str
    take: tuple[Range, ...]
    put: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A tensor of an engine. What no piece covers (rows of the padded vocabulary) is zero."""

    shape: Shape
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A checkpoint tensor of a fused one. Ranks cut dimension `dim` into runs of whole `units` (0: elements).

    With `replicate` several ranks share a unit when there are fewer units than ranks. `block` is the number of
    weights that a stored element stands for in each dimension: 1, or the block size of quantisation scales.
    """

    source: str
    shape: Shape
    dim: int | None = None
    units: int = 0
    replicate: bool = False
    block: int = 1

    @property
    def stored_shape(self) -> Shape:
        return tuple(-(-size // self.block) for size in self.shape)

    def take(self, rank: int, of: int) -> tuple[Range, ...]:
        ranges = [(0, size) for size in self.shape]
        if self.dim is not None:
            ranges[self.dim] = self._cut(self.shape[self.dim], rank, of)
        if any(start % self.block for start, _ in ranges):
            raise ConfigError(f"{self.source!r} cannot be cut for rank {rank} of {of}", why="a block would be split")
        return tuple((start // self.block, -(-stop // self.block)) for start, stop in ranges)

    def _cut(self, size: int, rank: int, of: int) -> Range:
        units = self.units or size
        if units % of == 0:
            first, count = rank * units // of, units // of
        elif self.replicate and of % units == 0:
            first, count = rank * units // of, 1
        else:
            raise ConfigError(f"{self.source!r} has {units} parts, which {of} ranks cannot share evenly")
        return first * size // units, (first + count) * size // units


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """Parts joined along dimension 0; for `experts` a list of such joins, stacked. `linear` ones may be quantised."""

    parts: tuple[tuple[_Part, ...], ...]
    experts: bool = False
    linear: bool = False
    vocab: bool = False

    def scales(self, block: int) -> _Recipe:
        """The recipe of the scales, one for each `block` × `block` weights."""
        joins = (
            tuple(replace(part, source=f"{part.source}_scale_inv", block=block) for part in join) for join in self.parts
        )
        return _Recipe(parts=tuple(joins), experts=self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of one model. `sources` are name -> shape of its checkpoint, without a tied head."""

    sources: Mapping[str, Shape]
    tied: bool
    _recipes: Mapping[str, _Recipe] = field(repr=False)

    @classmethod
    def from_hf(cls, config: bytes) -> Layout:
        """From a `config.json`. Raises ConfigError for one that is no Qwen3-MoE or DeepSeek-V3 layout."""
        try:
            hf: dict[str, Any] = json.loads(config)
            family = _FAMILIES.get(hf["model_type"])
            if family is None:
                raise ValueError(f"model_type {str(hf['model_type'])[:40]!r}; one of {sorted(_FAMILIES)}")
            recipes = dict(_model(hf, family))
            if block := _scale_block(hf):
                recipes |= {f"{name}_scale_inv": r.scales(block) for name, r in recipes.items() if r.linear}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("the model's config.json is not understood", why=repr(error)[:300]) from None
        parts = [part for recipe in recipes.values() for join in recipe.parts for part in join]
        sources = {part.source: part.stored_shape for part in parts}
        return cls(sources=sources, tied=bool(hf.get("tie_word_embeddings")), _recipes=recipes)

    def check(self, tensors: Iterable[TensorEntry]) -> None:
        """Raise WireError("layout_changed") unless a version's table is exactly this checkpoint's.

        A tied head may be absent, or present as an alias of the embeddings.
        """
        missing = dict(self.sources)
        for entry in tensors:
            if self.tied and (entry.name, entry.alias) == (HEAD, EMBED):
                continue
            expected = missing.pop(entry.name, None)
            if expected is None or entry.alias is not None:
                raise WireError("layout_changed", f"tensor {entry.name!r} is unknown, or tied, in this model's layout")
            if expected != entry.shape:
                raise WireError(
                    "layout_changed",
                    f"tensor {entry.name!r} has shape {list(entry.shape)}, this model's layout {list(expected)}",
                )
        if missing:
            raise WireError("layout_changed", f"tensor {min(missing)!r} of this model's layout is missing")

    def fused(self, rank: Rank = Rank()) -> dict[str, Fused]:
        """Name -> tensor as `rank` holds it. Raises ConfigError when the ranks cannot share the model evenly."""
        return {name: _fused(recipe, rank) for name, recipe in self._recipes.items()}


def placements(fused: Mapping[str, Fused]) -> dict[str, list[tuple[str, Piece]]]:
    """Source name -> where it goes: (fused name, piece), for a loader that is handed checkpoint tensors."""
    found: dict[str, list[tuple[str, Piece]]] = {}
    for name, tensor in fused.items():
        for piece in tensor.pieces:
            found.setdefault(piece.source, []).append((name, piece))
    return found


def fuse(tensor: Fused, sources: Mapping[str, U8], shapes: Mapping[str, Shape], width: int) -> U8:
    """The bytes of an engine's tensor (uint8, C order) from those of the checkpoint's, elements `width` bytes wide."""
    out = np.zeros(tensor.shape, f"V{width}")
    for piece in tensor.pieces:
        raw = sources[piece.source].view(f"V{width}").reshape(shapes[piece.source])
        target = out[_slices(piece.put)]
        target[...] = raw[_slices(piece.take)].reshape(target.shape)
    return out.reshape(-1).view(np.uint8)


def _slices(ranges: tuple[Range, ...]) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in ranges)


def _fused(recipe: _Recipe, rank: Rank) -> Fused:
    joins, number, of = recipe.parts, rank.rank, rank.tp
    if recipe.vocab:
        return _vocabulary(joins[0][0], rank)
    if recipe.experts:
        if len(joins) % rank.ep:
            raise ConfigError(f"{len(joins)} experts cannot be shared by {rank.ep} expert-parallel ranks evenly")
        of = rank.tp // rank.ep
        mine, number = len(joins) // rank.ep, rank.rank % of
        joins = joins[rank.rank // of * mine :][:mine]
    pieces: list[Piece] = []
    shape: Shape = ()
    for place, join in enumerate(joins):
        lead: tuple[Range, ...] = ((place, place + 1),) if recipe.experts else ()
        row = 0
        for part in join:
            take = part.take(number, of)
            sizes = [stop - start for start, stop in take]
            put = ((row, row + sizes[0]), *((0, size) for size in sizes[1:]))
            pieces.append(Piece(source=part.source, take=take, put=(*lead, *put)))
            row += sizes[0]
        shape = (row, *sizes[1:])
    return Fused(shape=(len(joins), *shape) if recipe.experts else shape, pieces=tuple(pieces))


def _vocabulary(part: _Part, rank: Rank) -> Fused:
    rows, d = part.shape
    unit = VOCAB_ROWS if -(-rows // VOCAB_ROWS) * VOCAB_ROWS % rank.tp == 0 else VOCAB_ROWS * rank.tp
    each = -(-rows // unit) * unit // rank.tp
    start, stop = (min(each * at, rows) for at in (rank.rank, rank.rank + 1))
    piece = Piece(source=part.source, take=((start, stop), (0, d)), put=((0, stop - start), (0, d)))
    return Fused(shape=(each, d), pieces=(piece,))


# The families. Every function yields fused name -> recipe.

Recipes = Iterator[tuple[str, _Recipe]]


def _whole(name: str, *shape: int) -> tuple[str, _Recipe]:
    return name, _Recipe(parts=((_Part(source=name, shape=shape),),))


def _rows(name: str, *parts: _Part) -> tuple[str, _Recipe]:
    return name, _Recipe(parts=(parts,), linear=True)


def _columns(name: str, out: int, width: int, units: int = 0) -> tuple[str, _Recipe]:
    return _rows(name, _Part(source=name, shape=(out, width), dim=1, units=units))


def _model(hf: Mapping[str, Any], family: _Family) -> Recipes:
    d, layers = int(hf["hidden_size"]), int(hf["num_hidden_layers"])
    experts = int(hf.get(family.experts_key) or 0)
    if not 0 < layers * max(experts, 1) <= TENSORS_MAX or hf.get("attention_bias"):
        raise ValueError(f"{layers} layers of {experts} experts, attention_bias {hf.get('attention_bias')}")
    for name in (EMBED,) if hf.get("tie_word_embeddings") else (EMBED, HEAD):
        yield name, _Recipe(parts=((_Part(source=name, shape=(int(hf["vocab_size"]), d)),),), vocab=True)
    yield _whole("model.norm.weight", d)
    step, dense = int(hf.get(family.step_key) or 1), set(hf.get("mlp_only_layers") or ())
    dense |= set(range(int(hf.get("first_k_dense_replace") or 0)))
    for n in range(layers):
        p = f"model.layers.{n}."
        yield _whole(f"{p}input_layernorm.weight", d)
        yield _whole(f"{p}post_attention_layernorm.weight", d)
        yield from family.attention(hf, f"{p}self_attn.", d)
        if n in dense or (n + family.step_from) % step or not experts:
            yield from _mlp(f"{p}mlp.", d, int(hf["intermediate_size"]))
            continue
        f = int(hf["moe_intermediate_size"])
        yield _whole(f"{p}mlp.gate.weight", experts, d)
        if hf.get("topk_method") == "noaux_tc":
            yield _whole(f"{p}mlp.gate.e_score_correction_bias", experts)
        yield from _experts(f"{p}mlp.experts.", d, f, experts)
        if shared := int(hf.get("n_shared_experts") or 0):
            yield from _mlp(f"{p}mlp.shared_experts.", d, f * shared)


def _mlp(p: str, d: int, f: int) -> Recipes:
    yield _rows(f"{p}gate_up_proj.weight", *_gate_up(p, d, f))
    yield _columns(f"{p}down_proj.weight", d, f)


def _gate_up(p: str, d: int, f: int) -> tuple[_Part, ...]:
    return tuple(_Part(source=f"{p}{x}_proj.weight", shape=(f, d), dim=0) for x in ("gate", "up"))


def _experts(p: str, d: int, f: int, experts: int) -> Recipes:
    w13 = tuple(_gate_up(f"{p}{e}.", d, f) for e in range(experts))
    w2 = tuple((_Part(source=f"{p}{e}.down_proj.weight", shape=(d, f), dim=1),) for e in range(experts))
    for name, parts in (("w13", w13), ("w2", w2)):
        yield f"{p}{name}_weight", _Recipe(parts=parts, experts=True, linear=True)


def _grouped_attention(hf: Mapping[str, Any], p: str, d: int) -> Recipes:
    """Qwen3: grouped queries, each head of q and k normalised."""
    heads, kv = int(hf["num_attention_heads"]), int(hf["num_key_value_heads"])
    width = int(hf.get("head_dim") or d // heads)
    q = _Part(source=f"{p}q_proj.weight", shape=(heads * width, d), dim=0, units=heads)
    k, v = (
        _Part(source=f"{p}{x}_proj.weight", shape=(kv * width, d), dim=0, units=kv, replicate=True) for x in ("k", "v")
    )
    yield _rows(f"{p}qkv_proj.weight", q, k, v)
    yield _columns(f"{p}o_proj.weight", d, heads * width, heads)
    yield _whole(f"{p}q_norm.weight", width)
    yield _whole(f"{p}k_norm.weight", width)


def _latent_attention(hf: Mapping[str, Any], p: str, d: int) -> Recipes:
    """DeepSeek: queries and key-values through low-rank projections; those down are whole on every rank."""
    heads, kv_rank = int(hf["num_attention_heads"]), int(hf["kv_lora_rank"])
    rope, nope, v = int(hf["qk_rope_head_dim"]), int(hf["qk_nope_head_dim"]), int(hf["v_head_dim"])
    kv_a = _Part(source=f"{p}kv_a_proj_with_mqa.weight", shape=(kv_rank + rope, d))

    def by_head(name: str, width: int, inputs: int) -> tuple[str, _Recipe]:
        return _rows(name, _Part(source=name, shape=(heads * width, inputs), dim=0, units=heads))

    if q_rank := int(hf.get("q_lora_rank") or 0):
        q_a = _Part(source=f"{p}q_a_proj.weight", shape=(q_rank, d))
        yield _rows(f"{p}fused_qkv_a_proj_with_mqa.weight", q_a, kv_a)
        yield _whole(f"{p}q_a_layernorm.weight", q_rank)
        yield by_head(f"{p}q_b_proj.weight", nope + rope, q_rank)
    else:
        yield _rows(f"{p}kv_a_proj_with_mqa.weight", kv_a)
        yield by_head(f"{p}q_proj.weight", nope + rope, d)
    yield _whole(f"{p}kv_a_layernorm.weight", kv_rank)
    yield by_head(f"{p}kv_b_proj.weight", nope + v, kv_rank)
    yield _columns(f"{p}o_proj.weight", d, heads * v, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """`step_from`: layer n has experts where (n + step_from) is divisible by the value of `step_key`."""

    attention: Any
    experts_key: str
    step_key: str
    step_from: int


_QWEN3 = _Family(attention=_grouped_attention, experts_key="num_experts", step_key="decoder_sparse_step", step_from=1)
_DEEPSEEK = _Family(attention=_latent_attention, experts_key="n_routed_experts", step_key="moe_layer_freq", step_from=0)
_FAMILIES = {"qwen3_moe": _QWEN3, "deepseek_v3": _DEEPSEEK, "kimi_k2": _DEEPSEEK}


def _scale_block(hf: Mapping[str, Any]) -> int:
    """The block size of fp8 checkpoints, 0 for others."""
    quantised = hf.get("quantization_config")
    if not quantised:
        return 0
    blocks: list[int] = quantised.get("weight_block_size") or []
    if quantised.get("quant_method") != "fp8" or len(set(blocks)) != 1 or int(blocks[0]) <= 0:
        raise ValueError(f"quantization_config {str(quantised)[:120]}")
    return blocks[0]
