"""The three families: a stack of layers (or two) with an embedding below and a head above."""

from .decoder import Decoder
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder

__all__ = ["Decoder", "Encoder", "EncoderDecoder"]
