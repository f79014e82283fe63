"""Use what a run has learned: a decoder continues the prompt; the others fill its blanks, written {}.

    python -m lmzoo.generate ckpt=RUN prompt="Once upon a time" top_p=0.9
    python -m lmzoo.generate ckpt=RUN prompt="Return a {} of names."
"""

from omegaconf import DictConfig

from .checks import one_line
from .config import command
from .errors import UserError

SAMPLING = ("temperature", "top_k", "top_p")


def main() -> None:
    command("generate", job)


def job(config: DictConfig) -> None:
    print(answer(config))


def answer(config: DictConfig) -> str:
    """What the net of `config.ckpt` makes of `config.prompt`."""
    import torch

    from . import load
    from .decoding import generate
    from .filling import fill_masks, fill_spans

    net = load(config.ckpt, tuple(config.trust))
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    try:
        net.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that isn't there
        raise UserError(f"device={device}: not here, or without room for this net ({one_line(error)})") from error
    sampling = {word: config[word] for word in SAMPLING}
    if net.family == "decoder":
        tokenizer = net.tokenizer
        ids = [id for id in (tokenizer.bos,) if id is not None] + tokenizer.encode(config.prompt)
        options = {"max_new_tokens": config.max_new_tokens, "eos": tokenizer.eos, "seed": config.seed}
        rows = generate(net, torch.tensor([ids]), **options, **sampling)
        return config.prompt + tokenizer.decode(rows[0, len(ids):].tolist())
    if given := [word for word in SAMPLING if sampling[word] is not None]:
        raise UserError(f"{given[0]}: only a decoder samples; an {net.family} fills blanks with what is likeliest")
    if net.family == "encoder":
        blanks = fill_masks(net, net.tokenizer, config.prompt)
        return "\n".join("   ".join(f"{token} {p:.2f}" for token, p in blank) for blank in blanks)
    spans = fill_spans(net, net.tokenizer, config.prompt, config.max_new_tokens)
    return "\n".join(f"{sentinel} {text}" for sentinel, text in spans.items())


if __name__ == "__main__":
    main()
