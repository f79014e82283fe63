"""Building a net from a config that may come from a stranger's file."""

from collections.abc import Iterable, Mapping, Sequence

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torch import nn

from ..errors import UserError
from ..signatures import belongs

TRUSTED = ("lmzoo.blocks", "lmzoo.models", "torch.nn")  # of what these define: each nn.Module, and
INIT = "lmzoo.blocks.init"  # what fills one


def build(config: Mapping, trust: Sequence[str] = ()) -> nn.Module:
    """The net that a model config describes; `net.config` is that config, resolved, as a plain dict.

    A DictConfig is resolved where it stands. Raises UserError for an interpolation in a plain dict, for sizes that do
    not fit, and for a `_target_` anywhere in the tree whose resolved object is neither an nn.Module of lmzoo.blocks,
    lmzoo.models or torch.nn, nor an initialisation of lmzoo, nor from a module in `trust`, whatever its path.
    """
    plain = checked(config, trust)
    try:
        net = instantiate(plain, _convert_="all")
    except InstantiationException as error:
        known = UserError | ValueError | TypeError | ArithmeticError
        if isinstance(error.__cause__, known):  # the part's own words, not hydra's too
            raise UserError(str(error.__cause__)) from error
        raise
    net.config = plain
    return net


def checked(config: Mapping, trust: Sequence[str] = ()) -> dict:
    """A model config as plain types, after `build` has refused what it would not resolve or import."""
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    for key, value in _leaves(plain, "model"):
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{key}={value!r} is an interpolation: resolve the config before building from it")
        if key.endswith("._target_"):
            _check_target(key, value, tuple(trust))
    if not isinstance(plain, Mapping) or "_target_" not in plain:
        raise UserError("the model config has no _target_: it must name a class of lmzoo.models")
    return plain


def _leaves(node: object, key: str) -> Iterable[tuple[str, object]]:
    """(dotted key, value) of every leaf of a tree of dicts and lists."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _leaves(child, f"{key}.{i}")
    else:
        yield key, node


def _check_target(key: str, target: object, trust: tuple[str, ...]) -> None:
    refusal = f"{key}={target!r} is no part of lmzoo or torch.nn: name its module in trust=[...] if you trust its code"
    packages = [module.partition(".")[0] for module in trust]
    if not isinstance(target, str) or not belongs(target, (*TRUSTED, *packages)):
        raise UserError(refusal)  # before resolving, which would import whatever the name says
    try:
        found = get_object(target)
    except Exception as error:
        raise UserError(f"{key}={target!r} does not exist: {str(error).splitlines()[0]}") from error
    module = str(getattr(found, "__module__", None))
    a_part = isinstance(found, type) and issubclass(found, nn.Module) or belongs(module, [INIT])
    if not (belongs(module, TRUSTED) and a_part or belongs(module, trust)):
        raise UserError(refusal)
