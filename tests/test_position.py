"""Each scheme against its paper's formula, worked out by hand."""

import math

import pytest
import torch

from lmzoo.blocks.position import (
    NTK,
    Alibi,
    Buckets,
    Learned,
    Llama3,
    Position,
    Rotary,
    Sinusoidal,
    YaRN,
    alibi_slopes,
)  # fmt: skip

PLACE = {"d_model": 16, "n_heads": 2, "d_head": 8, "max_len": 64, "causal": True}


def place(kind, **words):
    return kind(**{**PLACE, **words})


def at(*positions):
    return torch.tensor([positions])


def encoding(*positions):
    return place(Sinusoidal).embed(torch.zeros(1, len(positions), 16), at(*positions))[0].double()


def test_sinusoidal_by_the_formula():
    row = encoding(3)[0]
    for i in range(8):
        angle = 3 / 10000 ** (2 * i / 16)
        assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("k", [1, 5, 30])
def test_sinusoidal_shift_is_one_linear_map(k):
    shift = torch.zeros(16, 16, dtype=torch.double)  # (sin, cos) of p + k from those of p: a rotation by k * frequency
    for i in range(8):
        angle = k * 10000 ** (-2 * i / 16)
        c, s = math.cos(angle), math.sin(angle)
        shift[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, s], [-s, c]])
    for p in (0, 1, 7, 25):
        torch.testing.assert_close(shift @ encoding(p)[0], encoding(p + k)[0], rtol=0, atol=1e-5)


def test_learned_adds_the_vector_of_the_position():
    position, x = place(Learned), torch.ones(1, 3, 16)
    assert torch.equal(position.embed(x, at(4, 0, 9)), x + position.table.weight[[4, 0, 9]])
    assert position.max_positions == 64 and place(Rotary).max_positions is None


def turned(position, x, *places):
    """x as queries at these places; as keys it is the same."""
    q, k = position.rotate(x, x, position.turn(at(*places)))
    assert torch.equal(q, k)
    return q


def scores(position, q, k, q_at, k_at):
    q, k = (turned(position, x[None, None, None], place) for x, place in ((q, q_at), (k, k_at)))
    return (q * k).sum().item()


@pytest.mark.parametrize("words", [{}, {"theta": 500.0}, {"fraction": 0.5}, {"scaling": 4.0}], ids=str)
def test_rotary_scores_depend_on_the_distance_only(words):
    position = place(Rotary, **words)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert scores(position, q, k, 9, 2) == pytest.approx(scores(position, q, k, 47, 40), abs=1e-5)
    assert scores(position, q, k, 9, 2) != pytest.approx(scores(position, q, k, 9, 5), abs=1e-3)
    assert scores(position, q, k, 5, 5) == pytest.approx((q @ k).item(), abs=1e-5)


def test_rotary_turns_each_pair_by_its_own_angle():
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0  # pair (1, 5): frequency theta^(-2/8)
    found = turned(place(Rotary, theta=100.0), x, 3)
    angle = 3 * 100.0 ** (-2 / 8)
    expected = torch.zeros(8)
    expected[1], expected[5] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(found.flatten(), expected)


def test_rotary_part_of_a_head():
    x = torch.randn(1, 2, 3, 8)
    found = turned(place(Rotary, fraction=0.5), x, 5, 6, 7)
    assert torch.equal(found[..., 4:], x[..., 4:]) and not torch.isclose(found[..., :4], x[..., :4]).any(-1).all()


def test_position_interpolation_puts_four_positions_into_one():
    x = torch.randn(1, 1, 1, 8)
    torch.testing.assert_close(turned(place(Rotary, scaling=4.0), x, 28), turned(place(Rotary), x, 7))


LONGER = {
    "ntk": (NTK, {}, "dynamic", {}),  # at a row of `factor` times the trained length
    "yarn": (YaRN, {"trained_len": 64, "fast": 8.0}, "yarn", {"beta_fast": 8.0, "beta_slow": 1.0}),
    "llama3": (Llama3, {"trained_len": 64}, "llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
}


@pytest.mark.parametrize("kind", LONGER)
@pytest.mark.parametrize(("scaling", "theta"), [(2.0, 10000.0), (8.0, 500.0)])
def test_scalings_of_rotary_are_those_of_transformers(kind, scaling, theta):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    part, words, name, theirs = LONGER[kind]
    factor = {"factor": 1.0 if kind == "ntk" else scaling, "original_max_position_embeddings": 64}
    rope = {"rope_type": name, "rope_theta": theta, **factor, **theirs}
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    expected, amplitude = ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=64 * int(scaling))
    position = place(part, d_head=48, scaling=scaling, theta=theta, **words)
    torch.testing.assert_close(position.frequencies("cpu"), expected, rtol=0, atol=1e-6)
    assert position.amplitude == pytest.approx(amplitude)
    assert not torch.allclose(position.frequencies("cpu"), place(Rotary, d_head=48, theta=theta).frequencies("cpu"))


@pytest.mark.parametrize("kind", LONGER)
def test_scaled_rotary_scores_depend_on_the_distance_only(kind):
    part, words, *_ = LONGER[kind]
    position = place(part, scaling=4.0, **words)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert scores(position, q, k, 9, 2) == pytest.approx(scores(position, q, k, 207, 200), abs=1e-4)


def test_angles_are_float32_in_a_bfloat16_model():
    position, x = place(Rotary, d_head=2).bfloat16(), torch.tensor([1.0, 0.0]).bfloat16().expand(1, 1, 2, 2)
    found = turned(position, x, 256, 257)
    assert found.dtype == torch.bfloat16
    for row, p in zip(found[0, 0].float(), (256, 257), strict=True):
        torch.testing.assert_close(row, torch.tensor([math.cos(p), math.sin(p)]), rtol=0, atol=0.005)
    waves = place(Sinusoidal).bfloat16().embed(torch.zeros(1, 2, 16).bfloat16(), at(256, 257))[0].float()
    assert waves[:, 0].tolist() == pytest.approx([math.sin(256), math.sin(257)], abs=0.005)


def test_alibi_slopes():
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12) == pytest.approx([2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert alibi_slopes(1) == [2.0**-8]


def test_alibi_bias_is_linear_in_the_distance():
    bias = place(Alibi).bias(at(0, 1, 2), at(0, 1, 2))  # two heads: slopes 2^-4 and 2^-8
    distance = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    torch.testing.assert_close(bias[0], torch.stack([-distance / 16, -distance / 256]))


def test_buckets_looking_back():
    # 16 exact ones, then 16 + floor(16 ln(d/16) / ln 8): 32 is 16 + 5.33, 64 is 16 + 10.67
    position = place(Buckets)
    back = {**{d: d for d in range(16)}, 16: 16, 32: 21, 64: 26, 127: 31, 128: 31, 1000: 31}
    assert position.bucket(-torch.tensor(list(back))).tolist() == list(back.values())
    assert position.bucket(torch.tensor([1, 5, 100])).tolist() == [0, 0, 0]


def test_buckets_to_both_sides():
    # 16 a side, 8 of them exact, then 8 + floor(8 ln(d/8) / ln 16): 16 is 8 + 2, 32 is 8 + 4
    position = place(Buckets, causal=False)
    back = {**{d: d for d in range(8)}, 8: 8, 11: 8, 12: 9, 16: 10, 32: 12, 64: 14, 127: 15, 128: 15, 1000: 15}
    assert position.bucket(-torch.tensor(list(back))).tolist() == list(back.values())
    ahead = [16 + bucket for distance, bucket in back.items() if distance]
    assert position.bucket(torch.tensor(list(back)[1:])).tolist() == ahead


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_buckets, max_distance", [(32, 128), (16, 20), (8, 1000)])
def test_buckets_as_in_transformers(n_buckets, max_distance, causal):
    reference = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    position = place(Buckets, causal=causal, n_buckets=n_buckets, max_distance=max_distance)
    distance = torch.arange(-1500, 1501)
    expected = reference(distance, not causal, n_buckets, max_distance)
    assert torch.equal(position.bucket(distance), expected)


def test_bias_looks_up_key_minus_query_for_each_head():
    position = place(Buckets, causal=False)
    bias = position.bias(at(4), at(1, 4, 6))
    assert bias.shape == (1, 2, 1, 3)
    assert torch.equal(bias[0, :, 0], position.table.weight[[3, 0, 16 + 2]].T)


def test_without_positions_every_hook_is_the_identity():
    position, x = place(Position), torch.randn(1, 2, 16)
    q, k = torch.randn(2, 1, 2, 2, 8)
    assert position.embed(x, at(0, 1)) is x and position.bias(at(0, 1), at(0, 1)) is None
    assert position.rotate(q, k, position.turn(at(0, 1))) == (q, k)


@pytest.mark.parametrize(
    "kind, words, message",
    [
        (Sinusoidal, {"d_model": 15}, "d_model=15"),
        (Rotary, {"d_head": 7}, "d_head=7"),
        (Rotary, {"fraction": 1.5}, "fraction=1.5"),
        (Buckets, {"n_buckets": 1}, "n_buckets=1"),
        (Buckets, {"max_distance": 16}, "max_distance=16"),
    ],
)
def test_sizes_that_do_not_fit(kind, words, message):
    with pytest.raises(ValueError, match=message):
        place(kind, **words)
