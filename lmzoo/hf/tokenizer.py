"""A tokenizer in Hugging Face's files, and back: tokenizer.json as it is, roles in tokenizer_config.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..tokenizer import Tokenizer

FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")  # one of them: a tokenizer
THEIRS = {"bos": "cls_token", "eos": "sep_token"}  # what BERT calls them


def transformers():
    """The library; UserError where it isn't installed."""
    try:
        import transformers
    except ImportError:
        raise UserError("Hugging Face's formats need transformers: pip install 'lmzoo[hf]'") from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and advice; its errors still come."""
    logging = transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer saved in `folder`, None where there is none; UserError for a broken one."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in FILES):
        return None
    library, file = transformers(), folder / "tokenizer.json"
    try:
        with quiet():
            theirs = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries raise their own
        raise UserError(f"{folder}: its tokenizer cannot be read: {' '.join(str(error).split())[:200]}") from error
    as_it_is = type(theirs) is library.PreTrainedTokenizerFast and file.is_file()  # other classes build theirs anew
    plain = Tokenizer(file.read_text(encoding="utf-8") if as_it_is else theirs.backend_tokenizer.to_str())
    roles = {role: getattr(theirs, f"{role}_token") for role in ("bos", "eos", "pad", "unk", "mask")}
    roles |= {role: roles[role] or getattr(theirs, name) for role, name in THEIRS.items()}
    special = {role: name for role, name in roles.items() if name and plain.id(name) != getattr(plain, role)}
    return Tokenizer(plain.json, special)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """The files that transformers' AutoTokenizer reads: the same ids for the same text, every role set."""
    names = {role: tokenizer.token(id) for role in ("bos", "eos", "pad", "unk", "mask")
             if (id := getattr(tokenizer, role)) is not None}  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in names.items()},
        **{theirs: names[role] for role, theirs in THEIRS.items() if role in names},
        "extra_special_tokens": [tokenizer.token(id) for id in tokenizer.sentinels],
    }
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
