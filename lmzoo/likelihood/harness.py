"""A decoder of lmzoo as a model of EleutherAI's lm-eval, with the numbers of its own `hf` model on the exported folder.

    python -m lmzoo.likelihood.harness --model lmzoo --model_args pretrained=runs/x --tasks lambada_openai,hellaswag

or, from Python, `lm_eval.simple_evaluate(model=Harness("runs/x"), tasks=[...])`. A text is read behind bos, as the net
was trained. Needs `pip install 'lmzoo[eval]'`.
"""

import sys
from collections.abc import Sequence
from itertools import groupby

import torch

from .. import load
from ..decoding import check_family, generate
from ..decoding.answering import left_padded
from ..errors import UserError
from .pairs import continued
from .scoring import score

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    error = UserError("lmzoo.likelihood.harness needs lm-eval: pip install 'lmzoo[eval]'")
    if __name__ != "__main__":
        raise error from None
    print(f"lmzoo: {error}", file=sys.stderr)
    sys.exit(2)


@register_model("lmzoo")
class Harness(TemplateLM):
    """pretrained: a run's folder, a checkpoint or an exported folder; max_length: the longest row, null for the net's;
    add_bos_token: whether a text is read behind bos; max_gen_toks: of an answer whose task does not say."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 16,
        device: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool = True,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,  # lm-eval's, for batches that it sizes itself
        trust: str | Sequence[str] = (),
    ):
        super().__init__()
        if not str(batch_size).isdecimal():
            raise UserError(f"batch_size={batch_size}: give a number of rows")
        if not torch.cuda.is_available() and str(device or "cuda").startswith("cuda"):
            device = "cpu"  # lm-eval's command says cuda unless it is told otherwise
        trust = (trust,) if isinstance(trust, str) else tuple(trust)
        self.net = load(pretrained, trust, reads_text=True).to(device or "cuda")
        check_family(self.net, "decoder")
        self.words, self.batch_size = self.net.tokenizer, int(batch_size)
        self.words.require("bos", "eos", task="lm-eval")
        self.max_length, self.add_bos_token = max_length or self.net.max_len, add_bos_token
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return self.words.eos

    @property
    def prefix_token_id(self) -> int:
        return self.words.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        begins = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return [self.words.bos] * begins + self.words.encode(string)

    def _loglikelihood_tokens(self, requests: list[tuple], **_) -> list[tuple[float, bool]]:
        """[(log-likelihood, whether each token is the likeliest)] of (_, ids before, ids that are asked for)."""
        if (longest := max((len(asked) for *_, asked in requests), default=0)) > self.max_length:
            raise UserError(f"an answer has {longest} tokens, more than the {self.max_length} positions of the model")
        rows = (continued(before, asked, self.max_length) for _, before, asked in requests)
        return [(found.log_probabilities.sum().item(), bool(found.likeliest.all()))
                for found in score(self.net, rows, self.batch_size)]  # fmt: skip

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows without overlap."""
        windows = [(number, *make_disjoint_window(window)) for number, request in enumerate(requests)
                   for window in get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id,
                                                           self.max_length, context_len=1)]  # fmt: skip
        totals = [0.0] * len(requests)
        for (number, *_), (total, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += total
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """What the net writes behind each text, up to the first of the task's stop strings."""
        answers: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda i: repr(sorted(requests[i].args[1].items())))
        for _, alike in groupby(order, key=lambda i: requests[i].args[1]):
            alike = list(alike)
            for begin in range(0, len(alike), self.batch_size):
                batch = alike[begin : begin + self.batch_size]
                told = self._answers([requests[i].args[0] for i in batch], **requests[batch[0]].args[1])
                answers |= zip(batch, told, strict=True)
        return [answers[i] for i in range(len(requests))]

    def _answers(self, contexts: list[str], until: str | list[str] = (), max_gen_toks: int | None = None,
                 do_sample: bool = False, **sampling) -> list[str]:  # fmt: skip
        n, stop = max_gen_toks or self.max_gen_toks, [until] if isinstance(until, str) else list(until)
        if n >= self.max_length:
            raise UserError(f"max_gen_toks={n} must be less than the model's {self.max_length} positions")
        rows, mask = left_padded([self.tok_encode(text)[n - self.max_length :] for text in contexts])
        chosen = {word: sampling[word] for word in ("temperature", "top_k", "top_p") if do_sample and word in sampling}
        found = generate(self.net, rows, mask, n, eos=self.words.eos, stop=stop, **chosen)[:, rows.shape[1] :]
        texts = [self.words.decode(row) for row in found.tolist()]
        return [min((text.split(end)[0] for end in stop if end), key=len, default=text) for text in texts]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"lmzoo: {error}", file=sys.stderr)
        sys.exit(2)
