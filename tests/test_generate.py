"""The generate command: where prompts come from, where answers go, and what is refused before a net is read."""

import io
import json
import shutil
import signal

import pytest
import torch

import lmzoo
from lmzoo.decoding.answering import answer, fill
from lmzoo.generate import main as command


@pytest.fixture(scope="module")
def bert_run(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert") / "run"
    lmzoo.fit(lmzoo.compose(*words(folder, "model=bert", "task=mlm", "trainer.max_steps=1")))
    return folder


@pytest.fixture(scope="module")
def t5_run(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5") / "run"
    more = ("tokenizer.vocab_size=600", "trainer.max_steps=1")
    lmzoo.fit(lmzoo.compose(*words(folder, "model=t5", "task=span_corruption", *more)))
    return folder


@pytest.fixture
def said(monkeypatch, capsys, bert_run):
    """said(run, *words) -> what the command prints; with `lines` typed on a terminal."""

    def run(ckpt, *words, lines=None):
        limit = [] if ckpt == bert_run else ["max_new_tokens=8"]
        monkeypatch.setattr("sys.argv", ["lmzoo.generate", f"ckpt={ckpt}", "device=cpu", *limit, *words])
        if lines is not None:
            typed = io.StringIO(lines)
            typed.isatty = lambda: True
            monkeypatch.setattr("sys.stdin", typed)
        command()
        return capsys.readouterr()

    return run


def test_a_decoder_continues_the_prompt(gpt_run, said):
    net = lmzoo.load(gpt_run)
    for words, more in ([], {}), (["temperature=2", "seed=3"], {"temperature": 2.0, "seed": 3}):
        [[record]] = answer(net, ["the cat"], max_new_tokens=8, **more)
        assert said(gpt_run, "prompt=the cat", *words).out == f"the cat{record['answer']}\n"


def test_which_run_the_last_is_is_said(gpt_run, said, tmp_path, monkeypatch, caplog):
    shutil.copytree(gpt_run, tmp_path / "runs/tool/run")
    monkeypatch.chdir(tmp_path)
    assert said("last", "prompt=the cat").out == said(gpt_run, "prompt=the cat").out
    assert caplog.messages == ["last is runs/tool/run"]


def test_stop(gpt_run, said):
    whole = said(gpt_run, "prompt=the cat").out.removeprefix("the cat")
    one, other = whole[3:5], whole[6:8]
    assert said(gpt_run, "prompt=the cat", f"stop={one}").out == f"the cat{whole.partition(one)[0]}\n"
    listed = said(gpt_run, "prompt=the cat", f"stop=['{other}','{one}']").out
    assert listed == f"the cat{whole[: min(whole.find(one), whole.find(other))]}\n"


def test_beams(gpt_run, said):
    [found] = answer(lmzoo.load(gpt_run), ["the cat"], max_new_tokens=8, n_beams=3, n_best=2)
    lines = [f"{record['log_probability']:8.3f}  the cat{record['answer']}" for record in found]
    assert said(gpt_run, "prompt=the cat", "n_beams=3", "n_best=2").out == "\n".join(lines) + "\n"


def test_an_encoder_fills_each_blank(bert_run, said):
    for words, n in ([], 3), (["n_best=5"], 5):
        text, *lines = said(bert_run, "prompt=the {} sat on a [MASK] mat", *words).out.splitlines()
        assert len(lines) == 2 and all(line.startswith("  ") for line in lines)
        guesses = [[part.split() for part in line.strip().split("   ")] for line in lines]
        for blank in guesses:
            probabilities = [float(probability) for _, probability in blank]
            assert len(probabilities) == n and probabilities == sorted(probabilities, reverse=True)
        assert text == f"the [{guesses[0][0][0]}] sat on a [{guesses[1][0][0]}] mat"


def test_an_encoder_decoder_fills_spans_or_answers(t5_run, said):
    net = lmzoo.load(t5_run)
    [record] = fill(net, "the {} sat on {} hill", max_new_tokens=8)
    first, second = record["spans"].values()
    assert said(t5_run, "prompt=the {} sat on <extra_id_0> hill").out == f"the [{first}] sat on [{second}] hill\n"
    [[record]] = answer(net, ["the cat"], max_new_tokens=8)
    assert said(t5_run, "prompt=the cat").out == f"{record['answer']}\n"


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_file_of_prompts(gpt_run, said, tmp_path, batch_size):
    prompts, file, out = ["the cat", "a", "it's, “so” {} ${x}"], tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    file.write_text("the cat\na\nit's, “so” {} ${x}\n", encoding="utf-8")
    words = [f"prompts_path={file}", "temperature=1.5", "seed=4", f"batch_size={batch_size}"]
    net = lmzoo.load(gpt_run)
    expected = [answer(net, [prompt], max_new_tokens=8, temperature=1.5, seed=4 + i)[0][0]
                for i, prompt in enumerate(prompts)]  # fmt: skip
    assert [json.loads(line) for line in said(gpt_run, *words).out.splitlines()] == expected
    assert said(gpt_run, *words, f"out_path={out}").out == ""
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == expected


def test_only_newlines_part_prompts(gpt_run, said, tmp_path):
    prompts = ["the\u2028cat", "a\x0cmat", "the\x85dog\x1c", "one\x0bhill"]
    (tmp_path / "prompts").write_bytes("\r\n".join(prompts).encode("utf-8-sig"))
    records = [json.loads(line) for line in said(gpt_run, f"prompts_path={tmp_path / 'prompts'}").out.split("\n")[:-1]]
    assert [record["prompt"] for record in records] == prompts


@pytest.mark.parametrize("run, bad, more, line", [
    ("gpt_run", "the cat " * 40, [], "positions"), ("bert_run", "the cat", [], "no blank: put {}"),
    ("bert_run", "the q {}", [], "no token for 'q' of the prompt"), ("bert_run", "{} cat" * 70, [], "longer than"),
    ("t5_run", "{} " * 101, [], "101 blanks"), ("gpt_run", None, ["top_k=9999"], "the vocabulary's size"),
    ("t5_run", "the {}", ["n_beams=2"], "n_beams: an encoder-decoder fills blanks"),
])  # fmt: skip
def test_a_bad_prompt_late_in_a_file_is_found_before_anything_is_written(
    run, bad, more, line, gpt_run, bert_run, t5_run, said, tmp_path, capsys
):
    folder = {"gpt_run": gpt_run, "bert_run": bert_run, "t5_run": t5_run}[run]
    good = "the {} cat" if run == "bert_run" else "the cat"
    (tmp_path / "prompts").write_text("\n".join([*[good] * 4, *filter(None, [bad]), good]), encoding="utf-8")
    words = [f"prompts_path={tmp_path / 'prompts'}", f"out_path={tmp_path / 'out'}", "batch_size=1", *more]
    with pytest.raises(SystemExit, match="2"):
        said(folder, *words)
    got = capsys.readouterr()
    assert line in got.err and got.err.count("\n") == 1 and got.out == "" and not (tmp_path / "out").exists()
    assert bad is None or "prompts, line 5: " in got.err


def test_a_file_of_prompts_with_and_without_blanks(t5_run, said, tmp_path):
    (tmp_path / "prompts").write_text("the {} sat\nthe cat\n<extra_id_0> sat", encoding="utf-8")
    records = [json.loads(line) for line in said(t5_run, f"prompts_path={tmp_path / 'prompts'}").out.splitlines()]
    assert [set(record) for record in records] == [{"prompt", word} for word in ("spans", "answer", "spans")]


def test_a_conversation(bert_run, gpt_run, said):
    """A mistake is said and the next line read."""
    got = said(bert_run, lines="a {} cat\nthe cat\n{} cat\n")
    assert [got.out.count(part) for part in ("> ", "   ", "] cat")] == [4, 4, 2] and got.err.count("lmzoo: ") == 1
    assert said(gpt_run, lines="the cat\n").out == f"> {said(gpt_run, 'prompt=the cat').out}> \n"


@pytest.mark.parametrize("word, line", [
    ("device=foo", "device=foo"), ("device=meta", "device=meta"), ("temperature=1e-300", "temperature="),
    ("temperature=0", "temperature=0.0 must be between 0.0001 and 10000.0; for greedy decoding, the likeliest token"),
    ("seed=9999999999", "seed="), ("top_p=2", "top_p="), ("top_p=0", "top_p=0.0"),
    ("top_k=0", "top_k="), ("min_p=-1", "min_p="), ("repetition_penalty=0", "repetition_penalty="),
    ("n_beams=0", "n_beams="), ("n_best=0", "n_best="), ("stop=[]", "stop=[]"), ("ckpt=", "ckpt="),
    ("batch_size=0", "batch_size="), ("out_path=x", "out_path=x is for the answers to prompts_path"),
    ("length_penalty=2", "length_penalty=2.0 ranks beams: say n_beams=4 too, or leave it out"),
    ("seed=3", "seed=3 draws tokens, but each is the likeliest: say temperature, top_k, top_p or min_p too"),
    ("batch_size=4", "batch_size=4 is how many prompts of a file are read together: say prompts_path=FILE too"),
    ("prompts_path=nowhere.txt", "prompt=a and prompts_path=nowhere.txt: give one of them"),
])  # fmt: skip
def test_values_that_cannot_be_are_refused_before_a_net_is_read(word, line, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lmzoo.generate", "ckpt=/nowhere", "prompt=a", word])
    with pytest.raises(SystemExit, match="2"):
        command()
    assert capsys.readouterr().err.startswith(f"lmzoo: {line}")


@pytest.mark.parametrize("content, line", [
    ("", "no prompt in it"), ("\n \n", "no prompt in it"), ("a\n \nb\n", ", line 2: it is empty, and each line is"),
    ("a\r\n\r\n", ", line 2: it is empty"), (b"\xff\xfe", "no text in UTF-8"), (None, "No such file"),
])  # fmt: skip
def test_files_of_prompts_that_are_none(content, line, tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr("sys.argv", ["lmzoo.generate", "ckpt=/nowhere", f"prompts_path={file}"])
    with pytest.raises(SystemExit, match="2"):
        command()
    error = capsys.readouterr().err
    assert line in error and str(file) in error and error.count("\n") == 1


@pytest.mark.parametrize(("out", "line"), [("out", "is there already"), ("no/out", "there is no folder")])
def test_where_answers_go_is_looked_at_first(tmp_path, monkeypatch, capsys, out, line):
    for name in ("prompts", "out"):
        (tmp_path / name).write_text("kept", encoding="utf-8")
    words = [f"prompts_path={tmp_path / 'prompts'}", f"out_path={tmp_path / out}"]
    monkeypatch.setattr("sys.argv", ["lmzoo.generate", "ckpt=/nowhere", *words])
    with pytest.raises(SystemExit, match="2"):
        command()
    assert line in capsys.readouterr().err and (tmp_path / "out").read_text() == "kept"


def test_ctrl_c_at_the_prompt(gpt_run, said, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        said(gpt_run, lines="")
    assert capsys.readouterr() == ("", "lmzoo: interrupted\n")


def test_mistakes_that_need_the_net(gpt_run, bert_run, tmp_path, said, capsys):
    for run, words, line in [
        (bert_run, ["top_p=0.9", "prompt=a {}"], "top_p: an encoder fills blanks"),
        (bert_run, ["prompt=the cat"], "no blank: put {}"),
        (bert_run, ["prompt=a {}", "max_new_tokens=3"], "max_new_tokens=3: an encoder fills a blank with one token"),
        (bert_run, ["prompt=the q {}"], "no token for 'q' of the prompt"),
        (gpt_run, ["prompt=a", "max_new_tokens=10000"], "positions"),
        (gpt_run, ["prompt=a", "top_k=10000"], "the vocabulary's size"),
        (gpt_run, ["prompt=a", "n_beams=2", "n_best=3"], "n_best=3 must be between 1 and n_beams=2"),
        (gpt_run, ["prompt=a", "n_best=1", "temperature=0.8"], "temperature is for sampling, but n_best=1 looks for"),
        (gpt_run, [], "no prompt: say prompt="),
        (tmp_path, ["prompt=a"], "no whole checkpoint"),
        *([] if torch.cuda.is_available() else [(gpt_run, ["prompt=a", "device=cuda"], "device=cuda: not here")]),
    ]:
        with pytest.raises(SystemExit, match="2"):
            said(run, *words)
        got = capsys.readouterr()
        assert line in got.err and got.err.count("\n") == 1 and got.out == ""


@pytest.mark.parametrize("prompt", ["Hello, world!", "it's", "[x] {y} ${z}", "你好", "x = 3", "back\\", ""])
def test_prompts_are_literal_on_the_command_line(gpt_run, prompt, said):
    assert said(gpt_run, f"prompt={prompt}").out.startswith(prompt)
