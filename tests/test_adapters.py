"""Low-rank adapters: what they compute and what of them is trained and kept; test_adapter_runs.py has whole runs."""

import pytest
import torch
from torch.nn import functional as F

import models
from lmzoo import UserError, adapters, engines, memory

NAMES = models.FAMILIES.values()
TARGETS = ["*attn.q", "*attn.v"]
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True}}


def adapted(name, targets=TARGETS, rank=2, alpha=8.0, seed=3, **words):
    """(an adapted net, the same net without an adapter); B is no longer zero."""
    net, plain = models.make(name, **words), models.make(name, **words)
    adapters.adapt(net, rank, targets, alpha)
    torch.manual_seed(seed)
    for key, weight in net.named_parameters():
        if "lora_b" in key:
            torch.nn.init.normal_(weight, std=0.1)
    return net, plain


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()  # where the kernel of T5's attention does not depend on whether its bias learns
def test_an_adapted_net_begins_as_it_was_bit_for_bit(name):
    net, ids = models.make(name), models.ids(2, 9)
    before = models.logits(net, ids)
    adapters.adapt(net, 4, ["*"], 8.0)
    assert torch.equal(models.logits(net, ids), before)


def test_a_layer_by_hand():
    layer = torch.nn.Linear(3, 2)
    lora = adapters.LoRA(layer, 1, 6.0)
    assert lora.weight is layer.weight and lora.bias is layer.bias
    with torch.no_grad():
        lora.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
        lora.bias.copy_(torch.tensor([0.5, 0]))
        lora.lora_a.copy_(torch.tensor([[1.0, 2, 3]]))
        lora.lora_b.copy_(torch.tensor([[1.0], [-1]]))
    assert lora(torch.tensor([1.0, 1, 1])).tolist() == [1.5 + 6 * 6, 1 - 6 * 6]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("targets", [TARGETS, ["*", "-*attn*"]])
def test_merged_is_adapted(name, targets):
    net, plain = adapted(name, targets)
    ids = models.ids(2, 9)
    ours, before = models.logits(net, ids), models.logits(plain, ids)
    plain.load_state_dict(adapters.merge(adapters.weights(net), adapters.scale(net)))
    torch.testing.assert_close(models.logits(plain, ids), ours, rtol=0, atol=1e-5)
    assert (ours - before).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_only_adapters_and_what_is_new_are_trained_and_kept(name):
    net = models.make(name)
    layers = {key: layer for key, layer in net.named_modules() if key.endswith(("attn.q", "attn.v"))}
    adapters.adapt(net, 3, TARGETS, 8.0, new=["head"])
    trained = {key for key, weight in net.named_parameters() if weight.requires_grad}
    ours = {f"{key}.lora_{side}" for key in layers for side in "ab"}
    assert trained == {*net.state_dict()} == ours | {f"head.{key}" for key in net.head.state_dict()}
    n = sum(weight.numel() for key, weight in net.named_parameters() if "lora" in key)
    assert n == sum(3 * (layer.in_features + layer.out_features) for layer in layers.values()) and len(layers) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_loading_what_was_kept_leaves_the_frozen_weights(name):
    net, _ = adapted(name)
    frozen = {key: weight.clone() for key, weight in net.named_parameters() if not weight.requires_grad}
    other, _ = adapted(name, seed=4)
    holder = torch.nn.ModuleDict({"net": net})  # as a task holds it
    holder.load_state_dict({f"net.{key}": weight for key, weight in other.state_dict().items()})
    now = dict(net.named_parameters())
    assert all(torch.equal(now[key], weight) for key, weight in other.state_dict().items())
    assert all(torch.equal(now[key], weight) for key, weight in frozen.items()) and len(frozen) > 10
    with pytest.raises(RuntimeError, match="lora_b"):
        holder.load_state_dict({f"net.{key}": w for key, w in other.state_dict().items() if "lora_b" not in key})


def gradients(net, **autocast):
    net.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        logits = models.logits(net, models.ids(2, 9))
    F.cross_entropy(logits.float().flatten(0, 1), models.ids(18, seed=2)).backward()
    return {key: weight.grad.clone() for key, weight in net.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_merged_matrix(name):
    """dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, where dL/dW is the merged net's; recomputed and compiled alike."""
    net, plain = adapted(name)
    plain.load_state_dict(adapters.merge(adapters.weights(net), adapters.scale(net)))
    whole, ours = gradients(plain), gradients(net)
    assert {key.rpartition(".")[2] for key in ours} == {"lora_a", "lora_b"}
    weights = dict(net.named_parameters())
    for key in ours:
        layer, _, side = key.rpartition(".")
        a, b, d = weights[f"{layer}.lora_a"], weights[f"{layer}.lora_b"], whole[f"{layer}.weight"]
        expected = 4.0 * (b.T @ d if side == "lora_a" else d @ a.T)
        torch.testing.assert_close(ours[key], expected, rtol=1e-4, atol=1e-6)
    recomputed, _ = adapted(name)
    engines.recompute_blocks(recomputed)
    compiled, _ = adapted(name)
    for block in engines.blocks(compiled):
        block.compile(backend="eager")
    for other in (recomputed, compiled):
        found = gradients(other)
        assert found.keys() == ours.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, ours[key], rtol=1e-4, atol=1e-6)
    half = gradients(net, mixed=True)
    assert all(gradient.dtype == torch.float32 for gradient in half.values())
    for key, gradient in half.items():
        assert F.cosine_similarity(gradient.flatten(), ours[key].flatten(), 0) > 0.98, key


@pytest.mark.parametrize(("words", "line"), [
    ({"targets": ["*attn.w"]}, "adapter.targets: *attn.w matches no linear layer of the blocks; there are"),
    ({"targets": ["head*"]}, "adapter.targets: head* matches no linear layer of the blocks"),
    ({"targets": ["*norm*"]}, "adapter.targets: *norm* matches no linear layer of the blocks"),
    ({"targets": ["*attn.q", "-*"]}, "leaves no layer to adapt"),
    ({"targets": []}, "leaves no layer to adapt"),
    ({"rank": 17}, "adapter.rank=17 is more than the 16 x 16 matrix of blocks.0.attn.q can have: give at most 16"),
])  # fmt: skip
def test_what_can_not_be_adapted(words, line):
    with pytest.raises(UserError) as error:
        adapters.adapt(models.make("gpt"), **({"rank": 2, "targets": TARGETS, "alpha": 1.0} | words))
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_frozen_base(name):
    """Gradients and moments are of what is trained; what only a frozen matrix's gradient needs is not kept."""
    sizes = {"d_model": 32, "n_layers": 2, "d_ff": 64}
    config = {"model": models.config(name, **sizes), "trust": [], "task": {}, "optim": OPTIM, "data": {"batch_size": 4},
              "trainer": {"precision": "32-true", "strategy": "auto", "activation_checkpointing": "none"}}  # fmt: skip
    adapter = {"rank": 2, "targets": TARGETS, "alpha": 1.0}
    cpu = torch.device("cpu")
    full, lora = (memory.of_run(config | more, 4, (16, 16), 64, cpu, 1, torch.float32)
                  for more in ({}, {"adapter": adapter}))  # fmt: skip
    n = 2 * 2 * 2 * (32 + 32) * (2 if name == "t5" else 1)  # layers, q and v, rank, sides: of one stack or two
    assert lora.gradients == 4 * n and lora.weights == full.weights + 4 * n
    assert lora.optimizer == pytest.approx(8 * n, rel=0.1) and lora.total < 0.9 * full.total
