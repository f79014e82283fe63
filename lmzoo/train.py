"""Pretrain or fine-tune a language model.

    python -m lmzoo.train model=gpt task=clm  or model=bert task=mlm, model=t5 task=span_corruption
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
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import repeat
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from . import environment, parts, ranks, runs
from .config import command
from .errors import STOPPED, UserError, naming
from .literal import plain, write
from .literal import save as save_config

BUSY = "run_dir={}: another process is training this run; wait for it or end it"


def main() -> None:
    with ranks.leaving():
        command("train", job)


def job(config: DictConfig) -> float | None:
    """One run of the command line; returns its validation loss, which a sweeper may look at."""
    metrics = train_apart(config) if in_sweep() and config.trainer.strategy != "auto" else train(config)[1]
    return metrics.get("val/loss")


def in_sweep() -> bool:
    """Whether this run is one of several that the command line asks for."""
    return HydraConfig.initialized() and HydraConfig.get().mode.name == "MULTIRUN"


def train(config: DictConfig):
    """Train as `config` (of `lmzoo.compose`) says -> (net in eval mode, {metric: value at the end}).

    The net carries `.config` and `.tokenizer`. With `config.ckpt` that run goes on from where it was written. Where the
    data has a test, it is that of the best in validation, unless `checkpoint.test_best` says no; else it is the last.
    Under `trainer=fsdp` only the first rank gets the weights.
    Raises UserError for whatever doesn't fit; what shows on the net alone is found before any data is read.
    """
    with ranks.leading():
        return run(ranks.take_over() if ranks.follows() else config)


def run(config: DictConfig):
    """What `train` does, in the environment of its processes."""
    if not isinstance(config, DictConfig) or "run_dir" not in config:
        raise UserError(f"fit({type(config).__name__}): give the configuration that compose(...) returns")
    config = parts.settled(config)
    check_free(Path(config.run_dir))
    task, module = assemble(config)
    first_step = task.plan.first_step
    check_incomplete(config, task.over, beyond=first_step > task.total_steps)
    with run_folder(config, task.tokenizer) as folder, parts.outspoken(folder):
        say(f"run folder: {folder}")
        trainer = parts.build_trainer(config, first_step if task.over else task.total_steps, ended=bool(task.over))
        task.environment = environment.describe(trainer.num_devices * trainer.num_nodes)
        if ranks.on_first_rank():
            environment.record(task.environment, folder / "environment.jsonl", first_step)
            (folder / "result.json").unlink(missing_ok=True)  # of an end that is the end no more
        if task.over:
            say(f"all {first_step:,} steps of that run are taken: what comes after them follows")
        else:
            say_what_comes(config, task)
        try:
            trainer.fit(task, datamodule=module, ckpt_path=config.ckpt, weights_only=True)
            metrics = {} if stopped_by(trainer) else finish(config, trainer, task, module)
        except SystemExit:
            if not stopped_by(trainer):
                raise
        if callback := stopped_by(trainer):
            leave(trainer, callback)
    task.net.tokenizer = task.tokenizer
    return task.net.eval(), metrics


def say_what_comes(config: DictConfig, task) -> None:
    """Print the plan of a run, and where it begins if not at its first step."""
    if config.ckpt:
        say(f"going on from step {task.plan.first_step:,} of {task.total_steps:,}")
    say(task.plan.table())
    if (warmup := config.schedule.get("warmup_steps") or 0) > task.total_steps:
        say(f"schedule.warmup_steps={warmup} is more than the run's {task.total_steps} steps: "
            f"the learning rate stays below optim.lr={config.optim.lr}")


def finish(config: DictConfig, trainer, task, module) -> dict[str, float]:
    """What follows the last step and its validation: the test, what was learned, result.json; returns the metrics."""
    from . import checkpoint, engines

    folder, splits = Path(config.run_dir), module.store.splits
    if trainer.global_step < task.total_steps:
        say(f"{parts.ended_by(trainer, config)} has ended the run after step {trainer.global_step:,} of "
            f"{task.total_steps:,}; " + (f"ckpt={folder} with a longer one goes on" if checkpoint.names(
                folder / "checkpoints") else "nothing was saved, so that none goes on with it"))
    if "val" in splits and not trainer.callback_metrics:  # validated before it was stopped
        trainer.validate(task, datamodule=module, verbose=False)
    if "test" in splits and config.checkpoint.test_best:
        return_to_best(trainer, task, module)
    metrics = dict(trainer.callback_metrics)
    if "test" in splits:
        trainer.test(task, datamodule=module, verbose=False)
        metrics |= trainer.callback_metrics
    metrics = {name: float(value) for name, value in metrics.items()}
    task.net = engines.whole(task.net, trainer.is_global_zero, tuple(config.trust))
    if ranks.on_first_rank():
        say(f"{learned(task.cpu())}\n{parts.report(metrics, module.xz_bits_per_byte)}")
    if trainer.is_global_zero:
        write(folder / "result.json", json.dumps(metrics, indent=1) + "\n")
    parts.end(trainer)
    return metrics


def assemble(config: DictConfig):
    """(task, data module) of a run: a fresh net, or that of `init_from` (a resumed run's weights come with `fit`).

    `task.over` says why a resumed run has no step left, if it has none.
    """
    from . import data
    from .data import unknown
    from .origin import open_origin
    from .plan import count_steps, plan

    origin = open_origin(config)
    source, earlier = origin.source, origin.identity
    parts.check_parts(config, source, earlier)
    over = parts.over(parts.build_trainer(config, steps=1), origin.state)  # and the mistakes in its words
    check_incomplete(config, over)  # before long work
    tokenizer = parts.build_tokenizer(config, source, earlier, say)
    if source and config.tokenizer.add:
        say(f"vocabulary {len(source.tokenizer):,} -> {len(tokenizer):,}; a new token begins as the mean of the others")
        config.model.vocab_size = config.tokenizer.vocab_size = max(source.vocab_size, len(tokenizer))
    store = data.prepare(config, tokenizer)
    if line := unknown.told({split: store[split] for split in store.splits}, tokenizer.unk):
        say(line)
    if earlier.get("store", store.name) != store.name:
        mixed = config.data.get("sources")
        texts = f"one of data.sources, {', '.join(mixed)}" if mixed else f"data.path={config.data.path}"
        raise UserError(f"ckpt={config.ckpt}: its data has changed since ({texts}), so its run cannot go on; "
                        "init_from= starts a new one from its weights")
    config.model = parts.model_config(config, store.labels)
    task = parts.build_task(config, build_net(config, origin.base, tokenizer), tokenizer)
    task.identity = {
        "config": plain(config),
        "tokenizer": tokenizer.json,
        "chat_template": tokenizer.chat_template,
        "labels": store.labels,
        "store": store.name,
        "base": origin.named,
        "wandb_id": earlier.get("wandb_id") or secrets.token_hex(4),
        "version": version("lmzoo"),
    }
    module = data.DataModule(store, tokenizer, task.collator, config.data, seed=config.seed,
                             limits={"val": config.trainer.limit_val_batches})
    task.check(module)
    task.total_steps = count_steps(config.trainer, module)
    first_step = origin.state.get("global_step", 0)
    task.plan = plan(task, config, module, first_step)
    if first_step >= task.total_steps:
        over = (f"ckpt={config.ckpt}: that run has taken {first_step} steps, and would end after {task.total_steps}: "
                "give a larger trainer.max_steps to go on")
    task.over = over
    if config.trainer.overfit:
        repeat_first_window(module, task.total_steps)
    return task, module


def check_incomplete(config: DictConfig, over: str, beyond: bool = False) -> None:
    """Refuse a run that is `over`, or would have been before; one that was stopped before its result can be ended."""
    if over and (beyond or not config.ckpt or Path(config.run_dir, "result.json").exists()):
        raise UserError(over)


def build_net(config: DictConfig, base, tokenizer):
    """The net that a run trains, in the form that it trains it in, with the weights of `base` where there is one."""
    import torch

    from . import adapters, checkpoint, engines

    torch.manual_seed(config.seed)
    net = checkpoint.build(config.model, config.trust)
    if base:
        weights = checkpoint.widened(base.state_dict(), len(base.tokenizer), len(tokenizer))
        loaded = checkpoint.load_weights(net, weights, new=adapters.new_parts(config))
        say(textwrap.fill(str(loaded), 100))
    adapters.ready(net, plain(config))
    engines.recompute_blocks(net, config.trainer.activation_checkpointing)
    if config.compile:
        engines.compile_blocks(net)
    return net


def return_to_best(trainer, task, module) -> None:
    """Give the net the weights that were the best in validation, and measure them again, if they are not the last."""
    from . import checkpoint, engines

    saving = next((callback for callback in trainer.callbacks if hasattr(callback, "best")), None)
    best = trainer.strategy.broadcast(saving and saving.best())
    if saving and saving.keep_best and not best and "val" in module.store.splits:
        say(f"checkpoint.monitor={saving.monitor} was defined in no validation: the test is of the last step")
    if best and (state := checkpoint.read(best))["global_step"] != trainer.global_step:
        say(f"the test is of the best by {saving.monitor}, {best.name} (checkpoint.test_best=false: of the last)")
        engines.fill(task.net, checkpoint.weights(state))
        trainer.validate(task, datamodule=module, verbose=False)


def say(text: object) -> None:
    """Print on the first rank."""
    if ranks.on_first_rank():
        print(text, flush=True)


def learned(task) -> str:
    """What the task shows of what was learned, or why a net this short can't."""
    try:
        return task.show()
    except UserError as error:
        return f"nothing to show: {error}"


def repeat_first_window(module, steps: int) -> None:
    """Make the first step's rows those of every step."""
    loader = module.train_dataloader
    module.train_dataloader = lambda: Repeated(next(iter(loader())), steps)


class Repeated:
    """A loader that hands out the same item `n` times."""

    def __init__(self, item, n: int):
        self.item, self.n = item, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator:
        return repeat(self.item, self.n)


def check_free(folder: Path) -> None:
    """Refuse a run's folder in which another process trains, before the work that comes ahead of taking it."""
    from .checkpoint import in_training

    if ranks.on_first_rank() and in_training(folder):
        raise UserError(BUSY.format(folder))


@contextmanager
def run_folder(config: DictConfig, tokenizer) -> Iterator[Path]:
    """The run's folder, which no other process may train in meanwhile, with its config.yaml and tokenizer.json.

    The run's other processes take that config over.
    """
    from filelock import FileLock, Timeout

    folder = Path(config.run_dir)
    lock = FileLock(folder / ".lock")
    if ranks.on_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(BUSY.format(folder)) from None
        if not config.ckpt:  # another process may have begun and ended meanwhile
            runs.check_unused(folder)
        save_config(config, folder / "config.yaml")
        with naming(folder / "tokenizer.json"):
            (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    try:
        ranks.hand_over(folder / "config.yaml")
        yield folder
    finally:
        lock.release()


def stopped_by(trainer):
    """The callback that a signal has told to stop; None where none came."""
    return next((callback for callback in trainer.callbacks if getattr(callback, "preempted", False)), None)


def leave(trainer, callback) -> None:
    """Exit with the code that asks for a rerun, saying how to go on with a run that a signal has cut short."""
    say(f"stopped by a signal after step {trainer.global_step}, "
        + (parts.going_on(trainer.default_root_dir) or "and nothing was saved"))
    parts.end(trainer)
    if callback.requeue and trainer.is_global_zero and not in_sweep():
        say(ranks.requeue())
    sys.exit(callback.exit_code if trainer.is_global_zero else 0)


def train_apart(config: DictConfig) -> dict[str, float]:
    """A job of a sweep that starts ranks, in a process of its own, since a process can start ranks only once."""
    folder = Path(config.run_dir)
    command = [sys.executable, "-m", "lmzoo.train", *HydraConfig.get().overrides.task]  # for its environment.jsonl
    with tempfile.TemporaryDirectory() as apart, ranks.leading():
        save_config(config, Path(apart, "config.yaml"))
        done = subprocess.run(command, env=os.environ | {ranks.RANK_CONFIG: str(Path(apart, "config.yaml"))})
    if done.returncode == STOPPED:
        sys.exit(STOPPED)
    if done.returncode:
        raise UserError(f"the run in {folder} ended with code {done.returncode}")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
