"""Which wishes for the next token can be met, and together; without torch, so that a command can ask early."""

from collections.abc import Iterable, Mapping

from .errors import UserError

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
GREEDY = "for greedy decoding, the likeliest token each time, leave it out, as top_k, top_p and min_p"


def check_choices(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    n_beams: int = 1,
    n_best: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raise UserError for what no distribution can be made of, and for a search that would sample."""
    if temperature is not None and not temperature > 0:
        raise UserError(f"temperature={temperature} must be above 0; {GREEDY}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")
    if min_p is not None and not 0 <= min_p <= 1:
        raise UserError(f"min_p={min_p} must be between 0 and 1")
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise UserError(f"repetition_penalty={repetition_penalty} must be above 0; 1 changes nothing")
    for word, k in (("top_k", top_k), ("n_beams", n_beams)):
        if k is not None and (k < 1 or vocab_size is not None and k > vocab_size):
            raise UserError(f"{word}={k} must be between 1 and the vocabulary's size, {vocab_size}" if vocab_size else
                            f"{word}={k} must be at least 1")  # fmt: skip
    if n_best is not None and not 1 <= n_best <= n_beams:
        raise UserError(f"n_best={n_best} must be between 1 and n_beams={n_beams}")
    wishes = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    search = f"n_beams={n_beams}" if n_beams > 1 else None if n_best is None else f"n_best={n_best}"
    if search and (given := [word for word in SAMPLING if wishes[word] is not None]):
        raise UserError(f"{given[0]} is for sampling, but {search} looks for what is likeliest: leave one out")


def check_use(typed: Iterable[str], words: Mapping) -> None:
    """Raise UserError for a word that was ``typed`` though, with all these ``words``, nothing would look at it."""
    samples = any(words[word] is not None for word in SAMPLING)
    for word, is_used, use in (
        ("seed", samples, f"draws tokens, but each is the likeliest: say {', '.join(SAMPLING[:-1])} or {SAMPLING[-1]}"),
        ("length_penalty", words["n_beams"] > 1 or words["n_best"] is not None, "ranks beams: say n_beams=4"),
        ("batch_size", words["prompts_path"] is not None, "is how many prompts of a file are read together: say "
                                                          "prompts_path=FILE"),
    ):  # fmt: skip
        if word in typed and not is_used:
            raise UserError(f"{word}={words[word]} {use} too, or leave it out")
