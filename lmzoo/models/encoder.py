"""Encoder-only: every token sees the whole row (BERT: Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from torch import Tensor, nn

from ..blocks.head import Pooler
from ..blocks.stack import Stack
from ..errors import UserError


class Encoder(Stack):
    """Embedding, bidirectional layers, head. Parts are recipes (blocks/__init__.py), sizes are the papers'.

    ``attention_dropout``: None for ``dropout``. Raises ValueError for sizes that do not fit.
    """

    family = "encoder"
    causal = False

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        d_ff: int,
        max_len: int,
        embed,
        position,
        attention,
        ffn,
        norm,
        block,
        head,
        init,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        share: int = 1,
    ):
        super().__init__(
            d_model=d_model, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_ff=d_ff,
            max_len=max_len, dropout=dropout, attention_dropout=attention_dropout, share=share,
            activation_dropout=activation_dropout, position=position, attention=attention, ffn=ffn, norm=norm,
            block=block, causal=self.causal,
        )  # fmt: skip
        self.vocab_size, self.max_len = vocab_size, max_len
        self.embed = embed(vocab_size=vocab_size, d_model=d_model, dropout=dropout)
        self.head = head(embed=self.embed)
        init(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache=None,
        readout=None,
    ) -> Tensor:
        """input_ids (B, T) -> logits (B, T, V), or what ``readout(head, hidden)`` makes of hidden (B, T, D).

        A classifier's logits are (B, classes). attention_mask (B, T): 1 for kept tokens; document_ids (B, T): tokens
        see only their own document. With a ``cache`` (decoders only) the rows continue what it holds; mask and
        documents then cover the new tokens only.
        """
        check_ids(input_ids, attention_mask)
        layout = self.layout(input_ids, attention_mask, document_ids, cache)
        hidden = self.embed(input_ids, self.positions[0], layout.q_positions, token_type_ids)
        hidden = self.run(hidden, layout, cache)
        return read_out(self.head, hidden, attention_mask, readout)


def check_ids(ids: object, mask: object = None, name: str = "input_ids") -> None:
    """Refuse what is no tensor (B, T) of ids, and a mask that is none of that shape."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        given = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise UserError(f"{name}: give a tensor (B, T) of ids, rows of whole numbers, not {given}; "
                        "model.tokenizer.encode(text) makes ids, torch.tensor([ids]) a row of them")  # fmt: skip
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        given = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise UserError(f"the mask of {name} must be a tensor of their shape {tuple(ids.shape)}, not {given}")


def read_out(head: nn.Module, hidden: Tensor, attention_mask: Tensor | None, readout=None) -> Tensor:
    """What a forward returns: ``readout(head, hidden)``, or the head's logits; one that pools is told who is kept.

    hidden (B, T, D), attention_mask (B, T).
    """
    if readout is not None:
        return readout(head, hidden)
    return head(hidden, attention_mask) if isinstance(head, Pooler) else head(hidden)
