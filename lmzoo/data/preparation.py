"""Preparing a corpus: documents become a token store, once, before any process group exists.

The store's folder is named by a hash of everything that went in (the files, the reader's settings, the tokenizer), so a
changed corpus never meets an old store and two runs with the same settings share one. It is built in a folder beside,
under a lock, and renamed when whole; a preparation that was killed goes on after the last megabyte it committed.
"""

import contextlib
import hashlib
import json
import logging
import lzma
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import tokenizer as tokenizers
from ..errors import UserError
from .corpus import Document, files
from .shards import SPLITS, Store, Writer, write_whole

FORMAT = 1  # of stores and of what the readers yield: raise it when either changes
HASHED_MB = 64  # corpora up to this size are recognised by their content, larger ones by their files' sizes and times
XZ_MB = 16  # larger corpora get no xz yardstick
BATCH_MB = 1  # text that is tokenised, written and committed at a time
PATHS = ("path", "val_path", "test_path")
PYTHON = [platform.python_version(), sys.base_prefix]  # what the text of a reader without a path depends on
log = logging.getLogger(__name__)


def cache_dir(config: Mapping) -> Path:
    """Where stores, trained tokenizers and parsed corpora lie: `data.cache_dir`, $LMZOO_CACHE or ~/.cache/lmzoo."""
    return Path(config.get("cache_dir") or os.environ.get("LMZOO_CACHE") or "~/.cache/lmzoo").expanduser().absolute()


def identity(config: Mapping) -> dict:
    """What the documents of a `data` node depend on, as plain types. Raises `UserError` if a path matches nothing."""
    return {"format": FORMAT, "reader": _plain(config["reader"]), "val_fraction": config["val_fraction"],
            **{word: _fingerprints(config, word) for word in PATHS}}


def _plain(node):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _fingerprints(config: Mapping, word: str) -> list:
    if not config.get(word):
        return PYTHON if word == "path" else []
    found = [(file, file.stat()) for file in files(_plain(config[word]), f"data.{word}")]
    if sum(stat.st_size for _, stat in found) > HASHED_MB * 1e6:
        return [[str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in found]
    return [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file, _ in found]


def documents(config: Mapping, split: str | None = None) -> Iterator[tuple[str, Document]]:
    """(split, document) in the order of the source: each document in the split it belongs to.

    That is the split its source gives it; else that of the path it came from (`path`, `val_path`, `test_path`); and
    without a `val_path`, a hash of its text sends the share `val_fraction` of documents (at least one) to "val".
    With `split`, all documents of `path` are of that split, but for those that their source gives to another.
    """
    if split:
        yield from ((split, document) for document in _read(config, "path") if document.split in (None, split))
        return
    held_out = 0.0 if config.get("val_path") else _held_out(config)
    for document in _read(config, "path"):
        yield document.split or ("val" if _hash(document.text) < held_out else "train"), document
    for word, name in (("val_path", "val"), ("test_path", "test")):
        if config.get(word):
            yield from ((name, document) for document in _read(config, word))


def _hash(text: str, use: bytes = b"split") -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6, person=use).digest()) / (1 << 48)


def _held_out(config: Mapping) -> float:
    """The hash below which a document is for validation: `val_fraction`, or as much more as it takes to have one."""
    fraction = config["val_fraction"]
    if not 0 <= fraction < 1:
        raise UserError(f"data.val_fraction={fraction} is not in [0, 1)")
    smallest, n = 1.0, 0
    for document in _read(config, "path") if fraction else ():
        n += 1
        smallest = min(smallest, _hash(document.text))
        if smallest < fraction or document.split:
            return fraction
    if fraction and n < 2:
        raise UserError(f"data.path={config.get('path')} holds {n} document{'s' * (n != 1)}, so none can be held out "
                        "for validation: set data.val_path, or data.val_fraction=0, or a finer data.reader.split")
    return max(fraction, smallest + 2**-48) if fraction else 0.0


def _read(config: Mapping, word: str) -> Iterator[Document]:
    """The documents of one path. What a reader yields without a path is kept in the cache: it is slow to parse."""
    from hydra.utils import instantiate

    reader = instantiate(config["reader"])
    if config.get(word):
        yield from reader(_plain(config[word]))
        return
    key = _key(FORMAT, _plain(config["reader"]), PYTHON)
    kept = cache_dir(config) / "corpora" / f"{key}.jsonl"
    if not kept.exists():
        with _locked(kept):
            if not kept.exists():
                write_whole(kept, "".join(json.dumps(document) + "\n" for document in reader(None)))
    with kept.open(encoding="utf-8") as stream:
        yield from (Document(*json.loads(line)) for line in stream)


def _key(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of a file or folder of the cache; whatever the disk refuses inside becomes a `UserError`."""
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("another process is preparing %s: waiting for it", target)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise UserError(f"cannot prepare {target}: {error} (data.cache_dir names another place)") from error


def prepare_tokenizer(config: Mapping) -> tokenizers.Tokenizer:
    """The tokenizer of a run (`config` is the whole): the one at `tokenizer.path`, else trained on training documents.

    A trained one is kept in the cache, so it is trained once for any number of runs and ranks.
    """
    node, data = config["tokenizer"], config["data"]
    if node.get("path"):
        return tokenizers.prepare(node, ())
    kept = cache_dir(data) / "tokenizers" / f"{_key(identity(data), _plain(node))}.json"
    if not kept.exists():
        with _locked(kept):
            if not kept.exists():
                write_whole(kept, tokenizers.prepare(node, sample(data, node["sample_mb"])).json)
    return tokenizers.load(kept, node.get("special"))


def sample(config: Mapping, megabytes: float) -> Iterator[str]:
    """Training texts, about `megabytes` of them from all over the corpus: a hash of the text decides which."""
    share = megabytes * 1e6 / max(1, _size(config))
    for split, document in documents(config):
        if split == "train" and _hash(document.text, b"sample") < share:
            yield document.text


def _size(config: Mapping) -> int:
    """Bytes of the source's files."""
    return sum(file.stat().st_size for word in PATHS if config.get(word) for file in files(_plain(config[word])))


def prepare(config: Mapping, tokenizer: tokenizers.Tokenizer, split: str | None = None,
            labels: list[str] | None = None) -> Store:
    """The token store of a run (`config` is the whole), built if the cache does not hold it.

    Call it before any process group exists. `split` puts every document of `data.path` into one split (evaluation);
    `labels` fixes the classes and their numbers (those of a trained classifier). Where words begin is kept if the task
    says `whole_word`.
    """
    data, words = config["data"], bool((config.get("task") or {}).get("whole_word"))
    before = identity(data)
    folder = cache_dir(data) / "stores" / _key(before, tokenizer.hash, split, labels, words)
    if not (folder / "meta.json").exists():
        with _locked(folder):
            if not (folder / "meta.json").exists():
                partial = folder.with_name(folder.name + ".partial")
                try:
                    _build(partial, data, tokenizer, split, labels, words)
                    if identity(data) != before:
                        raise UserError(f"data.path={data.get('path')} changed while it was being prepared: run again")
                except UserError:  # nothing of it can be used later; what a kill or a full disk leaves, can
                    shutil.rmtree(partial)
                    raise
                partial.rename(folder)
    store = Store(folder)
    store.require(tokenizer)
    return store


def _build(folder: Path, config: Mapping, tokenizer: tokenizers.Tokenizer, split: str | None,
           labels: list[str] | None, words: bool) -> None:
    from tqdm import tqdm

    writer, yardstick = Writer(folder, tokenizer, words), _Xz()
    number, batch, size = 0, [], 0

    def write() -> None:
        for name in SPLITS:
            chosen = [document for one, document in batch if one == name]
            texts = [document.text for document in chosen]
            encoded = tokenizer.encode_words(texts) if words else [(ids, None) for ids in tokenizer.encode_batch(texts)]
            writer.add(name, encoded, texts, [document.label for document in chosen])
        writer.commit(number)

    look = {"desc": "tokenise", "unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm(total=_size(config) or None, **look) as bar:
        for number, (name, document) in enumerate(documents(config, split), 1):
            if labels is not None and document.label not in labels:
                raise UserError(f"data.path={config.get('path')}: document {number} has the label {document.label!r}; "
                                f"the model knows {', '.join(labels)}")
            n_bytes = len(document.text.encode())
            yardstick.add(name, document.text)
            bar.update(n_bytes)
            if number <= writer.done:
                continue
            batch.append((name, document))
            size += n_bytes
            if size >= BATCH_MB * 1e6:
                write()
                batch, size = [], 0
        write()
    if not writer.counts:
        raise UserError(f"data.path={config.get('path')} holds no documents" + f" for the {split} split" * bool(split))
    if not split and "train" not in writer.counts:
        raise UserError(f"data.val_fraction={config['val_fraction']} leaves no document of "
                        f"data.path={config.get('path')} to train on")
    writer.finish(labels, yardstick.bits_per_byte())


class _Xz:
    """What `xz` makes of the validation text once it has seen the training text: a yardstick for bits per byte.

    8 x (bytes of xz(train + validation) - bytes of xz(train)) / bytes of validation; each document is ended by one NUL
    as the model's is by eos. None for a corpus above `XZ_MB`, or without one of the two splits.
    """

    def __init__(self):
        self.texts = {name: bytearray() for name in SPLITS}
        self.n_val = 0

    def add(self, split: str, text: str) -> None:
        if sum(map(len, self.texts.values())) < XZ_MB * 1e6:
            self.texts[split] += text.encode() + b"\0"
            self.n_val += len(text.encode()) * (split == "val")

    def bits_per_byte(self) -> float | None:
        train, val = self.texts["train"], self.texts["val"]
        if not train or not self.n_val or sum(map(len, self.texts.values())) >= XZ_MB * 1e6:
            return None
        with ThreadPoolExecutor(2) as pool:
            alone, both = pool.map(lambda text: len(lzma.compress(text)), (train, train + val))
        return 8 * (both - alone) / self.n_val
