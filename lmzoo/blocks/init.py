"""How weights begin. Each function fills a whole model in place; norms keep their ones, biases become zero.

With hidden states of unit variance under a head of deviation ``std`` the first loss is ln V + d_model * std^2 / 2.
"""

from __future__ import annotations

import math

from torch import nn

from .position import Buckets

RESIDUAL = ("attn.out", "cross.out", "ffn.down")  # what is added to the residual stream


def normal(model: nn.Module, *, std: float = 0.02) -> None:
    """Every matrix and embedding from N(0, std^2) (BERT, Devlin et al. 2018; Llama, Touvron et al. 2023)."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        zero_bias(module)


def gpt2(model: nn.Module, *, std: float = 0.02) -> None:
    """As ``normal``, with residual outputs divided by sqrt(2 n_layers) (Radford et al. 2019, section 2.3)."""
    normal(model, std=std)
    for name, module in model.named_modules():
        if name.endswith(RESIDUAL):
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * model.n_layers))


def t5(model: nn.Module, *, factor: float = 1.0) -> None:
    """Deviation 1/sqrt(inputs) everywhere, queries also divided by sqrt(d_head) in place of the scale of the scores.

    Token embeddings have deviation 1 (Raffel et al. 2020, arXiv:1910.10683; as in the reference implementation).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("attn.q", "cross.q")):
                std *= model.get_submodule(name[:-2]).d_head ** -0.5
            nn.init.normal_(module.weight, std=factor * std)
        elif isinstance(module, Buckets):
            nn.init.normal_(module.table.weight, std=factor * model.d_model**-0.5)
        zero_bias(module)
    nn.init.normal_(model.embed.tokens.weight, std=factor)


def xavier(model: nn.Module) -> None:
    """Matrices uniform (Glorot & Bengio 2010); embeddings N(0, 1/d_model), to be scaled by sqrt(d_model)."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=model.d_model**-0.5)
        zero_bias(module)


def zero_bias(module: nn.Module) -> None:
    """Zero the bias of a matrix."""
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
