"""Attention: every query takes a weighted mean of the values, the weights coming from how well it fits each key.

    out = softmax(scale * q k^T + bias + mask) v        scaled dot product   (Vaswani et al. 2017, arXiv:1706.03762)
    out = softmax(e . tanh(q + k) + bias + mask) v      additive             (Bahdanau et al. 2014, arXiv:1409.0473)

Grouped-query attention: Ainslie et al. 2023, arXiv:2305.13245; multi-query: Shazeer 2019, arXiv:1911.02150; norms on
queries and keys: Henry et al. 2020, arXiv:2010.04245; sliding windows: Beltagy et al. 2020, arXiv:2004.05150.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import KeyValues, Ring
from .layout import Layout
from .project import Projects

NARROW = 16  # d_head; FlexAttention's kernels take no less
SHORT = 512  # keys; below it, one matrix of bf16 scores is quicker on a CPU than the fused kernel


def choose_backend(device: torch.device, dtype: torch.dtype, n_keys: int) -> str:
    """The quickest kernel for queries against ``n_keys`` keys: the only place where this is decided."""
    if device.type == "cuda":
        return "flex"
    return "matmul" if device.type == "cpu" and dtype == torch.bfloat16 and n_keys <= SHORT else "sdpa"


@cache
def flex(device_type: str):
    """FlexAttention (Dong et al. 2024, arXiv:2412.05496), compiled where it has a kernel to be compiled to."""
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, and seldom wanted

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products of ``x`` come out: autocast's where that is on."""
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


class Attention(Projects):
    """Multi-head attention over the same row, or over a ``memory`` of width d_memory.

    ``n_kv_heads`` < n_heads shares each key/value head between n_heads / n_kv_heads query heads. ``bias`` is that of
    q, k and v, ``out_bias`` that of the output (None: as bias). ``scale`` multiplies the scores (None: 1/sqrt(d_head)).
    ``window``: a causal query sees its last ``window`` positions, itself included; others window // 2 to each side.
    ``qk_norm``: a recipe of a norm over d_head for queries and keys. ``backend``: auto, matmul, sdpa, or flex, which
    is sdpa but for rows of several documents or with a window, without bias or dropout. Results are equal.
    """

    dot_product = True  # so that rotated queries and keys give scores that depend on the distance only

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        dropout: float = 0.0,
        d_memory: int | None = None,
        *,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        window: int | None = None,
        qk_norm=None,
        backend: str = "auto",
    ):
        super().__init__()
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}")
        if backend not in ("auto", "matmul", "sdpa", "flex"):
            raise ValueError(f"attention backend={backend} is unknown; there are: auto, matmul, sdpa, flex")
        if window is not None and window < 1:
            raise ValueError(f"attention window={window} must be at least 1")
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.dropout, self.scale, self.window, self.backend = dropout, scale or d_head**-0.5, window, backend
        self.q = nn.Linear(d_model, n_heads * d_head, bias)
        self.k = nn.Linear(d_memory or d_model, n_kv_heads * d_head, bias)
        self.v = nn.Linear(d_memory or d_model, n_kv_heads * d_head, bias)
        if d_memory is None:
            self.lay_together("q", "k", "v")
        self.out = nn.Linear(n_heads * d_head, d_model, bias if out_bias is None else out_bias)
        self.q_norm = nn.Identity() if qk_norm is None else qk_norm(d_head)
        self.k_norm = nn.Identity() if qk_norm is None else qk_norm(d_head)

    def forward(
        self, x: Tensor, layout: Layout, position=None, memory: Tensor | None = None, cache: KeyValues | None = None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D). With ``memory`` (B, S, d_memory) keys and values come from it."""
        x = x.to(product_dtype(x))  # once: under autocast each of q, k and v would do it, and keep its copy
        if memory is None:
            q, *new = self.project(x)
            k, v = self._by_head(*new)
        else:
            q = self.q(x)
            k, v = self.key_values(memory) if cache is None else (cache.keys, cache.values)
        q = self.q_norm(self._heads(q, self.n_heads))
        if position is not None:
            turn = layout.turns.get(id(position)) or position.turn(layout.q_positions)
            q, k = position.rotate(q, k, turn)
        if memory is None and cache is not None:
            k, v = cache.append(k, v, layout.offset)
        out = self.attend(q, k, v, *self.lower(x, layout, position))
        return self.out(out.transpose(1, 2).flatten(2))

    def key_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``source`` (B, S, d_memory), each (B, H_kv, S, K)."""
        source = source.to(product_dtype(source))
        return self._by_head(self.k(source), self.v(source))

    def lower(self, x: Tensor, layout: Layout, position=None) -> tuple[Tensor | None, bool]:
        """(mask, is_causal) for this part's window and kernel, see Layout.lower; made once for all layers alike.

        A stack calls it ahead of each layer: a learned bias must not enter the graph inside the layer that happens to
        be first, since activation checkpointing runs that layer anew and would not find the same graph.
        """
        layout, dtype = layout.within(self.window), product_dtype(x)
        kernel = self.kernel(x.device, dtype, layout.k_positions.shape[1])
        able = self.d_head >= NARROW and not (self.training and self.dropout or torch.compiler.is_exporting())
        able = able and not (x.device.type == "cpu" and torch.is_grad_enabled())  # where it has no backward pass
        return layout.lower(position, self.window, dtype, kernel == "matmul", kernel == "flex" and able)

    def kernel(self, device: torch.device, dtype: torch.dtype, n_keys: int) -> str:
        """matmul, sdpa or flex: how queries of this dtype meet ``n_keys`` keys."""
        return choose_backend(device, dtype, n_keys) if self.backend == "auto" else self.backend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask, is_causal: bool) -> Tensor:
        """q (B, H, T, K), k and v (B, H_kv, S, K) -> (B, H, T, K)."""
        if self.kernel(q.device, product_dtype(q), k.shape[2]) == "matmul":
            return self._weigh((q * self.scale) @ self._every_head(k).mT, v, mask)
        grouped = self.n_kv_heads < self.n_heads
        if not (mask is None or isinstance(mask, Tensor)):
            return flex(q.device.type)(q, k, v, block_mask=mask, scale=self.scale, enable_gqa=grouped)
        dropout = self.dropout if self.training else 0.0
        if grouped and q.shape[2] == 1 and (mask is None or mask.shape[1] == 1):  # a step: a group's heads as rows
            q = q.reshape(len(q), self.n_kv_heads, -1, self.d_head)
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale).reshape(
                len(q), self.n_heads, 1, self.d_head)  # fmt: skip
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=self.scale, enable_gqa=grouped)

    def cache(self, batch: int, max_len: int) -> KeyValues:
        """Room for the keys and values of ``max_len`` tokens of ``batch`` rows, or of the window's."""
        kind, length = (KeyValues, max_len) if self.window is None or self.window >= max_len else (Ring, self.window)
        shape = (batch, self.n_kv_heads, length, self.d_head)
        return kind(self.k.weight.new_empty(shape), self.k.weight.new_empty(shape))

    def _weigh(self, scores: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = (scores if mask is None else scores.add_(mask)).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ self._every_head(v)

    def _by_head(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_norm(self._heads(k, self.n_kv_heads)), self._heads(v, self.n_kv_heads)

    def _heads(self, x: Tensor, n_heads: int) -> Tensor:
        return x.unflatten(-1, (n_heads, self.d_head)).transpose(1, 2)

    def _every_head(self, x: Tensor) -> Tensor:
        groups = self.n_heads // self.n_kv_heads
        return x if groups == 1 else x.repeat_interleave(groups, dim=1)


class Additive(Attention):
    """Additive attention: scores e . tanh(q + k), with one vector e (K) per head. Takes B*H*T*S*K numbers."""

    dot_product = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        dropout: float = 0.0,
        d_memory: int | None = None,
        *,
        bias: bool = True,
        window: int | None = None,
    ):
        super().__init__(d_model, n_heads, n_kv_heads, d_head, dropout, d_memory, bias=bias, window=window)
        self.energy = nn.Parameter(torch.empty(n_heads, d_head))
        nn.init.normal_(self.energy, std=d_head**-0.5)

    def kernel(self, device: torch.device, dtype: torch.dtype, n_keys: int) -> str:
        """A matrix of scores is all that there is."""
        return "matmul"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask, is_causal: bool) -> Tensor:
        """q (B, H, T, K), k and v (B, H_kv, S, K) -> (B, H, T, K)."""
        summed = torch.tanh(q[:, :, :, None] + self._every_head(k)[:, :, None])
        return self._weigh(torch.einsum("bhtsk,hk->bhts", summed, self.energy.to(summed.dtype)), v, mask)


class GroupedQuery(Attention):
    """Attention whose every ``group`` query heads share a key/value head; None: all of them (multi-query attention)."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        dropout: float = 0.0,
        d_memory: int | None = None,
        *,
        group: int | None = None,
        **options,
    ):
        group = group or n_heads
        if n_heads % group:
            raise ValueError(f"n_heads={n_heads} is not divisible by group={group}")
        if n_kv_heads not in (n_heads, n_heads // group):
            raise ValueError(f"n_kv_heads={n_kv_heads} contradicts n_heads={n_heads} / group={group}: leave one out")
        super().__init__(d_model, n_heads, n_heads // group, d_head, dropout, d_memory, **options)
