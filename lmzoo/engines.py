"""How a net is spread over devices and how its arithmetic is run: FSDP2, activation checkpointing, compiled blocks.

All three change a net in place and leave its keys as they are, so its checkpoints do not tell them apart. `keep_memory`
is no matter of a net: it sets the allocator of the process.

FSDP2 (Zhao et al. 2023, arXiv:2304.11277; ZeRO-3 of Rajbhandari et al. 2019, arXiv:1910.02054) gives each rank its
slice of every weight, gradient and moment, and gathers a block's weights while that block runs. Each block is a group
of its own; what is left (embedding, positions, last norm, head, so tied weights too) is the root's. Activation
checkpointing (Chen et al. 2016, arXiv:1604.06174) keeps a block's input and runs the block again for its gradient; the
selective kind (Korthikanti et al. 2022, arXiv:2205.05198) also keeps what took long, and repeats what did not.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from . import adapters, checkpoint
from .checkpoint import folders
from .errors import UserError
from .optim.slices import slice_of

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
PRODUCTS = [  # what selective activation checkpointing keeps: linear layers, and attention by a fused kernel
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def blocks(net: nn.Module) -> Iterator[nn.Module]:
    """The layers of every stack of the net; one that is used several times once."""
    return (block for stack in net.modules() for block in getattr(stack, "blocks", ()))


def compile_blocks(net: nn.Module) -> None:
    """Compile each block: they share their graphs."""
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        raise UserError("compile=true needs a C++ compiler, and there is none on this machine")
    for block in blocks(net):
        block.compile()


def recompute_blocks(net: nn.Module, how: str = "full") -> None:
    """Keep each block's input, and run the block again, with the same dropout, when its gradient is due.

    how="selective" keeps the results of PRODUCTS too: what is run again are norms, activations, dropout and sums. With
    "none" nothing is changed.
    """
    options = {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if how == "selective" else {}
    for block in blocks(net) if how != "none" else ():
        block.forward = partial(recomputed, block.forward, use_reentrant=False, **options)


def keep_memory() -> None:
    """Have glibc's malloc keep what is freed; it would give large blocks back, and each step would fault them in."""
    if platform.libc_ver()[0] == "glibc":
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)


def fill(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a net, spread over ranks or not, these weights, which each rank has whole."""
    own = net.state_dict()
    net.load_state_dict({name: slice_of(weight, own[name]) for name, weight in weights.items()})


def whole(net: nn.Module, first: bool, trust: Sequence[str] = ()) -> nn.Module:
    """A net that is spread over ranks as one of its own on the CPU, with its weights on the first; to be called on all.

    What an adapter has learned is merged into it. Any other net as it is.
    """
    spread = isinstance(net, FSDPModule)
    if not (spread or adapters.scale(net)):
        return net
    weights, config, scale = gathered(adapters.weights(net), first), net.config, adapters.scale(net)
    net = checkpoint.build(config, trust)
    if first or not spread:
        net.load_state_dict(adapters.merge(weights, scale))
    return net


def gathered(node: object, first: bool) -> object:
    """A tree of dicts whose tensors are whole, on the CPU of the first rank; None in their place on the others."""
    if isinstance(node, Mapping):
        return {key: gathered(child, first) for key, child in node.items()}
    if not isinstance(node, DTensor):
        return node
    tensor = node.full_tensor()  # all ranks take part
    return tensor.cpu() if first else None


class FSDP(ModelParallelStrategy):
    """FSDP2 over all ranks; its checkpoints are those of one process, or if `sharded` folders that each rank writes to.

    Either kind is read, on any number of ranks.
    """

    def __init__(self, sharded: bool = False):
        super().__init__(tensor_parallel_size=1)
        self.sharded = sharded

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, net: nn.Module) -> None:
        """Leave each rank its slice of the net, once."""
        if isinstance(net, FSDPModule):
            return
        options = {"mesh": self.device_mesh["data_parallel"]}
        if self.precision_plugin.precision == "bf16-mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks(net):
            fully_shard(block, **options)
        fully_shard(net, **options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of the passes inside on their ranks, to be summed with those of the first one outside."""
        nets = [module for module in self.lightning_module.children() if isinstance(module, FSDPModule)]
        for net in nets:
            net.set_requires_gradient_sync(False)
        yield
        for net in nets:
            net.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        weights = self.lightning_module.state_dict()
        return weights if self.sharded else gathered(weights, self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict:
        state = optimizer.state_dict()
        return state if self.sharded else gathered(state, self.is_global_zero)

    def save_checkpoint(self, state: dict, path: str | Path, storage_options: object = None) -> None:
        if self.sharded or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(state, path)

    def load_checkpoint(self, path: str | Path, weights_only: bool | None = None) -> dict:
        parameters = [[p for g in optimizer.param_groups for p in g["params"]] for optimizer in self.optimizers]
        own = {f"weights/{name}": weight for name, weight in self.lightning_module.state_dict().items()}
        own |= {f"moments/{i}/{n}": p for i, listed in enumerate(parameters) for n, p in enumerate(listed)}

        def spread_as(name: str) -> Tensor | None:
            return own.get(name if name.startswith("weights") else name.rpartition("/")[0])

        def empty(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            like = spread_as(name)
            spread = isinstance(like, DTensor) and like.shape == shape
            return torch.empty_like(like, dtype=dtype) if spread else torch.empty(shape, dtype=dtype)

        if Path(path).is_dir():
            state = folders.load(Path(path), empty)
        else:
            state = checkpoint.read(path)
            for name, tensor in folders.tensors(state).items():
                folders.put(state, name, slice_of(tensor, spread_as(name)))
        self.lightning_module.load_state_dict(state["state_dict"])
        for optimizer, moments in zip(self.optimizers, state["optimizer_states"], strict=False):
            optimizer.load_state_dict(moments)
        return state
