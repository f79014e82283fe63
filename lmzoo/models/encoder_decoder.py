"""Encoder-decoder: a decoder that also looks at an encoder's output.

Vaswani et al. 2017, arXiv:1706.03762; T5: Raffel et al. 2020, arXiv:1910.10683.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..blocks.cache import Cache
from ..blocks.head import Pooler
from ..blocks.stack import Stack
from ..errors import UserError
from .encoder import check_ids, read_out


class EncoderDecoder(nn.Module):
    """One embedding, an encoder's stack, a decoder's stack with cross-attention, a head.

    ``n_decoder_layers``: None for n_layers. ``cross``: recipe of the attention over the encoder's output. All else is
    as in Encoder. Raises ValueError for sizes that do not fit.
    """

    family = "encoder-decoder"

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
        cross,
        ffn,
        norm,
        block,
        head,
        init,
        n_decoder_layers: int | None = None,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        share: int = 1,
    ):
        super().__init__()
        both = {
            "d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head, "d_ff": d_ff,
            "max_len": max_len, "dropout": dropout, "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout, "share": share,
            "position": position, "attention": attention, "ffn": ffn, "norm": norm, "block": block,
        }  # fmt: skip
        self.vocab_size, self.d_model, self.n_layers, self.max_len = vocab_size, d_model, n_layers, max_len
        self.embed = embed(vocab_size=vocab_size, d_model=d_model, dropout=dropout)
        self.encoder = Stack(n_layers=n_layers, causal=False, **both)
        self.decoder = Stack(n_layers=n_decoder_layers or n_layers, causal=True, cross=cross, d_memory=d_model, **both)
        self.head = head(embed=self.embed)
        self.max_positions = self.encoder.max_positions
        init(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        readout=None,
    ) -> Tensor:
        """input_ids (B, S), decoder_input_ids (B, T) -> logits (B, T, V), or ``readout(head, hidden)`` of (B, T, D).

        A classifier's logits are (B, classes); its decoder reads the text as well, where it is given nothing else.

        Attention masks: 1 for kept tokens; with both kinds of document ids, tokens see only their own document, also
        across from the decoder to the encoder.
        """
        if decoder_input_ids is None and isinstance(self.head, Pooler):
            decoder_input_ids, decoder_attention_mask = input_ids, attention_mask
        if decoder_input_ids is None:
            raise UserError("decoder_input_ids are missing: an encoder-decoder is called as net(input_ids, "
                            "attention_mask, decoder_input_ids), with None for a mask that keeps all")  # fmt: skip
        memory = self.encode(input_ids, attention_mask, document_ids)
        return self.decode(
            decoder_input_ids,
            memory,
            attention_mask,
            decoder_attention_mask,
            decoder_document_ids,
            document_ids,
            readout=readout,
        )

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """input_ids (B, S) -> memory (B, S, D)."""
        check_ids(input_ids, attention_mask)
        layout = self.encoder.layout(input_ids, attention_mask, document_ids)
        return self.encoder.run(self.embed(input_ids, self.encoder.positions[0], layout.q_positions), layout)

    def decode(
        self,
        decoder_input_ids: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        memory_documents: Tensor | None = None,
        cache: Cache | None = None,
        readout=None,
    ) -> Tensor:
        """decoder_input_ids (B, T) against memory (B, S, D) -> logits (B, T, V); ``cache`` as in Decoder."""
        check_ids(decoder_input_ids, decoder_attention_mask, "decoder_input_ids")
        layout = self.decoder.layout(decoder_input_ids, decoder_attention_mask, decoder_document_ids, cache)
        hidden = self.embed(decoder_input_ids, self.decoder.positions[0], layout.q_positions)
        hidden = self.decoder.run(hidden, layout, cache, memory, layout.over(memory, memory_mask, memory_documents))
        return read_out(self.head, hidden, decoder_attention_mask, readout)

    def cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache for ``batch`` decoder rows of at most ``max_len`` tokens."""
        return self.decoder.cache(batch, max_len)

    def generate(self, input_ids: Tensor, *given, **options) -> Tensor:
        """Answer rows of ids: see ``lmzoo.decoding.generate``."""
        from ..decoding import generate

        return generate(self, input_ids, *given, **options)
