"""Preparing a corpus: documents become a token store, once, before any process group exists.

The store's folder is named by a hash of everything that went in (the files, the reader's settings, the tokenizer), so a
changed corpus never meets an old store and two runs with the same settings share one. It is built in a folder beside,
under a lock, part of the source by part, and renamed when whole. A finished part carries a hash of what it was made
from (stretches of files, with their sizes and times), so whatever stopped a preparation, the next one with the same
settings goes on with it; also after a file was mended or has grown, which costs only the parts that read it. What is
damaged on the disk, a store, a part or a tokenizer, is made again, with a warning that names the file.
"""

import hashlib
import logging
import lzma
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np

from .. import tokenizer as tokenizers
from ..errors import UserError
from ..literal import plain
from . import duplicates
from .bar import Progress
from .cache import cache_dir, key, locked
from .duplicates import without
from .labelled import names_in
from .shardfile import AGAIN
from .shards import SPLITS, Store, open_shard, read_meta, write_meta
from .sources import FORMAT, Source
from .workers import work

DIGESTS, FIRST = "*.digests", "first"  # files that de-duplication leaves for a while
HELD_OUT_MB = 1  # on which a new tokenizer is measured
XZ_MB = 16  # larger corpora get no xz yardstick
VERIFIED_MB = 256  # a store up to this size is read through when it is opened; of a larger one the headers are
log = logging.getLogger(__name__)


def prepare_tokenizer(config: Mapping, source, say: Callable[[str], object] | None = None) -> tokenizers.Tokenizer:
    """The tokenizer of a run (`config` is the whole): the one at `tokenizer.path`, else trained on training documents,
    those of `source`, which is anything with `identity`, `sample` and `held_out_texts`.

    A trained one is kept in the cache, so it is trained once for any number of runs and ranks; `say` then hears, as one
    line, what it makes of held-out text.
    """
    node, data = config["tokenizer"], config["data"]
    if node.get("path"):
        return tokenizers.prepare(node, ())
    kept = cache_dir(data) / "tokenizers" / f"{key(source.identity(), plain(node))}.json"
    if _fault(kept, read_meta) is not None:
        with locked(kept):
            if (fault := _fault(kept, read_meta)) is not None:
                _warn(fault)
                trained = tokenizers.prepare(node, source.sample(node["sample_mb"]))
                write_meta(kept, {"tokenizer": trained.json})
                if say:
                    measure = tokenizers.measure(trained, tokenizers.sample(source.held_out_texts(), HELD_OUT_MB))
                    room = f" (the model has room for {n:,})" if (n := node["vocab_size"]) > len(trained) else ""
                    told = f"; on held-out text {measure}" if measure.n_tokens else ""
                    say(f"tokenizer trained: {len(trained):,} tokens{room}{told}")
    return tokenizers.Tokenizer(read_meta(kept)["tokenizer"], node.get("special"))


def store_name(config: Mapping, tokenizer: tokenizers.Tokenizer) -> str:
    """The name of the store that a run of `config` trains on: a hash of all that goes in."""
    return key(source_of(config).identity(), *_settings(config, tokenizer))


def source_of(config: Mapping) -> Source:
    """The source of a run (`config` is the whole), with labels of the kind that its task wants."""
    return Source(config["data"], (config.get("task") or {}).get("labels"))


def _settings(config: Mapping, tokenizer: tokenizers.Tokenizer, split: str | None = None,
              labels: list[str] | None = None) -> list:
    """What a store depends on, beside its source."""
    task = config.get("task") or {}
    words, unique = bool(task.get("whole_word")), bool(config["data"].get("deduplicate"))
    template = [tokenizer.chat_template] if task.get("labels") == "turns" else []
    return [tokenizer.hash, *template, split, labels, words, unique]


def prepare(config: Mapping, tokenizer: tokenizers.Tokenizer, split: str | None = None,
            labels: list[str] | None = None) -> Store:
    """The token store of a run (`config` is the whole), built if the cache does not hold it.

    Call it before any process group exists. `split` puts every document of `data.path` into one split (evaluation);
    `labels` fixes the classes and their numbers (those of a trained classifier). Where words begin is kept if the task
    says `whole_word`, and labels are of the kind that it calls `labels`.
    """
    data, settings = config["data"], _settings(config, tokenizer, split, labels)
    source, (*_, words, unique) = source_of(config), settings
    folder = cache_dir(data) / "stores" / key(source.identity(), *settings)
    if _fault(folder / "meta.json", _verify) is not None:
        partial = folder.with_name(f"{key(FORMAT, source.config, *settings)}.partial")
        with locked(folder), locked(partial):
            if (fault := _fault(folder / "meta.json", _verify)) is not None:
                _warn(fault)
                Preparation(partial, source, tokenizer, split, labels, words).run(data.get("processes"), unique)
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
                if (left_out := Store(folder).left_out)["documents"]:
                    log.warning("%s: left out %s documents (%s bytes) whose text had come before in it",
                                source.title, f"{left_out['documents']:,}", f"{left_out['bytes']:,}")
                if n := sum(Store(folder)[name].n_untagged for name in Store(folder).splits):
                    log.warning("%s: the tokenizer leaves %s words without a token, so their tags are neither learnt "
                                "nor measured", source.title, f"{n:,}")
    store = Store(folder)
    store.require(tokenizer)
    return store


def _fault(file: Path, verify: Callable[[Path], object]) -> str | None:
    """What `verify` finds wrong with a file of the cache: "" if it isn't there, None if nothing is."""
    if not file.exists():
        return ""
    try:
        verify(file)
    except UserError as error:
        return str(error).removesuffix(f": {AGAIN}")
    return None


def _verify(meta: Path) -> None:
    """Look through a store: one of `VERIFIED_MB` at most to the last byte."""
    size = sum(file.stat().st_size for file in meta.parent.glob("*.shard"))
    Store(meta.parent).verify(bodies=size <= VERIFIED_MB * 1e6)


def _warn(fault: str | None) -> None:
    if fault:
        log.warning("%s: it is made again", fault)


class Preparation:
    """Builds a store in `folder`, going on with the parts that an earlier one finished there."""

    def __init__(self, folder: Path, source: Source, tokenizer: tokenizers.Tokenizer, split: str | None,
                 labels: list[str] | None, words: bool):
        self.folder, self.source, self.tokenizer, self.split, self.labels = folder, source, tokenizer, split, labels
        self.parts, self.held_out = source.parts(), source.held_out(split)
        self.kind = source.config["kind"]
        data = source.config | {"cache_dir": str(source.cache)}
        self.setting = {"data": data, "tokenizer": tokenizer.__reduce__()[1], "folder": str(folder),
                        "split": split, "kind": self.kind, "labels": labels, "words": words, "held_out": self.held_out}

    def run(self, processes: int | None, unique: bool) -> None:
        """Do what is not done yet in so many processes (None: as many as this one may use CPUs), with `unique` leaving
        out every document whose text came before."""
        if str(self.source.config["reader"]["_target_"]).startswith("__main__."):
            processes = 1  # no other process can import it
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.processes = processes or cpus
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self._first_of_equals() if unique else None
        jobs = [self._job("tokenise", number, first) for number in range(len(self.parts))]
        for job in jobs:
            self._check(job)
        self._clear(jobs, DIGESTS, FIRST)
        try:
            began = time.monotonic()
            n_done = self._do("tokenise", [job for job in jobs if not _record(job)])
            speed = n_done / 1e6 / (time.monotonic() - began) if n_done else None
            meta = self._meta([_record(job) for job in jobs], first, speed)
        except BaseException:
            self._clear(jobs, DIGESTS, FIRST)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
            raise
        self._clear(jobs)
        write_meta(self.folder / "meta.json", meta)

    def _job(self, work: str, number: int, first: list | None = None) -> dict:
        """What a process has to know of a part. `key` says what it is made from, `target` is written when it is done,
        and `first` is where to read which of its documents are to be kept: [file, begin, end]."""
        units, of_part = self.parts[number], first and [first[0], *first[1][number:number + 2]]
        name = key(units, self.held_out, of_part and hashlib.sha256(_marks(of_part).tobytes()).hexdigest())
        target = f"part-{number:05}.json" if work == "tokenise" else f"part-{number:05}-{name}.digests"
        return {"work": work, "part": number, "units": units, "first": of_part, "key": name,
                "target": str(self.folder / target)}

    def _first_of_equals(self) -> list:
        """[file that marks the first documents of equal text, [where each part's marks begin in it, and their end]]"""
        jobs = [self._job("hash", number) for number in range(len(self.parts))]
        files = [Path(job["target"]) for job in jobs]
        faults = [_fault(file, duplicates.verify) for file in files]
        for fault in faults:
            _warn(fault)
        self._do("compare", [job for job, fault in zip(jobs, faults, strict=True) if fault is not None])
        duplicates.mark(files, self.folder / FIRST)
        return [str(self.folder / FIRST), list(accumulate(map(duplicates.count, files), initial=0))]

    def _check(self, job: dict) -> None:
        """Take the record of a finished part away if its shards are not what it says."""
        try:
            for told in (_record(job) or {"shards": {}})["shards"].values():
                open_shard(self.folder, told, self.tokenizer.hash, verify=True)
        except UserError as error:
            _warn(str(error).removesuffix(f": {AGAIN}"))
            Path(job["target"]).unlink()

    def _clear(self, jobs: list[dict], *others: str) -> None:
        """Remove all but `others` and what finished parts wrote: torn files, parts of a source that has changed."""
        records = {Path(job["target"]).name: record for job in jobs if (record := _record(job))}
        kept = {*records, *(shard["file"] for record in records.values() for shard in record["shards"].values())}
        for file in self.folder.iterdir():
            if file.name not in kept and not any(map(file.match, others)):
                file.unlink()

    def _do(self, title: str, jobs: list[dict]) -> int:
        """Work off the jobs, with a bar in a terminal; how many bytes of text they held."""
        progress = Progress(title, self.parts, jobs)
        with progress.bar:
            work(jobs, self.setting, self.processes, progress.add, progress.finish)
        return sum(progress.done.values())

    def _meta(self, records: list[dict], first: list | None, speed: float | None) -> dict:
        """What `meta.json` says. Raises `UserError` if there is nothing to train on, or nothing at all."""
        names = sorted({name for record in records for name in record["shards"]},
                       key=lambda name: (SPLITS.index(name.partition("/")[0]), name))
        splits = {name: [record["shards"][name] for record in records if name in record["shards"]] for name in names}
        path = self.source.title
        if not splits:
            raise UserError(f"{path} holds no documents" + f" for the {self.split} split" * bool(self.split))
        if not self.split and "train" not in splits:
            counts = {name: sum(shard["documents"] for shard in shards) for name, shards in splits.items()}
            n = sum(counts.values())
            if self.source.column:
                told = ", ".join(f"{n} {name}" for name, n in counts.items())
                raise UserError(f"{path}: data.split_column={self.source.column} leaves no row to train on ({told}): "
                                "say train of some, or name the text to train on by data.path and this one by "
                                "data.test_path or data.val_path, without the column")
            raise UserError(f"{path}: its text is all held out for validation, none is left to train on ({n} "
                            f"document{'s' * (n != 1)}; equal ones go the same way): set data.val_path, or "
                            "data.val_fraction=0, or a finer data.reader.split")
        labels = {name for shards in splits.values() for shard in shards for label in shard["labels"]
                  for name in names_in(label, self.kind)}
        left_out = sum((Counter(record["left_out"]) for record in records), Counter())
        return {"tokenizer": self.tokenizer.hash, "words": self.setting["words"], "kind": self.kind,
                "labels": self.labels or sorted(labels),
                "xz_bits_per_byte": self._xz_bits_per_byte(splits, first), "megabytes_per_second": speed,
                "left_out": {"documents": left_out["documents"], "bytes": left_out["bytes"]}, "splits": splits}

    def _xz_bits_per_byte(self, splits: dict, first: list | None) -> float | None:
        """What `xz` makes of the validation text once it has seen the training text: a yardstick for bits per byte.

        8 x (bytes of xz(train + validation) - bytes of xz(train)) / bytes of validation; each document is ended by one
        NUL as the model's is by eos. None for a corpus above `XZ_MB`, without one of the two splits or with labels.
        """
        shards = [shard for shards in splits.values() for shard in shards]
        size = sum(shard["bytes"] + shard["documents"] for shard in shards)
        n_val = sum(shard["bytes"] for name, shards in splits.items() if name.startswith("val") for shard in shards)
        if self.kind or "train" not in splits or not n_val or size >= XZ_MB * 1e6:
            return None
        found = self.source.documents(None, self.split, self.held_out)
        texts = {name: bytearray() for name in SPLITS}
        for name, document in without(found, first and _marks([first[0], 0, first[1][-1]]), Counter()):
            texts[name.partition("/")[0]] += document.text.encode() + b"\0" * (not document.more)
        with ThreadPoolExecutor(2) as pool:
            alone, both = pool.map(lambda text: len(lzma.compress(text)),
                                   (texts["train"], texts["train"] + texts["val"]))
        return 8 * (both - alone) / n_val


def _marks(first: list) -> np.ndarray:
    file, begin, end = first
    return np.fromfile(file, "u1", end - begin, offset=begin)


def _record(job: dict) -> dict | None:
    """What a finished part wrote, if it was made from what this job would make it from."""
    try:
        record = read_meta(Path(job["target"]))
    except UserError:
        return None
    return record if record["key"] == job["key"] else None
