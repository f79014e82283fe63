"""The generate command: a decoder continues, an encoder and an encoder-decoder fill."""

import pytest
import torch
from omegaconf import OmegaConf

import lmzoo
from lmzoo import UserError
from lmzoo.generate import answer
from lmzoo.generate import main as command

WORDS = {"max_new_tokens": 8, "seed": 0, "device": "cpu", "trust": []}
WORDS |= dict.fromkeys(("temperature", "top_k", "top_p"))


def asked(run, prompt, **words):
    return answer(OmegaConf.create({**WORDS, "ckpt": str(run), "prompt": prompt, **words}))


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


def test_a_decoder_continues_with_the_likeliest(gpt_run):
    """Greedy by default: each token is the argmax of the full forward."""
    net = lmzoo.load(gpt_run)
    ids = [net.tokenizer.bos, *net.tokenizer.encode("the cat")]
    for _ in range(8):
        with torch.no_grad():
            best = net(torch.tensor([ids]))[0, -1, : len(net.tokenizer)].argmax().item()
        if best == net.tokenizer.eos:
            break
        ids.append(best)
    assert asked(gpt_run, "the cat") == net.tokenizer.decode(ids)


def test_sampling_is_a_function_of_the_seed(gpt_run):
    texts = [asked(gpt_run, "the", temperature=2.0, seed=seed) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert asked(gpt_run, "the", temperature=2.0, top_k=1) == asked(gpt_run, "the")


def test_an_encoder_fills_each_blank(bert_run):
    lines = asked(bert_run, "the {} sat on a [MASK] hill").splitlines()
    assert len(lines) == 2
    for line in lines:
        probabilities = [float(part.split()[-1]) for part in line.split("   ")]
        assert len(probabilities) == 3 and probabilities == sorted(probabilities, reverse=True)


def test_an_encoder_decoder_fills_spans(t5_run):
    lines = asked(t5_run, "the {} sat on {} hill").splitlines()
    assert [line.split(" ")[0] for line in lines] == ["<extra_id_0>", "<extra_id_1>"]


def test_mistakes(gpt_run, bert_run, tmp_path):
    for run, words, line in [
        (bert_run, {"top_p": 0.9, "prompt": "a {}"}, "top_p: only a decoder samples"),
        (bert_run, {"prompt": "no blank"}, "blank"),
        (gpt_run, {"prompt": "a", "top_p": 1.5}, "top_p"),
        (gpt_run, {"prompt": "a", "max_new_tokens": 10000}, "positions"),
        (tmp_path, {"prompt": "a"}, "no whole checkpoint"),
    ]:
        with pytest.raises(UserError) as refusal:
            asked(run, **words)
        assert line in str(refusal.value)


def test_a_device_that_is_not_there(gpt_run):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda: not here"):
            asked(gpt_run, "a", device="cuda")


@pytest.mark.parametrize(
    "word", ["device=foo", "device=meta", "temperature=1e-300", "seed=9999999999", "top_p=2", "top_k=0", "ckpt="]
)
def test_values_that_cannot_be_are_refused_before_a_net_is_read(word, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lmzoo.generate", "ckpt=/nowhere", word])
    with pytest.raises(SystemExit, match="2"):
        command()
    assert capsys.readouterr().err.startswith(f"lmzoo: {word.partition('=')[0]}=")


@pytest.mark.parametrize("prompt", ["Hello, world!", "it's", "[x] {y} ${z}", "你好", "x = 3", "back\\"])
def test_prompts_are_literal_on_the_command_line(gpt_run, prompt, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lmzoo.generate", f"ckpt={gpt_run}", f"prompt={prompt}", "max_new_tokens=1"])
    command()
    assert capsys.readouterr().out.startswith(prompt)
