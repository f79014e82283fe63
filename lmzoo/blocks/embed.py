"""From ids to vectors: tokens, token types, projection, scale, position, norm, dropout, in this order."""

from __future__ import annotations

from torch import Tensor, nn

from .position import Position


class Embed(nn.Module):
    """dropout(norm(position.embed(scale * project(tokens[ids]) + types[type_ids]))).

    ``n_types`` token types (BERT: 2). ``d_embed`` < d_model stores narrow vectors and projects them (ALBERT, Lan et al.
    2019, arXiv:1909.11942). ``scale``: a number, or "sqrt" for sqrt(d_model) (Vaswani et al. 2017). ``norm``: a recipe.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        dropout: float = 0.0,
        *,
        n_types: int = 0,
        d_embed: int | None = None,
        scale: float | str = 1.0,
        norm=None,
    ):
        super().__init__()
        self.d_model = d_model
        self.scale = d_model**0.5 if scale == "sqrt" else float(scale)
        self.tokens = nn.Embedding(vocab_size, d_embed or d_model)
        self.types = nn.Embedding(n_types, d_model) if n_types else None
        self.project = nn.Linear(d_embed, d_model) if d_embed else None
        self.norm = nn.Identity() if norm is None else norm(d_model)
        self.drop = nn.Dropout(dropout)

    @property
    def tells_pairs(self) -> bool:
        """Whether there is a type for the second text of a pair."""
        return self.types is not None and self.types.num_embeddings > 1

    def forward(
        self, input_ids: Tensor, position: Position, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """input_ids (B, T), positions (B or 1, T), token_type_ids (B, T) or None: all of type 0 -> (B, T, D)."""
        x = self.tokens(input_ids)
        if self.project is not None:
            x = self.project(x)
        if self.scale != 1.0:
            x = x * self.scale
        if self.types is not None:
            x = x + (self.types.weight[0] if token_type_ids is None else self.types(token_type_ids))
        return self.drop(self.norm(position.embed(x, positions)))
