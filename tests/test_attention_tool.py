"""Recorded weights: those of transformers and of sums by hand; a net left as it was; a page that loads nothing."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from html import unescape

import pytest
import torch
from lmzoo.tools import attention
from matplotlib.image import imread

import lmzoo
import models
from lmzoo.tokenizer import byte

TOKENIZER = byte([], 400)
TEXT = "a cat, a mat"
PLACES = 24


def make(name, tokenizer=TOKENIZER, **words):
    """A net that reads bytes."""
    net = models.make(name, vocab_size=len(tokenizer), max_len=PLACES, **words)
    net.tokenizer = tokenizer
    return net


def classes(pool="first"):
    return {"_target_": "lmzoo.blocks.head.Classifier", "_partial_": True, "n_classes": 3, "pool": pool}


NETS = {
    "decoder": lambda: make("gpt"), "encoder": lambda: make("bert"), "encoder-decoder": lambda: make("t5"),
    "grouped": lambda: make("llama", n_kv_heads=2), "one key": lambda: make("t5", n_kv_heads=1),
    "window": lambda: make("llama", attention=models.attention(window=3)),
    "window of an encoder": lambda: make("bert", attention=models.attention(window=3)),
    "additive": lambda: make("gpt", attention="additive"), "alibi": lambda: make("gpt", position="alibi"),
    "t5's bias": lambda: make("bert", position="t5"), "parallel": lambda: make("transformer", block="parallel"),
    "two windows": lambda: make("gpt", attention=[models.attention(window=2), models.attention()]),
    "shared layers": lambda: make("gpt", share=2), "classes": lambda: make("bert", head=classes()),
    "classes of a decoder": lambda: make("gpt", head=classes("last")),
    "classes, answered": lambda: make("t5", n_kv_heads=2, head=classes()),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_each_row_sums_to_one_over_what_it_may_see(name):
    """And no query sees a later token under a causal mask, nor beyond its window."""
    net = NETS[name]()
    found = attention.views(net, TEXT)
    assert [view.name for view in found] == (
        ["encoder on itself", "decoder on itself", "decoder on encoder"]
        if net.family == "encoder-decoder" else [f"{net.family} on itself"])  # fmt: skip
    for view in found:
        queries, keys = len(view.queries), len(view.keys)
        assert view.weights.shape == (2, 4, queries, keys) and (keys > len(TEXT) or view.name == "decoder on itself")
        torch.testing.assert_close(view.weights.sum(-1), torch.ones(2, 4, queries))
        distance = torch.arange(queries)[:, None] - torch.arange(keys)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if view.name.startswith("decoder on itself"):
            seen = distance >= 0
        for layer, weights in enumerate(view.weights):
            window = {"window": 3, "two windows": [2, 99][layer]}.get(name, 99)
            within = distance.abs() <= 1 if name == "window of an encoder" else distance < window
            assert torch.equal(weights > 0, (seen & within).expand(4, -1, -1))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_the_net_is_afterwards_as_it_was(name, training):
    """Also where reading failed; and what it reads meanwhile is what it always reads."""
    net = NETS[name]().train(training)
    parts = [part for *_, some in attention.attentions(net) for part in some]
    before = [dict(vars(part)) for part in parts]
    hidden = read(net)
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        for *_, some in attention.attentions(net):
            stack.enter_context(attention.recording(some))
        torch.testing.assert_close(read(net), hidden)
        raise ZeroDivisionError
    attention.views(net, TEXT)
    assert net.training == training and [dict(vars(part)) for part in parts] == before
    assert torch.equal(read(net), hidden)


@torch.no_grad()
def read(net):
    ids = torch.tensor([TOKENIZER.encode(TEXT)])
    return models.logits(net, ids, readout=lambda head, hidden: hidden)


def test_the_weights_are_the_softmax_of_queries_and_keys():
    """Of the first layer, whose input is the embedding: worked out from its own matrices, head by head."""
    net = make("gpt")
    (view,) = attention.views(net, TEXT)
    block, ids = net.blocks[0], torch.tensor([[TOKENIZER.bos, *TOKENIZER.encode(TEXT)]])
    n = ids.shape[1]
    x = block.attn_norm(net.embed(ids, net.positions[0], torch.arange(n)[None]))[0]
    queries, keys = block.attn.q(x), block.attn.k(x)
    for head in range(4):
        mine = slice(4 * head, 4 * head + 4)
        scores = queries[:, mine] @ keys[:, mine].T / 2  # the root of four
        for i in range(n):
            expected = scores[i, : i + 1].exp() / scores[i, : i + 1].exp().sum()
            torch.testing.assert_close(view.weights[0, head, i, : i + 1], expected)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_the_weights_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    net = make(name, **{"n_kv_heads": 2} if name == "llama" else {})
    lmzoo.hf.to_hf(net, tmp_path / "hf")
    kinds = {"gpt": "CausalLM", "llama": "CausalLM", "bert": "MaskedLM", "t5": "Seq2SeqLM"}
    theirs = getattr(transformers, f"AutoModelFor{kinds[name]}").from_pretrained(
        tmp_path / "hf", attn_implementation="eager").eval()  # fmt: skip
    ids, bos, eos = TOKENIZER.encode(TEXT), [TOKENIZER.bos], [TOKENIZER.eos]
    if name == "t5":
        reply = TOKENIZER.encode("the dog")
        rows = {"input_ids": [ids + eos], "decoder_input_ids": [[TOKENIZER.start, *reply]]}
        wanted = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    else:
        rows, wanted = {"input_ids": [bos + ids + eos if name == "bert" else bos + ids]}, ["attentions"]
    with torch.no_grad():
        out = theirs(**{side: torch.tensor(row) for side, row in rows.items()}, output_attentions=True)
    found = attention.views(net, TEXT, "the dog" if name == "t5" else None)
    for view, name in zip(found, wanted, strict=True):
        torch.testing.assert_close(view.weights, torch.cat(out[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "text", "reply", "tokens"), [
    ("decoder", "a {}", None, ["<s> a ␣ { }"]),
    ("encoder", "a {}b", None, ["<s> a <mask> b </s>"]),
    ("encoder", "a <mask>b", None, ["<s> a <mask> b </s>"]),
    ("classes", "{} é", None, ["<s> { } ␣ Ã © </s>"]),
    ("classes of a decoder", "a", None, ["<s> a </s>"]),
    ("classes, answered", "a", None, ["<s> a </s>", "<s> a </s>"]),
    ("encoder-decoder", "a", "b", ["a </s>", "<s> b"]),
    ("encoder-decoder", "{} a {}", "{}b<extra_id_1>",
     ["<extra_id_0> ␣ a <extra_id_1> </s>", "<s> <extra_id_0> b <extra_id_1>"]),
])  # fmt: skip
def test_what_is_read(name, text, reply, tokens):
    """A row like those of training: blanks as masks or sentinels, an end where nothing is to follow."""
    found = attention.views(NETS[name](), text, reply)
    assert [" ".join(side) for side in (found[0].keys, *(view.queries for view in found[1:2]))] == tokens


def test_without_an_answer_the_net_gives_one():
    net = make("t5")
    ids = torch.tensor([[*TOKENIZER.encode(TEXT), TOKENIZER.eos]])
    said = net.generate(ids, max_new_tokens=attention.GENERATED, start=TOKENIZER.start, eos=TOKENIZER.eos)[0].tolist()
    found = attention.views(net, TEXT)
    expected = [attention.shown(TOKENIZER, id) for id in said if id != TOKENIZER.eos]
    assert found[1].keys == found[2].queries == expected and len(expected) > 2


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_the_page_holds_all_weights_and_loads_nothing(name):
    found = attention.views(NETS[name](), "</script> &")
    page = attention.page("runs/<x>", found)
    assert not re.search(r"http|//[a-z]|\bsrc=|\bhref=|@import|url\(|fetch\(", page)
    assert page.count("<script") == page.count("</script>") == 2 and "<x>" not in page
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["run"] == "runs/<x>" and len(data["views"]) == len(found)
    for one, view in zip(data["views"], found, strict=True):
        assert (one["name"], one["queries"], one["keys"]) == (view.name, view.queries, view.keys)
        torch.testing.assert_close(torch.tensor(one["weights"]), view.weights, atol=5.1e-5, rtol=0)


def test_the_picture_is_dark_where_a_weight_is_large(tmp_path):
    weights = torch.zeros(2, 3, 4, 4)
    weights[..., 0] = 1.0
    weights[1, 2] = torch.eye(4)
    attention.draw([attention.View("a", list("abcd"), list("abcd"), weights)], tmp_path / "a.png")
    dark = (imread(tmp_path / "a.png")[..., :3] < 0.4).all(-1)
    dark = dark[:, : dark.shape[1] * 3 // 4]  # without the scale of colours
    assert 0.12 < dark.mean() < 0.25  # a quarter of the maps, which leave room for names


def run(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["attention", *map(str, words)])
    try:
        attention.main()
    except SystemExit as end:
        return end.code, *capsys.readouterr()
    return 0, *capsys.readouterr()


def test_a_run_is_seen(gpt_run, tmp_path, monkeypatch, capsys):
    html, png = tmp_path / "a.html", tmp_path / "a.png"
    words = [f"ckpt={gpt_run}", "--text", "the cat sat on a mat", "--html", html, "--png", png]
    code, out, _ = run(monkeypatch, capsys, *words)
    assert code == 0 and out == f"{html} and {png}: decoder on itself: 2 layers x 2 heads\n"
    assert "<canvas" in html.read_text() and imread(png).shape[0] > 300
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, capsys, gpt_run, "--text", "the cat")[1].startswith("attention.html and attention.png: ")
    assert {*tmp_path.iterdir()} == {html, png, tmp_path / "attention.html", tmp_path / "attention.png"}


@pytest.mark.parametrize(("typed", "reason"), [
    (["RUN", "--html", "NEW.html"], 'no text to read: say --text "..."'),
    (["RUN", "--text", " ", "--html", "NEW.html"], "no text to read"),
    (["RUN", "--text", "a cat", "--html", "THERE.html"], "is there already, and nothing is overwritten"),
    (["RUN", "--text", "a cat", "--html", "NEW.html", "--png", "THERE.png"], "is there already"),
    (["RUN", "--text", "a cat", "--png", "NEW.jpg"], "name a file that ends in .png"),
    (["RUN", "--text", "the cat " * 99, "--html", "NEW.html"], "tokens: give one of 1 to 64, the positions of the net"),
    (["RUN", "--text", "a cat", "--answer", "b", "--html", "NEW.html"], "--answer is for a net whose decoder answers"),
    (["nowhere", "--text", "a cat", "--html", "NEW.html"], "nowhere does not exist"),
])  # fmt: skip
def test_mistakes_are_one_line_and_write_nothing(gpt_run, tmp_path, monkeypatch, capsys, typed, reason):
    monkeypatch.chdir(tmp_path)
    for name in ("THERE.html", "THERE.png"):
        (tmp_path / name).write_text("mine")
    code, out, error = run(monkeypatch, capsys, *(gpt_run if word == "RUN" else word for word in typed))
    assert code == 2 and out == "" and error.startswith("lmzoo: ") and reason in error and error.count("\n") == 1
    left = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert left == {"THERE.html": "mine", "THERE.png": "mine"}


def test_a_text_that_no_page_could_show():
    net = make("bert", position="alibi")
    with pytest.raises(lmzoo.UserError, match="the text has 202 tokens: give one of 1 to 128"):
        attention.views(net, "a" * 200)
    with pytest.raises(lmzoo.UserError, match="the answer has 201 tokens: give one of 1 to 128"):
        attention.views(make("t5"), "a", "a" * 200)


def test_a_net_that_has_diverged():
    net = make("t5")
    with torch.no_grad():
        net.decoder.blocks[1].cross.q.weight[0, 0] = torch.nan
    with pytest.raises(lmzoo.UserError, match="decoder on encoder: layer 1 has weights that are not finite"):
        attention.views(net, TEXT, "the dog")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
def test_a_browser_shows_what_is_pointed_at(tmp_path):
    """The encoder's attention, its second layer and head, and where its third token looks."""
    found = attention.views(make("t5"), TEXT, "the dog")
    probe = """<script>
      document.querySelector("#kinds button").click()
      document.querySelectorAll("#grid canvas")[5].click()
      document.querySelectorAll("#queries > span")[2].dispatchEvent(new MouseEvent("mouseenter"))
      document.title = JSON.stringify([at("where").textContent, [...at("keys").children].map(key => Number(key.title))])
    </script>"""
    (tmp_path / "a.html").write_text(attention.page("run", found) + probe)
    browser = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'own'}", "--dump-dom"]
    shown = subprocess.run([*browser, (tmp_path / "a.html").as_uri()], capture_output=True, text=True)
    where, weights = json.loads(unescape(re.search("<title>(.*)</title>", shown.stdout)[1]))
    assert where == "encoder on itself: layer 1, head 1"
    assert weights == pytest.approx(found[0].weights[1, 1, 2].tolist(), abs=1e-4)
