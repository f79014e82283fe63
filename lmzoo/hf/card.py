"""A model card, README.md: what a run's own files say of the net that was exported, and nothing else."""

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import nn

from .. import checkpoint
from ..errors import few

ANSWER = "tokenizer.decode(model.generate(**tokenizer('Some text', return_tensors='pt'), max_new_tokens=20)[0])"
REPLY = ANSWER.replace("tokenizer('Some text', return_tensors='pt')", "tokenizer.apply_chat_template("
                       "[{'role': 'user', 'content': 'Some text'}],\n    add_generation_prompt=True, return_dict=True, "
                       "return_tensors='pt')")  # fmt: skip
LOGITS = "model(**tokenizer('Some text', return_tensors='pt')).logits"
KINDS = {  # of their classes by how they end: what Hugging Face calls their use, and a use
    "LMHeadModel": ("text-generation", ANSWER), "CausalLM": ("text-generation", ANSWER),
    "ConditionalGeneration": ("text2text-generation", ANSWER), "MaskedLM": ("fill-mask", LOGITS),
    "SequenceClassification": ("text-classification", LOGITS),
    "TokenClassification": ("token-classification", LOGITS),
}  # fmt: skip
UNTIED = ("transformers 5 calls every T5 tied, and warns at loading that lm_head.weight and shared.weight of this one "
          "differ: they are meant to, and it leaves them so.")  # fmt: skip
PROBLEMS = {"class": "single_label_classification", "classes": "multi_label_classification", "number": "regression"}


def label_words(identity: Mapping) -> dict:
    """The words of a config.json that name the labels of a run on labelled data."""
    kind, labels = identity["config"].get("task", {}).get("labels"), identity.get("labels")
    words = {"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {}
    if labels:
        words["id2label"] = {str(i): label for i, label in enumerate(labels)}
        words["label2id"] = {label: i for i, label in enumerate(labels)}
    return words


class Format(NamedTuple):
    """What a card says of the format: the words at its head, what the net is called there, how it is used (Python),
    and what more there is to say."""

    head: dict[str, str]
    architecture: str
    use: str
    more: str = ""


def of_transformers(net: nn.Module, folder: Path, place: Path) -> Format:
    """What there is to say of `net`, which was written to `folder` for transformers and will lie at `place`."""
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    kind, example = next(found for end, found in KINDS.items() if architecture.endswith(end))
    if example == ANSWER and net.family == "decoder" and (folder / "chat_template.jinja").is_file():
        example = REPLY
    use = (f"from transformers import AutoTokenizer, {architecture}\n"
           f"tokenizer, model = (kind.from_pretrained({str(place)!r}) for kind in (AutoTokenizer, {architecture}))\n"
           f"print({example})")  # fmt: skip
    return Format({"library_name": "transformers", "pipeline_tag": kind}, architecture, use, note(net))


def write_card(net: nn.Module, folder: Path, state: Mapping, file: Path, format: Format) -> None:
    """README.md in `folder`, to which `net` of the checkpoint `state` in `file` is exported; its run's picture."""
    run = file.parent.parent if file.parent.name == "checkpoints" else file.parent
    identity, picture = checkpoint.identify(state, file), run / "loss.png"
    if picture.is_file():
        shutil.copyfile(picture, folder / picture.name)
    sections = [
        "\n".join(["---", *(f"{word}: {value}" for word, value in format.head.items()), "---"]),
        f"# {identity['config'].get('name') or format.architecture}",
        table(("", ""), facts(net, format.architecture, identity, state, file.name)),
        results(run, identity["config"]),
        f"![loss]({picture.name})" if picture.is_file() else "",
        commands(run),
        f"## Use\n\n```python\n{format.use}\n```",
        format.more,
    ]
    (folder / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def note(net: nn.Module) -> str:
    """What a user of transformers will wonder at."""
    untied = net.family == "encoder-decoder" and "head.weight" in dict(net.named_parameters())
    return UNTIED if untied else ""


def facts(net: nn.Module, architecture: str, identity: Mapping, state: Mapping, file: str) -> Iterator[tuple[str, str]]:
    """(what, value) of the net and of its training, as far as the checkpoint tells."""
    config = identity["config"]
    yield "architecture", f"{architecture}, {net.family}"
    yield "parameters", f"{sum(parameter.numel() for parameter in net.parameters()):,}"
    words = {"layers": net.n_layers, "d_model": net.d_model, "vocabulary": net.vocab_size, "longest row": net.max_len}
    yield "sizes", ", ".join(f"{word} {value:,}" for word, value in words.items())
    if task := config.get("task", {}).get("_target_"):
        yield "task", task.split(".")[-2]
    if config.get("init_from"):
        yield "began as", f"`{config['init_from']}`"
    if config.get("adapter"):
        yield "adapter", "merged into the weights that it began from"
    if data := config.get("data"):
        yield "data", "; ".join(sources(data))
    if identity.get("labels"):
        yield "labels", few(identity["labels"])
    if numbers := identity.get("numbers"):
        yield "the number that it tells", f"output x {numbers['deviation']:.6g} + {numbers['mean']:.6g}"
    tokens = [own["tokens"] for own in state.get("callbacks", {}).values() if isinstance(own, dict) and "tokens" in own]
    seen = f" and {tokens[0]:,} tokens" if tokens else ""
    yield "weights", f"`{file}`, after {state['global_step']:,} steps{seen}"
    if config.get("trainer", {}).get("precision"):
        yield "precision", config["trainer"]["precision"]
    if "seed" in config:
        yield "seed", str(config["seed"])
    yield "made by", f"lmzoo {identity.get('version', '')}".strip()


def sources(data: Mapping) -> Iterator[str]:
    """Each source of the data by its path or name, else by what reads it."""
    for name, own in (data.get("sources") or {"": data}).items():
        found = own.get("name") or own.get("path") or (own.get("reader") or {}).get("_target_", "")
        paths = found if isinstance(found, list) else [found]
        weight = f", weight {own['weight']}" if "weight" in own else ""
        yield (f"{name}: " if name else "") + few((f"`{path}`" for path in paths), longest=200) + weight


def results(run: Path, config: Mapping) -> str:
    """The metrics that the run ended with."""
    try:
        found = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    saved, tested = config.get("checkpoint", {}), any(name.startswith("test/") for name in found)
    of = f"best weights by {saved.get('monitor')}" if tested and saved.get("test_best") else "last weights"
    rows = ((name, f"{value:.4g}") for name, value in found.items())
    return f"## Results\n\nOf the run's {of}:\n\n{table(('metric', 'value'), rows)}"


def commands(run: Path) -> str:
    """How the run was started, and went on."""
    try:
        lines = (run / "environment.jsonl").read_text(encoding="utf-8").split("\n")
        starts = [shlex.split(json.loads(line)["command"]) for line in lines if line]
    except (OSError, ValueError, KeyError):
        return ""
    said = "\n".join(shlex.join([Path(program).name, *words]) for program, *words in starts)
    return f"## Training\n\n```\n{said}\n```"


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---|---|", *lines[1:]])
