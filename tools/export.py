"""Hand a run over: a folder with its net, its tokenizer and a model card, README.md, of what the
run's own files say.

python -m lmzoo.tools.export RUN [FOLDER] [--to hf] [--best]

hf             what transformers opens, with the same logits: GPT-2, Llama, BERT, T5 v1.0 and v1.1;
               of nets trained on labelled data those of BERT, read at the first token (classes,
               numbers) or at each (tags)
torch_export   any net as model.pt2, for torch.export.load: no code of lmzoo is needed, and any
               number of rows of any length can be read
onnx           the same as model.onnx, for onnxruntime and others (extra onnx)
onnx_int8      the same with weights of eight bits; int8.json says what that costs on the
               validation split and how quick it is beside fp32

Beside a program of a net of classes or tags labels.json has their names, in the logits' order.
RUN is a run's folder (its newest checkpoint, or with --best the best in validation), a checkpoint
file, or a folder of transformers.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from lmzoo.tools import answer, parser, trusting
from torch import nn

from lmzoo import UserError, checkpoint, compose, hf, load, programs
from lmzoo.blocks.head import Pooler, Tagger
from lmzoo.evaluate import assemble
from lmzoo.hf import card

FORMATS = ("hf", *programs.FILES)
ROUNDS = 21  # of each arm, by turns


def export(run: str, folder: str | None, to: str = "hf", best: bool = False, trust: tuple[str, ...] = ()) -> str:
    """Write the net of `run` to the new `folder`; of which checkpoint it is, and what to do with it then."""
    folder = hf.check_folder(folder or f"{Path(run).resolve().name.removesuffix('.ckpt')}-{to}")
    if to.startswith("onnx"):
        programs.check_packages()
    is_run = not hf.is_hf_folder(run)
    if best and not is_run:
        raise UserError(f"--best: {run} is a folder of transformers, which has no checkpoints: leave it out")
    file = Path(run) if not is_run else best_of(run) if best else checkpoint.find(run)
    state = checkpoint.read(file, tensors=False) if is_run else {}
    net = load(file, trust)
    with filling(folder) as apart:
        return write(net, apart, folder, to, file, state, trust)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder in `folder` to write to: its files are moved up once all of them are there, what makes a model of them
    last, and of what fails nothing is left. UserError where another export writes to `folder`, or has done so."""
    apart = folder / ".partial"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        apart.mkdir()
    except FileExistsError:
        raise UserError(f"{folder}: another export is writing to it; give a new folder") from None
    try:
        if len([*folder.iterdir()]) > 1:
            raise UserError(f"{folder} is not empty: give a new folder")
        yield apart
        for file in sorted(apart.iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(folder / file.name)
    finally:
        shutil.rmtree(apart, ignore_errors=True)
        with suppress(OSError):  # there is something in it
            folder.rmdir()


def write(
    net: nn.Module, apart: Path, folder: Path, to: str, file: Path, state: Mapping, trust: tuple[str, ...]
) -> str:
    """Write `net`, which is that of `file`, to `apart`, with all that goes with it to `folder`; `state`: the
    checkpoint's, where it is one."""
    is_run = bool(state)
    if to == "hf":
        hf.to_hf(net, apart, card.label_words(checkpoint.identify(state, file)) if is_run else None)
        format, told = card.of_transformers(net, apart, folder), card.note(net)
        how = "open it by transformers' AutoModel...from_pretrained and AutoTokenizer"
    else:
        format, told = write_program(net, apart, folder, to, file if is_run else None, trust)
        of_labels = isinstance(net.head, Pooler | Tagger)  # else its logits are of tokens, which may spell a label
        if is_run and of_labels and (labels := checkpoint.identify(state, file).get("labels")):
            (apart / "labels.json").write_text(json.dumps(labels, ensure_ascii=False) + "\n", encoding="utf-8")
        how = f"run it by\n\n{format.use}\n"
    if is_run:
        card.write_card(net, apart, state, file, format)
    of = f"{file}, step {state['global_step']:,}" if is_run else file
    return "\n".join(filter(None, [f"{folder}: {how}", f"it is of {of}", told]))


def best_of(run: str) -> Path:
    """The checkpoint of a run that was the best in validation, by what the run looked at."""
    from lmzoo.callbacks import Checkpoints  # slow to import, and seldom wanted

    file = checkpoint.find(run)
    config = checkpoint.identify(checkpoint.read(file, tensors=False), file)["config"]
    found = Checkpoints(file.parent, monitor=config.get("checkpoint", {}).get("monitor", "val/loss")).best()
    if found is None or file == Path(run):
        raise UserError(f"--best: give the folder of a run with a checkpoint best-..., which {run} is not")
    return found


def write_program(
    net: nn.Module, apart: Path, folder: Path, to: str, file: Path | None, trust: tuple[str, ...]
) -> tuple[card.Format, str]:
    """Write `net` (of the checkpoint `file`) as a program to `apart`; what a card in `folder` says of it, and what to
    tell."""
    program = programs.trace(net)
    if to != "torch_export":
        program = programs.to_onnx(net, program)
    written, more = apart / programs.FILES[to], ""
    with TemporaryDirectory() as passing:
        if to == "torch_export":
            torch.export.save(program, written)
        else:
            plain = written if to == "onnx" else Path(passing, "model.onnx")
            program.save(plain)
        if to == "onnx_int8":
            programs.to_int8(plain, written)
            cost = costs(net, plain, written, file, trust)
            (apart / "int8.json").write_text(json.dumps(cost, indent=1) + "\n", encoding="utf-8")
            told = said(cost)
            more = f"## Weights of eight bits\n\n{told}."
        else:
            told = f"logits differ from the net's by at most {difference(net, written):.1g}"
    if tokenizer := getattr(net, "tokenizer", None):
        hf.write_tokenizer(tokenizer, apart, net)
    return card.Format(*programs.described(net, folder / written.name), more), told


def difference(net: nn.Module, file: Path) -> float:
    """The largest between the logits of `net` and of its program in `file`, over rows of several lengths."""
    run, longest = programs.opened(file), net.max_positions or 64
    with torch.no_grad():
        tried = (programs.example(net, batch, min(length, longest)) for batch, length in ((1, 1), (3, 17), (2, 64)))
        return max(float((run(rows) - net(**rows)).abs().max()) for rows in tried)


def costs(
    net: nn.Module, plain: Path, small: Path, file: Path | None, trust: tuple[str, ...]
) -> dict[str, float | str]:
    """What the int8 program `small` costs and saves beside the fp32 one, `plain`: the ratios of size and speed, and the
    loss of both on the validation split of the run whose checkpoint `file` is."""
    runs = {"fp32": programs.opened(plain), "int8": programs.opened(small)}
    rows = programs.example(net, 1, min(128, net.max_positions or 128))
    times = {arm: [] for arm in runs}
    for _ in range(ROUNDS):
        for arm, run in runs.items():
            begin = time.perf_counter()
            run(rows)
            times[arm].append(time.perf_counter() - begin)
    cost = {"size": small.stat().st_size / plain.stat().st_size,
            "speed": median(times["fp32"]) / median(times["int8"]), "row": rows["input_ids"].shape[1]}
    try:
        if file is None:
            raise UserError("a folder of transformers has no validation split")
        return cost | losses(file, trust, {arm: programs.Program(net, run) for arm, run in runs.items()})
    except UserError as error:  # the data may have stayed where the run was
        return cost | {"unmeasured": str(error)}


@torch.no_grad()
def losses(file: Path, trust: tuple[str, ...], nets: Mapping[str, nn.Module]) -> dict[str, float | str]:
    """{"unit": of the loss, name: loss} of each of `nets` in the place of a checkpoint's, on its run's validation."""
    from lmzoo.tasks.clm import CausalLM

    config = compose(f"ckpt={file}", f"trust=[{','.join(trust)}]")
    config.split = "val"
    task, data, split = assemble(config)
    task.eval()
    loaders, sums = data.val_dataloader(), {name: {"nll": 0.0, "targets": 0} for name in nets}
    for batch in chain.from_iterable(loaders if isinstance(loaders, list) else [loaders]):
        for name, task.net in nets.items():
            found = task.loss(batch)
            sums[name] = {word: value + found[word].item() for word, value in sums[name].items()}
    whole = data.n_evaluated(split) == data.n_rows(split)
    if isinstance(task, CausalLM) and whole:
        unit, n = "bits per byte", math.log(2) * data.n_bytes(split)
    else:
        unit = "squared error" if config.task.get("labels") == "number" else "nats per target"
        n = max(1, sums["fp32"]["targets"])
    return {"unit": unit} | {name: own["nll"] / n for name, own in sums.items()}


def said(cost: Mapping) -> str:
    """The costs in a line."""
    loss = f"loss not measured: {cost['unmeasured']}" if "unmeasured" in cost else (
           f"{cost['unit']} {cost['fp32']:.4f} -> {cost['int8']:.4f} ({cost['int8'] - cost['fp32']:+.4f})")
    speed = f"speed x {cost['speed']:.2f} (a row of {cost['row']} tokens)"
    return f"int8 beside fp32: size x {cost['size']:.2f}, {speed}, validation {loss}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", help="a run's folder, a checkpoint file, or a folder of transformers")
    arguments.add_argument("folder", nargs="?", help="where to write, a new folder or an empty one (default: NAME-hf, "
                           "after the run and the format)")  # fmt: skip
    arguments.add_argument("--to", choices=FORMATS, default=FORMATS[0], help="the format")
    arguments.add_argument("--best", action="store_true", help="the run's best checkpoint, not its newest")
    trusting(arguments)
    given = arguments.parse_args()
    answer(export, given.run, given.folder, given.to, given.best, tuple(given.trust))


if __name__ == "__main__":
    main()
