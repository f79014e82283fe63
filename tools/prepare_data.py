"""Tokenise a corpus ahead of training; a run with the same words finds it done.

python -m lmzoo.tools.prepare_data model=gpt task=clm data=text data.path='books/*.txt'
"""

from lmzoo.tools import answer, parser

from lmzoo import compose, data


def prepare(words: list[str]) -> str:
    """Prepare tokenizer and token store of the run that `words` describe; what each split holds, as a table."""
    config = compose(*words)
    tokenizer = data.prepare_tokenizer(config)
    store = data.prepare(config, tokenizer)
    lines = [f"{'split':8}{'documents':>12}{'tokens':>16}{'bytes':>16}{'bytes/token':>14}"]
    for name in store.splits:
        split = store[name]
        ratio = split.n_bytes / split.n_tokens
        lines.append(f"{name:8}{split.n_documents:12,}{split.n_tokens:16,}{split.n_bytes:16,}{ratio:14.2f}")
    if store.xz_bits_per_byte:
        lines.append(f"xz needs {store.xz_bits_per_byte:.3f} bits per byte of val, having seen train")
    return "\n".join([*lines, f"tokenizer {tokenizer.hash[:12]}, {len(tokenizer):,} tokens", f"in {store.folder}"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=... task=...")
    answer(prepare, arguments.parse_args().words)


if __name__ == "__main__":
    main()
