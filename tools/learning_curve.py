"""How a metric grows with the number of labelled texts, of checkpoints and of what isn't pretrained.

python -m lmzoo.tools.learning_curve FOLDER --init runs/a runs/b scratch majority svm
    --sizes 10,50,all --seeds 1,2,3 task=classification data=jsonl data.path=reviews.jsonl
    data.split_column=split

Each RUN of --init is fine-tuned by each seed on so many texts of each class (data.per_class), which
the seed chooses, and tested on the data's test split (data.split_column, data.test_path); all other
words are those of lmzoo.train. `scratch:RUN` is the net and tokenizer of a RUN with fresh weights
(`scratch`: of the first RUN; where there is none the words say model=...), `majority` always names
the class that most training texts have, `svm` is a linear support vector machine on TF-IDF of words
and pairs of them (of Chinese: of up to three signs), by scikit-learn. All learn from and are
measured on the same texts.

--sizes 10:120,50:200,all trains on ten texts of each class for 120 steps, on fifty for 200, on all
for as many as a run has by the words. FOLDER gets a run for each cell, table.json and table.png. A
cell that is done is not done again: say the same words to go on.
"""

import json
import statistics
from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from lmzoo.tools import answer, parser

import lmzoo
from lmzoo import UserError
from lmzoo.literal import write
from lmzoo.signatures import nearest

SCRATCH, MAJORITY, SVM = "scratch", "majority", "svm"
ALL = "all"
SETTING = "setting.json"  # of a folder: what its cells are of
OWN = {"seed": "say --seeds", "data.per_class": "say --sizes", "init_from": "say --init", "ckpt": "say --init",
       "run_dir": "each cell has a folder in that of the curve"}  # fmt: skip
COUNTED = {MAJORITY: "majority class", SVM: "TF-IDF, linear SVM"}  # what is no net


class Size(NamedTuple):
    """How many texts of each class to learn from, or all; for how many steps, None: as the words say."""

    per_class: str
    steps: int | None = None

    @property
    def title(self) -> str:
        return ALL if self.per_class == ALL else f"{self.per_class} a class"

    @property
    def words(self) -> list[str]:
        return [*([] if self.per_class == ALL else [f"data.per_class={self.per_class}"]),
                *([f"trainer.max_steps={self.steps}"] if self.steps else [])]  # fmt: skip


class Init(NamedTuple):
    """What a line of the table starts from: the net of `base` (None: that of the words), or its like with fresh
    weights, or no net at all."""

    name: str
    base: str | None
    fresh: bool = False

    @property
    def title(self) -> str:
        return COUNTED.get(self.name, self.name)


def curve(folder: Path, inits: list[str], sizes: list[Size], seeds: list[int], metric: str, words: list[str]) -> str:
    """Train what is not trained yet; the table, in Markdown."""
    lines = named(inits)
    setting = matched(folder, words, {line.name: line.base for line in lines}, dict(sizes))
    todo = [line for line in lines for size in sizes for seed in seeds if not done(folder, line, size, seed).exists()]
    check(dict.fromkeys(todo), sizes[0], seeds[0], words)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / SETTING, json.dumps(setting, indent=1) + "\n")
    records = []
    for line in lines:
        for size in sizes:
            values = []
            for seed in seeds:
                found = result(done(folder, line, size, seed), line, size, seed, words)
                if metric not in found:
                    raise UserError(f"--metric {metric}: {line.title} has no such{nearest(metric, found)}")
                values.append(found[metric])
            records.append({"init": line.title, "per_class": size.per_class, "metric": metric, "seeds": seeds,
                            "values": values, "mean": statistics.fmean(values),
                            "deviation": statistics.stdev(values) if len(values) > 1 else None})  # fmt: skip
    write(folder / "table.json", json.dumps(records, indent=1) + "\n")
    picture(records, sizes, metric, folder / "table.png")
    return table(records, sizes, metric)


def named(inits: Sequence[str]) -> list[Init]:
    """What --init says, each with a name of its own."""
    runs = [one for one in inits if one not in COUNTED and one.partition(":")[0] != SCRATCH]
    first, found = next(iter(runs), None), []
    for one in inits:
        kind, _, run = one.partition(":")
        if one in COUNTED:
            found.append(Init(one, first))
        elif kind == SCRATCH:
            found.append(Init(f"{SCRATCH}-{Path(run).resolve().name}" if run else SCRATCH, run or first, fresh=True))
        else:
            found.append(Init(Path(one).resolve().name, one))
    if len({line.name for line in found}) < len(found):
        raise UserError(f"--init {' '.join(inits)}: two of them have one name; rename a folder")
    return found


def matched(folder: Path, words: list[str], bases: dict[str, str | None], steps: dict[str, int | None]) -> dict:
    """What the cells of a folder are of, to be noted in it; UserError where those that it has are of something else."""
    file = folder / SETTING
    if not file.exists() and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty, and holds no learning curve: give a new folder")
    noted = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"words": words, "bases": {}}
    if noted["words"] != words:
        raise UserError(f"{folder} holds runs of other words ({' '.join(noted['words'])}): give a new folder")
    for name, base in bases.items():
        if noted["bases"].setdefault(name, base) != base and name not in COUNTED:
            raise UserError(f"{folder} holds runs of another {name}, of {noted['bases'][name]}: give a new folder")
    for size, n in steps.items():
        if (other := noted.setdefault("steps", {}).setdefault(size, n)) != n:
            raise UserError(f"{folder} holds runs of {other or 'the usual'} steps for size {size}: give a new folder")
    return noted


def check(lines: Iterable[Init], size: Size, seed: int, words: list[str]) -> None:
    """UserError, before the first cell is trained, where one of `lines` couldn't be."""
    for word in words:
        if (name := word.partition("=")[0].lstrip("+")) in OWN:
            raise UserError(f"{word}: leave it out; {OWN[name]}")
    for line in lines:
        config = configured(line, size, seed, words)
        if line.name == SVM and find_spec("sklearn") is None:
            raise UserError("--init svm needs scikit-learn: pip install 'lmzoo[bench]'")
        if line.name in COUNTED and (config.task.get("labels") != "class" or config.data.deduplicate):
            raise UserError(f"--init {line.name}: this is for texts of one class each, without data.deduplicate")
        if line.name in COUNTED and all(split != "test" for split, _ in documents(config)):
            raise UserError(f"--init {line.name}: this is for data with a test (data.split_column, data.test_path)")


def done(folder: Path, line: Init, size: Size, seed: int) -> Path:
    """The file that a cell ends with."""
    return folder / f"{line.name}-{size.per_class}-{seed}" / "result.json"


def result(file: Path, line: Init, size: Size, seed: int, words: list[str]) -> dict[str, float]:
    """The metrics of the cell that ends with `file`, which is trained unless it has been."""
    run = file.parent
    if not file.exists():
        if (run / "checkpoints" / "MANIFEST.json").exists():
            lmzoo.fit(lmzoo.compose(f"ckpt={run}"))
        elif line.name in COUNTED:
            found = counted(line.name, configured(line, size, seed, words))
            run.mkdir(exist_ok=True)
            write(file, json.dumps(found) + "\n")
        else:
            lmzoo.fit(configured(line, size, seed, [*words, f"run_dir={run}"]))
    return json.loads(file.read_text(encoding="utf-8"))


def configured(line: Init, size: Size, seed: int, words: list[str]):
    """The configuration of a cell; one with fresh weights has the net and the tokenizer of its base, and no more."""
    own = [f"seed={seed}", *size.words, *([f"init_from={line.base}"] if line.base else [])]
    config = lmzoo.compose(*words, *own)
    if config.trainer.strategy != "auto":
        raise UserError(f"trainer.strategy={config.trainer.strategy}: the cells are of one process; leave it out")
    if line.fresh and line.base:
        if not (file := Path(line.base, "tokenizer.json")).is_file():
            raise UserError(f"--init {line.name}: {line.base} is no run's folder with a tokenizer.json")
        config.init_from, config.tokenizer.path = None, str(file)
    return config


def counted(init: str, config) -> dict[str, float]:
    """The accuracy of what is no net, on the test that a run of this configuration has."""
    from lmzoo.data.few import few_of_each

    splits = whole_splits(config)
    train, test = splits.get("train", []), splits["test"]
    if n := config.data.per_class:
        order, _ = few_of_each(lambda text: [train[text].label], len(train), n, config.seed)
        train = [train[text] for text in order]
    labels = [document.label for document in train]
    if init == MAJORITY:
        guesses = [Counter(labels).most_common(1)[0][0]] * len(test)
    else:
        read, asked = ([" ".join(document.texts) for document in texts] for texts in (train, test))
        guesses = support_vectors(read, asked, labels)
    right = sum(guess == document.label for guess, document in zip(guesses, test, strict=True))
    return {"test/accuracy": right / len(test), "test/f1": macro_f1([document.label for document in test], guesses)}


def whole_splits(config) -> dict[str, list]:
    """The documents of each split of a run's data."""
    from lmzoo.data.labelled import whole_texts

    splits: dict[str, list] = defaultdict(list)
    for split, own in groupby(documents(config), key=itemgetter(0)):
        splits[split] += whole_texts(document for _, document in own)
    return splits


def documents(config) -> Iterator[tuple]:
    """(split, document) of all of a run's data, one at a time."""
    from lmzoo.data.preparation import source_of

    return ((name.partition("/")[0], document) for name, document in source_of(config).documents())


def macro_f1(labels: Sequence[str], guesses: Sequence[str]) -> float:
    """The mean F1 of the classes that occur on either side."""
    right = Counter(label for label, guess in zip(labels, guesses, strict=True) if label == guess)
    both = Counter(labels) + Counter(guesses)
    return statistics.fmean(2 * right[name] / both[name] for name in both)


def support_vectors(texts: list[str], asked: list[str], labels: list[str]) -> list[str]:
    """What a linear support vector machine on TF-IDF that has learned the labels of `texts` says of those `asked`."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    spaced = statistics.fmean(len(text) / len(text.split()) for text in texts) < 15  # signs for a word
    of_words = {"ngram_range": (1, 2)} if spaced else {"analyzer": "char", "ngram_range": (1, 3)}
    vectors = TfidfVectorizer(sublinear_tf=True, **of_words)
    machine = LinearSVC(random_state=0).fit(vectors.fit_transform(texts), labels)
    return machine.predict(vectors.transform(asked)).tolist()


def table(records: Sequence[dict], sizes: Sequence[Size], metric: str) -> str:
    """A line for each of --init, its mean and standard deviation over the seeds for each size."""
    cells = {(one["init"], one["per_class"]): f"{one['mean']:.3f}" + (
        f" ± {one['deviation']:.3f}" if one["deviation"] is not None else "") for one in records}  # fmt: skip
    lines = [f"| {metric} | " + " | ".join(size.title for size in sizes) + " |",
             "|---" * (len(sizes) + 1) + "|"]  # fmt: skip
    for name in dict.fromkeys(one["init"] for one in records):
        lines.append(f"| {name} | " + " | ".join(cells[name, size.per_class] for size in sizes) + " |")
    return "\n".join(lines)


def picture(records: Sequence[dict], sizes: Sequence[Size], metric: str, file: Path) -> None:
    """A line for each of --init over the sizes, with the deviation over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(one["init"] for one in records):
        own = [one for one in records if one["init"] == name]
        axes.errorbar(range(len(sizes)), [one["mean"] for one in own], [one["deviation"] or 0 for one in own],
                      fmt="--" if name in COUNTED.values() else "o-", capsize=3, label=name)  # fmt: skip
    axes.set_xticks(range(len(sizes)), [size.per_class for size in sizes])
    axes.set(xlabel="labelled texts of each class", ylabel=f"{metric}, mean and deviation over seeds")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> None:
    def size(text: str) -> Size:
        per_class, _, steps = text.partition(":")
        if per_class != ALL and int(per_class) < 1 or steps and int(steps) < 1:
            raise ValueError
        return Size(per_class, int(steps) if steps else None)

    def seed(text: str) -> int:
        if int(text) < 0:
            raise ValueError
        return int(text)

    def several(kind):
        def values(text: str) -> list:
            found = [kind(one) for one in text.split(",")]
            if len({one[0] if isinstance(one, Size) else one for one in found}) < len(found):
                raise ArgumentTypeError(f"{text} says one twice")
            return found

        values.__name__ = "list"  # what argparse calls it
        return values

    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="of the runs, new or of the same words")
    arguments.add_argument("words", nargs="*", metavar="WORD", help="of training, as task=classification")
    arguments.add_argument("--init", nargs="+", action="extend", required=True, metavar="INIT",
                           help="runs, exported folders, scratch, majority, svm")  # fmt: skip
    arguments.add_argument("--sizes", type=several(size), default="10,50,200,all", metavar="10,50,all",
                           help="texts of each class; :STEPS behind it, for how long")  # fmt: skip
    arguments.add_argument("--seeds", type=several(seed), default=[1, 2, 3], metavar="1,2,3")
    arguments.add_argument("--metric", default="test/accuracy", help="of result.json (test/accuracy)")
    given = arguments.parse_args()
    words = [*given.words, *(one for one in given.init if "=" in one)]  # that stand behind --init
    inits = [one for one in given.init if "=" not in one]
    answer(curve, given.folder, inits, given.sizes, given.seeds, given.metric, words)


if __name__ == "__main__":
    main()
