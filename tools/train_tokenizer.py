"""Train a tokenizer on a corpus and write it to a file, for tokenizer.path=FILE.

python -m lmzoo.tools.train_tokenizer my.json tokenizer=unigram data=text data.path='books/*.txt'
"""

from itertools import islice
from pathlib import Path

from lmzoo.tools import answer, parser

from lmzoo import compose, data
from lmzoo.data.preparation import sample


def train(file: Path, words: list[str]) -> str:
    """Train, write `file`, and report how well it compresses the first of its own sample."""
    chosen = {word.partition("=")[0] for word in words}
    config = compose(*(word for word in ("model=gpt", "task=clm") if word[:word.index("=")] not in chosen), *words)
    tokenizer = data.prepare_tokenizer(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tokenizer.json, encoding="utf-8")
    texts = list(islice(sample(config.data, config.tokenizer.sample_mb), 10_000))
    ids = [id for document in tokenizer.encode_batch(texts) for id in document]
    n_bytes, n_unknown = sum(len(text.encode()) for text in texts), sum(id == tokenizer.unk for id in ids)
    return (f"{file}: {len(tokenizer):,} tokens, {n_bytes / len(ids):.2f} bytes per token, "
            f"{n_unknown / len(ids):.3%} unknown")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("file", type=Path, help="the tokenizer.json to write")
    arguments.add_argument("words", nargs="*", metavar="word=value", help="as for training: tokenizer=... data=...")
    given = arguments.parse_args()
    answer(train, given.file, given.words)


if __name__ == "__main__":
    main()
