"""Count a model's parameters, arithmetic and memory, and its optimizer's groups, without making it.

python -m lmzoo.tools.count model=gpt size=base
python -m lmzoo.tools.count model=bert size=base optim=muon optim.layer_decay=0.9
python -m lmzoo.tools.count model=llama size=7b --devices 8 --device-memory 80GB
"""

import re
from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from lmzoo.tools import answer, parser
from torch import nn

from lmzoo import UserError, adapters, build, compose, memory, optim, parts
from lmzoo.checks import groups, model_family
from lmzoo.literal import plain
from lmzoo.plan import arithmetic, count_flops, count_parameters, line, size

PARTS = ("weights", "gradients", "optimizer", "activations")
TASKS = {"decoder": "clm", "encoder": "mlm", "encoder-decoder": "span_corruption"}  # any that fits the family


def count(*words: str, devices: int = 8, device_memory: str | None = None) -> str:
    """The tables of the model that `words` choose, as for training; `task` may be left out.

    `devices` is how many ddp and fsdp run on; with `device_memory`, as 80GB, the answer says which engine fits.
    """
    if devices < 1:
        raise UserError(f"--devices {devices} is less than 1")
    if device_memory:
        in_bytes(device_memory)  # refused before any work
    chosen = dict(word.partition("=")[::2] for word in words)
    if "task" not in chosen and chosen.get("model") in groups()["model"]:
        words += (f"task={TASKS[model_family(chosen['model'])]}",)
    with torch.device("meta"):
        config = compose(*words)
        parts.check_parts(config, None, {})
        net = build(config.model, config.trust)
        adapters.ready(net, plain(config))
        groups_table = optim.table(optim.build(net, config.optim).param_groups)
    return f"{table(net)}\n\n{groups_table}\n\n{memory_table(net, plain(config), devices, device_memory)}"


def table(net: nn.Module) -> str:
    """Parameters by part, FLOPs of training per token of a full row, bytes of the weights."""
    counts = count_parameters(net)
    total, length = sum(counts.values()), net.max_len
    rows = {"tokens": length, "targets": length, "length": length}
    if net.family == "encoder-decoder":
        rows |= {"decoder_tokens": length, "decoder_length": length}
    both = " on both sides" if net.family == "encoder-decoder" else " tokens"
    return "\n".join(
        [
            *(line(part, f"{n:,}", "" if n else "tied to the embedding") for part, n in counts.items()),
            line("parameters", f"{total:,}", "in all, a tied weight once"),
            line("arithmetic", f"{count_flops(net, **rows) / length / 1e6:,.1f}",
                 f"MFLOP per token (6N + attention), rows of {length:,}{both}"),
            line("weights", size(4 * total), "float32; half of it in bfloat16"),
        ]
    )  # fmt: skip


def memory_table(net: nn.Module, config: Mapping, devices: int, device_memory: str | None) -> str:
    """What each device needs at its highest, a line for each engine and kind of activation checkpointing."""
    word = "bf16-mixed" if config["trainer"]["precision"] == "auto" else config["trainer"]["precision"]
    dtype, mixed = arithmetic(word), not word.endswith("true")
    net = net if mixed else net.to(dtype)
    batch, rows = config["data"]["batch_size"], config["data"]["micro_batch_size"]
    length, fused = config["data"]["row_length"] or net.max_len, config["trainer"]["accelerator"] != "cpu"
    room = in_bytes(device_memory) if device_memory else 0
    moments = memory.moments(net, config["optim"])
    lines = [f"memory of a device in {word}, of {devices} under ddp and fsdp; rows of {length:,}, {batch:,} a step",
             f"{'':<34}{'rows':>5}" + "".join(f"{name:>12}" for name in (*PARTS, "in all"))]  # fmt: skip
    fitting, kept = [], {}
    for engine, recompute in product(memory.ENGINES, memory.RECOMPUTE):
        n = 1 if engine == "one device" else devices
        own = rows if isinstance(rows, int) else max(1, batch // n)
        if (own, recompute) not in kept:
            kept[own, recompute] = memory.passes(
                config["model"], own, length, dtype, fused, tuple(config["trust"]), mixed=mixed, recompute=recompute,
                ready=partial(adapters.ready, config=config),
            )  # fmt: skip
        found = memory.memory(net, kept[own, recompute], moments, engine, n, batch > own * n, dtype)
        name = engine if recompute == "none" else f"{engine}, {recompute} recomputing"
        lines.append(f"{name:<34}{own:>5}" + "".join(f"{size(getattr(found, part)):>12}" for part in (*PARTS, "total")))
        if found.total <= 0.9 * room:  # a tenth for the allocator and the kernels
            fitting.append(name)
    if device_memory:
        fit = fitting[0] if fitting else "none; more devices, or fewer rows"
        lines.append(f"in nine tenths of {device_memory}: {fit}")
    return "\n".join(lines)


def in_bytes(text: str) -> float:
    """The bytes of 80GB, or 1.5 TB."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT])B", text.strip(), re.IGNORECASE)):
        raise UserError(f"--device-memory {text}: say it as 80GB")
    return float(found[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found[2].upper()]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=bert size=base ...")
    arguments.add_argument("--devices", type=int, default=8, help="how many there are under ddp and fsdp (8)")
    arguments.add_argument("--device-memory", help="of each, as 80GB: say which engine fits")
    given = arguments.parse_args()
    answer(lambda: count(*given.words, devices=given.devices, device_memory=given.device_memory))


if __name__ == "__main__":
    main()
