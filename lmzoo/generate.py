"""Use what a run has learned: a decoder continues a prompt; the others fill its blanks, written {};
an encoder-decoder answers a prompt without any.

    python -m lmzoo.generate ckpt=RUN prompt="Once upon a time" top_p=0.9 stop=.
    python -m lmzoo.generate ckpt=RUN prompt="Return a {} of names."
    python -m lmzoo.generate ckpt=RUN prompt="A cat" n_beams=4 n_best=2
    python -m lmzoo.generate ckpt=RUN prompts_path=prompts.txt out_path=new.jsonl # a prompt a line
    python -m lmzoo.generate ckpt=RUN                                             # asks for prompts

A decoder that has learned conversations answers: a prompt is what a user says (chat=false: a text).
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .checks import as_list
from .choices import SAMPLING, check_choices, check_use
from .config import command
from .errors import UserError
from .parts import on_device

WORDS = (*SAMPLING, "repetition_penalty", "n_beams", "n_best", "length_penalty", "max_new_tokens", "seed")


def main() -> None:
    command("generate", job)


def job(config: DictConfig) -> None:
    words = {word: config[word] for word in WORDS} | {"stop": as_list(config.stop or [])}
    check_choices(**{word: words[word] for word in (*SAMPLING, "repetition_penalty", "n_beams")})
    typed = {word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task}
    check_use(typed, config)
    if config.prompts_path is not None:
        return answer_file(config, words, typed)
    if config.out_path is not None:
        raise UserError(f"out_path={config.out_path} is for the answers to prompts_path=FILE: give that too")
    if config.prompt is None and not sys.stdin.isatty():
        raise UserError('no prompt: say prompt="...", or prompts_path=FILE with a prompt a line')
    net = open_net(config, typed)
    if config.prompt is not None:
        speak(net, config.prompt, words)
    while config.prompt is None:
        try:
            speak(net, input("> "), words)
        except UserError as error:
            print(f"lmzoo: {error}", file=sys.stderr)
        except EOFError:
            return print()


def answer_file(config: DictConfig, words: dict, typed: set[str]) -> None:
    """Answer the prompts of a file, once it is clear that each of them can be."""
    from .decoding.answering import check

    prompts = read(config.prompts_path, config.prompt, config.out_path)
    net = open_net(config, typed)
    for line, prompt in enumerate(prompts, 1):
        try:
            check(net, prompt, **words)
        except UserError as error:
            raise UserError(f"prompts_path={config.prompts_path}, line {line}: {error}") from error
    found = records(net, prompts, config.batch_size, words)
    first = next(found)  # what cannot be for any prompt is said before there is a file
    with open(config.out_path, "x", encoding="utf-8") if config.out_path else nullcontext(sys.stdout) as out:
        for record in chain([first], found):
            print(json.dumps(record, ensure_ascii=False), file=out, flush=True)


def read(path: str, prompt: str | None, out_path: str | None) -> list[str]:
    """The prompts in a file, one in each of its lines, which end at newlines and nowhere else."""
    if prompt is not None:
        raise UserError(f"prompt={prompt} and prompts_path={path}: give one of them")
    if out_path is not None and Path(out_path).exists():
        raise UserError(f"out_path={out_path} is there already: give a new file")
    if out_path is not None and not Path(out_path).absolute().parent.is_dir():
        raise UserError(f"out_path={out_path}: there is no folder {Path(out_path).parent}; make it first")
    try:
        with open(Path(path).expanduser(), encoding="utf-8-sig", newline="\n") as file:
            prompts = file.read().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"prompts_path={path} is no text in UTF-8") from None
    empty = [number for number, line in enumerate(prompts, 1) if not line.strip()]
    if len(empty) == len(prompts):
        raise UserError(f"prompts_path={path}: there is no prompt in it, only empty lines")
    if empty:
        raise UserError(f"prompts_path={path}, line {empty[0]}: it is empty, and each line is a prompt: take it out")
    return prompts


def open_net(config: DictConfig, typed: set[str]):
    """The net of `config.ckpt` on `config.device`, if it has a use for all words that were `typed`."""
    from . import load

    net = load(config.ckpt, tuple(config.trust), reads_text=True)
    if config.chat and (net.family != "decoder" or net.tokenizer.chat_template is None):
        raise UserError(f"chat=true: {config.ckpt} has no chat template; leave it out, or train it on conversations "
                        "(task=chat)")
    if config.chat is False:
        net.tokenizer.chat_template = None
    if net.family == "encoder" and "max_new_tokens" in typed:
        limit = f"max_new_tokens={config.max_new_tokens}"
        raise UserError(f"{limit}: an encoder fills a blank with one token, leave it out")
    return on_device(net, config.device)


def records(net, prompts: list[str], batch_size: int, words: dict) -> Iterator[dict]:
    """All that the net says to the prompts, in their order; the i-th prompt draws from seed + i."""
    from .decoding.answering import answer, fill, has_blanks

    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        blanks = [has_blanks(net, prompt) for prompt in batch]
        seeds = words | {"seed": words["seed"] + begin}
        if not any(blanks):
            found = answer(net, batch, **seeds)
        else:
            found = [fill(net, prompt, **words) if blank else answer(net, [prompt], **seeds)[0]
                     for prompt, blank in zip(batch, blanks, strict=True)]  # fmt: skip
        yield from (record for answers in found for record in answers)


def speak(net, prompt: str, words: dict) -> None:
    """Print what the net says to a prompt, as it comes."""
    from .decoding.answering import answer, chats, fill, filled, has_blanks

    if has_blanks(net, prompt):
        for record in fill(net, prompt, **words):
            print(filled(net.tokenizer, record))
            for blank in record.get("blanks", ()):
                print("  " + "   ".join(f"{token} {probability:.2f}" for token, probability in blank))
        return
    before = prompt if net.family == "decoder" and not chats(net) else ""
    if words["n_beams"] > 1 or words["n_best"] is not None:
        for record in answer(net, [prompt], **words)[0]:
            print(f"{record['log_probability']:8.3f}  {before}{record['answer']}")
        return
    shown = []  # nothing, until it is clear that there will be an answer

    def show(_: int, piece: str) -> None:
        print(piece if shown else before + piece, end="", flush=True)
        shown.append(piece)

    answer(net, [prompt], **words, stream=show)
    print("" if shown else before)


if __name__ == "__main__":
    main()
