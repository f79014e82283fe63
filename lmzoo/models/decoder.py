"""Decoder-only: every token sees itself and what stands before it (GPT-2: Radford et al. 2019)."""

from __future__ import annotations

from .encoder import Encoder


class Decoder(Encoder):
    """The encoder's layers under a causal mask; with ``cache=model.cache(batch, max_len)`` it decodes in steps."""

    family = "decoder"
    causal = True

    def generate(self, input_ids, *given, **options):
        """Continue rows of ids: see ``lmzoo.decoding.generate``."""
        from ..decoding import generate

        return generate(self, input_ids, *given, **options)
