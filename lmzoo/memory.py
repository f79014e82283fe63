"""What training takes of a device's memory at its highest, by engine: worked out without making room for anything.

A weight takes 4 bytes, in bf16-true 2, and its gradient as many; what the optimizer keeps is asked of it, on tensors
without content. On such tensors the net runs forward, its head computes the loss and its gradients chunk by chunk, and
the last block runs backward; of what these make, all that is alive at a time is counted, also the copies of weights
that autocast makes. That is the highest, since from there on each block frees more than it makes. Where each step is
one micro-batch, gradients come as activations go: the first then take the room of the second. Where micro-batches are
accumulated, gradients are there from the second one on.

DDP sends gradients in buckets, which hold them once more. FSDP over n devices keeps an n-th of weights, gradients and
moments; beside it, in the precision of the products, the root's weights and two blocks' (one runs, the next arrives),
and their gradients; accumulated gradients are whole until the last micro-batch, since it sends them once a step.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import adapters, checkpoint, engines, optim
from .blocks.head import Pooler
from .blocks.loss import cross_entropy

ENGINES = ("one device", "ddp", "fsdp")
RECOMPUTE = ("none", "selective", "full")  # what activation checkpointing there is; quick first


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. `activations`: what there is at the highest beside all of the other three."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Passes:
    """Bytes of what a forward pass keeps for the backward pass, and of what is there beside that for a moment."""

    outside: int  # kept outside of blocks
    blocks: int  # in all of them
    block: int  # in the one that keeps most
    casts: int  # of what the blocks keep: their weights in the precision of the products
    head: int  # beside what is kept, in the forward pass: logits and their gradients
    backward: int  # beside what is kept, in the last block's backward pass: gradients of what it computed

    def bytes(self, casts: bool = True) -> float:
        """At the highest. Weights that are gathered in the precision of the products need no `casts`."""
        return self.outside + self.blocks - (not casts) * self.casts + max(self.head, self.backward)


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on and still there: `now`, and at the highest `most`."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.now = self.most = self.casts = 0
        self.places = {tensor.untyped_storage()._cdata for tensor in known}  # not counted, nor what looks into them
        self.known = frozenset(self.places)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            made = args[0].clone()  # a mask has no content here: it keeps all rows
        else:
            made = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.known:
            self.casts += made.untyped_storage().nbytes()
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.places:
                self.places.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return made

    def free(self, place: int, n_bytes: int) -> None:
        self.places.remove(place)
        self.now -= n_bytes


def passes(
    config: Mapping, rows: int, length: int, dtype: torch.dtype = torch.float32, fused: bool = False,
    trust: tuple = (), decoder_length: int | None = None, targets: int | None = None, mixed: bool = True,
    ready: Callable[[nn.Module], object] | None = None, recompute: str = "none",
) -> Passes:  # fmt: skip
    """Of the net of `config` on `rows` rows of `length` tokens, and of the decoder's `decoder_length` (None: as many).

    `targets`: of all rows (None: every token is one). `fused`: attention as GPUs compute it, whose kernels keep no
    scores for dropout; else as the CPU does. Not `mixed`: the weights too are of `dtype`. `ready`: what is done to the
    net first, which may freeze weights: what only their gradients would need is not kept. `recompute`: of RECOMPUTE.
    """
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype")  # of RMSNorm, whose weight is float32 by intent
        net = checkpoint.build(config, trust).train()
        if ready:
            ready(net)
        engines.recompute_blocks(net, recompute)
        for tensor in () if mixed else (*net.parameters(), *net.buffers()):
            tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
        for part in net.modules() if fused else ():
            if getattr(part, "backend", None) == "auto":
                part.backend, part.dropout = "sdpa", 0.0
        sides = {"input_ids": length}
        if net.family == "encoder-decoder":
            sides["decoder_input_ids"] = decoder_length or length
        ids = {side: torch.zeros(rows, n, dtype=torch.long) for side, n in sides.items()}
        chosen = targets or rows * [*sides.values()][-1]
        return run(net, ids, chosen, "cuda" if fused else "cpu", dtype if mixed else torch.float32)


def run(net: nn.Module, inputs: dict[str, Tensor], targets: int, device: str, dtype: torch.dtype) -> Passes:
    """Run a net on fakes, forward, through its head on so many `targets`, and backward through its last block."""
    for weight in net.parameters():
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None  # the engine counts them
    there = [*net.parameters(), *net.buffers()]
    held = Held([*there, *(weight.grad for weight in there if weight.grad is not None)])
    kept, last, before, casts = [], (), 0, 0

    def enter(block: nn.Module, given: tuple) -> None:
        nonlocal last
        last = given[0], *block.parameters()
        kept.append(-held.now)

    def leave(*_) -> None:
        kept[-1] += held.now

    def readout(head: nn.Module, hidden: Tensor) -> Tensor:
        nonlocal before, casts
        before, casts = held.now, held.casts
        if isinstance(head, Pooler):
            return head(hidden).sum()
        rows = hidden.flatten(0, 1)[:targets]
        return cross_entropy(head, rows, torch.zeros(len(rows), dtype=torch.long), device=device)["loss"]

    for block in engines.blocks(net):
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    with held:
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = net(**inputs, readout=readout)
        head, held.most = held.most - before, held.now
        if wanted := [tensor for tensor in last if tensor.requires_grad]:
            loss.backward(inputs=wanted)
    return Passes(before - sum(kept), sum(kept), max(kept), casts, head, backward=held.most - before)


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
    net: nn.Module, kept: Passes, optimizer: int, engine: str, devices: int, accumulates: bool,
    dtype: torch.dtype = torch.float32,
) -> Memory:  # fmt: skip
    """Of training `net` (on the meta device) by an engine, whose devices run `kept` at a time each."""
    weights = sum(weight.nbytes for weight in net.parameters())
    gradients = sum(weight.nbytes for weight in net.parameters() if weight.requires_grad)
    held = gradients * (2 if engine == "ddp" else 1)
    if engine == "fsdp":
        numbers = sum(weight.numel() for weight in net.parameters())
        sizes = sorted(sum(weight.numel() for weight in block.parameters()) for block in engines.blocks(net))
        gathered = (numbers - sum(sizes) + sum(sizes[-2:])) * dtype.itemsize
        weights, optimizer = weights / devices + gathered, optimizer / devices
        gradients = held = gradients if accumulates else gradients / devices + min(gathered, gradients)
    activations = kept.bytes(casts=engine != "fsdp")
    if not accumulates:
        largest = max(weight.nbytes for weight in net.parameters())
        last = max(kept.block, kept.backward, largest)  # where all other gradients are there
        activations = max(activations - gradients, kept.outside + last)
    return Memory(weights, held, optimizer, activations)


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
        kept = passes(model, rows, lengths[0], dtype, device.type == "cuda", trust, lengths[1], targets, mixed, ready,
                      trainer["activation_checkpointing"])  # fmt: skip
    except RuntimeError:
        return None
    engine = "fsdp" if trainer["strategy"] == "fsdp" else "ddp" if devices > 1 else "one device"
    accumulates = config["data"]["batch_size"] > rows * devices
    return memory(net, kept, moments(net, config["optim"]), engine, devices, accumulates, dtype)
