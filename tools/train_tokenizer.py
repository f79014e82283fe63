"""Train a tokenizer on a corpus and write it to a new file, for tokenizer.path=FILE.

python -m lmzoo.tools.train_tokenizer my.json tokenizer=unigram data=text data.path='books/*.txt'

A table says what it makes of the text that it was trained on, and of text that was held out.
"""

from pathlib import Path

from lmzoo.tools import answer, new_file, parser

from lmzoo import compose, data
from lmzoo.data.mixture import texts
from lmzoo.tokenizer import measure, sample

MEASURED_MB = 1  # of either text


def train(file: Path, words: list[str]) -> str:
    """Train, write `file`, and measure it on text that it was trained on and on text that was held out."""
    new_file(file)
    chosen = {word.partition("=")[0] for word in words}
    config = compose(*(word for word in ("model=gpt", "task=clm") if word[:word.index("=")] not in chosen), *words)
    tokenizer = data.prepare_tokenizer(config)
    file.write_text(tokenizer.json, encoding="utf-8")
    source = texts(config)
    lines = [f"{file}: {len(tokenizer):,} tokens",
             f"{'text':<12}{'bytes':>12}{'tokens':>12}{'bytes/token':>14}{'unknown':>10}"]
    found = {"trained on": source.sample(config.tokenizer.sample_mb), "held out": source.held_out_texts()}
    for name, found_texts in found.items():
        n_bytes, n_tokens, n_unknown = measure(tokenizer, sample(found_texts, MEASURED_MB))
        each = max(1, n_tokens)
        lines.append(f"{name:<12}{n_bytes:>12,}{n_tokens:>12,}{n_bytes / each:>14.2f}{n_unknown / each:>10.3%}")
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("file", type=Path, help="the tokenizer.json to write, a new one")
    arguments.add_argument("words", nargs="*", metavar="word=value", help="as for training: tokenizer=... data=...")
    given = arguments.parse_args()
    answer(train, given.file, given.words)


if __name__ == "__main__":
    main()
