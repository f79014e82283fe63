"""What the words of a run's data can mean, as far as no file has to be opened: which words a reader looks at, which a
task, and whether a file's name is one of its kind."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

from . import literal
from .checks import as_list, content, groups, read, sources
from .errors import UserError, few
from .ranges import check_ranges
from .signatures import misfit, nearest

LABELS = (None, "class", "classes", "number", "tags", "text", "turns")  # what a task may want, see data/labelled.py
LOOKED_AT = {  # by tasks that want such labels
    "text_column": LABELS[:4] + ("text",), "field": LABELS[:4] + ("text",), "label_column": LABELS[:4],
    "pair_column": LABELS[1:4], "label_separator": ("classes",), "words_column": ("tags",), "tags_column": ("tags",),
    "target_column": ("text",), "template": LABELS[1:4] + ("text",), "split_column": LABELS,
    "messages_column": ("turns",),
}  # fmt: skip
OF_ROWS = {"per_class": ("class", "classes", "tags")}  # the same, though no reader looks at it
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}  # of files
PACKED = (".gz", ".bz2", ".xz", ".zst")


def check_sources(data: Mapping, task: Mapping | None) -> None:
    """Refuse what the words of each source of a plain `data` node can't mean, for a task where there is one."""
    for place, source in sources(data):
        try:
            check_source(source)
            if task is not None:
                check_labels(task, source)
            check_ranges({"data": source})
        except UserError as error:
            raise UserError(str(error).replace("data.", f"{place}.", 1)) from None


def check_source(data: Mapping) -> None:
    """Refuse a word of the data that its reader would not look at, naming the sources that take it."""
    reader = data["reader"]
    if data.get("name") is not None and data.get("path") is not None:
        raise UserError(f"data.name={data['name']} and data.path={data['path']}: give one of them")
    for word in ("name", "config", *LOOKED_AT):
        if data.get(word) is not None and word not in reader:
            taking = [name for name in groups()["data"] if f"${{..{word}}}" in read(f"data/{name}")]
            raise UserError(f"data.{word}: {reader['_target_'].rpartition('.')[2]} has no such word; it is one of "
                            f"{', '.join(f'data={name}' for name in taking)}")
    if (template := data.get("template")) is not None and template.count("{}") != 1:
        raise UserError(f"data.template={template!r} has no place, or more than one, for the text: write {{}} once")
    if len(delimiter := str(reader.get("delimiter", ","))) != 1:
        raise UserError(f"data.reader.delimiter={delimiter!r} is not a single character (tabs: call the file .tsv)")
    for place, path in paths(data):
        check_ending(place, path, data)
        library = reader["_target_"].startswith("lmzoo.data.pydoc.") and path
        if library and not (isinstance(library, str) and any(Path(library).expanduser().glob("*.py"))):
            raise UserError(f"{place}={library}: say which kind of source it is, data=text (or jsonl, csv) "
                            f"{place}={library}; the documentation of Python is read from a folder of its library")


def check_ending(place: str, path: object, data: Mapping) -> None:
    """Refuse the text of training in a file that is named as one of another kind."""
    own = reader_kinds().get(data["reader"]["_target_"])
    for one in as_list(path) if own and place.endswith(".path") else ():
        kind = ENDINGS.get(next((end for end in reversed(Path(str(one)).suffixes) if end not in PACKED), ""), own)
        if kind != own:
            word = "kind" if "kind" in data else "data"
            raise UserError(f"{place}={one}: {word}={own} reads no such files; did you mean {word}={kind}?")


@cache
def reader_kinds() -> dict[str, str]:
    """{reader: the kind of source} of those that files are of by their endings."""
    return {content(f"data/{kind}")["reader"]["_target_"]: kind for kind in ("text", *ENDINGS.values())}


def check_labels(task: Mapping, data: Mapping) -> None:
    """Refuse labels that are none, and a word of the data that no task with such labels looks at."""
    if (labels := task.get("labels")) not in LABELS:
        raise UserError(f"task.labels={labels}: there are no such labels{nearest(str(labels), LABELS[1:])}")
    if labels == "classes" and "head" not in task:
        raise UserError("task.labels=classes: a net that writes the name of a class writes one for each text; for any "
                        "number of them take task/head=classifier")
    for word, kinds in (LOOKED_AT | OF_ROWS).items():
        if data.get(word) is not None and labels not in kinds:
            raise UserError(f"data.{word}: the task does not look at it (its labels are {labels or 'none'}); a task of "
                            f"labels {' or '.join(filter(None, kinds))} does")


def spoken(labels: list[str], words: Mapping[str, str] | str, place: str) -> dict[str, str]:
    """{label: how it is said}: by its word among those at `place` (the verbaliser of Schick & Schütze 2020,
    arXiv:2001.07676), else by its name. A text says words as JSON or YAML do, {label: word, ...}: of any labels."""
    if isinstance(words, str):
        try:
            words = yaml.load(words, yaml.BaseLoader)  # all of it text
        except yaml.YAMLError:
            words = None
        if not isinstance(words, Mapping):
            raise UserError(f"""{place}: write them as {place}.LABEL=WORD or {place}='{{"LABEL": "WORD"}}'""")
    if unknown := sorted(words.keys() - labels):
        raise UserError(f"{place}.{unknown[0]}: no text has this label; the labels are {few(labels)}")
    said = {label: words.get(label, label) for label in labels}
    if bad := [label for label, word in said.items() if not isinstance(word, str) or not word.strip()]:
        raise UserError(f"{place}.{bad[0]}={said[bad[0]]!r} should be a text")
    if len({*said.values()}) < len(said):
        raise UserError(f"{place}: two labels have one word, among {few(said.values())}")
    return said


def word_for(label: str, place: str) -> str:
    """How a word for a label is given on the command line."""
    return f"{place}.{label}=WORD" if re.fullmatch("[A-Za-z_]+", label) else f"""{place}='{{"{label}": "WORD"}}'"""


def paths(data: Mapping) -> Iterator[tuple[str, str | list[str] | None]]:
    """(place, path) of all text that the data names. Refuses a set whose name no metric can hold, or without a path."""
    for word in ("path", "val_path", "test_path"):
        if not isinstance(sets := data.get(word), Mapping):
            yield f"data.{word}", sets
            continue
        for name, path in sets.items():
            literal.check_name(f"data.{word}.{name}", str(name))
            if not path or misfit(path, "str | list[str]"):
                raise UserError(f"data.{word}.{name}={path!r} should be a path or a list of them")
            yield f"data.{word}.{name}", path
