"""Low-rank adaptation (LoRA: Hu et al. 2021, arXiv:2106.09685): a frozen net learns by small matrices beside its own.

    W x + b + (alpha / rank) B A x        A (rank, inputs), B (outputs, rank)

B begins as zero, so an adapted net begins as the net that it was. The state dict of an adapted net holds what the
adapter brought, and a new head, which is trained with it; the frozen weights are the base's, and loading leaves them
as they are. Merged, W + (alpha / rank) B A, it is a net like any other.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import optim
from .errors import UserError


class LoRA(nn.Linear):
    """The linear layer `base`, whose weight and bias keep their names, with a matrix of rank `rank` beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias, self.scale = base.weight, base.bias, alpha / rank
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, rank))
        nn.init.normal_(self.lora_a, std=1 / math.sqrt(self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def ready(net: nn.Module, config: Mapping) -> None:
    """Make `net` what the run of a whole configuration trains: adapted, and what `optim.freeze` names frozen."""
    if adapter := config.get("adapter"):
        adapt(net, **adapter, new=new_parts(config))
    optim.freeze(net, config["optim"].get("freeze", ()))


def new_parts(config: Mapping) -> tuple[str, ...]:
    """The parts of the net that a run's task brings, whose weights no checkpoint has that it starts from."""
    return ("head",) if "head" in config["task"] else ()


def adapt(net: nn.Module, rank: int, targets: Sequence[str], alpha: float, new: Sequence[str] = ()) -> None:
    """Freeze `net` but for its parts `new`, and put an adapter beside each linear layer of its blocks in `targets`.

    UserError for a pattern that matches none, and for a rank that a matrix can't have.
    """
    layers = {name: layer for name, layer in net.named_modules()
              if type(layer) is nn.Linear and "blocks" in name.split(".")}
    chosen = optim.choose(layers, targets, "adapter.targets", "linear layer of the blocks")
    if not chosen:
        raise UserError(f"adapter.targets={list(targets)} leaves no layer to adapt: name some, as ['*attn.q']")
    net.requires_grad_(False)
    for part in new:
        net.get_submodule(part).requires_grad_()
    frozen = [name for name, weight in net.named_parameters() if not weight.requires_grad]
    for name, layer in layers.items():
        if name in chosen:
            if rank > min(layer.weight.shape):
                shape = " x ".join(map(str, layer.weight.shape))
                raise UserError(f"adapter.rank={rank} is more than the {shape} matrix of {name} can have: give at most "
                                f"{min(layer.weight.shape)}, or other adapter.targets")
            net.set_submodule(name, LoRA(layer, rank, alpha))
    net.register_state_dict_post_hook(partial(_leave_out, frozen))
    net.register_load_state_dict_pre_hook(partial(_leave_as_it_is, frozen))


def _leave_out(frozen: Collection[str], net: nn.Module, state: dict, prefix: str, *_: object) -> None:
    for name in frozen:
        del state[prefix + name]


def _leave_as_it_is(frozen: Collection[str], net: nn.Module, state: dict, prefix: str, *_: object) -> None:
    own = dict(net.named_parameters())
    for name in frozen:
        state.setdefault(prefix + name, own[name].detach())


def scale(net: nn.Module) -> float | None:
    """alpha / rank of an adapted net; None of any other."""
    return next((layer.scale for layer in net.modules() if isinstance(layer, LoRA)), None)


def weights(net: nn.Module) -> dict[str, Tensor]:
    """All weights of a net, adapted or not, by name."""
    return {**net.state_dict(), **{name: weight.detach() for name, weight in net.named_parameters()}}


def merge(weights: Mapping[str, Tensor], scale: float | None) -> dict[str, Tensor]:
    """All `weights` of an adapted net -> those of the net without an adapter that does the same."""
    merged = dict(weights)
    for name in weights:
        layer, _, kind = name.rpartition(".")
        if kind == "lora_a":
            a, b, weight = merged.pop(name), merged.pop(f"{layer}.lora_b"), weights[f"{layer}.weight"].cpu()
            merged[f"{layer}.weight"] = (weight.double() + scale * b.cpu().double() @ a.cpu().double()).to(weight.dtype)
    return merged


def digest(net: nn.Module) -> str:
    """sha256 of a net's weights, whatever file they came from."""
    found = hashlib.sha256()
    for name, weight in sorted(net.state_dict().items()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        found.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
