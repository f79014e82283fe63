"""Which values a word can mean, where its type alone does not say: numbers out of range, names that are no choice."""

import math
import re
from collections.abc import Iterator, Mapping

from .errors import UserError

# (words, the least value, the largest); a word is matched whole, null always passes
RANGES = [
    (r"trainer\.(max_steps|val_every_n_steps|log_every_n_steps|limit_val_batches|num_nodes)", 1, 10**12),
    (r"data\.(batch_size|row_length)", 1, 10**9),
    (r"data\.num_workers", 0, 1024),
    (r"model\.(d_model|d_head|d_ff|n_heads|n_kv_heads|max_len)", 1, 10**8),
    (r"model\.(n_layers|n_decoder_layers|share)", 1, 10**5),
    (r"(model|tokenizer)\.vocab_size", 2, 10**8),
    (r"model\.(\w+_)?dropout|task\.(label_smoothing|head\.dropout)|schedule\.(warmup_fraction|end)", 0, 1),
    (r"schedule\.warmup_steps|checkpoint\.keep_(last|best)|task\.z_loss|optim\.weight_decay", 0, 10**9),
    (r"checkpoint\.every_n_steps", 1, 10**12),
    (r"optim\.(lr|clip_norm)", 0, 1000),
    (r"seed", 0, 2**32 - 1),
]
POSITIVE = r"trainer\.max_(tokens|epochs)|tokenizer\.sample_mb|optim\.optimizer\.eps|model\.init\.\w+"
CHOICES = {
    "data.packing": ("stream", "isolate", "single"),
    "logger.wandb.mode": ("offline", "online", "disabled"),
}


def check_ranges(config: Mapping) -> None:
    """Refuse the first value of the plain `config` that no run can mean (UserError)."""
    for word, value in leaves(config):
        if word in CHOICES and value not in CHOICES[word]:
            raise UserError(f"{word}={value} is not one of {', '.join(CHOICES[word])}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise UserError(f"{word}={value} is not a finite number")
        if re.fullmatch(POSITIVE, word) and value <= 0:
            raise UserError(f"{word}={value} must be above 0")
        for words, least, largest in RANGES:
            if re.fullmatch(words, word) and not least <= value <= largest:
                raise UserError(f"{word}={value} must be between {least} and {largest}")


def leaves(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted word, value) of everything below a mapping that is no mapping itself."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
