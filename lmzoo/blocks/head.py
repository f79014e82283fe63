"""From the last hidden states to logits over the vocabulary or over classes.

A tied head holds the embedding without registering it: one parameter, one key in a checkpoint, one entry in the
optimizer, whatever is loaded, moved or resized (Press & Wolf 2016, arXiv:1608.05859).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .embed import Embed


class Linear(nn.Linear):
    """Logits from a matrix of the head's own: hidden (..., D) -> (..., V)."""

    def __init__(self, embed: Embed, *, bias: bool = False):
        super().__init__(embed.d_model, embed.tokens.num_embeddings, bias)


class Tied(nn.Module):
    """Logits from the embedding's matrix, through its projection backwards where it has one.

    ``scale`` multiplies the hidden states: a number or "rsqrt" for 1/sqrt(d_model) (T5 v1.0).
    """

    def __init__(self, embed: Embed, *, bias: bool = False, scale: float | str = 1.0):
        super().__init__()
        self.embed = (embed,)  # in a tuple, so that it is not a submodule here as well
        self.scale = embed.d_model**-0.5 if scale == "rsqrt" else float(scale)
        self.bias = nn.Parameter(torch.zeros(embed.tokens.num_embeddings)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> (..., V)."""
        embed = self.embed[0]
        if embed.project is not None:
            hidden = F.linear(hidden, embed.project.weight.T)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        return F.linear(hidden, embed.tokens.weight, self.bias)


class Masked(nn.Module):
    """BERT's head: tied(norm(activation(dense(hidden)))) + bias (Devlin et al. 2018, arXiv:1810.04805)."""

    def __init__(self, embed: Embed, *, activation, norm):
        super().__init__()
        self.embed = (embed,)
        d_embed = embed.tokens.embedding_dim
        self.dense, self.activation, self.norm = nn.Linear(embed.d_model, d_embed), activation(), norm(d_embed)
        self.bias = nn.Parameter(torch.zeros(embed.tokens.num_embeddings))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> (..., V)."""
        return F.linear(self.norm(self.activation(self.dense(hidden))), self.embed[0].tokens.weight, self.bias)


class Pooler(nn.Module):
    """One vector per row: tanh(dense(pooled)); pooled is the first or last kept position, or the mean of all kept."""

    def __init__(self, embed: Embed, *, pool: str = "first"):
        super().__init__()
        if pool not in ("first", "last", "mean"):
            raise ValueError(f"pool={pool} is unknown; there are: first, last, mean")
        self.pool, self.dense = pool, nn.Linear(embed.d_model, embed.d_model)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden (B, T, D), attention_mask (B, T) or None -> (B, D)."""
        return self.dense(self.pooled(hidden, attention_mask)).tanh()

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The same before the dense layer. A row that keeps nothing takes its first position; its mean is zero."""
        every = hidden.new_ones(hidden.shape[:2], dtype=torch.float32)  # bfloat16 could not tell column 256 from 257
        keep = every if attention_mask is None else attention_mask.float()
        if self.pool == "mean":
            mean = (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)
            return mean.to(hidden.dtype)
        columns = torch.arange(keep.shape[1], device=keep.device)
        column = (keep * columns).argmax(1) if self.pool == "last" else keep.argmax(1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)  # len(hidden) would be a constant in a program
        return hidden[rows, column]


class Classifier(Pooler):
    """Class logits: out(dropout(tanh(dense(pooled))))."""

    def __init__(self, embed: Embed, *, n_classes: int, pool: str = "first", dropout: float = 0.0):
        super().__init__(embed, pool=pool)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(embed.d_model, n_classes)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden (B, T, D), attention_mask (B, T) or None -> (B, n_classes)."""
        return self.out(self.drop(super().forward(hidden, attention_mask)))


class Tagger(nn.Module):
    """Class logits at every position: out(dropout(hidden))."""

    def __init__(self, embed: Embed, *, n_classes: int, dropout: float = 0.0):
        super().__init__()
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(embed.d_model, n_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> (..., n_classes)."""
        return self.out(self.drop(hidden))
