"""The cache folder: where it is, names for what lies in it, its locks, and files that are whole or not there."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError

log = logging.getLogger(__name__)


def cache_dir(config: Mapping) -> Path:
    """Where stores, trained tokenizers and parsed corpora lie: `data.cache_dir`, $LMZOO_CACHE or ~/.cache/lmzoo."""
    return Path(config.get("cache_dir") or os.environ.get("LMZOO_CACHE") or "~/.cache/lmzoo").expanduser().absolute()


def key(*parts) -> str:
    """A name for plain types: a hash of them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
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


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream for the new content of a file: a reader, or a crash at any moment, finds the old one or the new one."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with temporary.open("w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
