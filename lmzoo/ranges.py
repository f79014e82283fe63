"""Which values a word can mean, where its type alone does not say: numbers out of range, names that are no choice."""

import math
import re
from collections.abc import Iterator, Mapping

from .choices import GREEDY
from .errors import UserError
from .signatures import english, misfit, split

# (words, the least value, the largest); a word is matched whole, null always passes
RANGES = [
    (r"trainer\.devices", 1, 10**4),
    (r"trainer\.max_tokens", 0, 10**18),
    (r"trainer\.max_epochs", 0, 10**9),
    (r"trainer\.(max_steps|val_every_n_steps|patience|stop_after_nonfinite|log_every_n_steps|limit_val_batches|num_nodes)"
     r"|callbacks\.\w+\.(every_n_steps|stop_after)", 1, 10**12),
    (r"data\.(batch_size|micro_batch_size|row_length|per_class)", 1, 10**9),
    (r"data\.num_workers|tokenizer\.kind\.sentinels", 0, 10**4),
    (r"data\.val_fraction", 0, 0.999999),
    (r"model\.\w+(\[\d+\])?\.(window|group)|model\.embed\.d_embed", 1, 10**8),
    (r"model\.embed\.n_types", 0, 10**6),
    (r"model\.\w+(\[\d+\])?\.scale", 1e-6, 1e6),
    (r"model\.(\w+(\[\d+\])?\.)+eps|optim\.optimizer\.eps(\[\d\])?", 0, 1),
    (r"model\.init\.\w+|optim\.optimizer\.(lr_ratio|d)", 0, 10**4),
    (r"model\.position(\[\d+\])?\.theta", 1.01, 1e12),
    (r"model\.position(\[\d+\])?\.(scaling|slow|fast|low|high)", 1e-3, 1e6),
    (r"model\.position(\[\d+\])?\.fraction", 0, 1),
    (r"model\.position(\[\d+\])?\.(trained_len|n_buckets|max_distance)", 2, 10**9),
    (r"optim\.optimizer\.beta2_decay", -10, 0),
    (r"data\.processes", 1, 1024),
    (r"adapter\.rank", 1, 10**6),
    (r"model\.(d_model|d_head|d_ff|n_heads|n_kv_heads|max_len)", 1, 10**8),
    (r"model\.(n_layers|n_decoder_layers|share)", 1, 10**5),
    (r"(tokenizer|model)\.vocab_size", 2, 10**7),
    (r"model\.(\w+_)?dropout|task\.(label_smoothing|head\.dropout)|schedule\.(\w+_fraction|end)", 0, 1),
    (r"schedule\.(warmup|decay)_steps|(checkpoint|callbacks\.\w+)\.keep_(last|best)|task\.z_loss"
     r"|optim\.weight_decay", 0, 10**9),
    (r"checkpoint\.every_n_steps|logger\.wandb\.watch_every_n_steps", 1, 10**12),
    (r"optim\.(lr|clip_norm)", 0, 1000),
    (r"task\.class_weights\[\d+\]", 0, 1e6),
    (r"task\.mean_span|task\.max_answer", 1, 10**9),
    (r"task\.n_answers|measure\.n_shots", 0, 10**9),
    (r"measure\.(stride|max_len|batch_size)", 1, 10**9),
    (r"(measure\.)?seed", 0, 2**32 - 1),
    (r"optim\.optimizer\.(betas\[\d\]|momentum)", 0, 1),
    (r"optim\.optimizer\.ns_steps", 1, 99),
    (r"optim\.layer_decay", 0, 1),
    (r"temperature", 1e-4, 1e4),
    (r"max_new_tokens|top_k|(task\.)?n_beams|n_best|batch_size", 1, 10**9),
    (r"top_p|min_p", 0, 1),
    (r"repetition_penalty", 1e-4, 1e4),
    (r"(task\.)?length_penalty", -100, 100),
]
POSITIVE = (r"trainer\.max_(tokens|epochs)|(checkpoint|callbacks\.\w+)\.every_minutes|tokenizer\.sample_mb"
            r"|model\.init\.\w+|top_p|adapter\.alpha|optim\.(layer_decay|optimizer\.(eps|lr_ratio|d))")
EVERY_DEVICE = ("trainer.devices", -1)
TYPES = {  # of words that may be of more than one, as an annotation
    "trainer.devices": "int | list[int] | Literal['auto']",
    "data.micro_batch_size": "int | Literal['auto'] | None",
    "data.row_length": "int",
    "tokenizer.special": "Mapping | None",
    "stop": "str | list[str] | None",
    "data.path": "str | list[str] | None",
    **dict.fromkeys(("data.val_path", "data.test_path"), "str | list[str] | Mapping | None"),
}
CHOICES = {
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.strategy": ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"),
    "trainer.activation_checkpointing": ("none", "selective", "full"),
    "data.packing": ("stream", "isolate", "fit", "single"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "bf16",
                          "16", "64"),
    "logger.wandb.mode": ("offline", "online", "disabled"),
    "logger.wandb.watch": ("gradients", "parameters", "all", "null"),
    "device": ("auto", "cpu", "cuda", "cuda:N", "mps"),
}


def check_ranges(config: Mapping) -> None:
    """Refuse the first value of the plain `config` that no run can mean (UserError)."""
    for word, value in nodes({"tokenizer": None, **config}):  # before the model, whose vocab_size is the tokenizer's
        if word in TYPES and (value == [] or misfit(value, TYPES[word])):
            raise UserError(f"{word}={value!r} should be {english(split(TYPES[word]))}")
        if word.startswith("tokenizer.special.") and not isinstance(value, str):
            raise UserError(f"{word}={value!r} should be a text, the token of that role")
        choice = "null" if value is None else re.sub(r":\d+$", ":N", str(value))
        if word in CHOICES and choice not in CHOICES[word]:
            raise UserError(f"{word}={value} is not one of {', '.join(CHOICES[word])}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise UserError(f"{word}={value} is not a finite number")
        if re.fullmatch(POSITIVE, word) and value <= 0:
            raise UserError(f"{word}={value} must be above 0")
        for words, least, largest in RANGES:
            if re.fullmatch(words, word) and not least <= value <= largest and (word, value) != EVERY_DEVICE:
                more = f"; {GREEDY}" if word == "temperature" else ""
                raise UserError(f"{word}={value} must be between {least} and {largest}{more}")
    check_pairs(*(config.get(section) or {} for section in ("trainer", "optim", "data")))
    check_sizes(*(config.get(section) or {} for section in ("model", "task", "tokenizer", "data")))


def check_sizes(model: Mapping, task: Mapping, tokenizer: Mapping, data: Mapping) -> None:
    """Refuse numbers that leave no room for one another."""
    held, tokens = model.get("vocab_size"), tokenizer.get("vocab_size")
    if held is not None and tokens is not None and held < tokens:
        raise UserError(f"model.vocab_size={held} is less than tokenizer.vocab_size={tokens}: leave it out, since the "
                        "net has as many tokens as its tokenizer")
    span, length = task.get("mean_span"), data.get("row_length")
    if span is not None and length is not None and span >= length:
        raise UserError(f"task.mean_span={span} is no shorter than a row, data.row_length={length}: give less")
    weights = task.get("class_weights")
    if isinstance(weights, list) and not any(weights):
        raise UserError(f"task.class_weights={weights} leave nothing to learn: give one class a number above 0")


def check_pairs(trainer: Mapping, optim: Mapping, data: Mapping) -> None:
    """Refuse words of training that do not go together."""
    if trainer.get("max_time") and not any(trainer.get(word) for word in ("max_steps", "max_tokens", "max_epochs")):
        raise UserError(f"trainer.max_time={trainer['max_time']} ends a run early, but does not say how many steps its "
                        "schedule is for: give trainer.max_steps, max_tokens or max_epochs too")
    if trainer.get("strategy") == "fsdp":
        name = optim.get("optimizer", {}).get("_target_", "")
        if name in ("torch.optim.Adafactor", "torch.optim.Muon"):
            raise UserError(f"trainer=fsdp: {name} needs whole matrices, of which each rank has a slice: take "
                            "optim=adafactor, optim=muon, or trainer=ddp")
        if trainer.get("precision") == "16-mixed":
            raise UserError("trainer=fsdp: its ranks have no loss scale in common, which trainer.precision=16-mixed "
                            "needs; take bf16-mixed, or trainer=ddp")
        if data.get("micro_batch_size") == "auto":
            raise UserError("trainer=fsdp: its ranks cannot try data.micro_batch_size=auto, for one that is out of "
                            "memory would leave the others waiting; give a number of rows")


def nodes(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted word, value) of everything below a mapping, an item of a list as `word[0]`."""
    inside = {f".{key}": child for key, child in node.items()} if isinstance(node, Mapping) else {}
    inside |= {f"[{i}]": child for i, child in enumerate(node)} if isinstance(node, list) else {}
    for key, child in inside.items():
        here = f"{path}{key}".removeprefix(".")
        yield here, child
        yield from nodes(child, here)
