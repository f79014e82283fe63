"""What a run will take, before it starts: parameters by part, tokens, steps, arithmetic, about what time and memory.

Arithmetic is counted as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): training takes 6 FLOPs for each
weight that multiplies a token, plus 12 * n_heads * d_head * length per layer for attention's scores and sums. A head
works on targets only, a shared layer as often as it is used. Utilisation (MFU) is that over what the device can do.
"""

import bisect
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from . import memory, optim
from .blocks.loss import IGNORED
from .errors import UserError

PARTS = ("embed", "position", "attention", "cross", "ffn", "norms", "head", "other")
MEASURED_SECONDS = 1.0
MOST_STEPS = 10**12

# Dense peaks from the vendors' data sheets, FLOP/s: (bfloat16 or float16 with float32 sums, float32 without TF32).
PEAKS = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


def count_parameters(net: nn.Module) -> dict[str, int]:
    """{part: parameters}, a tied weight once, in the order of PARTS; norms wherever they sit."""
    counts = Counter()
    for name, weight in net.named_parameters():
        counts[part_of(name)] += weight.numel()
    return {part: counts[part] for part in PARTS if counts[part] or part == "head"}


def part_of(name: str) -> str:
    """The part to which a parameter's name belongs: `blocks.3.attn.q.weight` -> attention."""
    words = name.split(".")
    if any(word == "norm" or word.endswith("_norm") for word in words):
        return "norms"
    kinds = {"embed": "embed", "positions": "position", "position": "position", "attn": "attention"}
    kinds |= {part: part for part in ("cross", "ffn", "head")}
    return next((kinds[word] for word in words if word in kinds), "other")


def count_flops(
    net: nn.Module, tokens: int, targets: int, length: int, decoder_tokens: int = 0, decoder_length: int = 0
) -> float:
    """FLOPs of training (forward and backward) on `tokens` tokens in rows of `length`, and `targets` of the head."""
    flops = 6 * _matrices(net.head) * targets
    if hasattr(net.head, "embed"):  # a tied head multiplies with the embedding's matrix
        flops += 6 * net.embed.tokens.weight.numel() * targets
    if not hasattr(net, "encoder"):
        return float(flops + _stack_flops(net, tokens, length))
    flops += _stack_flops(net.encoder, tokens, length) + _stack_flops(net.decoder, decoder_tokens, decoder_length)
    for block in net.decoder.blocks:
        memory = _matrices(block.cross.k) + _matrices(block.cross.v)
        query = 6 * (_matrices(block.cross) - memory) + _attention_flops(block.cross, length)
        flops += (query * decoder_tokens + 6 * memory * tokens) * net.decoder.share
    return float(flops)


def _stack_flops(stack: nn.Module, tokens: int, length: int) -> int:
    once = sum(6 * (_matrices(b.attn) + _matrices(b.ffn)) + _attention_flops(b.attn, length) for b in stack.blocks)
    return once * tokens * stack.share


def _matrices(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.ndim >= 2)


def _attention_flops(part: nn.Module, keys: int) -> int:
    """FLOPs per query, forward and backward, of the scores and sums over `keys` keys, also those that a mask hides."""
    return 12 * part.n_heads * part.d_head * min(keys, part.window or keys)


def find_peak(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """(FLOP/s of one device in products of `dtype`, its source): of a data sheet, measured on a CPU, or unknown."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (half, single) in PEAKS.items():
            if re.search(rf"\b{key}\b", name):
                return (single if dtype == torch.float32 else half), "data sheet"
    if device.type == "cpu":
        n = 128 if dtype == torch.float16 else 1024  # most CPUs emulate fp16, a hundred times slower
        a = torch.ones(n, n, dtype=dtype)
        a @ a  # the first one is slower
        seconds = min(_seconds(lambda: a @ a) for _ in range(3))
        return 2 * n**3 / seconds, "measured"
    return None, "unknown"


@dataclass(frozen=True)
class Plan:
    """A run's sizes. Tokens, also in `flops_per_token`, are the kept input tokens.

    `steps` is the whole run's; `epochs`, `tokens` and `seconds` are what is left of it after `first_step`.
    """

    parameters: dict[str, int]
    corpus: dict[str, tuple[int, int]]  # split -> (tokens, rows)
    rows_per_step: int
    tokens_per_step: int
    first_step: int
    steps: int
    epochs: float
    tokens: int
    flops_per_token: float
    peak: float | None
    peak_source: str
    device: str
    seconds: float | None
    memory: memory.Memory | None  # of each device; None: its rows are yet to be tried, or a part looks into its tensors
    lost: tuple[int, int, int]  # of the training rows: tokens cut off, padding, and positions with what was cut
    sources: dict[str, tuple[int, int]]  # of a mixture: name -> (rows that are left to read, rows that there are)
    packing: str
    groups: tuple[tuple[str, int, float], ...]  # of the optimizer: (name, parameters, factor of the learning rate)

    def mfu(self, tokens_per_s: float, devices: int = 1) -> float | None:
        """Model FLOPs utilisation, 0 to 1, of all `devices`; None where the device's peak is not known."""
        return tokens_per_s * self.flops_per_token / (self.peak * devices) if self.peak else None

    def table(self) -> str:
        """The plan in lines of at most 100 columns."""
        total, left = sum(self.parameters.values()), self.steps - self.first_step
        lines = [line(part, f"{n:,}", "" if n else "tied to the embedding") for part, n in self.parameters.items()]
        lines.append(line("parameters", f"{total:,}", "in all, a tied weight once"))
        lines += self._trained(total)
        for split, (n, rows) in self.corpus.items():
            lines.append(line(f"{split} corpus", f"{n:,}", f"tokens in {rows:,} rows"))
        cut, padding, positions = self.lost
        most = "at most " if self.packing == "single" else ""  # rows end with the longest of their batch
        note = f"of tokens: {cut:,} cut, {most}{padding:,} padding"
        lines.append(line("lost", f"{most}{(cut + padding) / positions:.2%}", note))
        all_read = sum(read for read, _ in self.sources.values())
        for name, (read, rows) in self.sources.items():
            epochs = f"{read / rows:.2f} epochs of {rows:,}"
            lines.append(line(f"source {name}", f"{read:,}", f"rows, {read / all_read:.1%} of the run = {epochs}"))
        peak = f"{self.peak / 1e12:,.2f} TFLOP/s {self.peak_source}" if self.peak else "peak unknown, so no MFU"
        lines += [
            line("step", f"{self.tokens_per_step:,}", f"tokens in {self.rows_per_step:,} rows"),
            line(
                "left to run" if self.first_step else "run",
                f"{left:,}",
                f"steps = {self.epochs:.2f} epochs = {self.tokens:,} tokens",
            ),
            line("arithmetic", f"{self.flops_per_token / 1e6:,.1f}", "MFLOP per token (6N + attention)"),
            line("device", self.device, peak),
            line("time", "unknown" if self.seconds is None else f"about {duration(self.seconds)}"),
            self._needed(),
        ]
        return "\n".join(lines)

    def _needed(self) -> str:
        if self.memory is None:
            return line("memory", "unknown")
        total, activations = self.memory.total, self.memory.activations
        note = f"weights, gradients, moments {size(total - activations)}; activations {size(activations)}"
        return line("memory", f"about {size(total)}", note + ("" if self.device.startswith("1 x ") else " each"))

    def _trained(self, total: int) -> list[str]:
        """A line on the optimizer's groups, where they are not all parameters in the two that every run has."""
        names, numbers, factors = zip(*self.groups, strict=True)
        if sum(numbers) == total and {*names} <= {"decay", "no_decay"}:
            return []
        if len(names) < 4:
            note = ", ".join(f"{name} {n:,}" for name, n in zip(names, numbers, strict=True))
        else:
            note = f"in {len(names)} groups, learning rate x {min(factors):.3g} to x {max(factors):.3g}"
        return [line("trained", f"{sum(numbers):,}", note)]


def plan(task, config: Mapping, datamodule, first_step: int = 0) -> Plan:
    """The plan of the run that `config` describes; takes about two seconds, in which it runs one micro-batch.

    `first_step`: how many of the task's `total_steps` are taken already. On a GPU nothing is run, and the time is that
    of the arithmetic at 40 % of the peak.
    """
    net, steps, trainer, rows_per_step = task.net, task.total_steps, config["trainer"], config["data"]["batch_size"]
    device, devices = _devices(trainer)
    dtype = arithmetic(trainer["precision"])
    batch = next(iter(datamodule.train_dataloader()))[0]
    rows, length = batch["input_ids"].shape
    tokens, targets = _kept(batch, ""), int((batch.get("decoder_labels", batch["labels"]) != IGNORED).sum())
    decoder = {"decoder_tokens": 0, "decoder_length": 0}
    if net.family == "encoder-decoder":
        side = "decoder_" if "decoder_input_ids" in batch else ""  # a classifier's decoder reads what its encoder does
        decoder = {"decoder_tokens": _kept(batch, side), "decoder_length": batch[f"{side}input_ids"].shape[1]}
    flops = count_flops(net, tokens, targets, length, **decoder)
    peak, source = find_peak(device, dtype)
    rows_left = datamodule.rows_read(steps) - datamodule.rows_read(first_step)
    every = trainer["val_every_n_steps"] or steps
    validations = math.ceil(steps / every) - first_step // every  # the last step is followed by one too
    val_rows = min(datamodule.n_rows("val"), rows_per_step * (trainer["limit_val_batches"] or math.inf))
    row_passes = rows_left + val_rows * validations / 3  # a forward is a third of a pass
    if device.type == "cpu" and flops / peak < 2 * MEASURED_SECONDS and not datamodule.undecided:
        seconds = measure(task, batch, dtype) * row_passes / rows
    else:
        seconds = flops * row_passes / rows / (0.4 * peak * devices) if peak else None
    needed = None
    if not datamodule.undecided:
        sides = (length, decoder["decoder_length"])
        needed = memory.of_run(config, rows, sides, targets, device, devices, dtype)
    return Plan(
        parameters=count_parameters(net),
        corpus={split: (datamodule.n_tokens(split), datamodule.n_rows(split)) for split in ("train", "val")},
        rows_per_step=rows_per_step,
        tokens_per_step=datamodule.tokens_per_step,
        first_step=first_step,
        steps=steps,
        epochs=(steps - first_step) / datamodule.steps_per_epoch,
        tokens=datamodule.tokens_read(steps) - datamodule.tokens_read(first_step),
        flops_per_token=flops / max(1, tokens),
        peak=peak,
        peak_source=source,
        device=f"{devices} x {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}",
        seconds=seconds,
        memory=needed,
        packing=config["data"]["packing"],
        lost=datamodule.lost,
        sources=datamodule.sources(first_step, steps),
        groups=tuple(
            (group["name"], sum(weight.numel() for weight in group["params"]), group["lr_factor"])
            for group in optim.build(net, config["optim"]).param_groups
        ),
    )


def count_steps(trainer: Mapping, datamodule) -> int:
    """Optimizer steps of the run: the fewest that `max_steps`, `max_tokens` and `max_epochs` give; else one epoch."""
    bounds = []
    if trainer["max_steps"]:
        bounds.append(trainer["max_steps"])
    if trainer["max_tokens"]:
        bounds.append(bisect.bisect_left(range(MOST_STEPS + 1), trainer["max_tokens"], key=datamodule.tokens_read))
    if trainer["max_epochs"]:
        bounds.append(math.ceil(trainer["max_epochs"] * datamodule.steps_per_epoch))
    if (steps := min(bounds, default=datamodule.steps_per_epoch)) > MOST_STEPS:
        given = [f"trainer.{word}={trainer[word]:g}" for word in ("max_tokens", "max_epochs") if trainer[word]]
        raise UserError(f"{' and '.join(given)} are more than {MOST_STEPS:,} steps: give less, or trainer.max_steps")
    return steps


def measure(task, batch: Mapping, dtype: torch.dtype) -> float:
    """Seconds of one forward and backward of the task's loss of `batch` on the CPU.

    Weights, gradients and the random state are afterwards as they were.
    """

    def run() -> None:
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = task.loss(batch)["loss"]
        loss.backward()

    with torch.random.fork_rng(devices=[]):
        passes = [_seconds(run)]  # the first is slower: it does not count if there is time for another
        while len(passes) < 4 and sum(passes) < MEASURED_SECONDS:
            passes.append(_seconds(run))
    task.net.zero_grad(set_to_none=True)
    return statistics.median(passes[1:] or passes)


def _kept(batch: Mapping, side: str) -> int:
    mask = batch.get(f"{side}attention_mask")
    return batch[f"{side}input_ids"].numel() if mask is None else int(mask.sum())


def _devices(trainer: Mapping) -> tuple[torch.device, int]:
    """One of the run's devices, and how many there are."""
    kind = {"gpu": "cuda"}.get(trainer["accelerator"], trainer["accelerator"])
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    asked = trainer["devices"]
    each = torch.cuda.device_count() if kind == "cuda" else 1  # what `auto` and -1 mean
    if isinstance(asked, list | tuple):
        each = len(asked)
    elif str(asked).isdigit():
        each = int(asked)
    return torch.device(kind), each * trainer["num_nodes"]


def arithmetic(precision: str | int) -> torch.dtype:
    """The dtype in which a run of this `trainer.precision` multiplies matrices."""
    word = str(precision)
    return torch.bfloat16 if "bf16" in word else torch.float16 if "16" in word else torch.float32


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def line(name: str, value: str, note: str = "") -> str:
    """A row of a table: name, value to the right of its column, note."""
    return f"{name:<16} {value:>18}  {note}".rstrip()


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are at least one and a half."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def size(n_bytes: float) -> str:
    """Bytes in the largest of TB, GB and MB of which there is at least one."""
    for unit, bytes_each in (("TB", 1e12), ("GB", 1e9)):
        if n_bytes >= bytes_each:
            return f"{n_bytes / bytes_each:.1f} {unit}"
    return f"{n_bytes / 1e6:.0f} MB"
