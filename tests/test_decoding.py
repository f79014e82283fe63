"""Generation against the full forward, row by row, and what is refused."""

import pytest
import torch

from lmzoo.decoding import generate
from lmzoo.decoding.sampling import distribution, draw, uniforms
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte
from models import POSITIONS, attention, ids, make

NETS = {
    **{f"gpt {name}": ("gpt", {"position": name}) for name in POSITIONS},
    "llama": ("llama", {"n_kv_heads": 2}),
    "window": ("gpt", {"attention": attention(window=3), "position": "t5"}),
    "t5": ("t5", {}),
    "transformer": ("transformer", {}),
}


def greedy(net, row, n, start=None):
    """n likeliest tokens by the full forward each time, without any cache: row (1, T) -> (1, T + n) or (1, 1 + n)."""
    out = row if start is None else torch.tensor([[start]])
    for _ in range(n):
        logits = net(out) if start is None else net(row, None, out)
        out = torch.cat([out, logits[:, -1:].argmax(-1)], 1)
    return out


@pytest.mark.parametrize("name", NETS)
def test_greedy_is_the_argmax_of_the_full_forward(name):
    kind, words = NETS[name]
    net, row = make(kind, **words), ids(1, 6)
    start = None if kind in ("gpt", "llama") else 3
    assert torch.equal(generate(net, row, max_new_tokens=9, start=start), greedy(net, row, 9, start))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NETS)
def test_a_batch_gives_what_its_rows_give_alone(name, side):
    kind, words = NETS[name]
    net, start = make(kind, **words), None if kind in ("gpt", "llama") else 3
    rows = [ids(1, length, seed=length) for length in (7, 3, 1, 5)]
    alone = [generate(net, row, max_new_tokens=8, start=start)[0, -8:].tolist() for row in rows]
    assert len({tuple(tokens) for tokens in alone}) > 1
    batch, mask = torch.full((4, 8), 9), torch.zeros(4, 8, dtype=torch.long)
    for i, row in enumerate(rows):
        columns = slice(8 - row.shape[1], 8) if side == "left" else slice(0, row.shape[1])
        batch[i, columns], mask[i, columns] = row[0], 1
    together = generate(net, batch, mask, max_new_tokens=8, start=start)
    assert together[:, -8:].tolist() == alone
    assert together.shape == (4, 16 if start is None else 9)


def test_rows_end_with_eos_and_are_filled_up_with_it():
    net, rows = make("gpt"), ids(6, 4)
    free = generate(net, rows, max_new_tokens=12)
    eos = free[0, 6].item()  # what the first row says third
    got = generate(net, rows, max_new_tokens=12, eos=eos)
    for row, whole in zip(got[:, 4:].tolist(), free[:, 4:].tolist(), strict=True):
        n = whole.index(eos) + 1 if eos in whole else len(whole)
        assert row[:n] == whole[: len(row)][:n] and set(row[n:]) <= {eos}
    assert torch.equal(generate(net, rows[:1], max_new_tokens=12, eos=eos), free[:1, :7])  # and it stops there


@pytest.mark.parametrize("kind, words", [("gpt", {}), ("t5", {"start": 3})])
def test_a_net_is_asked_as_the_function_is(kind, words):
    net, rows, mask = make(kind), ids(2, 4), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert torch.equal(net.generate(rows, mask, 5, **words), generate(net, rows, mask, 5, **words))


def test_forbidden_ids_never_come_out():
    net, rows = make("gpt"), ids(8, 4)
    likeliest = generate(net, rows, max_new_tokens=6)[:, 4:].unique().tolist()
    for words in ({}, {"temperature": 5.0}):
        got = generate(net, rows, max_new_tokens=6, forbidden=likeliest, **words)[:, 4:]
        assert not set(likeliest) & set(got.flatten().tolist())


def test_ids_beyond_the_tokenizer_never_come_out():
    net, rows = make("gpt"), ids(8, 4, vocab_size=5)
    assert generate(net, rows, max_new_tokens=6, temperature=9.0)[:, 4:].max() >= 5
    net.tokenizer = range(5)  # any object of that length
    assert generate(net, rows, max_new_tokens=6, temperature=9.0)[:, 4:].max() < 5


def test_sampling_is_a_function_of_the_seed_and_of_the_row_alone():
    net, rows = make("gpt"), ids(3, 4)
    got = generate(net, rows, max_new_tokens=6, temperature=2.0, seed=7)
    assert torch.equal(generate(net, rows, max_new_tokens=6, temperature=2.0, seed=7), got)
    assert not torch.equal(generate(net, rows, max_new_tokens=6, temperature=2.0, seed=8), got)
    for i in range(3):
        assert torch.equal(
            generate(net, rows[i : i + 1], max_new_tokens=6, temperature=2.0, seed=7 + i), got[i : i + 1]
        )
    same = generate(net, rows[:1].repeat(3, 1), max_new_tokens=6, temperature=2.0)
    assert len({tuple(row) for row in same.tolist()}) == 3


def test_torchs_own_generator_is_left_alone():
    net, before = make("gpt"), torch.get_rng_state()
    generate(net, ids(1, 4), max_new_tokens=3, top_k=5)
    assert torch.equal(torch.get_rng_state(), before)


def frequencies(temperature=None, top_k=None, top_p=None, n=10000):
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log().expand(n, 4)
    drawn = draw(*distribution(logits, temperature, top_k, top_p), uniforms(0, n, 1, logits.device)[:, 0])
    return torch.bincount(drawn, minlength=4).double() / n


@pytest.mark.parametrize(
    "words, expected",
    [
        ({"temperature": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 0.5}, [0.0025 / 0.365, 0.25 / 0.365, 0.0225 / 0.365, 0.09 / 0.365]),  # p^2, normalised
        ({"top_k": 2}, [0, 5 / 8, 0, 3 / 8]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 5 / 8, 0, 3 / 8]),
        ({"top_p": 0.9}, [0, 50 / 95, 15 / 95, 30 / 95]),
        ({"top_p": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        ({"top_k": 3, "top_p": 0.6}, [0, 5 / 8, 0, 3 / 8]),  # among the three: .526, .316, .158
    ],
    ids=str,
)
def test_distributions(words, expected):
    got = frequencies(**words)
    assert got.tolist() == pytest.approx(expected, abs=0.02)
    assert all(g == 0 for g, e in zip(got.tolist(), expected, strict=True) if e == 0)


def test_top_k_keeps_k_of_equal_ones():
    probabilities, ids = distribution(torch.zeros(1, 6), top_k=2)
    assert probabilities.tolist() == [[0.5, 0.5]] and len(ids.unique()) == 2


def test_dropout_is_off_and_the_mode_comes_back():
    net, row = make("gpt", dropout=0.5), ids(1, 4)
    expected = generate(net, row, max_new_tokens=8)
    net.train()
    assert torch.equal(generate(net, row, max_new_tokens=8), expected) and net.training and net.blocks[0].training
    assert not expected.requires_grad


def test_up_to_the_last_learned_position():
    net, row = make("gpt"), ids(1, 20)
    assert generate(net, row, max_new_tokens=12).shape == (1, 32)
    with pytest.raises(UserError, match="max_new_tokens=13: this takes 33 positions, but the model has 32"):
        generate(net, row, max_new_tokens=13)
    assert generate(make("gpt", position="rotary"), row, max_new_tokens=13).shape == (1, 33)


@pytest.mark.parametrize(
    "kind, words, message",
    [
        ("gpt", {"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ("gpt", {"temperature": float("nan")}, "temperature=nan must be above 0"),
        ("gpt", {"top_p": 0.0}, "top_p=0.0"),
        ("gpt", {"top_p": 1.5}, "top_p=1.5"),
        ("gpt", {"top_k": 51}, "top_k=51 must be between 1 and the vocabulary's size, 50"),
        ("gpt", {"top_k": 0}, "top_k=0"),
        ("gpt", {"min_p": 1.5}, "min_p=1.5 must be between 0 and 1"),
        ("gpt", {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ("gpt", {"n_beams": 2, "top_k": 3}, "top_k is for sampling"),
        ("gpt", {"stop": ["a"], "eos": 1}, "model.tokenizer"),
        ("gpt", {"max_new_tokens": 0}, "max_new_tokens=0"),
        ("gpt", {"input_ids": torch.tensor([[50]])}, "between 0 and 49"),
        ("gpt", {"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ("gpt", {"input_ids": torch.tensor([1, 2])}, "rows"),
        ("gpt", {"input_ids": "Return a"}, r"give a tensor \(B, T\) of ids, .* not a str; .*encode\(text\)"),
        ("gpt", {"input_ids": [5, 6, 7]}, "not a list; model.tokenizer.encode"),
        ("gpt", {"input_ids": [[5, 6, 7]]}, r"not a list; .* torch.tensor\(\[ids\]\) a row of them"),
        ("gpt", {"input_ids": torch.rand(1, 4)}, "torch.float32"),
        ("gpt", {"attention_mask": torch.ones(1, 3)}, r"mask of input_ids .* shape \(1, 4\), not of shape \(1, 3\)"),
        ("gpt", {"attention_mask": [[1, 1, 1, 1]]}, "not a list"),
        ("gpt", {"attention_mask": torch.zeros(1, 4)}, "keep a token of every row"),
        ("bert", {}, "family encoder, which fills masks, it cannot generate"),
        ("t5", {}, "needs start"),
        ("gpt head", {}, "head, Pooler"),
    ],
)
def test_refusals_in_one_line(kind, words, message):
    net = make("gpt", head="pooler") if kind == "gpt head" else make(kind)
    with pytest.raises(UserError, match=message) as error:
        generate(net, **{"input_ids": ids(1, 4), "max_new_tokens": 4, **words})
    assert "\n" not in str(error.value)


def test_only_new_tokens_are_read():
    net, lengths = make("gpt"), []
    net.embed.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    generate(net, ids(2, 5), max_new_tokens=4)
    assert lengths == [5, 1, 1, 1]


def test_the_source_is_read_once():
    net, reads = make("t5"), []
    net.encoder.blocks[0].register_forward_hook(lambda *_: reads.append("encoder"))
    for block in net.decoder.blocks:
        block.cross.k.register_forward_hook(lambda *_: reads.append("memory"))
    generate(net, ids(2, 5), max_new_tokens=4, start=0)
    assert reads == ["encoder", "memory", "memory"]


def test_logits_only_where_they_are_needed():
    net, shapes = make("gpt"), []
    net.head.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    generate(net, ids(2, 5), max_new_tokens=2)
    assert shapes == [(2, 16), (2, 16)]


def test_padding_may_stand_amid_a_row_even_with_a_window():
    for words in ({"position": "rotary"}, {"attention": attention(window=3), "position": "t5"}):
        net, row = make("gpt", **words), ids(1, 5)
        holes = torch.tensor([[7, *row[0, :2], 7, 7, *row[0, 2:], 7]])
        mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
        alone = generate(net, row, max_new_tokens=9)[:, 5:]
        assert torch.equal(generate(net, holes, mask, max_new_tokens=9), torch.cat([holes, alone], 1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_penalty_counts_what_is_kept(side):
    """Padding is a token that the row itself does not hold."""
    net, row = make("gpt"), ids(1, 4)
    words = {"max_new_tokens": 8, "repetition_penalty": 3.0}
    alone = generate(net, row, **words)[:, 4:]
    likeliest = alone[0, 0].item()
    padding, zeros = torch.full((1, 3), likeliest), torch.zeros(1, 3, dtype=torch.long)
    pair, mask = ([row, padding], [torch.ones_like(row), zeros]) if side == "right" else (
        [padding, row], [zeros, torch.ones_like(row)])  # fmt: skip
    assert torch.equal(generate(net, torch.cat(pair, 1), torch.cat(mask, 1), **words)[:, 7:], alone)
    assert not torch.equal(alone, generate(net, row, max_new_tokens=8)[:, 4:])


def test_each_rows_text_streams_and_ends_before_a_stop_string():
    """Rows of bytes that are said whatever was read: "abcabc..." from where the prompt is."""
    tokenizer = byte([], 400)
    net = Cycle(tokenizer, "abc")
    rows = torch.tensor([tokenizer.encode("a"), tokenizer.encode("b")])
    heard = {0: "", 1: ""}

    def hear(row, piece):
        heard[row] += piece

    got = generate(net, rows, max_new_tokens=7, eos=tokenizer.eos, stream=hear)
    assert heard == {0: "bcabcab", 1: "cabcabc"} and got.shape == (2, 8)
    heard.update({0: "", 1: ""})
    got = generate(net, rows, max_new_tokens=7, eos=tokenizer.eos, stop=["bca"], stream=hear)
    assert heard == {0: "", 1: "ca"}
    assert got[:, 1:].tolist() == [tokenizer.encode("bca") + [tokenizer.eos] * 2, tokenizer.encode("cabca")]
    assert torch.equal(generate(net, rows, max_new_tokens=7, eos=tokenizer.eos, stop="bca"), got)


class Cycle(torch.nn.Module):
    """A decoder that says a word over and over."""

    family, max_positions, head = "decoder", None, torch.nn.Identity()

    def __init__(self, tokenizer, word):
        super().__init__()
        self.tokenizer, self.vocab_size, self.weight = tokenizer, len(tokenizer), torch.nn.Parameter(torch.zeros(1))
        ids = tokenizer.encode(word)
        self.after = dict(zip(ids, ids[1:] + ids[:1], strict=True))

    def cache(self, batch, max_len):
        return None

    def forward(self, input_ids, attention_mask=None, *, cache, readout):
        following = torch.tensor([[self.after.get(id, 0) for id in row] for row in input_ids.tolist()])
        return readout(self.head, torch.nn.functional.one_hot(following, self.vocab_size))


def test_no_step_makes_rows_anew(monkeypatch):
    """Nothing grows with the steps: cat is called as often for many tokens as for few."""
    net, rows, calls = make("gpt"), ids(2, 3), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *given, **words: calls.append(1) or cat(*given, **words))
    counts = []
    for n in (3, 20):
        generate(net, rows, torch.tensor([[1, 1, 1], [0, 1, 1]]), max_new_tokens=n, eos=60)
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1]


def test_what_comes_out_can_be_trained_on():
    """Ids and weights are ordinary tensors, though the steps ran in inference mode."""
    net, rows = make("gpt"), ids(2, 4)
    out = generate(net, rows, max_new_tokens=4)
    assert not out.is_inference()
    net(out).sum().backward()
    assert all(weight.grad is not None for name, weight in net.named_parameters())


def test_compiled_blocks_are_not_compiled_anew_for_each_length():
    net, row, graphs = make("gpt"), ids(1, 4), []
    expected = generate(net, row, max_new_tokens=4)
    for block in net.blocks:
        block.compile(backend=lambda graph, examples: graphs.append(graph) or graph.forward)
    assert torch.equal(generate(net, row, max_new_tokens=4), expected) and not graphs
    net(row)
    assert graphs  # elsewhere they are compiled as before
