"""The parts of a run, made from its configuration: net, task and trainer; what `train` and `evaluate` share."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from glob import iglob
from pathlib import Path

from omegaconf import DictConfig

from . import checks, ranks, runs, signatures, texts
from .errors import Interrupted, Lost, UserError
from .literal import plain, restore
from .ranks import by_torchrun, on_first_rank

FROM_FILES = ("lmzoo.data.corpus.", "lmzoo.data.tables.")  # readers that have no text of their own


def settled(config: DictConfig) -> DictConfig:
    """A copy in which everything is decided: interpolations, the precision, words of classes outside lmzoo checked."""
    config = restore(plain(config))
    if on_first_rank():
        check_texts(plain(config.data))
    if on_first_rank() and not config.ckpt:
        runs.check_unused(config.run_dir)
    signatures.check(plain(config), imported=True)
    config.trainer.precision = precision(config.trainer.precision, config.trainer.accelerator)
    return config


def check_texts(data: Mapping) -> None:
    """Refuse a path of text that is missing or leads nowhere: a look at the folders, before torch is imported."""
    from .data.opening import files

    for place, source in checks.sources(data):
        of_files = source["reader"]["_target_"].startswith(FROM_FILES) and "name" not in source["reader"]
        for word, path in texts.paths(source):
            given = [path] if isinstance(path, str) else path or []
            here = [Path(one).expanduser().absolute() for one in given]
            if word == "data.path" and of_files and not given or not all(
                    one.exists() or next(iglob(str(one), recursive=True), None) for one in here):
                files(path, word.replace("data", place, 1))  # which says what is wrong


def quiet() -> None:
    """Silence Lightning's notes and warnings on its own matters (once it is imported); lmzoo's warnings still show."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in (r"lightning(\.|$)", r"torch\.utils\._pytree"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message="Mismatch dtype")  # of RMSNorm: its weights are float32 by intent


def precision(word: str, accelerator: str) -> str:
    """Lightning's word for the arithmetic; `auto` is bf16-mixed where the device computes bf16 fast, else 32-true."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif accelerator in ("auto", "cpu"):
        features = getattr(torch.cpu, "get_capabilities", dict)()
        fast = features.get("amx_bf16") or features.get("avx512_bf16")
        if word == "16-true":
            raise UserError(f"trainer.precision={word}: a CPU trains in fp16 as 16-mixed only; bf16-mixed is quicker")
    else:
        fast = False
    return ("bf16-mixed" if fast else "32-true") if word == "auto" else word


def check_parts(config: DictConfig, source, earlier: Mapping) -> None:
    """Try all parts together before any data is read: the net without memory, in one pass over a row, a step of the
    optimizer, and the task with a tokenizer like the run's (`source`, `earlier`: as for `build_tokenizer`)."""
    import torch

    from . import adapters, checkpoint, memory
    from .tokenizer import prepare

    with torch.device("meta"):
        net = checkpoint.build(model_config(config, labels=["one", "other"]), config.trust)
        row = torch.zeros(1, 1, dtype=torch.long)
    check_length(config, net)
    try:
        adapters.ready(net, plain(config))
        memory.moments(net, plain(config.optim))
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"optim.optimizer: {checks.one_line(error)}") from error
    try:
        net(row, **({"decoder_input_ids": row} if net.family == "encoder-decoder" else {}))
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        if "meta" not in str(error):  # somebody's own part may look into a tensor, which has no content here
            raise UserError(f"model: {checks.one_line(error)}") from error
    known = source or earlier or config.tokenizer.path
    tokenizer = (build_tokenizer(config, source, earlier) if known else
                 conversing(prepare(plain(config.tokenizer), ["a text"]), config.tokenizer.chat_template))
    if not hasattr(build_task(config, net, tokenizer), "collator"):
        raise UserError(f"task._target_={config.task._target_} is no task: choose by task=NAME, one of "
                        f"{', '.join(checks.groups()['task'])}")


def check_length(config: DictConfig, net) -> None:
    """Refuse rows that reach beyond the positions of a net."""
    limit, length = net.max_positions, config.data.row_length
    if limit is not None and length > limit:
        more = "" if config.ckpt or config.init_from else f", or model.max_len={length}"
        raise UserError(f"data.row_length={length} is more than the {limit} positions of the model: give fewer{more}")


def model_config(config: DictConfig, labels: list[str] | None) -> dict:
    """The net's configuration, its head replaced by the task's where that has one; UserError for too few labels."""
    model, kind = plain(config.model), config.task.get("labels")
    if kind not in ("class", "classes", "number", "tags"):
        return model
    labels = [""] if kind == "number" else labels  # one output
    if not labels:
        column = "tags_column" if kind == "tags" else "label_column"
        raise UserError(f"this task needs labels, and the data has none: name their column, data.{column}=NAME")
    if len(labels) < 2 and kind not in ("number", "classes"):
        raise UserError(f"every text has the label {labels[0]!r}: a task of classes needs two or more")
    if "head" not in config.task:
        return model
    head = plain(config.task.head)
    if head.get("pool") == "auto":  # where each family's pretraining gathers what it knows of the row
        head["pool"] = "first" if checks.family(model) == "encoder" else "last"
    return model | {"head": head | {"n_classes": len(labels)}}


def build_tokenizer(config: DictConfig, source, earlier: Mapping, say: Callable[[str], object] | None = None):
    """The tokenizer of the net `source`, or of an `earlier` checkpoint's identity; else as `config` says.

    `say` hears of one that had to be trained.
    """
    from . import data
    from .tokenizer import Tokenizer

    if earlier:
        return Tokenizer(earlier["tokenizer"], plain(config.tokenizer.special), earlier.get("chat_template"))
    if source:
        tokenizer = source.tokenizer.extended(added) if (added := plain(config.tokenizer.add)) else source.tokenizer
    else:
        tokenizer = data.prepare_tokenizer(config, say)
    return conversing(tokenizer, config.tokenizer.chat_template)


def conversing(tokenizer, choice: str | None):
    """The tokenizer with a chat template, where one is chosen."""
    from .tokenizer.chat import template

    return tokenizer.conversing(template(choice)) if choice else tokenizer


def build_task(config: DictConfig, net, tokenizer):
    """The task's LightningModule."""
    words = {word: value for word, value in plain(config.task).items() if word not in signatures.OWNERS_WORDS["task"]}
    settings = {"seed": config.seed, "packing": config.data.packing}
    return made(words, net, tokenizer, plain(config.optim), made(plain(config.schedule)), **settings)


def made(node: Mapping, *args, **words):
    """What a node's `_target_` makes of its words, or if `_partial_` will; unlike Hydra's `instantiate` it reads no
    `${x}` in a text, and checks no later call anew, which for a schedule was a quarter of a step's own cost."""
    from hydra.utils import get_object

    target = get_object(node["_target_"])
    words |= {word: value for word, value in node.items() if word not in ("_target_", "_partial_")}
    return partial(target, *args, **words) if node.get("_partial_") else target(*args, **words)


def build_trainer(config: DictConfig, steps: int, ended: bool = False):
    """Lightning's Trainer: every word of `config.trainer` stands here, all intervals in optimizer steps.

    `ended`: of a run that has taken its steps, whose `fit` does what comes after the last of them.
    """
    from lightning import Trainer
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from . import engines
    from .callbacks import AtomicIO, EarlyStopping, Ended

    quiet()
    words = config.trainer
    if words.devices == -1 and on_cpu(words.accelerator):
        raise UserError("trainer.devices=-1 means all GPUs, and there is none: say how many processes are to train")
    if words.keep_memory and on_cpu(words.accelerator):
        engines.keep_memory()
    sharded = words.strategy == "fsdp" and config.checkpoint.sharded
    half = half_on_cpu() if words.precision == "16-mixed" and on_cpu(words.accelerator) else None
    options = dict(
        accelerator=words.accelerator,
        strategy=engines.FSDP(sharded) if words.strategy == "fsdp" else words.strategy,
        devices=plain(words.devices),
        num_nodes=words.num_nodes,
        precision=None if half else words.precision,
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=min(words.val_every_n_steps or steps, steps),
        check_val_every_n_epoch=None,
        log_every_n_steps=words.log_every_n_steps,
        plugins=[AtomicIO(sharded), *([half] if half else []), *([] if by_torchrun() else [LightningEnvironment()])],
        default_root_dir=config.run_dir,
        use_distributed_sampler=False,  # the data module shares rows among ranks
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar="progress" in config.callbacks,
        enable_checkpointing="checkpoints" in config.callbacks,
    )
    try:
        ends = [Timer(words.max_time)] if words.max_time else []  # first: the others see the stop that they ask for
        ends += [EarlyStopping(config.checkpoint.monitor, words.patience)] if words.patience else []
        trainer = Trainer(callbacks=ends + [made(node) for node in plain(config.callbacks).values()], **options)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"trainer: {checks.one_line(error)}") from error
    if ended:
        Ended.of(trainer)
    check_processes(trainer.num_devices, trainer.num_nodes)
    return trainer


def over(trainer, state: Mapping) -> str:
    """Why no step is left by a `max_time` or a `patience` that is over before the first, of a new run or of one that
    was left as `state`; empty where neither is."""
    states = state.get("callbacks", {})
    for callback in trainer.callbacks:
        if callback.state_key == "Timer":
            if earlier := states.get("Timer"):
                callback.load_state_dict(earlier)
            if callback.time_remaining() <= 0:
                return ("trainer.max_time is over for that run: give a longer one to go on" if earlier else
                        "trainer.max_time leaves no time for a single step: give a longer one, DD:HH:MM:SS")
        waited = states.get(callback.state_key, {}).get("wait_count", 0)
        if hasattr(callback, "patience") and waited >= callback.patience:
            return (f"trainer.patience={callback.patience} is over for that run, which was no better in "
                    f"{callback.monitor} for {waited} validations: give a larger one, or null, to go on")
    return ""


def ended_by(trainer, config: DictConfig) -> str:
    """What has ended a run before its last step."""
    if any(getattr(callback, "exhausted", False) for callback in trainer.callbacks):
        return f"trainer.patience={config.trainer.patience} without a better {config.checkpoint.monitor}"
    return f"trainer.max_time={config.trainer.max_time}" if config.trainer.max_time else "a callback"


def on_cpu(accelerator: str) -> bool:
    """Whether Lightning's word means the CPU: `auto` does where there is nothing else."""
    import torch

    return accelerator == "cpu" or accelerator == "auto" and not (
        torch.cuda.is_available() or torch.backends.mps.is_available()
    )


def on_device(net, word: str):
    """The net on a device: cpu, cuda, mps, or auto for CUDA where there is any."""
    import torch

    device = {"auto": "cuda" if torch.cuda.is_available() else "cpu", "gpu": "cuda"}.get(word, word)
    try:
        return net.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that isn't there
        line = checks.one_line(error)
        raise UserError(f"device={device}: not here, or without room for this net ({line})") from error


def half_on_cpu():
    """Mixed precision in fp16 with its loss scaling, for which Lightning itself would take bf16 on a CPU."""
    import torch
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def check_processes(devices: int, nodes: int) -> None:
    """Refuse a number of processes other than torchrun has started; several machines need it."""
    if by_torchrun() and devices * nodes != int(os.environ["WORLD_SIZE"]):
        raise UserError(f"trainer.devices={devices} on trainer.num_nodes={nodes} is not the {os.environ['WORLD_SIZE']} "
                        "processes that torchrun has started: say trainer=ddp and how many there are of each")
    if nodes > 1 and not by_torchrun():
        raise UserError(f"trainer.num_nodes={nodes}: start the run by torchrun on each of the machines, "
                        "torchrun --nnodes ... -m lmzoo.train ...")


def report(metrics: Mapping[str, float], xz: float | None = None) -> str:
    """The metrics, a line for each split and each set of it; beside the bits per byte of validation those of `xz`.
    Whole numbers count what was measured.

    `val    loss 2.345  perplexity 10.43  accuracy 0.512  bits per byte 1.623 (xz: 2.021)`
    """
    splits: dict[str, list[str]] = {}
    for name, value in metrics.items():
        split, _, metric = name.rpartition("/")
        splits.setdefault(split, []).append(
            f"of {value:,} {metric}" if isinstance(value, int) else f"{metric.replace('_', ' ')} {value:.4g}")
        if name == "val/bits_per_byte" and xz:
            splits[split][-1] += f" (xz: {xz:.4g})"
    width = max([6, *map(len, splits)])
    return "\n".join(f"{split:<{width}} {'  '.join(values)}" for split, values in splits.items())


def going_on(folder: str | Path) -> str:
    """How a run that was stopped goes on, empty where nothing of it was saved."""
    from . import checkpoint

    return f"saved: python -m lmzoo.train ckpt={folder}" if checkpoint.names(Path(folder, "checkpoints")) else ""


@contextmanager
def outspoken(folder: Path | None = None) -> Iterator[None]:
    """Say in a line, with how the run in `folder` goes on, what else would be an exit without a word (which Lightning
    makes of Ctrl-C and SIGTERM), or a traceback out of a collective: that another rank has died."""
    def line(what: str) -> str:
        return ", ".join(filter(None, [what, going_on(folder) if folder else ""]))

    try:
        yield
    except (SystemExit, KeyboardInterrupt) as end:
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        if isinstance(end, Interrupted):  # which says how it was
            raise Interrupted(line(str(end)), end.exit_code) from None
        by_hand = isinstance(end, KeyboardInterrupt) or isinstance(end.__context__, KeyboardInterrupt)
        if not by_hand and not isinstance(end, SIGTERMException):
            raise
        said = line("interrupted" if by_hand else "ended by SIGTERM")
        raise Interrupted(said, 130 if by_hand else 143) from None
    except RuntimeError as error:
        from torch.distributed import DistError

        if not isinstance(error, DistError) and "/gloo/" not in str(error):
            raise
        if not ranks.speaks():
            raise SystemExit(1) from None
        said = line("another process of this run has died (what it said stands above; killed, or out of memory?)")
        raise Lost(said) from None


def end(trainer) -> None:
    """End the records that are written to, and the ranks' process group."""
    import torch.distributed

    for callback in trainer.callbacks:
        if hasattr(callback, "finish"):
            callback.finish()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
