"""Chat templates render what transformers renders; a decoder learns the assistant's turns alone, and answers."""

import json
import sys

import numpy as np
import pytest
from lmzoo.tasks.chat import Chat, Turns
from lmzoo.tools.export import export
from transformers import AutoConfig, AutoTokenizer

import downstream_run
import lmzoo
import models
import tiny_run
from downstream_run import OPTIM, learn
from lmzoo import generate, hf
from lmzoo.config import command
from lmzoo.data.corpus import Jsonl
from lmzoo.data.labelled import Document
from lmzoo.data.packing import Rows
from lmzoo.data.preparation import prepare, store_name
from lmzoo.data.tables import Parquet
from lmzoo.errors import UserError
from lmzoo.evaluate import evaluate
from lmzoo.tokenizer import Tokenizer, byte
from lmzoo.tokenizer.chat import TEMPLATES
from test_evaluate import configured
from test_labelled import labelled, write

BYTES = byte((), 400, sentinels=0)
CHATML = BYTES.extended(["<|im_start|>", "<|im_end|>"]).conversing(TEMPLATES["chatml"])
PLAIN = BYTES.conversing(TEMPLATES["plain"])
TALK = [{"role": "user", "content": "Hi, "}, {"role": "assistant", "content": "Hello <中>\n"},
        {"role": "user", "content": "5 & 6?"}, {"role": "assistant", "content": "11"}]  # fmt: skip
GENERATING = (
    "{{ bos_token }}{% set told = namespace(n=0) %}\n{%- for m in messages %}\n    {%- set told.n = told.n + 1 %}\n"
    "    {%- if m.role == 'assistant' %}\n{{ '[' }}"
    "{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}{{ ']\n' }}\n"
    "    {%- else %}\n        {%- if told.n > 6 %}{% break %}{% endif %}{{ m | tojson }}{%- endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}{{ '[' }}{% endif %}"
)


def exported(folder, tokenizer):
    """The tokenizer as transformers opens it."""
    net = models.make("gpt", vocab_size=len(tokenizer), max_len=64)
    net.tokenizer = tokenizer
    hf.to_hf(net, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [*TEMPLATES, GENERATING])
@pytest.mark.parametrize("messages", [TALK, TALK[:1], [{"role": "system", "content": "Be kind."}, *TALK]])
def test_a_conversation_is_what_transformers_makes_of_it(tmp_path, template, messages):
    tokenizer = (CHATML if template == "chatml" else BYTES).conversing(TEMPLATES.get(template, template))
    theirs = exported(tmp_path / "hf", tokenizer)
    for prompt in (False, True):
        words = {"add_generation_prompt": prompt, "tokenize": False}
        assert tokenizer.chat.render(messages, prompt) == theirs.apply_chat_template(messages, **words)
    ids, said = tokenizer.chat.encode(messages)
    assert ids == theirs.apply_chat_template(messages, return_dict=False)
    assert tokenizer.chat.prompt("a b") == theirs.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, return_dict=False)  # fmt: skip
    if template == GENERATING:
        found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert [int(is_said) for is_said in said] == found["assistant_masks"]


def test_what_the_assistant_says_by_hand():
    text, spans = CHATML.chat.said(TALK)
    assert text == ("<|im_start|>user\nHi, <|im_end|>\n<|im_start|>assistant\nHello <中>\n<|im_end|>\n"
                    "<|im_start|>user\n5 & 6?<|im_end|>\n<|im_start|>assistant\n11<|im_end|>\n")  # fmt: skip
    assert [text[begin:end] for begin, end in spans] == ["Hello <中>\n<|im_end|>", "11<|im_end|>"]
    ids, said = CHATML.chat.encode(TALK)
    learned = [id for id, is_said in zip(ids, said, strict=True) if is_said]
    assert CHATML.decode(learned) == "Hello <中>\n11"  # the end of a turn is a special token
    assert [CHATML.token(id) for id in learned].count("<|im_end|>") == 2 and CHATML.chat.eos == CHATML.id("<|im_end|>")
    assert PLAIN.chat.eos == PLAIN.eos
    text, spans = BYTES.conversing(GENERATING).chat.said(TALK)
    assert [text[begin:end] for begin, end in spans] == ["Hello <中></s>", "11</s>"]


@pytest.mark.parametrize(("template", "line"), [
    ("{{ 1 +", "the chat template is none of Jinja's"),
    ("{% for m in messages %}{{ m.content }}!{% endfor %}", "ends what the assistant says with '!', and this"),
    (TEMPLATES["chatml"] + "!", "is of no use for a question and its answer: the chat template renders a turn"),
    (TEMPLATES["chatml"], "ends what the assistant says with '<|im_end|>', and .* tokenizer.add="),
    ("Hello", "leaves out what the assistant says"),
    ("{% for m in messages %}{% generation %}{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}"
     "{% endfor %}", "has a {% generation %} in another, or leaves one by a break"),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}",
     "has a {% generation %} in another, or leaves one by a break"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses it: maximum recursion depth exceeded"),
    ("{{ messages|dictsort }}", "refuses it: 'list' object has no attribute 'items'"),
    ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "is none of Jinja's: .*recursion"),
])  # fmt: skip
def test_templates_that_are_of_no_use(template, line):
    with pytest.raises(UserError, match=line.replace("|", r"\|")):
        BYTES.conversing(template)


def test_a_conversation_that_a_template_can_not_render():
    changing = "{% for m in messages %}{{ m.content if loop.last else '' }}{{ eos_token }}{% endfor %}"
    with pytest.raises(ValueError, match="renders a turn in other words once another follows"):
        Tokenizer(BYTES.json, None, changing).chat.said(TALK)
    refusing = TEMPLATES["plain"] + "{% if messages[0].role == 'tool' %}{{ raise_exception('No tools!') }}{% endif %}"
    with pytest.raises(ValueError, match="the chat template refuses it: No tools!"):
        BYTES.conversing(refusing).chat.render([{"role": "tool", "content": "x"}])
    for unsafe in ("{{ messages.__class__.__mro__ }}", "{% set x = namespace(__class__=1) %}",
                   "{% set x = namespace() %}{% set x._a = 1 %}"):  # fmt: skip
        template = TEMPLATES["plain"] + f"{{% if messages[0].role == 'tool' %}}{unsafe}{{% endif %}}"
        with pytest.raises(ValueError, match="refuses it: .*(unsafe|is no name for it)"):
            BYTES.conversing(template).chat.render([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match="holds one of the code points U.FDD0"):  # the marks of {% generation %}
        PLAIN.chat.encode([TALK[0], {"role": "assistant", "content": "\ufdd0a\ufdd1b"}])


def test_what_is_exported_ends_an_answer_where_a_turn_ends(tmp_path):
    for tokenizer, eos in ((CHATML, [CHATML.eos, CHATML.chat.eos]), (PLAIN, PLAIN.eos), (BYTES, BYTES.eos)):
        exported(tmp_path / f"{len(list(tmp_path.iterdir()))}", tokenizer)
        assert AutoConfig.from_pretrained(max(tmp_path.iterdir())).eos_token_id == eos


# --- data

@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_rows_become_conversations(tmp_path, name):
    path = write(tmp_path, name, {"talk": [TALK, TALK[:2]], "text": ["a", "b"]})
    reader = {"jsonl": Jsonl, "parquet": Parquet}[name](messages_column="talk", kind="turns")
    assert list(reader(path)) == [
        Document("\n".join(message["content"] for message in talk), messages=tuple(talk)) for talk in (TALK, TALK[:2])]


@pytest.mark.parametrize(("messages", "line"), [
    ("Hi", "data.messages_column=messages is no list of messages but 'Hi'"), ([], "is no list of messages but"),
    ([3], 'messages: 3 is no message, {"role": "user", "content": "..."}'),
    ([{"role": "user"}], "is no message"), ([{"role": "user", "content": None}], "is no message"),
    (TALK[:1], "no message has the role assistant and says something: leave the row out"),
    ([{"role": "assistant", "content": " "}], "no message has the role assistant"),
    ([{"role": "assistant", "content": "\ud800"}], "holds half of a surrogate pair"),
    ([{"role": "assistant", "content": "x" * 600_000}], "its messages hold 600,000 characters, more than the 500,000"),
])  # fmt: skip
def test_what_is_no_conversation_is_named_with_its_row(tmp_path, messages, line):
    rows = [{"messages": TALK}, {"messages": messages}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError) as error:
        list(Jsonl(kind="turns")(tmp_path / "a.jsonl"))
    assert "a.jsonl line 2: " in str(error.value) and line in str(error.value) and "\n" not in str(error.value)


def test_conversations_are_prepared_without_bos_and_eos_and_cut_at_their_end(tmp_path):
    config = labelled(tmp_path, "turns", [{"messages": TALK}], data={"val_fraction": 0})
    split = prepare(config, CHATML)["train"]
    ids, said = CHATML.chat.encode(TALK)
    row = Rows(split, "single", 1000, None)[0]
    assert row["tokens"].tolist() == ids and row["written"].tolist() == said and "label" not in row
    row = Rows(split, "single", 30, None)[0]
    assert row["tokens"].tolist() == ids[:30] and row["written"].tolist() == said[:30]
    assert Rows(split, "single", 30, None).n_cut == len(ids) - 30 and split.n_unlabelled == 0
    other = BYTES.extended(["<|im_start|>", "<|im_end|>"]).conversing(" " + TEMPLATES["chatml"])
    assert store_name(config, CHATML) != store_name(config, other)  # another template is another store


# --- the task

def test_labels_are_what_the_assistant_says_by_hand():
    rows = [{"tokens": np.arange(1, 8), "written": np.array([0, 0, 1, 1, 0, 0, 1], bool), "key": (0, 0, 4)},
            {"tokens": np.arange(3), "written": np.array([0, 1, 1], bool), "key": (0, 0, 2)}]  # fmt: skip
    assert {name: tensor.tolist() for name, tensor in Turns(pad=9)(rows).items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6], [0, 1, 9, 9, 9, 9]], "attention_mask": [[1] * 6, [1, 1, 0, 0, 0, 0]],
        "labels": [[-100, 3, 4, -100, -100, 7], [1, 2, -100, -100, -100, -100]], "sample": [4, 2],
    }  # fmt: skip


def talks():
    """Conversations of two turns, the second of which depends on the first."""
    for sample, words in enumerate([("ab", "cd"), ("ba", "cd"), ("ab", "dc")]):
        ids, said = PLAIN.chat.encode([
            {"role": "user", "content": words[0]}, {"role": "assistant", "content": words[0][::-1]},
            {"role": "user", "content": words[1]}, {"role": "assistant", "content": "".join(words)}])  # fmt: skip
        yield {"tokens": np.array(ids), "written": np.array(said), "key": (0, 0, sample)}


def test_the_last_turn_is_written_and_compared(tmp_path):
    net = models.make("gpt", vocab_size=len(PLAIN), max_len=96)
    tested = Chat(net, PLAIN, OPTIM, lambda step, total: 1.0, packing="single").eval()
    assert learn(tested, talks(), steps=150) < 0.05
    data = downstream_run.Texts(tested.collator, talks(), None, "turns")
    data.rows["test"].length = 24
    found, written, _ = downstream_run.evaluate(tmp_path, tested.eval(), data)
    assert [row["target"] for row in written] == [row["prediction"] for row in written] == ["abcd", "bacd", "abdc"]
    assert written[0]["text"] == "user:\nab\nassistant:\nba\nuser:\ncd\nassistant:\n"
    assert found["test/exact_match"] == 1


# --- whole runs

def spoken(folder, *more):
    talks = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n}" * 2}]}
             for n in range(40)]  # fmt: skip
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    return [*tiny_run.TINY, "task=chat", f"data.path={folder / 'talks.jsonl'}", f"run_dir={folder / 'run'}",
            f"data.cache_dir={folder / 'cache'}", *more]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    with tiny_run.lean():
        (folder / "own.jinja").write_text(TEMPLATES["plain"].replace(":\\n", "> "), encoding="utf-8-sig")
        words = ["model=gpt", "model.max_len=48", "task.max_answer=4"]
        lmzoo.fit(lmzoo.compose(*spoken(folder, *words, f"tokenizer.chat_template={folder / 'own.jinja'}")))
    (folder / "own.jinja").unlink()  # the run holds it
    return folder / "run"


def test_a_measure_of_texts_asks_for_some(run, tmp_path):
    """In the place of the run's own data, which are conversations."""
    with pytest.raises(UserError, match="from conversations, and this measure reads texts: say which, as data=text"):
        configured(f"ckpt={run}", "measure=sliding_window")
    (tmp_path / "a.txt").write_text("1 2 3")
    measured = configured(f"ckpt={run}", "measure=sliding_window", "data=text", f"data.path={tmp_path / 'a.txt'}")
    assert evaluate(measured)["test/tokens"] == 6


def test_the_template_travels(run, tmp_path, capsys):
    net = lmzoo.load(run)
    template = TEMPLATES["plain"].replace(":\\n", "> ")
    assert net.tokenizer.chat_template == template
    export(str(run), str(tmp_path / "hf"))
    made = {}
    exec((tmp_path / "hf" / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0], made)
    assert capsys.readouterr().out.startswith("<s>user> Some text\nassistant> ")  # what the net has learned to answer
    assert lmzoo.load(tmp_path / "hf").tokenizer.chat_template == template
    result = json.loads((run / "result.json").read_text())
    assert evaluate(configured(f"ckpt={run}"))["val/loss"] == pytest.approx(result["val/loss"], abs=1e-5)
    init = ["model.", "size=", "tokenizer=", "run_dir="]
    words = [word for word in spoken(tmp_path) if not word.startswith(tuple(init))]
    with tiny_run.lean():
        again, _ = lmzoo.fit(lmzoo.compose(*words, f"init_from={run}", f"run_dir={tmp_path / 'run'}"))
        assert again.tokenizer.chat_template == template
        lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'run'}", "trainer.max_steps=10"))


def prompted(monkeypatch, capsys, *words):
    asked = []
    monkeypatch.setattr("lmzoo.decoding.answering.generate",
                        lambda net, ids, mask, eos, **_: asked.append((net.tokenizer.decode(ids[0].tolist()), eos)))
    monkeypatch.setattr(sys, "argv", ["generate", *words])
    command("generate", generate.job)
    return asked[0], capsys.readouterr().out


def test_a_prompt_is_a_users_turn_unless_chat_is_false(run, monkeypatch, capsys):
    tokenizer = lmzoo.load(run).tokenizer
    asked = prompted(monkeypatch, capsys, f"ckpt={run}", "prompt=7")
    assert asked == (("user> 7\nassistant> ", tokenizer.chat.eos), "\n")
    assert prompted(monkeypatch, capsys, f"ckpt={run}", "prompt=7", "chat=false") == (("7", tokenizer.eos), "7\n")


@pytest.mark.parametrize(("words", "line"), [
    (["model=gpt"], "the tokenizer has no chat template: say tokenizer.chat_template=plain, or another of"),
    (["model=gpt", "tokenizer.chat_template=x.jinja"], "chat_template=x.jinja is neither chatml nor plain nor"),
    (["model=gpt", "tokenizer.chat_template=chatml"], "this tokenizer has no token for that"),
    (["model=t5", "tokenizer.chat_template=plain"], "task=chat needs a model of family decoder"),
    (["model=gpt", "data.field=x"], "data.field: the task does not look at it"),
    (["model=gpt", "tokenizer.chat_template=plain", "data.messages_column=x"],
     "line 1: no field data.messages_column=x; the fields are messages"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, words, line):
    with pytest.raises(UserError) as error:
        lmzoo.fit(lmzoo.compose(*spoken(tmp_path, *words)))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_chat_is_not_for_a_net_without_a_template(gpt_run):
    from types import SimpleNamespace

    with pytest.raises(UserError, match="chat=true: .* has no chat template"):
        generate.open_net(SimpleNamespace(ckpt=str(gpt_run), trust=[], chat=True, device="cpu"), set())
