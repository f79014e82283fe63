"""Pretrain or fine-tune a language model.

    python -m lmzoo.train model=gpt task=clm                     also model=bert task=mlm, model=t5 task=span_corruption
    python -m lmzoo.train model=gpt task=clm data=text data.path='books/*.txt' trainer=ddp
    python -m lmzoo.train task=classification init_from=RUN          fine-tune
    python -m lmzoo.train ckpt=RUN                                   go on with a run
    python -m lmzoo.train -m model=gpt,llama optim.lr=1e-3,3e-4      a sweep

In a notebook: config = lmzoo.compose("model=gpt", "task=clm"); model, metrics = lmzoo.fit(config).
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import repeat
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from . import parts
from .config import RANK_CONFIG, command
from .errors import UserError
from .literal import plain
from .literal import save as save_config


def main() -> None:
    command("train", job)


def job(config: DictConfig) -> float | None:
    """One run of the command line; returns its validation loss, which a sweeper may look at."""
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode.name == "MULTIRUN"
    metrics = train_apart(config) if in_sweep and config.trainer.strategy != "auto" else train(config)[1]
    return metrics.get("val/loss")


def train(config: DictConfig):
    """Train as `config` (of `lmzoo.compose`) says -> (net in eval mode, {metric: value at the end}).

    The net carries `.config` and `.tokenizer`. With `config.ckpt` that run goes on from where it was written.
    Raises UserError for whatever doesn't fit; what shows on the net alone is found before any data is read.
    """
    config = parts.settled(config)
    task, module = assemble(config)
    if task.first_step >= task.total_steps:
        raise UserError(f"ckpt={config.ckpt}: that run has taken all its {task.first_step} steps: "
                        "give a larger trainer.max_steps to go on")
    with run_folder(config, task.tokenizer) as folder:
        trainer = parts.build_trainer(config, task.total_steps)
        say(f"{task.plan.table()}\nrun folder: {folder}")
        trainer.fit(task, datamodule=module, ckpt_path=config.ckpt, weights_only=True)
        leave_if_preempted(trainer)
        metrics = dict(trainer.callback_metrics)
        if "test" in module.store.splits:
            trainer.test(task, datamodule=module, verbose=False)
            metrics |= trainer.callback_metrics
        metrics = {name: float(value) for name, value in metrics.items()}
        say(f"{learned(task)}\n{parts.report(metrics, module.xz_bits_per_byte)}")
        if trainer.is_global_zero:
            (folder / "result.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        parts.end(trainer)
    task.net.tokenizer = task.tokenizer
    return task.net.eval(), metrics


def assemble(config: DictConfig):
    """(task, data module) of a run: a fresh net, or that of `init_from` (a resumed run's weights come with `fit`)."""
    import torch

    from . import checkpoint, data, load
    from .plan import count_steps, plan

    state = checkpoint.read(config.ckpt) if config.ckpt else {}
    earlier = state.get("lmzoo", {})
    source = load(config.init_from) if config.init_from and not earlier else None
    parts.check_net(config)
    parts.build_trainer(config, steps=1)  # for the mistakes in its words, before any long work
    tokenizer = parts.build_tokenizer(config, source, earlier)
    store = data.prepare(config, tokenizer)
    if earlier.get("store", store.folder.name) != store.folder.name:
        raise UserError(f"ckpt={config.ckpt}: its data has changed since (data.path={config.data.path}), so its run "
                        "cannot go on; init_from= starts a new one from its weights")
    config.model = parts.model_config(config, store.labels)

    torch.manual_seed(config.seed)
    net = checkpoint.build(config.model)
    if source:
        say(checkpoint.load_weights(net, source.state_dict(), new=("head",) if "head" in config.task else ()))
    if config.compile:
        parts.compile_blocks(net)
    task = parts.build_task(config, net, tokenizer)
    task.identity = {
        "config": plain(config),
        "tokenizer": tokenizer.json,
        "labels": store.labels,
        "store": store.folder.name,
        "wandb_id": earlier.get("wandb_id") or secrets.token_hex(4),
        "version": version("lmzoo"),
    }
    module = data.DataModule(store, tokenizer, task.collator, config.data, seed=config.seed)
    task.total_steps = count_steps(config.trainer, module)
    task.first_step = state.get("global_step", 0)
    task.plan = plan(net, config, module, task, steps=task.total_steps)
    if config.trainer.overfit:
        repeat_first_window(module, task.total_steps)
    return task, module


def say(text: object) -> None:
    """Print on the first rank."""
    if parts.on_first_rank():
        print(text, flush=True)


def learned(task) -> str:
    """What the task shows of what was learned, or why a net this short can't."""
    try:
        return task.show()
    except UserError as error:
        return f"nothing to show: {error}"


def repeat_first_window(module, steps: int) -> None:
    """Make the first step's rows those of every step."""
    window = next(iter(module.train_dataloader()))
    module.train_dataloader = lambda: Repeated(window, steps)


class Repeated:
    """A loader that hands out the same item `n` times."""

    def __init__(self, item, n: int):
        self.item, self.n = item, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator:
        return repeat(self.item, self.n)


@contextmanager
def run_folder(config: DictConfig, tokenizer) -> Iterator[Path]:
    """The run's folder, which no other process may train in meanwhile, with its config.yaml and tokenizer.json.

    Ranks that Lightning starts find that config.
    """
    from filelock import FileLock, Timeout

    folder, before = Path(config.run_dir), dict(os.environ)
    lock = FileLock(folder / ".lock")
    if parts.on_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"run_dir={folder}: another process is training this run; wait for it or end it") from None
        save_config(config, folder / "config.yaml")
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    os.environ[RANK_CONFIG] = str(folder.absolute() / "config.yaml")
    try:
        yield folder
    finally:  # Lightning leaves LOCAL_RANK and more behind, which a second run would take for its own
        lock.release()
        os.environ.clear()
        os.environ.update(before)


def leave_if_preempted(trainer) -> None:
    """Exit with the code that asks for a rerun where a signal has cut the run short, saying how to go on."""
    for callback in trainer.callbacks:
        if getattr(callback, "preempted", False):
            folder = trainer.default_root_dir
            say(f"stopped by a signal after step {trainer.global_step}, saved: python -m lmzoo.train ckpt={folder}")
            parts.end(trainer)
            sys.exit(callback.exit_code if trainer.is_global_zero else 0)


def train_apart(config: DictConfig) -> dict[str, float]:
    """A job of a sweep that starts ranks, in a process of its own, since a process can start ranks only once."""
    folder = Path(config.run_dir).absolute()
    save_config(config, folder / "config.yaml")
    environment = os.environ | {RANK_CONFIG: str(folder / "config.yaml")}
    done = subprocess.run([sys.executable, "-m", "lmzoo.train"], env=environment)
    if done.returncode:
        raise UserError(f"the run in {folder} ended with code {done.returncode}")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
