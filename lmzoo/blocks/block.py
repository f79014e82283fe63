"""The residual wiring of a layer: self-attention, cross-attention where there is a memory, feed-forward.

pre        x + f(norm(x))           Xiong et al. 2020, arXiv:2002.04745; GPT-2, Llama, T5
post       norm(x + f(x))           Vaswani et al. 2017, arXiv:1706.03762; BERT
sandwich   x + norm(f(norm(x)))     Ding et al. 2021, arXiv:2105.13290; Gemma 2
parallel   x + attn(h) + ffn(h), h = norm(x)         GPT-J; PaLM, arXiv:2204.02311
"""

from __future__ import annotations

from torch import Tensor, nn


class PreNorm(nn.Module):
    """x + dropout(f(norm(x))) for each part f of the layer; ``norm`` is a recipe called with ``d_model``."""

    final_norm = True  # whether the stack ends with a norm of its own

    def __init__(
        self, attn: nn.Module, ffn: nn.Module, norm, d_model: int, dropout: float = 0.0, cross: nn.Module | None = None
    ):
        super().__init__()
        self.attn_norm, self.attn = norm(d_model), attn
        self.cross_norm, self.cross = (None, None) if cross is None else (norm(d_model), cross)
        self.ffn_norm, self.ffn = norm(d_model), ffn
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, layout, position, cache=None, memory=None, memory_layout=None, cross_cache=None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D); memory (B, S, d_memory) for a layer with cross-attention."""
        x = self.add("attn", x, lambda h: self.attn(h, layout, position, cache=cache))
        if self.cross is not None:
            x = self.add("cross", x, lambda h: self.cross(h, memory_layout, memory=memory, cache=cross_cache))
        return self.add("ffn", x, self.ffn)

    def add(self, name: str, x: Tensor, f) -> Tensor:
        """One residual step with part ``f``, whose norm is called ``name``_norm."""
        return x + self.dropped(f(getattr(self, f"{name}_norm")(x)))

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout, left out where it does nothing: steps of decoding are so short that its calls count."""
        return self.drop(x) if self.training else x


class PostNorm(PreNorm):
    """norm(x + dropout(f(x)))."""

    final_norm = False

    def add(self, name: str, x: Tensor, f) -> Tensor:
        return getattr(self, f"{name}_norm")(x + self.dropped(f(x)))


class Sandwich(PreNorm):
    """x + dropout(norm(f(norm(x))))."""

    def __init__(
        self, attn: nn.Module, ffn: nn.Module, norm, d_model: int, dropout: float = 0.0, cross: nn.Module | None = None
    ):
        super().__init__(attn, ffn, norm, d_model, dropout, cross)
        self.attn_out_norm, self.ffn_out_norm = norm(d_model), norm(d_model)
        self.cross_out_norm = None if cross is None else norm(d_model)

    def add(self, name: str, x: Tensor, f) -> Tensor:
        return x + self.dropped(getattr(self, f"{name}_out_norm")(f(getattr(self, f"{name}_norm")(x))))


class Parallel(nn.Module):
    """x + dropout(attn(h) + cross(h) + ffn(h)), h = norm(x)."""

    final_norm = True

    def __init__(
        self, attn: nn.Module, ffn: nn.Module, norm, d_model: int, dropout: float = 0.0, cross: nn.Module | None = None
    ):
        super().__init__()
        self.attn_norm, self.attn, self.cross, self.ffn = norm(d_model), attn, cross, ffn
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, layout, position, cache=None, memory=None, memory_layout=None, cross_cache=None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D); memory (B, S, d_memory) for a layer with cross-attention."""
        h = self.attn_norm(x)
        mixed = self.attn(h, layout, position, cache=cache) + self.ffn(h)
        if self.cross is not None:
            mixed = mixed + self.cross(h, memory_layout, memory=memory, cache=cross_cache)
        return x + (self.drop(mixed) if self.training else mixed)
