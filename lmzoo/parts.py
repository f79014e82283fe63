"""The parts of a run, made from its configuration: net, task and trainer; what `train` and `evaluate` share."""

import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from . import checks, signatures
from .config import RANK_CONFIG
from .errors import UserError
from .literal import load as load_config
from .literal import plain, restore


def settled(config: DictConfig) -> DictConfig:
    """A copy in which everything is decided: interpolations, the precision, words of classes outside lmzoo checked."""
    if not on_first_rank() and RANK_CONFIG in os.environ:
        config = load_config(os.environ[RANK_CONFIG])
    config = restore(plain(config))
    folder = Path(config.run_dir)
    if on_first_rank() and not config.ckpt and (folder / "checkpoints" / "MANIFEST.json").exists():
        raise UserError(f"run_dir={folder} holds a run already: go on with it by ckpt={folder}, or take another")
    signatures.check(plain(config), imported=True)
    config.trainer.precision = precision(config.trainer.precision, config.trainer.accelerator)
    return config


def on_first_rank() -> bool:
    """Whether this process is the one that the user started, not one that Lightning started beside it."""
    return not int(os.environ.get("LOCAL_RANK", 0))


def quiet() -> None:
    """Silence Lightning's notes and warnings on its own matters (once it is imported); lmzoo's warnings still show."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in (r"lightning(\.|$)", r"torch\.utils\._pytree"):
        warnings.filterwarnings("ignore", module=module)


def precision(word: str, accelerator: str) -> str:
    """Lightning's word for the arithmetic; `auto` is bf16-mixed where the device computes bf16 fast, else 32-true."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif accelerator in ("auto", "cpu"):
        features = getattr(torch.cpu, "get_capabilities", dict)()
        fast = features.get("amx_bf16") or features.get("avx512_bf16")
        if word.startswith("16"):
            raise UserError(f"trainer.precision={word}: a CPU has no fp16 training; take bf16-mixed or 32-true")
    else:
        fast = False
    return ("bf16-mixed" if fast else "32-true") if word == "auto" else word


def check_net(config: DictConfig) -> None:
    """Build the net without memory, for the errors of its sizes, and hold the rows against its positions."""
    import torch

    from . import checkpoint

    with torch.device("meta"):
        net = checkpoint.build(model_config(config, labels=["one", "other"]))
    limit, length = net.max_positions, config.data.row_length
    if limit is not None and length > limit:
        raise UserError(f"data.row_length={length} is more than the {limit} positions of the model: give fewer, "
                        f"or model.max_len={length}")


def model_config(config: DictConfig, labels: list[str] | None) -> dict:
    """The net's configuration, its head replaced by the task's where that has one."""
    model = plain(config.model)
    if "head" not in config.task:
        return model
    if not labels:
        raise UserError("this task needs labels, and the data has none: name their column, data.label_column=NAME")
    if len(labels) < 2:
        raise UserError(f"every text has the label {labels[0]!r}: a task of classes needs two or more")
    head = plain(config.task.head)
    if head.get("pool") == "auto":  # where each family's pretraining gathers what it knows of the row
        head["pool"] = "first" if checks.family(model) == "encoder" else "last"
    return model | {"head": head | {"n_classes": len(labels)}}


def build_tokenizer(config: DictConfig, source, earlier: Mapping):
    """The tokenizer of the net `source`, or of an `earlier` checkpoint's identity; else as `config` says."""
    from . import data
    from .tokenizer import Tokenizer

    if source:
        return source.tokenizer
    if earlier:
        return Tokenizer(earlier["tokenizer"], plain(config.tokenizer.special))
    return data.prepare_tokenizer(config)


def build_task(config: DictConfig, net, tokenizer):
    """The task's LightningModule."""
    from hydra.utils import instantiate

    words = {word: value for word, value in plain(config.task).items() if word not in ("family", "head")}
    schedule = instantiate(plain(config.schedule))
    return made(words, net, tokenizer, plain(config.optim), schedule, seed=config.seed)


def made(node: Mapping, *args, **words):
    """What a node's `_target_` makes of its words; unlike Hydra's `instantiate` it reads no `${x}` in a text."""
    from hydra.utils import get_object

    words |= {word: value for word, value in node.items() if word != "_target_"}
    return get_object(node["_target_"])(*args, **words)


def compile_blocks(net) -> None:
    """Compile each block in place: they share their graphs, and the net's keys stay as they are."""
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        raise UserError("compile=true needs a C++ compiler, and there is none on this machine")
    for block in {block for stack in net.modules() for block in getattr(stack, "blocks", ())}:
        block.compile()


def build_trainer(config: DictConfig, steps: int):
    """Lightning's Trainer: every word of `config.trainer` stands here, all intervals in optimizer steps."""
    from lightning import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from .callbacks import AtomicIO

    quiet()
    words = config.trainer
    options = dict(
        accelerator=words.accelerator,
        strategy=words.strategy,
        devices=plain(words.devices),
        num_nodes=words.num_nodes,
        precision=words.precision,
        max_steps=steps,
        max_epochs=-1,
        max_time=words.max_time,
        val_check_interval=min(words.val_every_n_steps or steps, steps),
        check_val_every_n_epoch=None,
        limit_val_batches=words.limit_val_batches,
        log_every_n_steps=words.log_every_n_steps,
        callbacks=[made(node) for node in plain(config.callbacks).values()],
        plugins=[AtomicIO()],
        default_root_dir=config.run_dir,
        use_distributed_sampler=False,  # the data module shares rows among ranks
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar="progress" in config.callbacks,
        enable_checkpointing="checkpoints" in config.callbacks,
    )
    try:
        return Trainer(**options)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"trainer: {checks.one_line(error)}") from error


def report(metrics: Mapping[str, float], xz: float | None = None) -> str:
    """The metrics on one line for each split; beside the bits per byte of validation those that `xz` needs.

    `val    loss 2.345  perplexity 10.43  accuracy 0.512  bits per byte 1.623 (xz: 2.021)`
    """
    splits: dict[str, list[str]] = {}
    for name, value in metrics.items():
        split, _, metric = name.partition("/")
        splits.setdefault(split, []).append(f"{metric.replace('_', ' ')} {value:.4g}")
        if name == "val/bits_per_byte" and xz:
            splits[split][-1] += f" (xz: {xz:.4g})"
    return "\n".join(f"{split:<6} {'  '.join(values)}" for split, values in splits.items())


def end(trainer) -> None:
    """End the records that are written to, and the ranks' process group."""
    import torch.distributed

    for callback in trainer.callbacks:
        if hasattr(callback, "finish"):
            callback.finish()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
