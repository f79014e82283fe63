"""Tokenise a corpus ahead of training; a run with the same words finds it done.

python -m lmzoo.tools.prepare_data model=gpt task=clm data=text data.path='books/*.txt'
"""

from lmzoo.tools import answer, parser

from lmzoo import compose, data, load, parts
from lmzoo.data import unknown


def prepare(words: list[str]) -> str:
    """Prepare tokenizer and token store of the run that `words` describe; what each split holds, as a table."""
    config = compose(*words)
    source = load(config.init_from, tuple(config.trust), reads_text=True) if config.init_from else None
    tokenizer = parts.build_tokenizer(config, source, {})
    prepared = data.prepare(config, tokenizer)
    stores = getattr(prepared, "stores", {"": prepared})  # of a mixture's sources
    tables = [line for name, store in stores.items()
              for line in ([f"source {name}"] if name else []) + table(store, tokenizer.unk)]
    return "\n".join([*tables, f"tokenizer {tokenizer.hash[:12]}, {len(tokenizer):,} tokens"])


def table(store: data.Store, unk: int | None) -> list[str]:
    """What is in a store, a line for each split; `unk` is the id of what the tokenizer doesn't know."""
    lines = [f"{'split':8}{'documents':>12}{'tokens':>16}{'bytes':>16}{'bytes/token':>14}{'unknown':>10}"]
    sets = {f"{split}/{name}" if name else split: own for split in store.splits
            for name, own in store.sets(split).items()}
    for name, split in sets.items():
        ratio = split.n_bytes / max(1, split.n_tokens)
        lines.append(f"{name:8}{split.n_documents:12,}{split.n_tokens:16,}{split.n_bytes:16,}{ratio:14.2f}"
                     f"{unknown.share(split, unk):10.3%}")
    if store.left_out["documents"]:
        lines.append(f"{'repeated':8}{store.left_out['documents']:12,}{'left out':>16}{store.left_out['bytes']:16,}")
    if store.megabytes_per_second:
        lines.append(f"tokenised at {store.megabytes_per_second:.2f} MB/s")
    if store.xz_bits_per_byte:
        lines.append(f"xz needs {store.xz_bits_per_byte:.3f} bits per byte of val, having seen train")
    return [*lines, f"in {store.folder}"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=... task=...")
    answer(prepare, arguments.parse_args().words)


if __name__ == "__main__":
    main()
