"""What else trains the benchmark's models, each built as its own documentation says: (net, batch -> mean loss).

A shape is what `train.SHAPES` says of a family. Dropout is 0, heads are tied as lmzoo's are. `attention` is one of the
kinds that `ATTENTIONS` lists for the library; a benchmark takes the quickest of them.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Built = tuple[nn.Module, Callable[[nn.Module, dict], Tensor]]
ATTENTIONS = {"transformers": ("sdpa", "eager"), "litgpt": ("sdpa",), "x-transformers": (True, False)}
EXTRA = "pip install 'lmzoo[bench]'"


def transformers_gpt(shape: dict, attention: str) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["max_len"], n_embd=shape["d_model"],
        n_layer=shape["n_layers"], n_head=shape["n_heads"], n_inner=shape["d_ff"], resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation=attention,
    )  # fmt: skip

    def loss(net: nn.Module, batch: dict) -> Tensor:
        return net(batch["input_ids"], labels=batch["labels"], shift_labels=batch["labels"]).loss

    return GPT2LMHeadModel(config), loss


def transformers_bert(shape: dict, attention: str) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=shape["vocab_size"], max_position_embeddings=shape["max_len"], hidden_size=shape["d_model"],
        num_hidden_layers=shape["n_layers"], num_attention_heads=shape["n_heads"], intermediate_size=shape["d_ff"],
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return BertForMaskedLM(config), lambda net, batch: net(batch["input_ids"], labels=batch["labels"]).loss


def transformers_t5(shape: dict, attention: str) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=shape["vocab_size"], d_model=shape["d_model"], d_kv=shape["d_model"] // shape["n_heads"],
        d_ff=shape["d_ff"], num_layers=shape["n_layers"], num_heads=shape["n_heads"], dropout_rate=0.0,
        feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip

    def loss(net: nn.Module, batch: dict) -> Tensor:
        ids = {name: batch[name] for name in ("input_ids", "decoder_input_ids", "labels")}
        return net(**ids).loss

    return T5ForConditionalGeneration(config), loss


def litgpt_gpt(shape: dict, attention: str) -> Built:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=shape["max_len"], padded_vocab_size=shape["vocab_size"], n_embd=shape["d_model"],
        n_layer=shape["n_layers"], n_head=shape["n_heads"], intermediate_size=shape["d_ff"], bias=True, attn_bias=True,
        parallel_residual=False, gelu_approximate="tanh",
    )  # fmt: skip
    net = GPT(config)
    net.apply(net._init_weights)
    net.lm_head.weight = net.transformer.wte.weight
    return net, logits_loss


def x_transformers_gpt(shape: dict, attention: bool) -> Built:
    return x_transformers("Decoder", shape, attn_flash=attention), logits_loss


def x_transformers_bert(shape: dict, attention: bool) -> Built:
    return x_transformers("Encoder", shape, attn_flash=attention), logits_loss


def x_transformers_t5(shape: dict, attention: bool) -> Built:
    words = {"ff_glu": True, "use_rmsnorm": True}
    words |= {"attn_flash": True} if attention else {"rel_pos_bias": True}  # with flash no bias, which is less work
    net = nn.ModuleDict({
        "encoder": x_transformers("Encoder", shape, **words),
        "decoder": x_transformers("Decoder", shape, cross_attend=True, **words),
    })  # fmt: skip
    net.decoder.token_emb = net.encoder.token_emb

    def loss(net: nn.Module, batch: dict) -> Tensor:
        memory = net.encoder(batch["input_ids"], return_embeddings=True)
        logits = net.decoder(batch["decoder_input_ids"], context=memory)
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return net, loss


def x_transformers(layers: str, shape: dict, **words) -> nn.Module:
    import x_transformers
    from x_transformers import TransformerWrapper

    layers = getattr(x_transformers, layers)(
        dim=shape["d_model"], depth=shape["n_layers"], heads=shape["n_heads"],
        attn_dim_head=shape["d_model"] // shape["n_heads"], ff_mult=shape["d_ff"] // shape["d_model"], **words,
    )  # fmt: skip
    return TransformerWrapper(num_tokens=shape["vocab_size"], max_seq_len=shape["max_len"], tie_embedding=True,
                              use_abs_pos_emb="rel_pos_bias" not in words, attn_layers=layers)


def logits_loss(net: nn.Module, batch: dict) -> Tensor:
    return cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


PEERS: dict[str, dict[str, Callable[[dict, object], Built]]] = {
    "gpt": {"transformers": transformers_gpt, "litgpt": litgpt_gpt, "x-transformers": x_transformers_gpt},
    "bert": {"transformers": transformers_bert, "x-transformers": x_transformers_bert},
    "t5": {"transformers": transformers_t5, "x-transformers": x_transformers_t5},
}


def attentions(family: str, library: str) -> dict[str, Callable[[dict], Built]]:
    """The ways to build a library's model of a family, by the kind of attention."""
    return {str(kind): partial(PEERS[family][library], attention=kind) for kind in ATTENTIONS[library]}
