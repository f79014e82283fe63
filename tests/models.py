"""Small nets for the tests, from the YAML files of `conf/model`: an architecture by name, parts and sizes by word."""

from functools import cache
from importlib.resources import files

import torch
from omegaconf import OmegaConf

from lmzoo.checkpoint import build

CONF = files("lmzoo.conf")
TINY = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "max_len": 32, "dropout": 0.0}
FAMILIES = {"encoder": "bert", "decoder": "gpt", "encoder-decoder": "t5"}
POSITIONS = ["none", "learned", "sinusoidal", "rotary", "rotary_linear", "alibi", "t5"]


@cache
def read(path: str) -> dict:
    """The mapping in one file of `conf`, interpolations as they stand."""
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{path}.yaml"))


def config(name: str, vocab_size: int = 50, **words) -> dict:
    """The resolved config of ``conf/model/NAME.yaml``: words are sizes, and parts: a name, a dict, or a list."""
    model = dict(read(f"model/{name}"))
    parts = {kind: option for line in model.pop("defaults") for kind, option in line.items() if "override" not in kind}
    for kind, option in parts.items():
        option = words.pop(kind, option)
        options = option if isinstance(option, list) else [option]
        found = [read(f"model/{kind}/{item}") if isinstance(item, str) else item for item in options]
        model[kind] = found if isinstance(option, list) else found[0]
    tree = OmegaConf.create({"model": model | TINY | words, "tokenizer": {"vocab_size": vocab_size}})
    return OmegaConf.to_container(tree, resolve=True)["model"]


def make(name: str, seed: int = 0, **words) -> torch.nn.Module:
    """The net of ``config(name, **words)`` in eval mode, every parameter moved away from its initial zeros and ones."""
    torch.manual_seed(seed)
    net = build(config(name, **words)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def attention(**options) -> dict:
    """The recipe of an attention with these options."""
    return {"_target_": "lmzoo.blocks.attention.Attention", "_partial_": True, **options}


def logits(net: torch.nn.Module, ids: torch.Tensor, mask=None, documents=None, **more) -> torch.Tensor:
    """Logits (B, T, V) of any family: an encoder-decoder gets the same rows on both sides."""
    if net.family == "encoder-decoder":
        return net(ids, mask, ids, mask, documents, documents, **more)
    return net(ids, mask, documents, **more)


def ids(*shape: int, vocab_size: int = 50, seed: int = 1) -> torch.Tensor:
    """Random ids."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
