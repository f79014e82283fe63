"""What training takes of a device's memory at its highest, by engine: worked out without making room for anything.

A weight takes 4 bytes, in bf16-true 2, and its gradient as many; what the optimizer keeps is asked of it, on tensors
without content. So is what the blocks keep for the backward pass. A head works on a chunk of targets at once and holds
HEAD times their logits in float32: the logits, their softmax's gradient and what is on the way. DDP sends gradients in
buckets, which hold them once more. FSDP over n devices keeps an n-th of the three; beside it, in the precision of the
products, the root's weights and two blocks' (one runs, the next arrives), and their gradients. Where micro-batches are
accumulated it keeps the whole gradient until the last of them, since it sends gradients once a step.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import adapters, checkpoint, engines, optim
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
    config: Mapping, rows: int, length: int, dtype: torch.dtype = torch.float32, fused: bool = False,
    trust: tuple = (), decoder_length: int | None = None, targets: int | None = None, mixed: bool = True,
    ready: Callable[[nn.Module], object] | None = None,
) -> Passes:  # fmt: skip
    """Of the net of `config` on `rows` rows of `length` tokens, and of the decoder's `decoder_length` (None: as many).

    `targets`: of all rows (None: every token is one). `fused`: attention as GPUs compute it, whose kernels keep no
    scores for dropout; else as the CPU does. Not `mixed`: the weights too are of `dtype`. `ready`: what is done to the
    net first, which may freeze weights: what only their gradients would need is not kept.
    """
    with FakeTensorMode():
        net = checkpoint.build(config, trust).train()
        if ready:
            ready(net)
        for tensor in () if mixed else (*net.parameters(), *net.buffers()):
            tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
        for part in net.modules() if fused else ():
            if getattr(part, "backend", None) == "auto":
                part.backend, part.dropout = "sdpa", 0.0
        sides = {"input_ids": length}
        if net.family == "encoder-decoder":
            sides["decoder_input_ids"] = decoder_length or length
        ids = {side: torch.zeros(rows, n, dtype=torch.long) for side, n in sides.items()}
        outside, inside, width = saved(net, ids, dtype if mixed else torch.float32)
    stacks = [net.encoder, net.decoder] if len(sides) == 2 else [net]
    sizes = zip(stacks, sides.values(), strict=True)
    inputs = sum(rows * n * stack.d_model * stack.n_layers for stack, n in sizes) * (4 if mixed else dtype.itemsize)
    n_blocks = sum(stack.n_layers for stack in stacks)
    chunk = min(targets or rows * [*sides.values()][-1], ROWS["cuda" if fused else "cpu"])
    return Passes(outside, inside, n_blocks, inputs, HEAD * 4 * chunk * width)


def saved(net: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that a forward pass up to the head keeps outside of blocks, and inside only, the weights themselves left
    out; and the width of the logits."""
    weights = {weight.untyped_storage()._cdata for weight in net.parameters()}
    kept: dict[int, Tensor] = {}  # which hold their storages, so that no two have the same place
    outside, running = set(), set()

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        kept[place] = tensor
        if not running:
            outside.add(place)
        return tensor

    def width(head: nn.Module, hidden: Tensor) -> int:
        with torch.no_grad():
            return head(hidden[:, :1]).shape[-1]

    for block in engines.blocks(net):
        block.register_forward_pre_hook(lambda block, _: running.add(block))
        block.register_forward_hook(lambda block, *_: running.remove(block))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            n_logits = net(**inputs, readout=width)
    sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights}
    alone = sum(n for place, n in sizes.items() if place in outside)
    return alone, sum(sizes.values()) - alone, n_logits


class Ones(TorchDispatchMode):
    """Whoever asks for a number in a tensor without content, as Adafactor does, is told 1."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return 1.0 if op is torch.ops.aten._local_scalar_dense.default else op(*args, **(kwargs or {}))


def moments(net: nn.Module, settings: Mapping) -> int:
    """Bytes that the optimizer of `settings` keeps for a net on the meta device."""
    optimizer = optim.build(net, settings)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight)
    with Ones():
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
    weights = sum(weight.nbytes for weight in net.parameters())
    gradients = sum(weight.nbytes for weight in net.parameters() if weight.requires_grad)
    activations = kept.bytes(recompute)
    if engine != "fsdp":
        return Memory(weights, gradients * (2 if engine == "ddp" else 1), optimizer, activations)
    numbers = sum(weight.numel() for weight in net.parameters())
    sizes = sorted(sum(weight.numel() for weight in block.parameters()) for block in engines.blocks(net))
    gathered = (numbers - sum(sizes) + sum(sizes[-2:])) * dtype.itemsize
    sent = gradients if accumulates else min(gathered, gradients)
    return Memory(weights / devices + gathered, gradients / devices + sent, optimizer / devices, activations)


def of_run(
    config: Mapping, rows: int, lengths: tuple[int, int], targets: int, device: torch.device, devices: int,
    dtype: torch.dtype,
) -> Memory | None:  # fmt: skip
    """Of the run that a whole configuration describes, on each of its devices, in micro-batches of `rows` rows whose
    two sides are of `lengths`; None where a part of the net looks into its tensors, which have no content here."""
    model, trainer, trust = config["model"], config["trainer"], tuple(config["trust"])
    mixed = not str(trainer["precision"]).endswith("true")
    with torch.device("meta"):
        net = checkpoint.build(model, trust).to(torch.float32 if mixed else dtype)
    ready = partial(adapters.ready, config=config)
    ready(net)
    try:
        kept = passes(model, rows, lengths[0], dtype, device.type == "cuda", trust, lengths[1], targets, mixed, ready)
    except RuntimeError:
        return None
    engine = "fsdp" if trainer["strategy"] == "fsdp" else "ddp" if devices > 1 else "one device"
    accumulates = config["data"]["batch_size"] > rows * devices
    return memory(net, kept, moments(net, config["optim"]), engine, devices, trainer["activation_checkpointing"],
                  accumulates, dtype)  # fmt: skip
