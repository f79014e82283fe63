"""What training takes of a device's memory at its highest, by engine: worked out without making room for anything.

N weights take 4 bytes each, so do their gradients; what the optimizer keeps is asked of it, on tensors without content.
So is what the blocks keep for the backward pass. A head works on a chunk of targets at once and holds HEAD times
their logits in float32: the logits, their softmax's gradient and what is on the way. DDP sends gradients in buckets,
which hold them once more. FSDP over n devices keeps an n-th of the three; beside it, in the precision of the products,
the root's weights and two blocks' (one runs, the next arrives), and their gradients. Where micro-batches are
accumulated it keeps the whole gradient until the last of them, since it sends gradients once a step.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from . import checkpoint, engines, optim
from .blocks.loss import ROWS

HEAD = 4
WAYS = [(engine, recompute) for engine in ("one device", "ddp", "fsdp") for recompute in (False, True)]  # quick first


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Passes:
    """What a forward pass keeps for the backward pass: outside of blocks, in all of them and in one; and the head."""

    outside: int
    blocks: int
    n_blocks: int
    inputs: int  # of all blocks
    head: int

    def bytes(self, recompute: bool) -> float:
        """With `recompute` the blocks' inputs, and one block whole once the head is done with its logits."""
        if not recompute:
            return self.outside + self.blocks + self.head
        return self.outside + self.inputs + max(self.head, self.blocks / self.n_blocks)


def passes(
    config: dict, rows: int, length: int, dtype: torch.dtype = torch.float32, fused: bool = False, trust: tuple = ()
) -> Passes:
    """Of the net of `config` on `rows` rows of `length` tokens, all of them targets.

    `fused`: attention as GPUs compute it, whose kernels keep no scores for dropout; else as the CPU does.
    """
    kept = []
    with FakeTensorMode():
        for recompute in (False, True):
            net = checkpoint.build(config, trust).train()
            if recompute:
                engines.recompute_blocks(net)
            for part in net.modules() if fused else ():
                if getattr(part, "backend", None) == "auto":
                    part.backend, part.dropout = "sdpa", 0.0
            kept.append(saved(net, rows, length, dtype))
    stacks = [(net.encoder, length), (net.decoder, length)] if hasattr(net, "encoder") else [(net, length)]
    inputs = sum(rows * length * stack.d_model * stack.n_layers * 4 for stack, length in stacks)
    n_blocks = sum(stack.n_layers for stack, _ in stacks)
    head = HEAD * 4 * min(rows * length, ROWS["cuda" if fused else "cpu"]) * net.vocab_size
    return Passes(kept[1], kept[0] - kept[1], n_blocks, inputs, head)


def saved(net: nn.Module, rows: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a forward pass up to the head keeps, the weights themselves left out."""
    weights = {weight.untyped_storage()._cdata for weight in net.parameters()}
    kept: dict[int, Tensor] = {}  # which hold their storages, so that no two have the same place

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros(rows, length, dtype=torch.long)
    sides = {"decoder_input_ids": ids} if net.family == "encoder-decoder" else {}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            net(ids, **sides, readout=lambda head, hidden: hidden)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def moments(net: nn.Module, settings: dict) -> int:
    """Bytes that the optimizer of `settings` keeps for a net on the meta device."""
    optimizer = optim.build(net, settings)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight)
    optimizer.step()
    kept = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    for weight in net.parameters():
        weight.grad = None
    return kept


def memory(
    net: nn.Module, kept: Passes, optimizer: int, engine: str, devices: int, recompute: bool, accumulates: bool,
    dtype: torch.dtype = torch.float32,
) -> Memory:  # fmt: skip
    """Of training `net` (on the meta device) by an engine, whose devices run `kept` at a time each."""
    n = 4 * sum(weight.numel() for weight in net.parameters())
    activations = kept.bytes(recompute)
    if engine != "fsdp":
        return Memory(n, n * (2 if engine == "ddp" else 1), optimizer, activations)
    sizes = sorted(sum(weight.numel() for weight in block.parameters()) for block in engines.blocks(net))
    gathered = (n // 4 - sum(sizes) + sum(sizes[-2:])) * dtype.itemsize
    gradients = n / devices + (n if accumulates else gathered)
    return Memory(n / devices + gathered, gradients, optimizer / devices, activations)
