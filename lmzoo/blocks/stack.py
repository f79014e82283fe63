"""A stack of layers: the body that all three families share.

A part is a recipe: the stack calls it once per layer and hands over the sizes. A recipe may be a list: layer i takes
item i mod n (windows that alternate, two rotary bases). ``share=n`` uses each layer n times in a row (ALBERT).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cache import Cache, KeyValues
from .layout import Layout


class Stack(nn.Module):
    """``n_layers`` layers over rows of width d_model, and the final norm where the block's wiring asks for one.

    ``d_head``: None for d_model / n_heads. ``n_kv_heads``: None for n_heads. ``cross``: recipe of the attention over a
    memory of width ``d_memory``. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int | None,
        d_head: int | None,
        d_ff: int,
        max_len: int,
        dropout: float,
        attention_dropout: float | None,
        activation_dropout: float,
        share: int,
        position,
        attention,
        ffn,
        norm,
        block,
        causal: bool,
        cross=None,
        d_memory: int | None = None,
    ):
        super().__init__()
        if d_head is None and d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}")
        if n_layers % share:
            raise ValueError(f"n_layers={n_layers} is not divisible by share={share}")
        self.causal, self.d_model, self.n_layers, self.share = causal, d_model, n_layers, share
        d_head = d_head or d_model // n_heads
        heads = {
            "d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads or n_heads, "d_head": d_head,
            "dropout": dropout if attention_dropout is None else attention_dropout,
        }  # fmt: skip
        place = {"d_model": d_model, "n_heads": n_heads, "d_head": d_head, "max_len": max_len, "causal": causal}
        self.positions = nn.ModuleList(recipe(**place) for recipe in as_list(position))
        self.blocks = nn.ModuleList(
            pick(block, i)(
                attn=pick(attention, i)(**heads),
                ffn=pick(ffn, i)(d_model=d_model, d_ff=d_ff, dropout=activation_dropout),
                norm=pick(norm, i),
                d_model=d_model,
                dropout=dropout,
                cross=None if cross is None else pick(cross, i)(**heads, d_memory=d_memory),
            )
            for i in range(n_layers // share)
        )
        for i in range(n_layers):
            if self.positions[i % len(self.positions)].rotates and not self.blocks[i // share].attn.dot_product:
                raise ValueError("rotary positions need attention by dot products, not additive attention")
        self.norm = pick(norm, 0)(d_model) if self.blocks[-1].final_norm else nn.Identity()
        self.max_positions = self.positions[0].max_positions

    def run(
        self,
        x: Tensor,
        layout: Layout,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D), through every layer and the final norm; fills ``cache``."""
        layout.turns = {id(position): position.turn(layout.q_positions) for position in self.positions}
        for i in range(self.n_layers):
            block = self.blocks[i // self.share]
            position = self.positions[i % len(self.positions)]
            layer, cross = (None, None) if cache is None else (cache.layers[i], cache.cross[i])
            if memory is not None and cache is not None and cross is None:
                cross = cache.cross[i] = KeyValues(*(part.contiguous() for part in block.cross.key_values(memory)))
            if torch.is_grad_enabled():
                block.attn.lower(x, layout, position)
            x = block(x, layout, position, layer, memory, memory_layout, cross)
        if cache is not None:
            cache.length += x.shape[1]
        return self.norm(x)

    def layout(
        self, tokens: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, cache: Cache | None = None
    ) -> Layout:
        """The facts of these rows, (B, T). Raises ValueError where the positions do not reach so far."""
        length = tokens.shape[1] + (0 if cache is None else cache.length)
        if self.max_positions is not None and length > self.max_positions and document_ids is None:
            raise ValueError(
                f"a row of {length} tokens is longer than the model's {self.max_positions} learned positions"
            )
        return Layout.of(tokens, attention_mask, document_ids, self.causal, cache)

    def cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache for ``batch`` rows of at most ``max_len`` tokens."""
        return Cache([self.blocks[i // self.share].attn.cache(batch, max_len) for i in range(self.n_layers)], max_len)


def as_list(recipe) -> list:
    """A recipe, or a list of recipes, as a list."""
    return list(recipe) if isinstance(recipe, (list, tuple)) else [recipe]


def pick(recipe, layer: int):
    """The recipe of layer number ``layer``."""
    recipes = as_list(recipe)
    return recipes[layer % len(recipes)]
