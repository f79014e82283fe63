"""Working off the parts of a source, in this process or in several: each part becomes its shards and a record of them.

A worker is a process of its own (`python -m lmzoo.data.workers`) that reads the setting and then jobs from its standard
input and answers on its standard output, a line of JSON each. It is neither forked (this process may have threads) nor
spawned by multiprocessing (which would import the user's script again), and it ends when its input does, so it doesn't
outlive a parent that was killed.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, few
from ..tokenizer import Tokenizer
from . import duplicates
from .duplicates import without
from .labelled import KINDS, Document
from .opening import Piece
from .shardfile import ShardWriter
from .shards import write_meta
from .sources import Source, Unit

FEW = 3  # parts that one process, with a thread a core, does before several have started and shared them out
BATCH_MB = 1  # text that is tokenised and written at a time
Documents = Iterator[tuple[str, Document]]
Report = Callable[[int, int, int], None]  # (part, bytes of text, documents) that were done since the last report


class Workshop:
    """What a part is worked off with; `setting` (plain types) says all of it, so that a process can be told.

    It has `data`, `tokenizer` (its json and its special tokens), `folder`, `split`, `kind` and names of `labels`,
    `words` and `held_out`.
    """

    def __init__(self, setting: dict):
        self.setting, self.folder = setting, Path(setting["folder"])
        self.source, self.tokenizer = Source(setting["data"], setting["kind"]), Tokenizer(*setting["tokenizer"])

    def do(self, job: dict, report: Report) -> None:
        """Do `job`: {"work": "hash" or "tokenise", "part": its number, "units": of the source, "target": file, ...}."""
        units = [Unit(word, Piece(*piece), files) for word, piece, files in job["units"]]
        documents = self.source.documents(units, self.setting["split"], self.setting["held_out"])
        getattr(self, f"_{job['work']}")(job, documents, report)

    def _hash(self, job: dict, documents: Documents, report: Report) -> None:
        duplicates.write(Path(job["target"]), documents)

    def _tokenise(self, job: dict, documents: Documents, report: Report) -> None:
        left_out = {"documents": 0, "bytes": 0}
        first = None
        if job["first"]:
            file, begin, end = job["first"]
            first = np.memmap(file, "u1", "r")[begin:end]
        writers: dict[str, ShardWriter] = {}
        batch, size = [], 0

        def write() -> None:
            for name in dict.fromkeys(name for name, _ in batch):
                chosen = [document for one, document in batch if one == name]
                if name not in writers:
                    file = self.folder / f"{name.replace('/', '-')}-{job['part']:05}.shard"
                    writers[name] = ShardWriter(file, self.tokenizer, self.setting["words"], self.setting["kind"])
                writers[name].add(self._encoded(chosen), chosen)
            report(job["part"], size, sum(not document.more for _, document in batch))

        for name, document in without(documents, first, left_out):
            self._check(document)
            batch.append((name, document))
            size += document.n_bytes
            if size >= BATCH_MB * 1e6:
                write()
                batch, size = [], 0
        write()
        shards = {name: writer.close() for name, writer in writers.items()}
        write_meta(Path(job["target"]), {"key": job["key"], "shards": shards, "left_out": left_out})

    def _encoded(self, documents: list[Document]) -> Iterable[tuple[list[int], list | None]]:
        if self.setting["kind"] == "tags":
            return self.tokenizer.encode_firsts([document.words for document in documents])
        if self.setting["kind"] == "turns":
            return map(self._conversation, documents)
        texts = [text for document in documents for text in document.texts]
        if self.setting["words"]:
            return self.tokenizer.encode_words(texts)
        return ((ids, None) for ids in self.tokenizer.encode_each(texts))

    def _conversation(self, document: Document) -> tuple[list[int], list[bool]]:
        try:
            return self.tokenizer.chat.encode(document.messages)
        except ValueError as error:
            raise UserError(f"data.path={self.source.config['path']}: the conversation {document.text[:40]!r}: "
                            f"{error}") from error

    def _check(self, document: Document) -> None:
        """Raise `UserError` for a label of another kind than the task wants, as a function of the user's may give, or
        one that a trained model does not know."""
        kind, known = self.setting["kind"], self.setting["labels"]
        if kind is None and known is None:
            return
        label, text = document.label, f"data.path={self.source.config['path']}: the text {document.text[:40]!r}"
        fits = label is None if kind in ("text", "turns") else label is None or isinstance(label, KINDS[kind])
        if kind == "turns":
            fits = fits and document.messages is not None
        if kind == "tags":
            fits = fits and len(label or ()) == len(document.words or ()) > 0
        if not fits or document.more and document.second is not None:
            raise UserError(f"{text} has the label {label!r:.50}, but the task wants task.labels={kind}")
        names = label if isinstance(label, tuple | list) else [label]
        if known is not None and label is None:
            raise UserError(f"{text} has no label: leave it out")
        if known is not None and (unknown := [name for name in names if name not in known]):
            raise UserError(f"{text} has the label {unknown[0]!r}; the model knows {few(known)}")


def work(jobs: list[dict], setting: dict, processes: int, report: Report, done: Callable[[dict], None]) -> None:
    """Do all jobs with so many processes, in this one if it is one or the jobs are few; `done` hears of each."""
    if processes == 1 or len(jobs) <= FEW:
        workshop = Workshop(setting)
        for job in jobs:
            workshop.do(job, report)
            done(job)
        return
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker(setting) for _ in range(min(processes, len(jobs)))]
    for worker in workers:
        idle.put(worker)

    def do(job: dict) -> dict:
        worker = idle.get()
        try:
            worker.do(job, report)
        finally:
            idle.put(worker)
        return job

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for future in as_completed([pool.submit(do, job) for job in jobs]):
                done(future.result())
        finally:
            for worker in workers:
                worker.process.kill()
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.process.communicate()


class Worker:
    """A process that does jobs, seen from the one that gives them."""

    def __init__(self, setting: dict):
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, encoding="utf-8", env=environment)
        self._tell(setting)

    def _tell(self, message: dict) -> None:
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it is dead: whoever reads its answers finds out

    def do(self, job: dict, report: Report) -> None:
        self._tell(job)
        for line in self.process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise {"UserError": UserError, "OSError": OSError}.get(answer["error"], RuntimeError)(answer["message"])
            if "done" in answer:
                return
            report(*answer["report"])
        code, (_, piece, _) = self.process.wait(), job["units"][0]
        reason = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with code {code}"
        raise UserError(f"part {job['part']} of the source, from {piece[0]} at {piece[1]:,}, failed: its process "
                        f"{reason}; run again, finished parts are kept")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reader prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    messages: queue.SimpleQueue[dict] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(messages,), daemon=True).start()

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        workshop = Workshop(messages.get())
        while True:
            workshop.do(messages.get(), lambda *counts: answer(report=counts))
            answer(done=True)
    except UserError as error:
        answer(error="UserError", message=str(error))
    except OSError as error:
        answer(error="OSError", message=str(error))
    except Exception:
        answer(error="", message=traceback.format_exc())


def _listen(messages: "queue.SimpleQueue[dict]") -> None:
    for line in sys.stdin:
        messages.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
