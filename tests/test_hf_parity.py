"""The same logits, gradients and greedy answers as transformers' own models, both ways, and what is refused."""

import pytest
import torch
from omegaconf import OmegaConf

import lmzoo
import models
from lmzoo import hf
from lmzoo.errors import UserError
from lmzoo.hf import architectures, weights

transformers = pytest.importorskip("transformers")

V = 53  # the vocabulary: no size here is a multiple of another
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def gpt2(**options):
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 3, "n_inner": 37, "n_positions": 19}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, **sizes, **NO_IDS, **options))


ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 5.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5},
    "llama3": {"factor": 5.0, "original_max_position_embeddings": 16, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
}


def llama(rope="default", **options):
    rope = {"rope_type": rope, "rope_theta": 500.0} | ROPES[rope]
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
             "num_hidden_layers": 3, "intermediate_size": 37, "max_position_embeddings": 64}  # fmt: skip
    config = transformers.LlamaConfig(vocab_size=V, rope_parameters=rope, **sizes, **NO_IDS, **options)
    return transformers.LlamaForCausalLM(config)


def bert(cls=transformers.BertForMaskedLM, **options):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 37,
             "max_position_embeddings": 19, "type_vocab_size": 3}  # fmt: skip
    return cls(transformers.BertConfig(vocab_size=V, **sizes, **NO_IDS, **options))


def t5(feed_forward="relu", tied=True):
    sizes = {"d_model": 24, "d_kv": 10, "num_heads": 3, "num_layers": 3, "num_decoder_layers": 2, "d_ff": 37,
             "relative_attention_num_buckets": 12, "relative_attention_max_distance": 9}  # fmt: skip
    config = transformers.T5Config(vocab_size=V, feed_forward_proj=feed_forward, tie_word_embeddings=tied, **sizes)
    net = transformers.T5ForConditionalGeneration(config)
    if not tied:  # transformers ties it whatever the config says
        net.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn(V, 24))
    return net


THEIRS = {
    "gpt2": gpt2,
    "gpt2-untied-relu": lambda: gpt2(tie_word_embeddings=False, activation_function="relu", scale_attn_weights=False),
    "llama": llama,
    "llama-tied-linear": lambda: llama("linear", tie_word_embeddings=True),
    "llama-yarn": lambda: llama("yarn"),
    "llama-llama3": lambda: llama("llama3"),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "bert": bert,
    "bert-tanh": lambda: bert(hidden_act="gelu_new"),
    "t5-v1.0": t5,
    "t5-v1.1": lambda: t5("gated-gelu", tied=False),
    "t5-silu-tied": lambda: t5("gated-silu"),
}


def noisy(build):
    """`build()` in eval mode, every parameter moved off its initial value, biases and norms included."""
    torch.manual_seed(0)
    net = build().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


@pytest.fixture(params=THEIRS)
def theirs(request):
    return noisy(THEIRS[request.param])


def rows(side):
    """ids (3, 11) and a mask that cuts 4 and 10 tokens off the second and third row, at `side`."""
    mask = torch.ones(3, 11, dtype=torch.long)
    if side != "none":
        mask[1, :4], mask[2, :10] = 0, 0
    mask = mask.flip(1) if side == "right" else mask
    return models.ids(3, 11, vocab_size=V), mask


def both(theirs, ours, side, types=None):
    """Their logits and ours (N, V), at the kept positions."""
    ids, mask = rows(side)
    if ours.family == "encoder-decoder":
        answers, kept = ids.flip(0)[:, :7], mask[:, :7] if side == "right" else mask[:, -7:]
        reference = theirs(ids, attention_mask=mask, decoder_input_ids=answers, decoder_attention_mask=kept).logits
        return reference[kept.bool()], ours(ids, mask, answers, kept)[kept.bool()]
    extra = {} if types is None else {"token_type_ids": types}
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    reference = getattr(theirs(ids, attention_mask=mask, **positions, **extra), "logits", None)
    return reference[mask.bool()], ours(ids, mask, **extra)[mask.bool()]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_logits_agree_both_ways(theirs, tmp_path):
    ours = hf.from_hf(theirs)
    assert not ours.training
    hf.to_hf(ours, tmp_path / "out")
    back, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for side in "none", "right", "left":
        reference, logits = both(theirs, ours, side)
        assert reference.std() > 0.1
        close(logits, reference)
        close(both(back, ours, side)[0], reference)


def test_gradients_agree(theirs):
    ours = hf.from_hf(theirs)
    names = [name for name, _ in ours.named_parameters()]
    reference, logits = both(theirs, ours, "left")
    target = torch.randint(V, (len(logits),), generator=torch.Generator().manual_seed(2))
    for these in reference, logits:
        torch.nn.functional.cross_entropy(these, target).backward()
    table = architectures.read(theirs.config.to_dict())[0].weights
    expected = weights.to_ours(table, names, {name: p.grad for name, p in theirs.named_parameters()})
    largest = max(gradient.norm() for gradient in expected.values())
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - expected[name]).norm()
        assert error <= 1e-4 * expected[name].norm() + 1e-7 * largest, name


def test_every_parameter_is_used_exactly_once(theirs):
    ours = hf.from_hf(theirs)
    names = [name for name, _ in ours.named_parameters()]
    pairs = weights.pair(architectures.read(theirs.config.to_dict())[0].weights, names)
    assert sorted(pairs) == sorted(name for name, _ in theirs.named_parameters())
    assert sorted(name for parts, _ in pairs.values() for name in parts) == sorted(names)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_a_folder_gives_what_the_object_gives(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, expected = hf.from_hf(tmp_path), hf.from_hf(theirs)
    assert hf.is_hf_folder(tmp_path) and not hasattr(ours, "tokenizer")
    assert ours.config == expected.config
    for name, value in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert lmzoo.build(ours.config).state_dict().keys() == expected.state_dict().keys()
    assert all(map(torch.equal, lmzoo.load(tmp_path).parameters(), ours.parameters()))


def test_pickled_weights_are_read(tmp_path):
    theirs = noisy(gpt2)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    close(*both(theirs, hf.from_hf(tmp_path), "none"))


def test_a_head_that_transformers_ties_without_saying_so_is_taken_over():
    theirs = noisy(lambda: t5("gated-gelu", tied=False))
    theirs.lm_head.weight = theirs.shared.weight
    assert "lm_head.weight" not in dict(theirs.named_parameters())
    ours = hf.from_hf(theirs)
    reference, logits = both(theirs, ours, "right")
    torch.testing.assert_close(logits, reference, atol=1e-6 * reference.abs().max().item(), rtol=0)


def test_token_types_move_the_logits_alike():
    theirs = noisy(bert)
    ours = hf.from_hf(theirs)
    types = torch.randint(3, (3, 11), generator=torch.Generator().manual_seed(3))
    reference, logits = both(theirs, ours, "right", types)
    close(logits, reference)
    assert (reference - both(theirs, ours, "right")[0]).abs().max() > 0.1


@pytest.mark.parametrize("is_folder", [False, True])
def test_berts_pooler_is_left_out_with_a_note(is_folder, tmp_path, caplog):
    theirs = noisy(lambda: bert(transformers.BertForPreTraining))
    if is_folder:
        theirs.save_pretrained(tmp_path)
    ours = hf.from_hf(tmp_path if is_folder else theirs)
    assert "bert.pooler.dense.weight" in caplog.text and "cls.seq_relationship.bias" in caplog.text
    ids, mask = rows("none")
    close(ours(ids, mask), theirs(ids, attention_mask=mask).prediction_logits)


PUBLISHED = {
    "gpt": ("gpt-base", lambda: transformers.GPT2Config()),
    "llama": ("llama-7b", lambda: transformers.LlamaConfig()),
    "bert": ("bert-base", lambda: transformers.BertConfig()),
    "t5_v1_0": ("t5_v1_0-small", lambda: transformers.T5Config()),
    "t5": ("t5-base", lambda: transformers.T5Config(d_model=768, d_ff=2048, num_layers=12, num_heads=12,
                                                    feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}  # fmt: skip
SAME = ("vocab_size", "d_model", "n_layers", "d_ff", "max_len", "embed", "position", "attention", "ffn", "norm",
        "block", "head", "init")  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_houses_own(name):
    size, config = PUBLISHED[name]
    published = models.read(f"published/{size}")
    found = architectures.read(config().to_dict())[1]
    expected = models.config(name, **published["tokenizer"], **published["model"])
    assert {word: found[word] for word in SAME} == {word: expected[word] for word in SAME}
    assert (found["n_kv_heads"] or found["n_heads"]) == found["n_heads"] == expected["n_heads"]
    assert (found["d_head"] or found["d_model"] // found["n_heads"]) == (128 if name == "llama" else 64)


OWN = [
    ("gpt", {}), ("gpt", {"head": "untied"}), ("llama", {}), ("llama", {"attention": "grouped_query"}),
    ("llama", {"attention": "multi_query", "head": "tied"}), ("llama", {"position": "rotary_linear", "dropout": 0.1}),
    ("llama", {"norm": ["rmsnorm"]}), ("bert", {}), ("t5_v1_0", {}), ("t5", {"n_decoder_layers": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), OWN)
def test_own_nets_open_in_transformers(name, words, tmp_path):
    ours = models.make(name, vocab_size=V, **words)
    hf.to_hf(ours, tmp_path)
    kinds = {"encoder": "MaskedLM", "decoder": "CausalLM", "encoder-decoder": "Seq2SeqLM"}
    theirs = getattr(transformers, f"AutoModelFor{kinds[ours.family]}").from_pretrained(tmp_path)
    for side in "right", "left":
        close(*both(theirs, ours, side))


ODD = [
    ("gpt", {"position": "alibi"}, "positions.0 is Alibi"),
    ("gpt", {"norm": "rmsnorm"}, "attn_norm is RMSNorm"),
    ("gpt", {"block": "parallel"}, "blocks.0 is Parallel"),
    ("gpt", {"share": 2}, "share is 2"),
    ("gpt", {"d_head": 6}, "d_head is 6"),
    ("gpt", {"embed": "scaled"}, "embed.scale is 4.0"),
    ("gpt", {"attention": ["multi_head", "sliding_window"]}, "blocks.1.attn.window is 64"),
    ("llama", {"attention": "qk_norm"}, "attn.q_norm is RMSNorm"),
    ("llama", {"ffn": "geglu"}, "ffn.activation is GELU"),
    ("llama", {"position": ["rotary", "rotary_linear"]}, "positions.1 is Rotary"),
    ("llama", {"d_model": 18, "d_head": 4}, "not a multiple of the number of attention heads"),
    ("bert", {"block": "pre"}, "blocks.0 is PreNorm"),
    ("bert", {"head": "pooler"}, "head is Pooler"),
    ("bert", {"embed": "tokens"}, "embed.norm is Identity"),
    ("t5", {"cross": "additive"}, "decoder.blocks.0.cross is Additive"),
    ("t5", {"attention": "multi_head"}, "attn.scale is 0.5"),
    ("t5", {"head": "tied"}, "head.scale is 1.0"),
    ("transformer", {}, "positions.0 is Sinusoidal"),
]


@pytest.mark.parametrize(("name", "words", "part"), ODD)
def test_a_net_that_transformers_lacks_is_refused_by_its_part(name, words, part, tmp_path):
    with pytest.raises(UserError, match=part):
        hf.to_hf(models.make(name, **words), tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED = [
    (lambda: llama(), {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type='dynamic'"),
    (lambda: llama("yarn"), {"rope_parameters": {"rope_type": "yarn", "mscale": 2.0}}, "no rope_parameters.mscale"),
    (lambda: gpt2(), {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    (lambda: bert(), {"is_decoder": True}, "is_decoder=True"),
    (lambda: t5(), {"feed_forward_proj": "gelu"}, "feed_forward_proj='gelu'"),
    (lambda: gpt2(), {"model_type": "mamba"}, "model_type='mamba'"),
]


@pytest.mark.parametrize(("build", "words", "message"), REFUSED)
def test_an_architecture_that_lmzoo_lacks_is_refused(build, words, message):
    with pytest.raises(UserError, match=message):
        architectures.read(build().config.to_dict() | words)


def test_parameters_missing_or_left_over_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = gpt2()
    theirs.transformer.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(UserError, match="left over transformer.extra"):
        hf.from_hf(theirs)
    with pytest.raises(UserError, match="lacks transformer.h.0.attn.c_attn.bias"):
        hf.from_hf(gpt2().transformer)
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: value for name, value in whole.items() if name != "model.norm.weight"}, file, {"format": "pt"})
    with pytest.raises(UserError, match="lacks model.norm.weight"):
        hf.from_hf(tmp_path)
    save_file(whole | {"score.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(UserError, match="left over score.weight"):
        hf.from_hf(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="weights cannot be read"):
        hf.from_hf(tmp_path)


def test_what_is_no_such_folder_is_refused(tmp_path):
    for content in None, "{", "3", '{"sizes": 3}':
        if content:
            (tmp_path / "config.json").write_text(content)
        assert not hf.is_hf_folder(tmp_path)
        with pytest.raises(UserError, match="not a Hugging Face folder"):
            hf.from_hf(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5-v1.0", "t5-v1.1"])
def test_greedy_answers_agree(name, tmp_path):
    own = noisy(THEIRS[name])
    ours = hf.from_hf(own)
    hf.to_hf(ours, tmp_path)
    theirs = type(own).from_pretrained(tmp_path)
    ids, mask = rows("left")
    ids, mask, start = ids[:2], mask[:2], {"start": 7} if ours.family == "encoder-decoder" else {}
    starts = {"decoder_start_token_id": 7} if start else {}
    expected = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **starts
    )
    assert lmzoo.decoding.generate(ours, ids, mask, 8, **start).tolist() == expected.tolist()


def test_conf_is_resolved():
    config = hf.from_hf(noisy(bert)).config
    assert type(config) is dict and "${" not in OmegaConf.to_yaml(OmegaConf.create(config))
    assert config["embed"]["norm"] == config["norm"] == config["head"]["norm"]
