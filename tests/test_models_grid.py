"""What holds for every family: all parts go together, published sizes, padding and packing change nothing."""

from functools import partial
from itertools import product

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from lmzoo.checkpoint import build
from lmzoo.config import compose
from lmzoo.errors import UserError
from lmzoo.models import Decoder, Encoder, EncoderDecoder
from models import FAMILIES, POSITIONS, TINY, attention, config, ids, logits, make, read

ATTENTIONS = ["multi_head", "no_bias", "grouped_query", "multi_query", "qk_norm", "sliding_window", "t5", "additive"]
FFNS = ["relu", "relu_no_bias", "gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu", "reglu"]
NORMS = ["layernorm", "rmsnorm"]
BLOCKS = ["pre", "post", "parallel", "sandwich"]


def recipe(node):
    """A part's node as a plain partial, which is called ten thousand times below."""
    words = {key: recipe(value) if isinstance(value, dict) else value for key, value in node.items() if key[0] != "_"}
    return partial(get_object(node["_target_"]), **words)


@pytest.mark.slow
def test_all_parts_go_together():
    """Every position x attention x ffn x norm x block x family is built, run forward and backward, or refused."""
    norms = {name: recipe(read(f"model/norm/{name}")) for name in NORMS}
    attentions = {name: read(f"model/attention/{name}") for name in ATTENTIONS}
    attentions["sliding_window"] = attentions["sliding_window"] | {"window": 2}
    groups = {"position": POSITIONS, "ffn": FFNS, "block": BLOCKS, "cross": ["t5"]}
    parts = {f"{kind}/{name}": recipe(read(f"model/{kind}/{name}")) for kind in groups for name in groups[kind]}
    attentions = {
        (name, norm): recipe(node | {"qk_norm": read(f"model/norm/{norm}")} if name == "qk_norm" else node)
        for (name, node), norm in product(attentions.items(), norms)
    }
    fixed = {"embed": "tokens", "head": "tied", "init": "normal"}
    fixed = {kind: recipe(read(f"model/{kind}/{name}")) for kind, name in fixed.items()}
    sizes = {"vocab_size": 7, "d_model": 8, "n_layers": 1, "n_heads": 4, "d_ff": 8, "max_len": 4}
    families = {Encoder: {}, Decoder: {}, EncoderDecoder: {"cross": parts["cross/t5"]}}
    rows, refused, run = ids(1, 3, vocab_size=7), set(), 0
    for position, kind, ffn, norm, block, family in product(POSITIONS, ATTENTIONS, FFNS, NORMS, BLOCKS, families):
        words = {"position": parts[f"position/{position}"], "attention": attentions[kind, norm], "norm": norms[norm],
                 "ffn": parts[f"ffn/{ffn}"], "block": parts[f"block/{block}"]}  # fmt: skip
        try:
            net = family(**sizes, **fixed, **words, **families[family])
        except ValueError as error:
            assert "rotary positions need attention by dot products" in str(error)
            refused.add((position, kind))
            continue
        out = logits(net, rows)
        out.logsumexp(-1).sum().backward()
        name = (position, kind, ffn, norm, block, family.__name__)
        gradients = [p.grad for p in net.parameters()]
        assert out.shape == (1, 3, 7) and all(g is not None for g in gradients), name
        assert torch.cat([out.flatten(), *(g.flatten() for g in gradients)]).isfinite().all(), name
        run += 1
    assert refused == {("rotary", "additive"), ("rotary_linear", "additive")}
    assert run == (7 * 8 - 2) * 8 * 2 * 4 * 3


@pytest.mark.parametrize(
    "name, task",
    [("gpt", "clm"), ("llama", "clm"), ("bert", "mlm"), ("t5", "span_corruption"), ("t5_v1_0", "span_corruption"),
     ("transformer", "span_corruption")],
)  # fmt: skip
def test_the_nets_of_these_tests_are_those_that_a_user_composes(name, task):
    sizes = [f"model.{key}={value}" for key, value in TINY.items()]
    composed = compose(f"model={name}", f"task={task}", "tokenizer.vocab_size=50", *sizes)
    assert OmegaConf.to_container(composed, resolve=True)["model"] == config(name)


EXACT = {
    "gpt-base": 124_439_808,
    "gpt-medium": 354_823_168,
    "gpt-large": 774_030_080,
    "gpt-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5_v1_0-small": 60_506_624,
    "t5_v1_0-base": 222_903_552,
    "t5_v1_0-large": 737_668_096,
    "t5-small": 76_961_152,
    "t5-base": 247_577_856,
    "t5-large": 783_150_080,
}
ROUNDED = {"transformer-base": (65e6, 0.03), "transformer-big": (213e6, 0.03), "gpt-175b": (175e9, 0.01)}


def published(name, **words):
    """The number of parameters of ``conf/published/NAME.yaml``."""
    size = read(f"published/{name}")
    with torch.device("meta"):
        net = build(config(name.split("-")[0], **size["tokenizer"], **size["model"], **words))
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_published_sizes_are_exact(name):
    assert published(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_published_sizes_as_the_papers_round_them(name):
    count, tolerance = ROUNDED[name]
    assert published(name) == pytest.approx(count, rel=tolerance)


def test_bert_with_its_pooler():
    assert published("bert-base", head="pooler") == 109_482_240


SEEN = {
    "all": attention(),
    "all by matmul": attention(backend="matmul"),
    "window": attention(window=3),
    "window by matmul": attention(window=3, backend="matmul"),
    "grouped": read("model/attention/grouped_query"),
    "additive": read("model/attention/additive"),
}
TRIPLES = [(f, p, s) for f, p, s in product(FAMILIES, POSITIONS, SEEN) if not (s == "additive" and "rotary" in p)]


def net_of(family, position, seen):
    words = {"cross": SEEN[seen]} if family == "encoder-decoder" and "window" not in seen else {}
    return make(FAMILIES[family], position=position, attention=SEEN[seen], **words)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family, position, seen", TRIPLES)
def test_padding_is_inert(family, position, seen):
    net, rows = net_of(family, position, seen), ids(2, 6)
    with torch.no_grad():
        expected = logits(net, rows)
        close(logits(net, rows, torch.ones(2, 6)), expected)
        for left, right in ((0, 3), (3, 0), (2, 4)):
            padded = torch.nn.functional.pad(rows, (left, right), value=5)
            mask = torch.nn.functional.pad(torch.ones(2, 6), (left, right))
            close(logits(net, padded, mask)[:, left : left + 6], expected)


@pytest.mark.parametrize("family, position, seen", TRIPLES)
def test_a_packed_document_gives_what_it_gives_alone(family, position, seen):
    net, documents = net_of(family, position, seen), [ids(1, n, seed=n) for n in (5, 1, 7, 3)]
    row = torch.cat([*documents, torch.zeros(1, 2, dtype=torch.long)], 1)
    number = torch.tensor([[4] * 5 + [0] + [1] * 7 + [2] * 3 + [-1] * 2])
    mask = (number >= 0).long()
    with torch.no_grad():
        alone = torch.cat([logits(net, document) for document in documents], 1)
        close(logits(net, row, mask, number)[:, :16], alone)
        close(logits(net, row, None, number)[:, :16], alone)


@pytest.mark.parametrize("position", POSITIONS)
def test_documents_of_other_lengths_on_the_two_sides(position):
    net = make("t5", position=position)
    pairs = [(ids(1, s, seed=s), ids(1, t, seed=10 * t)) for s, t in ((4, 6), (7, 2), (3, 5))]
    source, target = (torch.cat(side, 1) for side in zip(*pairs, strict=True))
    source_number = torch.tensor([[0] * 4 + [1] * 7 + [2] * 3])
    target_number = torch.tensor([[0] * 6 + [1] * 2 + [2] * 5])
    with torch.no_grad():
        got = net(source, None, target, None, source_number, target_number)
        close(got, torch.cat([net(s, None, t) for s, t in pairs], 1))


@pytest.mark.parametrize("family, position, seen", TRIPLES)
def test_a_row_of_padding_only_gives_finite_numbers_and_gradients(family, position, seen):
    net, rows, mask = net_of(family, position, seen), ids(2, 6), torch.ones(2, 6)
    mask[0] = 0
    out = logits(net, rows, mask)
    out.logsumexp(-1).sum().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in net.parameters())
    with torch.no_grad():
        close(out[1:], logits(net, rows[1:]))


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
@pytest.mark.parametrize("name", ["bert", "gpt", "t5"])
def test_a_classifier_called_plainly_answers_a_row_alike_however_it_is_padded(name, pool):
    head = {"_target_": "lmzoo.blocks.head.Classifier", "_partial_": True, "n_classes": 4, "pool": pool}
    net, row = make(name, head=head), ids(1, 5)
    expected = logits(net, row)
    assert expected.shape == (1, 4) and not torch.allclose(logits(net, row[:, 1:-1]), expected, atol=1e-3)
    for left in (0, 1, 3):
        rows, mask = torch.full((1, 8), 7), torch.zeros(1, 8)
        rows[:, left : left + 5], mask[:, left : left + 5] = row, 1
        torch.testing.assert_close(logits(net, rows, mask), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt", "t5"])
def test_what_are_no_rows_of_ids_is_said_in_a_sentence(name):
    net = make(name)
    for given in "Return a", [5, 6], [[5, 6]], torch.tensor([5, 6]), torch.rand(1, 2):
        with pytest.raises(UserError, match=r"^input_ids: give a tensor \(B, T\) of ids, .*encode\(text\) makes ids"):
            net(given, None, ids(1, 2))
    with pytest.raises(UserError, match=r"mask of input_ids must be a tensor of their shape \(1, 6\), not of"):
        net(ids(1, 6), torch.ones(1, 5), ids(1, 5))
