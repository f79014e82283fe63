"""From text to batches: how fast, in how much memory, and beside what other libraries take.

python -m lmzoo.tools.benchmark data --mb 20 --json data.json

    prepare   a file of text becomes a token store (`data.prepare`, an empty cache each time) beside
              `tokenizers`' encode_batch alone on the same documents in memory, and beside
              `datasets`: load, map tokenise, map group into rows, both maps batched. lmzoo makes
              the rows of a store as it reads them: see collate.
    memory    the largest process while `tools.prepare_data` prepares the text, and ten times the
              text
    collate   tokens/s of the training loader of a default run, beside those that its tiny model
              trains at, on the CPU
    open      from a prepared corpus to the batch of step 1,000,000

The text is what Python carries, its library's modules, in documents of 200 to 8,000 characters.
Where that is not enough it comes again in another order, and with other words: in the n-th
repetition the letters of words of six and more are rotated by n, so that no cache of words or
documents gains by it. The tokenizer is a BPE of 16,000 tokens trained on the first 4 MB. Peers run
with as many processes or threads as lmzoo.
"""

import argparse
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from pathlib import Path

import tokenizers

from lmzoo import UserError, compose, data, parts
from lmzoo.tokenizer import load, sample, train_bpe

from .measure import Row, by_turns, disk, peak_memory, positive, ratio, spread
from .train import FAMILIES

VOCABULARY, TRAINED_MB = 16_000, 4
SHORTEST, LONGEST = 200, 8000  # characters of a document
LARGER = 10  # times the text, for the peak of memory
LATE = 10**6  # the step at which a corpus is opened
LOADED, TRAINED = 200, 10  # optimizer steps in a round
LONG_WORD = re.compile(r"[a-z]{6,}")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mb", type=float, default=20, help="of text; lmzoo also compresses less than 16 with xz")
    parser.add_argument("--processes", type=positive, default=len(os.sched_getaffinity(0)), help="of each arm")
    parser.add_argument("--rounds", type=positive, default=3, help="of each measurement, in which its arms take turns")


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All measurements, in a folder of their own that is removed afterwards."""
    if not 0 < given.mb < math.inf:
        raise UserError(f"--mb {given.mb} is no size above 0")
    os.environ["RAYON_NUM_THREADS"] = str(given.processes)  # read when tokenizers first starts threads
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        folder = Path(name)
        os.environ["LMZOO_CACHE"] = str(folder / "cache")
        texts = list(sample(documents(), given.mb))
        tokenizer = train_bpe(sample(texts, TRAINED_MB), VOCABULARY)
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
        with (folder / "larger.txt").open("w", encoding="utf-8") as file:
            file.writelines(text + "\n\n" for text in sample(documents(), LARGER * given.mb))
        yield from prepare(folder, texts, given.processes, given.rounds)
        del texts
        yield from memory(folder, given.mb, given.processes)
        yield from collate(given.rounds)
        yield from opening(folder, given.rounds)


def documents() -> Iterator[str]:
    """Endlessly many documents without blank lines, from the modules of Python's library, always the same ones."""
    draw = random.Random(0)
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.rglob("*.py")) if "site-packages" not in file.parts]
    for turn in count():
        draw.shuffle(files)
        for file in files:
            lines = [line for line in file.read_text("utf-8", errors="ignore").splitlines() if line.strip()]
            for text in cut("\n".join(lines), draw):
                yield LONG_WORD.sub(lambda word: rotate(word[0], turn), text) if turn else text  # noqa: B023


def cut(text: str, draw: random.Random) -> Iterator[str]:
    """Pieces of whole lines whose lengths are spread evenly on a logarithmic scale."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + int(SHORTEST * (LONGEST / SHORTEST) ** draw.random()))
        end = len(text) if end < 0 else end
        if piece := text[begin:end].strip():
            yield piece
        begin = end + 1


def rotate(word: str, n: int) -> str:
    n %= len(word)
    return word[n:] + word[:n]


def words(folder: Path, text: str, cache: str, processes: int) -> list[str]:
    """The words of a run over a text of the folder, with the benchmark's tokenizer."""
    return ["model=gpt", "task=clm", "data=text", f"data.path={folder / text}", f"data.cache_dir={folder / cache}",
            f"data.processes={processes}", f"tokenizer.path={folder}", f"tokenizer.vocab_size={VOCABULARY}"]


def prepare(folder: Path, texts: list[str], processes: int, rounds: int) -> Iterator[Row]:
    """Text to a token store, to tokens in memory, and to an Arrow file of rows."""
    tokenizer, config = load(folder), compose(*words(folder, "text.txt", "ours", processes))
    library, made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), {}

    def ours() -> None:
        shutil.rmtree(folder / "ours", ignore_errors=True)
        made["lmzoo"] = data.prepare(config, tokenizer)

    def alone() -> None:
        batches = (texts[begin:begin + 1000] for begin in range(0, len(texts), 1000))
        encoded = (library.encode_batch(batch, add_special_tokens=False) for batch in batches)
        made["tokenizers"] = sum(len(one) for batch in encoded for one in batch)

    def theirs() -> None:
        shutil.rmtree(folder / "theirs", ignore_errors=True)
        made["datasets"] = rows_by_datasets(folder, library, tokenizer.eos, config.data.row_length, processes)

    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}

    arms: dict[str, Callable[[], None]] = {"lmzoo": ours, "tokenizers": alone, "datasets": theirs}
    try:
        import datasets  # noqa: F401
    except ImportError:
        del arms["datasets"]
        yield Row("prepare", "datasets map", note="skipped: datasets is not installed")
    library.encode_batch(texts[:100])  # starts the threads
    seconds = by_turns(arms, rounds)
    times = {name: spread(spent) for name, spent in seconds.items()}
    size, n_tokens = disk(folder / "ours"), sum(made["lmzoo"][split].n_tokens for split in made["lmzoo"].splits)
    yield Row("prepare", "lmzoo data.prepare", tokens_per_s=n_tokens / times["lmzoo"][0], seconds=times["lmzoo"],
              disk_mb=size)
    yield Row("prepare", "tokenizers encode_batch", tokens_per_s=made["tokenizers"] / times["tokenizers"][0],
              seconds=times["tokenizers"],
              note=f"this / lmzoo: {ratio(seconds['tokenizers'], seconds['lmzoo'], 'at least 0.85')}")
    if "datasets" in arms:
        rows, larger = made["datasets"], disk(folder / "theirs")
        alone = sum(Path(file["filename"]).stat().st_size for file in rows.cache_files) / 1e6
        yield Row("prepare", "datasets map", tokens_per_s=sum(map(len, rows["input_ids"])) / times["datasets"][0],
                  seconds=times["datasets"], disk_mb=larger,
                  note=f"this / lmzoo: {ratio(seconds['datasets'], seconds['lmzoo'], 'at least 1.4')}; disk, lmzoo / "
                       f"this: {size / larger:.2f}, wanted: at most 0.5 (its rows alone: {size / alone:.2f})")


def rows_by_datasets(folder: Path, library: tokenizers.Tokenizer, eos: int, row_length: int, processes: int):
    """What training scripts do with `datasets`, but ids only: its cache holds the text, the tokens, and the rows."""
    import datasets

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its processes are the parallel work

    def tokenise(batch: dict) -> dict:
        encoded = library.encode_batch(batch["text"], add_special_tokens=False)
        return {"input_ids": [[eos, *one.ids, eos] for one in encoded]}

    def group(batch: dict) -> dict:
        tokens = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [tokens[i:i + row_length] for i in range(0, len(tokens), row_length)]}

    text = datasets.load_dataset("text", data_files=str(folder / "text.txt"), sample_by="paragraph", split="train",
                                 cache_dir=str(folder / "theirs"))
    options = {"batched": True, "num_proc": processes}
    rows = text.map(tokenise, remove_columns=["text"], **options).map(group, **options)
    del os.environ["TOKENIZERS_PARALLELISM"]
    return rows


def memory(folder: Path, megabytes: float, processes: int) -> Iterator[Row]:
    """The peak of preparing the text, and that of ten times as much; the latter's store stays for `opening`."""
    peaks = []
    for text, size in (("text.txt", megabytes), ("larger.txt", LARGER * megabytes)):
        command = [sys.executable, "-m", "lmzoo.tools.prepare_data", *words(folder, text, "kept", processes)]
        peaks.append(peak_memory(command))
        note = f"{peaks[-1] / peaks[0]:.3f} of that, wanted: at most 1.1; and under 1,000 MB" if len(peaks) > 1 else ""
        yield Row("memory", f"lmzoo prepare {size:g} MB", peak_memory_mb=peaks[-1], note=note)


def opening(folder: Path, rounds: int) -> Iterator[Row]:
    """From the prepared larger text to the batch of a late step."""
    from lmzoo.tasks.clm import Shift

    tokenizer, config = load(folder), compose(*words(folder, "larger.txt", "kept", 1))
    collator = Shift(pad=tokenizer.pad, isolate=False)

    def late() -> None:
        module = data.DataModule(data.prepare(config, tokenizer), tokenizer, collator, config.data, seed=0)
        loader = module.train_dataloader()
        loader.load_state_dict({"step": LATE})
        next(iter(loader))

    late()  # imports
    yield Row("open", f"lmzoo step {LATE:,}", seconds=spread(by_turns({"late": late}, 3 * rounds)["late"]),
              note="wanted: under 0.1 s")


def collate(rounds: int) -> Iterator[Row]:
    """The loader of each family's default run beside its training, which is not more than forward, backward, step."""
    from lmzoo.tasks.base import kept_tokens

    from lmzoo.train import assemble

    for model, name in FAMILIES.items():
        config = parts.settled(compose(f"model={model}", f"task={name}", "trainer.accelerator=cpu"))
        task, module = assemble(config)
        bf16 = config.trainer.precision == "bf16-mixed"
        first = list(islice(module.train_dataloader(), LOADED))
        train = training(task, first[:TRAINED], bf16)
        train()
        seconds = by_turns({"load": lambda: list(islice(module.train_dataloader(), LOADED)), "train": train}, rounds)  # noqa: B023
        steps = {"load": [spent / LOADED for spent in seconds["load"]],
                 "train": [spent / TRAINED for spent in seconds["train"]]}
        for arm, n, dtype in (("load", LOADED, None), ("train", TRAINED, "bfloat16" if bf16 else "float32")):
            n_tokens = sum(int(kept_tokens(batch)) for window in first[:n] for batch in window)
            middle = spread(seconds[arm])
            note = f"train / load: {ratio(steps['train'], steps['load'], 'at least 20')}" if arm == "load" else ""
            yield Row("collate", f"lmzoo {arm} {model}", task.net.family, dtype, n_tokens / middle[0], seconds=middle,
                      note=note)


def training(task, windows: list[list[dict]], bf16: bool) -> Callable[[], None]:
    """Optimizer steps on these windows and nothing around them."""
    import torch

    optimizer = task.configure_optimizers()

    def train() -> None:
        for window in windows:
            for batch in window:
                with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                    loss = task.loss(batch)["loss"]
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train
