"""Tokens per second of generation beside `transformers.generate`: the same weights, by turns.

python -m lmzoo.tools.benchmark generate --families gpt,llama,t5 --json generate.json

Each row is continued greedily by as many tokens, none ends early, and both arms must say the same.
T5 reads the prompt and answers. The nets are lmzoo's own (`--size`, tiny: as `train` makes them),
with weights as they are initialised and noise on them, in fp32, both in one process. Both arms keep
keys and values; lmzoo's cache is allocated once, transformers' grows.

    seconds    of all rows: median [lowest - highest] over the rounds
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .measure import Row, by_turns, ratio, spread

MODELS = {"gpt": ("gpt", "clm"), "llama": ("llama", "clm"), "t5": ("t5_v1_0", "span_corruption")}
WANTED = "at least 1.3"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(MODELS), metavar="gpt,llama,t5")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16], metavar="1,16")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="that each row is continued by")
    parser.add_argument("--rounds", type=int, default=9, help="in which the arms take turns")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both arms")


def run(given: argparse.Namespace) -> Iterator[Row]:
    """Each family and batch: both arms."""
    import torch

    torch.set_num_threads(given.threads)
    for family in given.families:
        try:
            ours, theirs = nets(family, given.size)
        except ImportError as error:
            yield Row(family, "transformers", note=f"skipped: {error} (pip install 'lmzoo[bench]')")
            return
        for batch in given.batch:
            prompts = torch.randint(ours.vocab_size, (batch, given.prompt), generator=torch.Generator().manual_seed(0))
            yield from table(f"{family} batch {batch}", ours, theirs, prompts, given.tokens, given.rounds)


def nets(family: str, size: str):
    """lmzoo's net, and transformers' with its weights."""
    import torch
    import transformers

    from lmzoo import build, compose, hf

    model, task = MODELS[family]
    torch.manual_seed(0)
    ours = build(compose(f"model={model}", f"task={task}", f"size={size}").model).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        hf.to_hf(ours, Path(name) / "net")
        kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
        return ours, kind.from_pretrained(Path(name) / "net").eval()


def table(what: str, ours, theirs, prompts, n: int, rounds: int) -> Iterator[Row]:
    """One batch: lmzoo, transformers."""
    import torch

    answers = ours.family == "encoder-decoder"
    settings = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": n, "min_new_tokens": n,
                "do_sample": False, "pad_token_id": 0, **({"decoder_start_token_id": 0} if answers else {})}
    said, arms = {}, {
        "lmzoo": lambda: said.update(ours=ours.generate(prompts, max_new_tokens=n, start=0 if answers else None)),
        "transformers": lambda: said.update(theirs=theirs.generate(prompts, **settings)),
    }  # fmt: skip
    by_turns(arms, 1)  # warm
    same = "the same tokens" if torch.equal(said["ours"], said["theirs"]) else "OTHER TOKENS"
    seconds = by_turns(arms, rounds)
    note = f"{same}; transformers / this: {ratio(seconds['transformers'], seconds['lmzoo'], WANTED)}"
    for name, spent in seconds.items():
        yield Row(what, name, ours.family, "fp32", prompts.shape[0] * n / spread(spent)[0], seconds=spread(spent),
                  note=note if name == "lmzoo" else "")
