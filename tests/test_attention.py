"""Attention against loops written from the formulas, and its backends against each other."""

import math

import pytest
import torch
from torch import nn

from lmzoo.blocks.attention import Additive, Attention, GroupedQuery, choose_backend
from lmzoo.blocks.layout import Layout
from lmzoo.blocks.position import Alibi, Buckets, Position, Rotary
from models import ids, make

SIZES = {"d_model": 16, "n_heads": 4, "d_head": 4}
PLACE = {**SIZES, "max_len": 32}


def part(kind=Attention, seed=0, **options):
    torch.manual_seed(seed)
    return kind(**{**SIZES, "n_kv_heads": 4, **options}).eval()


def layout(batch=2, length=6, mask=None, documents=None, causal=True):
    return Layout.of(torch.zeros(batch, length, dtype=torch.long), mask, documents, causal)


def states(batch=2, length=6, width=16, seed=1):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def close(got, expected, atol=1e-5):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_scaled_dot_product_by_a_loop():
    attn, x = part(n_kv_heads=2), states()
    q, k, v = attn.q(x), attn.k(x), attn.v(x)
    out = torch.zeros(2, 6, 16)
    for b in range(2):
        for h in range(4):
            mine, shared = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
            for t in range(6):
                scores = torch.stack([q[b, t, mine] @ k[b, s, shared] / math.sqrt(4) for s in range(t + 1)])
                weights = scores.exp() / scores.exp().sum()
                out[b, t, mine] = sum(w * v[b, s, shared] for s, w in enumerate(weights))
    close(attn(x, layout()), attn.out(out))


def test_additive_by_a_loop():
    attn, x, memory = part(Additive, d_memory=10), states(), states(length=3, width=10, seed=2)
    q, k, v = attn.q(x), attn.k(memory), attn.v(memory)
    out = torch.zeros(2, 6, 16)
    for b in range(2):
        for h in range(4):
            mine = slice(4 * h, 4 * h + 4)
            for t in range(6):
                scores = torch.stack([attn.energy[h] @ torch.tanh(q[b, t, mine] + k[b, s, mine]) for s in range(3)])
                out[b, t, mine] = scores.softmax(0) @ v[b, :, mine]
    close(attn(x, layout().over(memory, None), memory=memory), attn.out(out))


def test_additive_self_attention_is_causal_and_takes_a_bias():
    attn, x, position = part(Additive), states(batch=1), Alibi(**PLACE, causal=True)
    q, k, v = (layer(x)[0].unflatten(-1, (4, 4)) for layer in (attn.q, attn.k, attn.v))
    out = torch.zeros(6, 4, 4)
    for h, slope in enumerate([2**-2, 2**-4, 2**-6, 2**-8]):
        for t in range(6):
            scores = [attn.energy[h] @ torch.tanh(q[t, h] + k[s, h]) - slope * (t - s) for s in range(t + 1)]
            out[t, h] = torch.stack(scores).softmax(0) @ v[: t + 1, h]
    close(attn(x, layout(batch=1), position), attn.out(out.flatten(1))[None])


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
FACTS = {"plain": {}, "padded": {"mask": PADDED}, "packed": {"documents": DOCUMENTS},
         "both": {"mask": PADDED, "documents": DOCUMENTS}, "nothing kept": {"mask": PADDED * 0}}  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("scheme", [Position, Rotary, Alibi, Buckets])
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"n_kv_heads": 2}, {"n_kv_heads": 1, "scale": 1.0, "window": 2}], ids=str
)
def test_backends_agree_in_outputs_and_gradients(options, scheme, facts, causal):
    results = []
    for backend in ("sdpa", "matmul"):
        attn = part(**options, backend=backend)
        torch.manual_seed(3)
        position, x = scheme(**PLACE, causal=causal), states().requires_grad_()
        out = attn(x, layout(causal=causal, **FACTS[facts]), position)
        (out * states(seed=4)).sum().backward()
        assert out.isfinite().all()
        results.append([out, x.grad, *(p.grad for p in (*attn.parameters(), *position.parameters()))])
    for got, expected in zip(*results, strict=True):
        close(got, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("facts", ["packed", "both"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"n_kv_heads": 2, "window": 2, "scale": 1.0}], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_blocks_of_documents_and_windows_agree_with_the_dense_mask(options, facts, causal):
    wide = {"d_model": 64, "d_head": 16, **options}
    rows, x = layout(causal=causal, **FACTS[facts]), states(width=64)
    mask, is_causal = part(**wide, backend="flex").lower(x, rows)
    assert mask.kv_num_blocks.shape == (2, 1, 1) and not is_causal
    position = Rotary(d_model=64, n_heads=4, d_head=16, max_len=32, causal=causal)
    got, expected = (part(**wide, backend=kind)(x, rows, position) for kind in ("flex", "matmul"))
    seeing = rows.keep if rows.keep is not None else torch.ones(2, 6, dtype=torch.bool)
    close(got[seeing], expected[seeing])
    assert got.isfinite().all()


def test_blocks_are_for_much_that_is_unseen():
    def mask(position=None, train=False, **options):
        return part(**{"d_head": 16, "backend": "flex", **options}).train(train).lower(
            states(), layout(documents=DOCUMENTS), position)[0]  # fmt: skip

    with torch.no_grad():
        assert part(d_head=16, backend="flex").lower(states(), layout()) == (None, True)
        assert not isinstance(mask(dropout=0.5), torch.Tensor)
        biased, narrow, dropped = mask(Buckets(**PLACE, causal=True)), mask(d_head=4), mask(dropout=0.5, train=True)
    for dense in (biased, narrow, dropped, mask()):  # the last would have no backward pass on a CPU
        assert isinstance(dense, torch.Tensor)


@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_cross_attention_reads_a_memory_of_another_width(backend):
    attn, memory = part(d_memory=10, backend=backend), states(length=9, width=10)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    got = attn(states(), layout().over(memory, mask), memory=memory)
    close(got[1:], attn(states()[1:], layout(batch=1).over(memory[1:, :4], None), memory=memory[1:, :4]))


def test_one_head_and_eight_have_equal_parameters():
    def count(n_heads):
        attn = Attention(d_model=64, n_heads=n_heads, n_kv_heads=n_heads, d_head=64 // n_heads)
        return sum(p.numel() for p in attn.parameters())

    assert count(1) == count(8) == 4 * (64 * 64 + 64)


def test_shared_heads_are_repeated_heads():
    grouped, full = part(n_kv_heads=2), part()
    state = grouped.state_dict()
    for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    close(grouped(states(), layout()), full(states(), layout()))


@pytest.mark.parametrize("group, n_kv_heads", [(2, 2), (4, 1), (1, 4), (None, 1)])
def test_groups(group, n_kv_heads):
    attn = part(GroupedQuery, group=group)
    assert attn.n_kv_heads == n_kv_heads and attn.k.out_features == 4 * n_kv_heads and attn.q.out_features == 16


def test_a_head_may_have_a_width_of_its_own():
    attn = part(d_head=6)
    assert attn.q.weight.shape == (24, 16) and attn.out.weight.shape == (16, 24)
    assert attn(states(), layout()).shape == (2, 6, 16)


def test_norms_on_queries_and_keys():
    attn, x = part(qk_norm=nn.RMSNorm, scale=1.0), states(batch=1, length=1)
    q = attn.q_norm(attn.q(x).unflatten(-1, (4, 4)))
    close(q.square().mean(-1), torch.ones(1, 1, 4), atol=1e-3)
    grown = part(qk_norm=nn.RMSNorm, scale=1.0)
    with torch.no_grad():  # what the norm takes away cannot matter
        for layer in (grown.q, grown.k):
            layer.weight.mul_(7)
            layer.bias.mul_(7)
    close(grown(states(), layout()), attn(states(), layout()), atol=1e-4)


def test_biases_are_chosen_apart():
    assert [name for name, _ in part(bias=False).named_parameters() if "bias" in name] == []
    assert [name for name, _ in part(bias=False, out_bias=True).named_parameters() if "bias" in name] == ["out.bias"]


@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_dropout_falls_on_the_weights_in_training_only(backend):
    attn = part(dropout=0.5, backend=backend, bias=False)
    x = torch.ones(1, 1, 16).expand(64, 64, 16)  # equal values: dropped weights change the sums, not their mean
    facts = layout(64, 64, causal=False)
    with torch.no_grad():
        full = attn(x, facts)
        attn.train()
        torch.manual_seed(0)
        noisy = attn(x, facts)
    close(full.std(dim=1), torch.zeros(64, 16))
    ratio = (noisy * full).sum() / (full * full).sum()
    assert (noisy - full).abs().max() > 0.01 and abs(ratio - 1) < 0.02


AUTOCAST = ["multi_head", "no_bias", "grouped_query", "multi_query", "qk_norm", "sliding_window", "t5", "additive"]


@pytest.mark.parametrize("position", ["learned", "alibi", "t5"])
@pytest.mark.parametrize("kind", AUTOCAST)
def test_bfloat16_autocast_stays_close_to_float32(kind, position):
    net, rows = make("gpt", attention=kind, position=position), ids(4, 12)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[0, :3] = 0

    def loss():
        net.zero_grad()
        value = nn.functional.cross_entropy(net(rows, mask)[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
        value.backward()
        assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
        return value.item()

    exact = loss()
    with torch.autocast("cpu", torch.bfloat16):
        assert loss() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("kind", AUTOCAST)
def test_a_bfloat16_model_runs(kind):
    net, rows = make("gpt", attention=kind, position="t5"), ids(2, 12)
    torch.testing.assert_close(net.bfloat16()(rows).float(), net.float()(rows), rtol=0.1, atol=0.2)


def test_the_choice_of_a_kernel():
    cpu = torch.device("cpu")
    assert choose_backend(cpu, torch.float32, 64) == "sdpa"
    assert choose_backend(cpu, torch.bfloat16, 64) == "matmul"
    assert choose_backend(cpu, torch.bfloat16, 4096) == "sdpa"
    assert choose_backend(torch.device("cuda"), torch.bfloat16, 64) == "flex"


@pytest.mark.parametrize(
    "kind, options, words",
    [
        (Attention, {"n_kv_heads": 3}, "n_heads=4 is not divisible by n_kv_heads=3"),
        (Attention, {"backend": "flash"}, "backend=flash"),
        (Attention, {"window": 0}, "window=0"),
        (GroupedQuery, {"group": 3}, "n_heads=4 is not divisible by group=3"),
        (GroupedQuery, {"group": 2, "n_kv_heads": 1}, "n_kv_heads=1 contradicts n_heads=4 / group=2"),
    ],
)
def test_sizes_that_do_not_fit(kind, options, words):
    with pytest.raises(ValueError, match=words):
        part(kind, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("facts", ["plain", "padded", "packed"])
def test_backends_agree_on_a_gpu_in_bf16(facts, window):
    results = []
    for backend in ("flex", "sdpa", "matmul"):
        with torch.device("cuda"):
            attn = part(d_head=16, window=window, backend=backend).cuda()
            rows = layout(causal=True, **{name: fact.cuda() for name, fact in FACTS[facts].items()})
        x = states().cuda().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out = attn(x, rows, None)
        (out * states(seed=4).cuda()).sum().backward()
        results.append([out.float(), x.grad])
    for got, *others in zip(*results, strict=True):
        for expected in others:
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
