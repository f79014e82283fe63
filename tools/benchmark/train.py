"""Training steps of lmzoo beside other libraries', by turns: the same batches, threads and allocator.

python -m lmzoo.tools.benchmark train --families gpt,bert --dtype bf16 --json new.json --png new.png

A step is forward, backward, clipping to norm 1 and fused AdamW, without dropout. lmzoo's goes
through all that its `train` command runs: loader, Lightning's loop, callbacks, logs. The others run
the loop that everyone writes on the same batches, which lie in memory, with the quicker of the
kinds of attention that they offer; each eager and compiled (lmzoo: block by block). An arm is a
process of its own, all of them wait while one takes its turn.

    seconds    of a step: median [lowest - highest] over the rounds
    memory     peak of the steps, above what the process held before it built the model
    keep       lmzoo as it comes, trainer.keep_memory=true: beside arms that leave the system's
               allocator as it is
    first      seconds from building the model to the end of the first step: lmzoo's plan, a
               compiler
    MFU        model FLOPs (lmzoo.plan.count_flops, for all arms alike) over those that a matrix
               product reaches here
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from .measure import Row, by_turns, positive, ratio, some_of, spread

FAMILIES = {"gpt": "clm", "bert": "mlm", "t5": "span_corruption"}
COMMON = {"vocab_size": 8192, "d_model": 256, "n_heads": 8, "d_ff": 1024}
SHAPES = {
    "cpu": {
        "gpt": COMMON | {"n_layers": 6, "max_len": 256, "batch_size": 16},
        "bert": COMMON | {"n_layers": 6, "max_len": 128, "batch_size": 32},
        "t5": COMMON | {"n_layers": 4, "max_len": 256, "batch_size": 16},
    },
    "cuda": {  # GPT-2 124M, BERT-base and T5 v1.1-base, their vocabularies filled up to a multiple of 64
        "gpt": {"vocab_size": 50304, "d_model": 768, "n_heads": 12, "d_ff": 3072, "n_layers": 12, "max_len": 1024,
                "batch_size": 16},
        "bert": {"vocab_size": 30528, "d_model": 768, "n_heads": 12, "d_ff": 3072, "n_layers": 12, "max_len": 512,
                 "batch_size": 32},
        "t5": {"vocab_size": 32128, "d_model": 768, "n_heads": 12, "d_ff": 2048, "n_layers": 12, "max_len": 512,
               "batch_size": 32},
    },
}  # fmt: skip
SPAN_WORDS = ["model/head=tied_scaled", "task.density=0.1643"]  # 64 targets for 256 tokens; transformers ties T5's head
WANTED = {  # of lmzoo's speed: over transformers, eager; over the quickest peer, compiled or not
    ("gpt", "bf16"): ("at least 2.0", "at least 1.3"), ("gpt", "fp32"): ("more", "at least 1.1"),
    ("bert", "bf16"): ("at least 2.9", "at least 2.4"), ("bert", "fp32"): ("more", "at least 1.4"),
    ("t5", "bf16"): ("at least 2.4", "at least 1.25"), ("t5", "fp32"): ("more", "at least 1.15"),
}  # fmt: skip
LIBRARIES = ("transformers", "litgpt", "x-transformers")
ALLOCATORS = ("default", "tuned")
BATCHES, WARM = 16, 2  # batches of the peers; steps before those that are timed
KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", type=some_of(*FAMILIES), default=list(FAMILIES), metavar="gpt,bert,t5")
    parser.add_argument("--dtype", type=some_of("fp32", "bf16"), default=["fp32", "bf16"], metavar="fp32,bf16")
    parser.add_argument("--peers", type=some_of(*LIBRARIES, "none"), default=list(LIBRARIES), metavar="NAME,...",
                        help=f"{', '.join(LIBRARIES)} (all of them), or none")
    parser.add_argument("--no-compile", action="store_true", help="eager arms only: a quick look")
    parser.add_argument("--allocator", type=some_of(*ALLOCATORS), default=list(ALLOCATORS), metavar="default,tuned",
                        help="tables: with the system's allocator, and with one that keeps memory, for all arms alike")
    parser.add_argument("--steps", type=positive, default=4, help="of an arm's turn")
    parser.add_argument("--rounds", type=positive, default=5, help="in which the arms take turns")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each arm")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the tokens per second of all arms to a new file")


@dataclass
class Arm:
    """What `arm` takes steps of; `run` starts it, `take` has it take some."""

    library: str
    family: str
    dtype: str
    compile: bool
    device: str
    shape: dict
    batches: str
    keep: bool = False  # trainer.keep_memory
    words: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.library + " compiled" * self.compile + " keep_memory" * self.keep

    def start(self, environment: dict[str, str]) -> None:
        """Run it up to the end of its first step, of which it has `said` something then."""
        command = [sys.executable, "-m", "lmzoo.tools.benchmark.arm", json.dumps(asdict(self))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.PIPE, env=environment)
        self.said = self.hear()

    def take(self, steps: int) -> None:
        print(steps, file=self.process.stdin, flush=True)
        self.last = self.hear()

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended:\n{self.process.communicate()[1][-4000:]}")
        return json.loads(line)

    def end(self) -> None:
        self.process.communicate()


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All tables, in a folder of their own that is removed afterwards."""
    import torch

    torch.set_num_threads(given.threads)
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        for family in given.families:
            batches, flops = prepared(family, device, Path(name))
            for dtype in given.dtype:
                for allocator in given.allocator if device == "cpu" else ["default"]:
                    for row in table(family, dtype, allocator, device, batches, flops, given, Path(name)):
                        rows.append(row)
                        yield row
    if given.png:
        picture(rows, given.png)


def start_ours(family: str, dtype: str, device: str, shape: dict, more: list[str], threads: int, place: Path) -> Arm:
    """An arm of lmzoo as it comes, with `more` words, in a new folder `place`; its first steps are done."""
    from .arm import PRECISIONS

    given = [*words(family, shape, device, place), f"trainer.precision={PRECISIONS[dtype]}", *more]
    arm = Arm("lmzoo", family, dtype, False, device, shape, "", words=given)
    arm.start(environment("default", threads, place))
    print(f"{family} {dtype} {place.name}: first step after {arm.said['first_s']:.1f} s", file=sys.stderr, flush=True)
    arm.take(WARM)
    return arm


def words(family: str, shape: dict[str, int], device: str, folder: Path) -> list[str]:
    """The words of lmzoo's run."""
    sizes = [f"model.{word}={n}" for word, n in shape.items() if word != "batch_size"]
    return [
        f"model={family}", f"task={FAMILIES[family]}", "model.dropout=0", *sizes, *(SPAN_WORDS * (family == "t5")),
        f"tokenizer.vocab_size={COMMON['vocab_size']}", f"data.batch_size={shape['batch_size']}", "optim=adamw",
        "optim.lr=1e-3", f"trainer.accelerator={device}", "trainer.max_steps=1000000", "trainer.val_every_n_steps=null",
        f"run_dir={folder}/run",
    ]  # fmt: skip


def prepared(family: str, device: str, folder: Path) -> tuple[Path, float]:
    """A file of batches of lmzoo's default corpus, made once for all arms, and the model FLOPs of the first of them."""
    import torch

    from lmzoo import compose, parts
    from lmzoo.plan import count_flops
    from lmzoo.train import assemble

    task, module = assemble(parts.settled(compose(*words(family, SHAPES[device][family], device, folder))))
    windows = islice(module.train_dataloader(), BATCHES)
    kept = ("input_ids", "decoder_input_ids", "labels")
    batches = [{name: batch[name] for name in kept if name in batch} for (batch,) in windows]
    file = folder / f"{family}.pt"
    torch.save(batches, file)
    first = batches[0]
    n_tokens, length = first["input_ids"].numel(), first["input_ids"].shape[1]
    decoder = first.get("decoder_input_ids")
    sides = {} if decoder is None else {"decoder_tokens": decoder.numel(), "decoder_length": decoder.shape[1]}
    return file, count_flops(task.net, n_tokens, int((first["labels"] >= 0).sum()), length, **sides)


def table(family: str, dtype: str, allocator: str, device: str, batches: Path, flops: float,
          given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One family in one dtype: all arms."""
    import torch

    from .arm import DTYPES, PRECISIONS
    from .peers import EXTRA, PEERS

    what, shape = f"{family} {dtype} {allocator}", SHAPES[device][family]
    arms = []
    for library in ["lmzoo", *(name for name in given.peers if name in PEERS[family])]:
        kinds = [(False, False), *([] if given.no_compile else [(True, False)])]
        if library == "lmzoo" and allocator == "default" and device == "cpu":
            kinds += [(compiled, True) for compiled, _ in kinds]  # as it comes
        for compiled, keep in kinds:
            arm = Arm(library, family, dtype, compiled, device, shape, str(batches), keep)
            place = folder / what.replace(" ", "-") / arm.name.replace(" ", "-")
            arm.words = [*words(family, shape, device, place), f"trainer.precision={PRECISIONS[dtype]}",
                         f"compile={compiled}", f"trainer.keep_memory={keep}"]
            arm.start(environment(allocator, given.threads, place))
            if "missing" in arm.said:
                yield Row(what, arm.name, family, dtype, note=f"skipped: {arm.said['missing']} ({EXTRA})")
                arm.end()
                break
            print(f"{what} {arm.name}: first step after {arm.said['first_s']:.1f} s", file=sys.stderr, flush=True)
            arms.append(arm)
    ceilings: list[float] = []
    turns = {arm.name: partial(arm.take, given.steps) for arm in arms}
    turns["ceiling"] = lambda: ceilings.append(ceiling(device, DTYPES[dtype]))
    for arm in arms:
        arm.take(WARM)
    seconds = {name: [spent / given.steps for spent in times] for name, times in by_turns(turns, given.rounds).items()}
    for arm in arms:
        arm.end()
    tokens = torch.load(batches)[0]["input_ids"].numel()
    peers = [arm.name for arm in arms if arm.library != "lmzoo"]
    best = min(peers, key=lambda name: spread(seconds[name])[0], default=None)
    for arm in arms:
        time, said = spread(seconds[arm.name]), arm.said
        notes = [f"loss {said['loss']:.2f}", *([f"{said['attention']} attention"] if "attention" in said else [])]
        if arm.library == "lmzoo":
            pairs = zip(("transformers", best), WANTED[family, dtype], strict=True)
            notes += [f"{other} / this: {ratio(seconds[other], seconds[arm.name], wanted)}" for other, wanted in pairs
                      if other in seconds]
        yield Row(what, arm.name, family, dtype, tokens / time[0], arm.last["peak_memory_mb"], time,
                  first_s=said["first_s"], mfu=flops / time[0] / max(ceilings), note="; ".join(notes))
    yield Row(what, "ceiling", family, dtype, note=f"{max(ceilings) / 1e12:.2f} TFLOP/s in a matrix product")


def ceiling(device: str, dtype) -> float:
    """FLOP/s of a matrix product: a data sheet's on a GPU, the best of some on a CPU."""
    import torch

    from lmzoo.plan import find_peak

    return max(find_peak(torch.device(device), dtype)[0] or float("nan") for _ in range(20))


def environment(allocator: str, threads: int, folder: Path) -> dict[str, str]:
    """The same for all arms: threads, the allocator, and an empty cache of compiled code."""
    folder.mkdir(parents=True)
    chosen = os.environ | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if allocator == "tuned":
        library = find_library("jemalloc") or find_library("tcmalloc") or find_library("tcmalloc_minimal")
        chosen |= {"LD_PRELOAD": library} if library else {"GLIBC_TUNABLES": KEPT}
    return chosen


def picture(rows: list[Row], file: Path) -> None:
    """Tokens per second of all arms, a panel for each table."""
    from matplotlib.figure import Figure

    tables: dict[str, list[Row]] = {}
    for row in rows:
        if row.tokens_per_s:
            tables.setdefault(row.what, []).append(row)
    figure = Figure(figsize=(9, 0.6 + 0.32 * sum(len(arms) + 1.5 for arms in tables.values())), layout="constrained")
    axes = figure.subplots(len(tables), squeeze=False, height_ratios=[len(arms) + 1 for arms in tables.values()])
    for (name, arms), axis in zip(tables.items(), axes[:, 0], strict=True):
        ours = ["tab:orange" if row.arm.startswith("lmzoo") else "tab:blue" for row in arms]
        axis.barh([row.arm for row in arms], [row.tokens_per_s for row in arms], color=ours)
        axis.invert_yaxis()
        axis.set_title(f"{name}, tokens/s", loc="left", fontsize="medium")
    figure.savefig(file, dpi=120)
