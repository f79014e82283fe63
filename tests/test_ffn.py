"""Feed-forward parts against their formulas, by the names of the YAML files."""

import math

import pytest
import torch
from hydra.utils import instantiate

from models import read


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN = {
    "relu": lambda x: x.clamp(min=0),
    "relu_no_bias": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * normal_cdf(x),
    "gelu_tanh": gelu_tanh,
}
GATED = {"swiglu": lambda x: x / (1 + torch.exp(-x)), "geglu": gelu_tanh, "reglu": lambda x: x.clamp(min=0)}
BIASED = {"relu", "gelu", "gelu_tanh"}


def build(name):
    torch.manual_seed(0)
    return instantiate(read(f"model/ffn/{name}"))(d_model=6, d_ff=10, dropout=0.0)


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_by_the_formula(name):
    ffn, x = build(name), torch.randn(3, 4, 6)
    if name in GATED:
        hidden = GATED[name](linear(ffn.gate, x)) * linear(ffn.up, x)
    else:
        hidden = PLAIN[name](linear(ffn.up, x))
    torch.testing.assert_close(ffn(x), linear(ffn.down, hidden))


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_parameters(name):
    expected = (3 if name in GATED else 2) * 60 + (16 if name in BIASED else 0)
    assert sum(p.numel() for p in build(name).parameters()) == expected


def test_exact_and_approximate_gelu_differ():
    x = torch.tensor([2.0])
    exact, approximate = (
        instantiate(read(f"model/ffn/{name}")["activation"])()(x).item() for name in ("gelu", "gelu_tanh")
    )
    assert exact == pytest.approx(2 * 0.97724987, abs=1e-6) and 1e-5 < abs(exact - approximate) < 1e-3


def test_dropout_falls_on_the_activations():
    ffn = instantiate(read("model/ffn/relu_no_bias"))(d_model=1, d_ff=1000, dropout=0.5)
    with torch.no_grad():
        ffn.up.weight.fill_(1.0)
        ffn.down.weight.fill_(1.0)
        out = ffn(torch.ones(50, 1))  # a sum of 1000 values, each 0 or 2
        assert abs(out.mean() - 1000) < 30 and 20 < out.std() < 45  # sqrt(1000) = 31.6
        assert (ffn.eval()(torch.ones(2, 1)) == 1000).all()
