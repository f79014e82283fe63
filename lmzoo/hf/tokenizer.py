"""A tokenizer in Hugging Face's files, and back: tokenizer.json, with what the net reads around a text; roles in
tokenizer_config.json; a chat template in chat_template.jinja."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..tokenizer import Tokenizer

FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")  # one of them: a tokenizer
OWN = "lmzoo_post_processor"  # the word for what stood in our tokenizer.json in the place of what is added to a text
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
    found = file.read_text(encoding="utf-8") if as_it_is else theirs.backend_tokenizer.to_str()
    if OWN in theirs.init_kwargs:
        found = json.dumps(json.loads(found) | {"post_processor": theirs.init_kwargs[OWN]})
    plain = Tokenizer(found)
    roles = {role: getattr(theirs, f"{role}_token") for role in ("bos", "eos", "pad", "unk", "mask")}
    roles |= {role: roles[role] or getattr(theirs, name) for role, name in THEIRS.items()}
    special = {role: name for role, name in roles.items() if name and plain.id(name) != getattr(plain, role)}
    template = theirs.chat_template if isinstance(theirs.chat_template, str) else None  # of several none is the one
    return Tokenizer(plain.json, special, template)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, net) -> None:
    """The files that transformers' AutoTokenizer reads: every role set, and for a text the ids that `net` reads."""
    names = {role: tokenizer.token(id) for role in ("bos", "eos", "pad", "unk", "mask")
             if (id := getattr(tokenizer, role)) is not None}  # fmt: skip
    has_types = net.family == "encoder" and net.embed.tells_pairs
    own = json.loads(tokenizer.json)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": net.max_len,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"] if has_types else
                             ["input_ids", "attention_mask"],
        "padding_side": "left" if net.family == "decoder" else "right",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in names.items()},
        **{theirs: names[role] for role, theirs in THEIRS.items() if role in names},
        "extra_special_tokens": [tokenizer.token(id) for id in tokenizer.sentinels],
        OWN: own["post_processor"],
    }  # fmt: skip
    own["post_processor"] = around(tokenizer, net.family)
    for name, content in ("tokenizer.json", own), ("tokenizer_config.json", config):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def around(tokenizer: Tokenizer, family: str) -> dict | None:
    """What a net of a family reads around a text, or a pair of them, as tokenizers' post-processor: a decoder begins
    with bos, an encoder's documents stand between bos and eos, an encoder-decoder reads up to eos."""
    bos = tokenizer.bos if family != "encoder-decoder" else None
    eos = tokenizer.eos if family != "decoder" else None
    names = {id: tokenizer.token(id) for id in (bos, eos) if id is not None}
    if not names:
        return None

    def special(id: int | None, type_id: int = 0) -> list[dict]:
        return [] if id is None else [{"SpecialToken": {"id": names[id], "type_id": type_id}}]

    text, second = ({"Sequence": {"id": name, "type_id": type_id}} for type_id, name in enumerate("AB"))
    single = [*special(bos), text, *special(eos)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, *special(eos, type_id=1)],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()},
    }
