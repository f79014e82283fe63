"""Chat templates: a conversation becomes one text, and it is known what in it the assistant says.

A template is a Jinja program, which may be a stranger's and runs in Jinja's sandbox, over `messages`, the names of the
special tokens (`bos_token` ...) and `add_generation_prompt`; it renders what transformers' `apply_chat_template` does.
(It is not told the date, so that a conversation is the same text every day.) What the assistant says is what stands in
its {% generation %}, where it has such; else what each of its messages adds to the rendering of those before it, with
the generation prompt at its end, but for blank space at its own end, which comes after the token that ends the turn.

    <|im_start|>user  Hi<|im_end|>  <|im_start|>assistant  Hello<|im_end|>  <|im_start|>user ...
                                                           ~~~~~~~~~~~~~~~
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import UserError

ASSISTANT = "assistant"
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
              "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
              "{% endif %}",
    "plain": "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + "
             "(eos_token if message['role'] == 'assistant' else '') + '\\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}",
}  # fmt: skip
BEGIN, END, SAID = "\ufdd0", "\ufdd1", "\ufdd2"  # code points that no text holds
Spans = list[tuple[int, int]]


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


class Names(Namespace):
    """What a template calls `namespace`; a name that could lead out of the sandbox is refused."""

    def __init__(*args, **words):
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **words).items():
            self[name] = value

    def __setitem__(self, name: str, value) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"{name} is no name for it")
        Namespace.__setitem__(self, name, value)


def refuse(message: str):
    raise TemplateError(message)


def dumped(value, ensure_ascii: bool = False, **words) -> str:
    """JSON, in which unlike in Jinja's own filter < and > stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **words)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENVIRONMENT.globals |= {"raise_exception": refuse, "namespace": Names}
ENVIRONMENT.filters["tojson"] = dumped


def template(choice: str) -> str:
    """The template of a name, or in a file."""
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer.chat_template={choice} is neither {' nor '.join(TEMPLATES)} nor a file of a "
                        f"template ({getattr(error, 'strerror', None) or 'no text in UTF-8'})") from None


class Chat:
    """Conversations by a tokenizer's chat template. A message is {"role": ..., "content": ...}, as is usual."""

    def __init__(self, tokenizer):
        if tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template: say tokenizer.chat_template=plain, or another of "
                            f"{', '.join(TEMPLATES)}, or a file of one")
        self.tokenizer = tokenizer
        self.names = {f"{role}_token": tokenizer.token(id) for role in ("bos", "eos", "pad", "unk", "mask")
                      if (id := getattr(tokenizer, role)) is not None}  # fmt: skip
        try:
            self.template = ENVIRONMENT.from_string(tokenizer.chat_template)
        except Exception as error:  # beside Jinja's own Python's, of what is nested too deep
            raise UserError(f"the chat template is none of Jinja's: {error}") from None

    def render(self, messages: Sequence[Mapping], prompt: bool = False) -> str:
        """The text of a conversation; with `prompt` up to where the assistant speaks next. ValueError where the
        template can't be used on it."""
        return re.sub(f"[{BEGIN}{END}]", "", self._render(messages, prompt))

    def _render(self, messages: Sequence[Mapping], prompt: bool = False) -> str:
        given = [{word: value for word, value in message.items() if value is not None} for message in messages]
        try:
            return self.template.render(messages=given, add_generation_prompt=prompt, **self.names)
        except Exception as error:  # a program may fail in any way
            raise ValueError(f"the chat template refuses it: {error}") from error

    def said(self, messages: Sequence[Mapping]) -> tuple[str, Spans]:
        """The text of a conversation, and (begin, end) of what the assistant says in it."""
        if any(mark in str(message["content"]) for message in messages for mark in (BEGIN, END)):
            raise ValueError("a message holds one of the code points U+FDD0 and U+FDD1, which are of no text")
        text = self._render(messages)
        if BEGIN in text:
            pieces = re.split(f"{BEGIN}([^{BEGIN}{END}]*){END}", text)
            if any(mark in piece for piece in pieces for mark in (BEGIN, END)):
                raise ValueError("the chat template has a {% generation %} in another, or leaves one by a break")
            ends = [sum(map(len, pieces[:n])) for n in range(1, len(pieces))]
            return "".join(pieces), list(zip(ends[::2], ends[1::2], strict=True))
        spans = []
        for place, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, through = self.render(messages[:place], prompt=True), self.render(messages[: place + 1])
                if not (text.startswith(through) and through.startswith(before)):
                    raise ValueError("the chat template renders a turn in other words once another follows, or begins "
                                     "the assistant's unlike its generation prompt: mark what the assistant says by "
                                     "{% generation %} in a template of your own")
                spans.append((len(before), max(len(before), len(through.rstrip()))))
        return text, spans

    def encode(self, messages: Sequence[Mapping]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and of each whether it is what the assistant says. Names of special tokens in
        the text are those tokens, as in transformers."""
        text, spans = self.said(messages)
        ids, offsets = self.tokenizer.encode_special(text)
        return ids, [any(begin < last and first < end for begin, end in spans) for first, last in offsets]

    def prompt(self, text: str) -> list[int]:
        """The ids of what a user says, up to where the assistant is to answer."""
        return self.tokenizer.encode_special(self.render([{"role": "user", "content": text}], prompt=True))[0]

    @cached_property
    def eos(self) -> int:
        """The id with which an assistant's turn ends."""
        try:
            text, spans = self.said([{"role": "user", "content": SAID}, {"role": ASSISTANT, "content": SAID}])
        except ValueError as error:
            raise UserError(f"the chat template is of no use for a question and its answer: {error}") from None
        begin, end = spans[-1]
        _, said, after = text[begin:end].rpartition(SAID)
        if not said:
            raise UserError("the chat template leaves out what the assistant says, its message's content")
        found = self.tokenizer.encode_special(after)[0]
        if not found or found[0] not in self.tokenizer.added_ids:
            raise UserError(f"the chat template ends what the assistant says with {after!r}, and this tokenizer has no "
                            "token for that, so that no answer would end: add one (init_from=RUN tokenizer.add="
                            "'[<|im_start|>,<|im_end|>]'), or take tokenizer.chat_template=plain")
        return found[0]
