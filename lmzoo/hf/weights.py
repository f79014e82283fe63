"""Which of their parameters is which of ours: one list of (ours, theirs, transform) an architecture, read both ways.

A row names modules, and stands for their weight and their bias where they have one. `*` is the number of a layer.
`q+k+v` are three modules of ours that are one of theirs. Rows whose module a net doesn't have (the head of a tied one)
are passed over.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Transform(NamedTuple):
    """`split(theirs, n)` is the n tensors of ours that one of theirs holds, `join(ours)` the way back."""

    split: Callable[[Tensor, int], Iterable[Tensor]]
    join: Callable[[list[Tensor]], Tensor]


same = Transform(lambda theirs, n: theirs.chunk(n), torch.cat)
# stored as (inputs, outputs), where torch's linear layers hold (outputs, inputs)
turned = Transform(lambda theirs, n: theirs.t().chunk(n), lambda ours: torch.cat(ours).t())

Row = tuple[str, str, Transform]

GPT2: list[Row] = [
    ("embed.tokens", "transformer.wte", same),
    ("positions.0.table", "transformer.wpe", same),
    ("blocks.*.attn_norm", "transformer.h.*.ln_1", same),
    ("blocks.*.attn.q+k+v", "transformer.h.*.attn.c_attn", turned),
    ("blocks.*.attn.out", "transformer.h.*.attn.c_proj", turned),
    ("blocks.*.ffn_norm", "transformer.h.*.ln_2", same),
    ("blocks.*.ffn.up", "transformer.h.*.mlp.c_fc", turned),
    ("blocks.*.ffn.down", "transformer.h.*.mlp.c_proj", turned),
    ("norm", "transformer.ln_f", same),
    ("head", "lm_head", same),
]

LLAMA: list[Row] = [
    ("embed.tokens", "model.embed_tokens", same),
    ("blocks.*.attn_norm", "model.layers.*.input_layernorm", same),
    ("blocks.*.attn.q", "model.layers.*.self_attn.q_proj", same),
    ("blocks.*.attn.k", "model.layers.*.self_attn.k_proj", same),
    ("blocks.*.attn.v", "model.layers.*.self_attn.v_proj", same),
    ("blocks.*.attn.out", "model.layers.*.self_attn.o_proj", same),
    ("blocks.*.ffn_norm", "model.layers.*.post_attention_layernorm", same),
    ("blocks.*.ffn.gate", "model.layers.*.mlp.gate_proj", same),
    ("blocks.*.ffn.up", "model.layers.*.mlp.up_proj", same),
    ("blocks.*.ffn.down", "model.layers.*.mlp.down_proj", same),
    ("norm", "model.norm", same),
    ("head", "lm_head", same),
]

BERT_BODY: list[Row] = [
    ("embed.tokens", "bert.embeddings.word_embeddings", same),
    ("embed.types", "bert.embeddings.token_type_embeddings", same),
    ("embed.norm", "bert.embeddings.LayerNorm", same),
    ("positions.0.table", "bert.embeddings.position_embeddings", same),
    ("blocks.*.attn.q", "bert.encoder.layer.*.attention.self.query", same),
    ("blocks.*.attn.k", "bert.encoder.layer.*.attention.self.key", same),
    ("blocks.*.attn.v", "bert.encoder.layer.*.attention.self.value", same),
    ("blocks.*.attn.out", "bert.encoder.layer.*.attention.output.dense", same),
    ("blocks.*.attn_norm", "bert.encoder.layer.*.attention.output.LayerNorm", same),
    ("blocks.*.ffn.up", "bert.encoder.layer.*.intermediate.dense", same),
    ("blocks.*.ffn.down", "bert.encoder.layer.*.output.dense", same),
    ("blocks.*.ffn_norm", "bert.encoder.layer.*.output.LayerNorm", same),
]
BERT = [
    *BERT_BODY,
    ("head.dense", "cls.predictions.transform.dense", same),
    ("head.norm", "cls.predictions.transform.LayerNorm", same),
    ("head", "cls.predictions", same),
]
BERT_LABELS = [*BERT_BODY, ("head.dense", "bert.pooler.dense", same), ("head.out", "classifier", same)]


def _t5(up: str) -> list[Row]:
    """T5's rows, with `up` the name of the matrix that isn't the gate."""
    attention = [("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")]
    rows: list[Row] = [("embed.tokens", "shared", same), ("head", "lm_head", same)]
    for side, feed_forward in ("encoder", 1), ("decoder", 2):
        ours, theirs = f"{side}.blocks.*", f"{side}.block.*.layer"
        first = f"{side}.block.0.layer.0.SelfAttention"
        rows += [(f"{ours}.attn.{a}", f"{theirs}.0.SelfAttention.{b}", same) for a, b in attention]
        rows += [
            (f"{side}.positions.0.table", f"{first}.relative_attention_bias", same),
            (f"{ours}.attn_norm", f"{theirs}.0.layer_norm", same),
            (f"{ours}.ffn.gate", f"{theirs}.{feed_forward}.DenseReluDense.wi_0", same),
            (f"{ours}.ffn.up", f"{theirs}.{feed_forward}.DenseReluDense.{up}", same),
            (f"{ours}.ffn.down", f"{theirs}.{feed_forward}.DenseReluDense.wo", same),
            (f"{ours}.ffn_norm", f"{theirs}.{feed_forward}.layer_norm", same),
            (f"{side}.norm", f"{side}.final_layer_norm", same),
        ]
    ours, theirs = "decoder.blocks.*", "decoder.block.*.layer.1"
    rows += [(f"{ours}.cross.{a}", f"{theirs}.EncDecAttention.{b}", same) for a, b in attention]
    return [*rows, (f"{ours}.cross_norm", f"{theirs}.layer_norm", same)]


T5_V1_0 = _t5(up="wi")
T5_V1_1 = _t5(up="wi_1")


def pair(rows: list[Row], names: Iterable[str]) -> dict[str, tuple[list[str], Transform]]:
    """{their parameter: (our parameters, transform)} for all parameters `names` of a net, in the order of the rows."""
    known = {}
    for ours, theirs, transform in rows:
        stem, dot, leaves = ours.rpartition(".")
        known |= {f"{stem}{dot}{leaf}": (theirs, transform) for leaf in leaves.split("+")}
    order = {module: i for i, module in enumerate(known)}
    pairs: dict[str, tuple[list[str], Transform]] = {}
    for name in sorted(names, key=lambda name: order[_any_layer(name)]):
        theirs, transform = known[_any_layer(name)]
        layer = re.search(r"blocks\.(\d+)", name)
        their_name = f"{theirs.replace('*', layer[1]) if layer else theirs}.{name.rpartition('.')[2]}"
        pairs.setdefault(their_name, ([], transform))[0].append(name)
    return pairs


def _any_layer(name: str) -> str:
    """The module of a parameter, `*` for the number of its layer."""
    return re.sub(r"blocks\.\d+", "blocks.*", name.rpartition(".")[0])


def to_ours(rows: list[Row], names: Iterable[str], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters `names` out of theirs (weights, or their gradients)."""
    return {
        name: tensor
        for their_name, (ours, transform) in pair(rows, names).items()
        for name, tensor in zip(ours, transform.split(theirs[their_name], len(ours)), strict=True)
    }


def to_theirs(rows: list[Row], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their parameters out of ours."""
    pairs = pair(rows, ours)
    return {name: transform.join([ours[n] for n in parts]).contiguous() for name, (parts, transform) in pairs.items()}
