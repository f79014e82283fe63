"""The typed root of every configuration: which words exist, and of which type each is.

Hydra merges the YAML files and the command line into these classes, so an unknown word or a value of the wrong type
is refused while a run is composed. Parts that a YAML file names with `_target_` (`recipe()` below) are open here:
`signatures.py` holds them against the signature of what they name. The values themselves live in `conf/`.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf


def recipe() -> Any:
    """A field whose words are those of the `_target_` that fills it."""
    return field(default_factory=dict)


@dataclass
class Tokenizer:
    kind: Any = recipe()
    path: str | None = None
    vocab_size: int | None = None
    special: Any = recipe()
    sample_mb: float = MISSING
    chat_template: str | None = None
    add: list[str] = field(default_factory=list)


@dataclass
class Source:
    """A source of a mixture; what is not given is as in `conf/data/KIND.yaml`."""

    weight: float = MISSING
    kind: str = "text"
    reader: Any = MISSING
    path: Any = MISSING
    val_path: Any = MISSING
    test_path: Any = MISSING
    name: str | None = MISSING
    config: str | None = MISSING
    field: str | None = MISSING
    text_column: str | None = MISSING
    label_column: str | None = MISSING
    pair_column: str | None = MISSING
    target_column: str | None = MISSING
    words_column: str | None = MISSING
    tags_column: str | None = MISSING
    messages_column: str | None = MISSING
    label_separator: str | None = MISSING
    template: str | None = MISSING
    split_column: str | None = MISSING
    val_fraction: float = MISSING
    deduplicate: bool = MISSING


@dataclass
class Data:
    sources: Any = recipe()  # of a mixture: {name: Source}
    reader: Any = recipe()
    path: Any = None  # one path or a list
    val_path: Any = None  # the same, or {name: such}
    test_path: Any = None
    name: str | None = None
    config: str | None = None
    field: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    pair_column: str | None = None
    target_column: str | None = None
    words_column: str | None = None
    tags_column: str | None = None
    messages_column: str | None = None
    label_separator: str | None = None
    template: str | None = None
    split_column: str | None = None
    val_fraction: float = MISSING
    deduplicate: bool = False
    per_class: int | None = None
    group_by_length: bool = True
    packing: str = MISSING
    row_length: int | None = None
    batch_size: int = MISSING
    micro_batch_size: Any = None  # rows, auto or null
    num_workers: int = MISSING
    processes: int | None = None
    cache_dir: str | None = None


@dataclass
class Optim:
    lr: float = MISSING
    weight_decay: float = MISSING
    clip_norm: float | None = None
    layer_decay: float = 1.0
    no_decay: list[str] = field(default_factory=list)
    freeze: list[str] = field(default_factory=list)
    optimizer: Any = recipe()


@dataclass
class Adapter:
    rank: int = MISSING
    targets: list[str] = MISSING
    alpha: float = MISSING


@dataclass
class Trainer:
    strategy: str = MISSING
    devices: Any = MISSING  # a number, a list of numbers or auto
    num_nodes: int = MISSING
    accelerator: str = MISSING
    precision: str = MISSING
    max_steps: int | None = None
    max_tokens: float | None = None
    max_epochs: float | None = None
    max_time: str | None = None
    val_every_n_steps: int | None = None
    patience: int | None = None
    val_before_training: bool = False
    stop_after_nonfinite: int | None = None
    log_every_n_steps: int = MISSING
    limit_val_batches: int | None = None
    overfit: bool = MISSING
    activation_checkpointing: str = MISSING
    keep_memory: bool = True


@dataclass
class Checkpoint:
    every_n_steps: int | None = None
    every_minutes: float | None = None
    keep_last: int = MISSING
    keep_best: int = MISSING
    monitor: str = "val/loss"
    test_best: bool = True
    sharded: bool = False


@dataclass
class Wandb:
    mode: str = MISSING
    project: str = MISSING
    group: str | None = None
    name: str | None = None
    notes: str | None = None
    watch: str | None = None
    watch_every_n_steps: int = 100


@dataclass
class Logger:
    wandb: Wandb = field(default_factory=Wandb)
    tensorboard: bool = False


@dataclass
class Train:
    name: str | None = None
    run_dir: str | None = None
    seed: int = MISSING
    tags: list[str] = field(default_factory=list)
    trust: list[str] = field(default_factory=list)
    compile: bool = MISSING
    ckpt: str | None = None
    init_from: str | None = None
    model: Any = recipe()
    task: Any = recipe()
    adapter: Adapter | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    schedule: Any = recipe()
    trainer: Trainer = field(default_factory=Trainer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logger: Logger = field(default_factory=Logger)
    callbacks: Any = recipe()


@dataclass
class Evaluate:
    ckpt: str | None = None
    trust: list[str] = field(default_factory=list)
    split: str | None = None
    measure: Any = recipe()
    data: Data = field(default_factory=Data)
    trainer: Trainer = field(default_factory=Trainer)


@dataclass
class Generate:
    ckpt: str | None = None
    trust: list[str] = field(default_factory=list)
    prompt: str | None = None
    prompts_path: str | None = None
    out_path: str | None = None
    batch_size: int = MISSING
    max_new_tokens: int = MISSING
    stop: Any = None  # one text or a list
    chat: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n_beams: int = MISSING
    n_best: int | None = None
    length_penalty: float = MISSING
    seed: int = MISSING
    device: str = MISSING


def opened(node: DictConfig) -> DictConfig:
    """The same tree with every empty mapping open to new words (a struct, Hydra's default, refuses them)."""
    for key, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and node[key] is not None:
            node[key] = opened(child) if len(child) else DictConfig({}, flags={"struct": False})
    return node


SCHEMAS = {name: opened(OmegaConf.structured(kind)) for name, kind in
           {"train": Train, "evaluate": Evaluate, "generate": Generate}.items()}


def register() -> None:
    """Let the defaults lists of `conf/{train,evaluate,generate}.yaml` find their schema as `schema/<command>`."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(group="schema", name=name, node=schema, package="_global_")
