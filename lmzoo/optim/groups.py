"""Which parameters are trained, which of them decay, and with what share of the learning rate.

Weight decay is for the matrices that multiply activations. Norm gains and biases (fewer than two dimensions) are not
decayed; embeddings are, as in BERT (Devlin et al. 2018, arXiv:1810.04805) and GPT-2/3, whose recipes spare only norms
and biases. Layer-wise decay of the learning rate: Howard and Ruder 2018, arXiv:1801.06146; as in BEiT (Bao et al. 2021,
arXiv:2106.08254) a head has the whole rate, the last layer `layer_decay` times it, and so on down to the embeddings.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from ..errors import UserError


def freeze(net: nn.Module, patterns: Iterable[str]) -> None:
    """Take the parameters that `patterns` choose out of training: they get no gradient and are in no group."""
    weights = dict(net.named_parameters())
    for name in choose(weights, patterns, "optim.freeze"):
        weights[name].requires_grad_(False)


def choose(names: Collection[str], patterns: Iterable[str], word: str, kind: str = "parameter") -> set[str]:
    """The names that shell patterns match, each pattern after those before: `-head*` leaves out again what it matches.

    Raises UserError, which begins with `word` and says of which `kind` they are, for a pattern that matches none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("-"))}
        if not matched:
            parts = dict.fromkeys(part for name in names for part in accumulate(name.split("."), "{}.{}".format))
            near = difflib.get_close_matches(pattern.strip("-*."), parts, n=3, cutoff=0.5)
            near = near or dict.fromkeys(name.split(".")[0] for name in names)
            raise UserError(f"{word}: {pattern} matches no {kind}; there are {', '.join(f'{n}*' for n in near)}")
        chosen = chosen - matched if pattern.startswith("-") else chosen | matched
    return chosen


def parameter_groups(net: nn.Module, config: Mapping) -> list[dict]:
    """An optimizer's groups, those of the highest learning rate first; each trainable parameter once, tied ones too.

    config: lr; weight_decay, of parameters of two dimensions or more but those that the patterns of no_decay match;
    layer_decay, the factor between the learning rates of a layer and the one above it (1: one rate for all). The groups
    are `decay` and `no_decay`, or with layer_decay those of each depth, `decay_3`; `lr_factor` is a group's lr over
    that of config.
    """
    names = [name for name, weight in net.named_parameters() if weight.requires_grad]
    if not names:
        raise UserError("the model has no trainable parameter: unfreeze at least one (optim.freeze)")
    every, factor = dict(net.named_parameters()), config.get("layer_decay", 1.0)
    spared = choose(every, config.get("no_decay", ()), "optim.no_decay")
    depth, groups = depths(net), {}
    for name in names:
        decays = every[name].ndim >= 2 and name not in spared
        kind = "decay" if decays else "no_decay"
        share = factor ** depth[name]
        group = groups.setdefault((-share, kind), {
            "name": kind if factor == 1 else f"{kind}_{depth[name]}", "params": [], "lr": config["lr"] * share,
            "lr_factor": share, "weight_decay": config["weight_decay"] if decays else 0.0,
        })  # fmt: skip
        group["params"].append(every[name])
    return [groups[key] for key in sorted(groups)]


def depths(net: nn.Module) -> dict[str, int]:
    """{parameter: how far below the top it stands}: a head 0, layer i of n n - i, embeddings and positions n + 1.

    Layers count from 0. A stack's final norm is level with what follows it. A decoder's layers stand on its encoder's.
    A layer that is used several times has the depth of its last use.
    """
    height, level = 0, {}
    for stack in net.modules():
        if isinstance(blocks := getattr(stack, "blocks", None), nn.ModuleList):
            share = getattr(stack, "share", 1)
            level |= dict.fromkeys(stack.parameters(), height + share * len(blocks) + 1)
            for block in blocks:
                height += share
                level |= dict.fromkeys(block.parameters(), height)
    for path, module in net.named_modules():
        if path.split(".")[-1] in ("embed", "positions"):
            level |= dict.fromkeys(module.parameters(), 0)
    return {name: height + 1 - level.get(weight, height + 1) for name, weight in net.named_parameters()}


def hidden_matrices(net: nn.Module) -> set[nn.Parameter]:
    """The matrices inside the blocks, none of which is tied to anything outside of them."""
    inside, outside = set(), set()
    for path, module in net.named_modules():
        matrix = isinstance(module, nn.Linear) and "blocks" in path.split(".")
        for name, weight in module.named_parameters(recurse=False):
            (inside if matrix and name == "weight" else outside).add(weight)
    return inside - outside


def table(groups: Sequence[Mapping]) -> str:
    """A line for each of an optimizer's groups, with its sizes, weight decay and factor of the learning rate."""
    lines = [f"{'group':<16} {'tensors':>8} {'parameters':>18} {'weight decay':>13} {'lr factor':>10}"]
    for group in groups:
        n = sum(weight.numel() for weight in group["params"])
        lines.append(f"{group['name']:<16} {len(group['params']):>8,} {n:>18,} {group['weight_decay']:>13.4g} "
                     f"{group['lr_factor']:>10.4g}")  # fmt: skip
    return "\n".join(lines)
