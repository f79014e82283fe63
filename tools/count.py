"""Count the parameters, arithmetic and memory of a model without making room for it.

python -m lmzoo.tools.count model=gpt size=base
"""

import torch
from lmzoo.tools import answer, parser
from torch import nn

from lmzoo import build, compose
from lmzoo.checks import groups, model_family
from lmzoo.plan import BYTES_PER_WEIGHT, count_flops, count_parameters, line, size

TASKS = {"decoder": "clm", "encoder": "mlm", "encoder-decoder": "span_corruption"}  # any that fits the family


def count(*words: str) -> str:
    """The table of the model that `words` choose, as for training; `task` may be left out."""
    chosen = dict(word.partition("=")[::2] for word in words)
    if "task" not in chosen and chosen.get("model") in groups()["model"]:
        words += (f"task={TASKS[model_family(chosen['model'])]}",)
    with torch.device("meta"):
        return table(build(compose(*words).model))


def table(net: nn.Module) -> str:
    """Parameters by part, FLOPs of training per token of a full row, bytes of the weights and of training's state."""
    parts = count_parameters(net)
    total, length = sum(parts.values()), net.max_len
    rows = {"tokens": length, "targets": length, "length": length}
    if net.family == "encoder-decoder":
        rows |= {"decoder_tokens": length, "decoder_length": length}
    both = " on both sides" if net.family == "encoder-decoder" else " tokens"
    return "\n".join(
        [
            *(line(part, f"{n:,}", "" if n else "tied to the embedding") for part, n in parts.items()),
            line("parameters", f"{total:,}", "in all, a tied weight once"),
            line("arithmetic", f"{count_flops(net, **rows) / length / 1e6:,.1f}",
                 f"MFLOP per token (6N + attention), rows of {length:,}{both}"),
            line("weights", size(4 * total), "float32; half of it in bfloat16"),
            line("training state", size(BYTES_PER_WEIGHT * total), "weights, gradients and AdamW's moments, float32"),
        ]
    )  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=bert size=base ...")
    answer(count, *arguments.parse_args().words)


if __name__ == "__main__":
    main()
