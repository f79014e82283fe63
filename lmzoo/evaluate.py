"""Measure what a run has learned.

    python -m lmzoo.evaluate ckpt=RUN                                     on its own test or val
    python -m lmzoo.evaluate ckpt=RUN data=text data.path=held_out.txt    on all of another text
    python -m lmzoo.evaluate ckpt=RUN measure=sliding_window              the likelihood of text
"""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from . import parts, ranks, runs, signatures
from .config import command
from .literal import escaped, plain, save

log = logging.getLogger(__name__)


def main() -> None:
    command("evaluate", job)


def job(config: DictConfig) -> None:
    report = parts.report(evaluate(config))
    if ranks.on_first_rank():
        print(report)


def evaluate(config: DictConfig) -> dict[str, float]:
    """{metric: value} of the run's task, or of `config.measure`.

    `config` is the run's (or what `measures.completed` made), with `ckpt`, the data, and which `split` of them:
    "whole" (all of data.path), "test", "val", or None: "test" where the data has one, else "val".
    """
    with ranks.leading(), parts.outspoken():
        if not ranks.follows() and "measure" in config:
            return by_measure(config)
        with TemporaryDirectory() as apart:
            return measure(ranks.take_over() if ranks.follows() else config, Path(apart, "config.yaml"))


def measure(config: DictConfig, file: Path) -> dict[str, float]:
    """What `evaluate` does, in the environment of its processes, which take the configuration over from `file`."""
    config = parts.settled(config)
    if ranks.on_first_rank():
        save(config, file)
    task, module, split = assemble(config)
    config.callbacks = {}
    config.run_dir = escaped(str(Path(config.run_dir) / "evaluation"))
    trainer = parts.build_trainer(config, steps=1)
    run = trainer.validate if split == "val" else trainer.test
    if ranks.on_first_rank():
        ranks.hand_over(file)
    run(task, datamodule=module, verbose=False)
    parts.end(trainer)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def assemble(config: DictConfig):
    """(task, data module, split): the net of `config.ckpt` under its task, and the split to measure it on."""
    from . import data, load
    from .data import unknown
    from .likelihood.measuring import chosen

    net = load(config.ckpt, tuple(config.trust))
    parts.check_length(config, net)
    trained = net.identity
    runs.check_unedited({word: plain(config[word]) for word in ("seed", "model", "task")}, trained["config"])
    whole = config.split == "whole"
    if not whole:
        tell_changed(config, net.tokenizer, trained)
    labels = trained.get("labels") if {"labels", "head"} & set(config.task) else None  # else nobody looks at any
    store = data.prepare(config, net.tokenizer, split="test" if whole else None, labels=labels)
    split = "test" if whole else chosen(config.split, store.splits)
    if ranks.on_first_rank() and (line := unknown.told({split: store[split]}, net.tokenizer.unk)):
        log.warning(line)
    task = parts.build_task(config, net, net.tokenizer)
    task.identity = trained
    module = data.DataModule(store, net.tokenizer, task.collator, config.data, seed=config.seed,
                             limits={split: config.trainer.limit_val_batches})
    return task, module, split


def tell_changed(config: DictConfig | dict, tokenizer, trained: dict) -> None:
    """Warn where a run's data (`config` has its data and task) is no more what its checkpoint was trained on."""
    from .data import store_name

    if store_name(config, tokenizer) != trained.get("store"):
        log.warning("the run's data has changed since it was trained: other text is measured than was held out then")


def by_measure(config: DictConfig) -> dict[str, float]:
    """{metric: value} of `config.measure`, on one device, in fp32; whole numbers are counts."""
    from . import load
    from .likelihood import measuring

    settings = plain(config)
    signatures.check(settings, imported=True)
    parts.check_texts(settings["data"])
    measure = parts.made(settings["measure"])
    measuring.check_data(measure, settings)
    net = load(config.ckpt, tuple(config.trust), reads_text=True)
    measuring.check_net(measure, net)
    if measure.reads == "documents" and not settings["other"]:
        tell_changed(settings | {"task": net.identity["config"]["task"]}, net.tokenizer, net.identity)
    split, texts = measuring.read(measure, settings, net.tokenizer)
    found = measure(parts.on_device(net, config.trainer.accelerator), texts)
    return {f"{split}/{name}": value if isinstance(value, int) else float(value) for name, value in found.items()}


if __name__ == "__main__":
    main()
