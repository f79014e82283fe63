"""How Hugging Face calls what lmzoo calls otherwise: seven architectures as tables, their configs read both ways.

Each is the house's own `conf/model/NAME.yaml`, BERT also under the heads of two tasks; the tables add the words of a
config.json and the names of the weights. A net fits an architecture if the config written for it, read again, builds
the same net.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from operator import attrgetter

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from .. import checkpoint
from ..errors import UserError
from . import weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """One architecture, in both languages.

    `name`: that of conf/model/NAME.yaml. `model_type`, `classes`: theirs; the first class is the one that is written.
    `words`: (ours in the model config, theirs in config.json, the attribute of the net that holds it).
    `choices`: their words that change parts, {value: what it changes in our YAML}; any other value is refused.
    `implied`: their words that may be left out, and what is meant then. `weights`: see weights.py.
    `absent`: their words that change what no part of ours has. `left_out`: beginnings of the names of their parameters
    that language modelling doesn't need. `parts`: those that are others than in the YAML.
    """

    name: str
    model_type: str
    classes: tuple[str, ...]
    words: list[tuple[str, str, str]]
    choices: dict[str, dict]
    weights: list[weights.Row]
    implied: dict[str, Callable[[Mapping], object]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    parts: dict[str, dict] = field(default_factory=dict)


GPT2 = Architecture(
    "gpt", "gpt2", ("GPT2LMHeadModel",),
    words=[
        ("vocab_size", "vocab_size", "vocab_size"),
        ("d_model", "n_embd", "d_model"),
        ("n_layers", "n_layer", "n_layers"),
        ("n_heads", "n_head", "blocks.0.attn.n_heads"),
        ("d_ff", "n_inner", "blocks.0.ffn.up.out_features"),
        ("max_len", "n_positions", "max_len"),
        ("norm.eps", "layer_norm_epsilon", "norm.eps"),
        ("dropout", "embd_pdrop", "blocks.0.drop.p"),
        ("dropout", "resid_pdrop", "blocks.0.drop.p"),
        ("attention_dropout", "attn_pdrop", "blocks.0.attn.dropout"),
    ],
    choices={
        "activation_function": {"gelu_new": {}, "gelu": {"ffn": "gelu"}, "relu": {"ffn": "relu"}},
        "tie_word_embeddings": {True: {}, False: {"head": "untied"}},
        "scale_attn_weights": {True: {}, False: {"attention.scale": 1.0}},
        "scale_attn_by_inverse_layer_idx": {False: {}},
        "add_cross_attention": {False: {}},
    },
    implied={"n_inner": lambda theirs: 4 * theirs["n_embd"]},
    weights=weights.GPT2,
)  # fmt: skip

LLAMA = Architecture(
    "llama", "llama", ("LlamaForCausalLM",),
    words=[
        ("vocab_size", "vocab_size", "vocab_size"),
        ("d_model", "hidden_size", "d_model"),
        ("n_layers", "num_hidden_layers", "n_layers"),
        ("n_heads", "num_attention_heads", "blocks.0.attn.n_heads"),
        ("n_kv_heads", "num_key_value_heads", "blocks.0.attn.n_kv_heads"),
        ("d_head", "head_dim", "blocks.0.attn.d_head"),
        ("d_ff", "intermediate_size", "blocks.0.ffn.up.out_features"),
        ("max_len", "max_position_embeddings", "max_len"),
        ("norm.eps", "rms_norm_eps", "norm.eps"),
        ("position.theta", "rope_parameters.rope_theta", "positions.0.theta"),
        ("position.scaling", "rope_parameters.factor", "positions.0.scaling"),
        ("position.trained_len", "rope_parameters.original_max_position_embeddings", "positions.0.trained_len"),
        ("position.fast", "rope_parameters.beta_fast", "positions.0.fast"),
        ("position.slow", "rope_parameters.beta_slow", "positions.0.slow"),
        ("position.low", "rope_parameters.low_freq_factor", "positions.0.low"),
        ("position.high", "rope_parameters.high_freq_factor", "positions.0.high"),
        ("attention_dropout", "attention_dropout", "blocks.0.attn.dropout"),
    ],
    choices={
        "hidden_act": {"silu": {}},
        "tie_word_embeddings": {False: {}, True: {"head": "tied"}},
        "rope_parameters.rope_type": {"default": {"position.scaling": 1.0}, "linear": {},
                                      "yarn": {"position": "rotary_yarn"}, "llama3": {"position": "rotary_llama3"}},
        "attention_bias": {False: {}, True: {"attention.bias": True}},
        "mlp_bias": {False: {}, True: {"ffn.bias": True}},
    },
    implied={"rope_parameters.factor": lambda theirs: 1.0},
    weights=weights.LLAMA,
    absent=tuple(f"rope_parameters.{word}" for word in ("attention_factor", "mscale", "mscale_all_dim", "truncate")),
)  # fmt: skip

BERT = Architecture(
    "bert", "bert", ("BertForMaskedLM", "BertForPreTraining"),
    words=[
        ("vocab_size", "vocab_size", "vocab_size"),
        ("d_model", "hidden_size", "d_model"),
        ("n_layers", "num_hidden_layers", "n_layers"),
        ("n_heads", "num_attention_heads", "blocks.0.attn.n_heads"),
        ("d_ff", "intermediate_size", "blocks.0.ffn.up.out_features"),
        ("max_len", "max_position_embeddings", "max_len"),
        ("embed.n_types", "type_vocab_size", "embed.types.num_embeddings"),
        ("norm.eps", "layer_norm_eps", "embed.norm.eps"),
        ("dropout", "hidden_dropout_prob", "blocks.0.drop.p"),
        ("attention_dropout", "attention_probs_dropout_prob", "blocks.0.attn.dropout"),
    ],
    choices={
        "hidden_act": {"gelu": {}, "gelu_new": {"ffn": "gelu_tanh", "head.activation.approximate": "tanh"}},
        "tie_word_embeddings": {True: {}},
        "is_decoder": {False: {}},
        "add_cross_attention": {False: {}},
    },
    weights=weights.BERT,
    left_out=("bert.pooler.", "cls.seq_relationship."),
)  # fmt: skip


def _labelling(name: str, head: str, **settings) -> Architecture:
    """BERT under a head of our tasks on labelled data."""
    return replace(
        BERT, classes=(name,), weights=weights.BERT_LABELS,
        parts={"head": {"_target_": f"lmzoo.blocks.head.{head}", "_partial_": True, **settings}},
        words=[*BERT.words, ("head.n_classes", "num_labels", "head.out.out_features"),
               ("head.dropout", "classifier_dropout", "head.drop.p")],
        choices=BERT.choices | {"hidden_act": {"gelu": {}, "gelu_new": {"ffn": "gelu_tanh"}}},
        implied={"num_labels": lambda theirs: len(theirs.get("id2label") or "12"),  # transformers' default: two
                 "classifier_dropout": lambda theirs: theirs["hidden_dropout_prob"]},
    )  # fmt: skip


BERT_CLASSIFIER = _labelling("BertForSequenceClassification", "Classifier", pool="first")
BERT_TAGGER = _labelling("BertForTokenClassification", "Tagger")

T5_WORDS = [
    ("vocab_size", "vocab_size", "vocab_size"),
    ("d_model", "d_model", "d_model"),
    ("n_layers", "num_layers", "encoder.n_layers"),
    ("n_decoder_layers", "num_decoder_layers", "decoder.n_layers"),
    ("n_heads", "num_heads", "encoder.blocks.0.attn.n_heads"),
    ("d_head", "d_kv", "encoder.blocks.0.attn.d_head"),
    ("d_ff", "d_ff", "encoder.blocks.0.ffn.up.out_features"),
    ("max_len", "n_positions", "max_len"),
    ("position.n_buckets", "relative_attention_num_buckets", "encoder.positions.0.n_buckets"),
    ("position.max_distance", "relative_attention_max_distance", "encoder.positions.0.max_distance"),
    ("norm.eps", "layer_norm_epsilon", "encoder.norm.eps"),
    ("activation_dropout", "dropout_rate", "encoder.blocks.0.ffn.drop.p"),
    ("dropout", "dropout_rate", "encoder.blocks.0.drop.p"),
]

T5_V1_0 = Architecture(
    "t5_v1_0", "t5", ("T5ForConditionalGeneration",),
    words=T5_WORDS,
    choices={"feed_forward_proj": {"relu": {}}, "tie_word_embeddings": {True: {}, False: {"head": "untied"}}},
    implied={"n_positions": lambda theirs: 512},
    weights=weights.T5_V1_0,
)  # fmt: skip

T5_V1_1 = Architecture(
    "t5", "t5", ("T5ForConditionalGeneration",),
    words=T5_WORDS,
    choices={
        "feed_forward_proj": {"gated-gelu": {}, "gated-silu": {"ffn": "swiglu"}, "gated-relu": {"ffn": "reglu"}},
        "tie_word_embeddings": {False: {}, True: {"head": "tied_scaled"}},
    },
    implied={"n_positions": lambda theirs: 512},
    weights=weights.T5_V1_1,
)  # fmt: skip

ARCHITECTURES = (GPT2, LLAMA, BERT, BERT_CLASSIFIER, BERT_TAGGER, T5_V1_0, T5_V1_1)


def read(theirs: Mapping) -> tuple[Architecture, dict]:
    """The architecture and our model config of a config.json with all its defaults.

    Raises UserError for an architecture, or a value that changes one, which lmzoo doesn't have.
    """
    kind = theirs.get("model_type")
    known = [architecture for architecture in ARCHITECTURES if architecture.model_type == kind]
    if not known:
        names = ", ".join(dict.fromkeys(architecture.model_type for architecture in ARCHITECTURES))
        raise UserError(f"config.json: model_type={kind!r} is not an architecture that lmzoo can take over ({names})")
    saved = set(theirs.get("architectures") or ())
    known = [architecture for architecture in known if saved & set(architecture.classes)] or known
    theirs = dict(theirs)
    if "scale_decoder_outputs" in theirs:  # what transformers makes of T5's tie_word_embeddings
        theirs["tie_word_embeddings"] = theirs["scale_decoder_outputs"]
    refused = {architecture.name: list(_strange(architecture, theirs)) for architecture in known}
    architecture = min(known, key=lambda architecture: len(refused[architecture.name]))
    if refused[architecture.name]:
        raise UserError(f"config.json of {kind}: {'; '.join(refused[architecture.name])}")
    return architecture, translate(architecture, theirs)


def _strange(architecture: Architecture, theirs: Mapping) -> Iterator[str]:
    """A sentence for each of their values that no choice of ours answers."""
    for word, choice in architecture.choices.items():
        value = _look(theirs, word)
        if value is not None and value not in choice:
            yield f"lmzoo has no {word}={value!r}, only {', '.join(map(repr, choice))}"
    yield from (f"lmzoo has no {word}" for word in architecture.absent if _look(theirs, word) is not None)


def translate(architecture: Architecture, theirs: Mapping) -> dict:
    """Our model config: the house's YAML, their numbers in it."""
    root = template(architecture.name)
    root.model.update(architecture.parts)
    changes = {}
    for word, choice in architecture.choices.items():
        changes |= choice.get(_look(theirs, word), {})
    parts = {ours: value for ours, value in changes.items() if "." not in ours}
    for kind, part in parts.items():
        root.model[kind] = option(f"{kind}/{part}")
    told: dict[str, object] = {}
    for ours, word, _ in architecture.words:
        value = _look(theirs, word)
        if value is None and word in architecture.implied:
            value = architecture.implied[word](theirs)
        if value is None:
            continue
        if told.setdefault(ours, value) != value:
            log.warning("lmzoo has one %s where config.json has two: taking %s=%s", ours, word, value)
        OmegaConf.update(root, f"model.{ours}", value)
    for ours in changes.keys() - parts.keys():
        OmegaConf.update(root, f"model.{ours}", changes[ours], merge=False, force_add=True)
    return OmegaConf.to_container(root.model, resolve=True)


def write(net: nn.Module) -> tuple[Architecture, dict]:
    """The architecture that a net has, and the words of its config.json.

    Raises UserError naming what doesn't fit if none of the tables is of such a net.
    """
    closest: tuple[Architecture, list[str]] | None = None
    for architecture in ARCHITECTURES:
        if not template(architecture.name).model["_target_"].endswith(f".{type(net).__name__}"):
            continue
        theirs, differences = fit(architecture, net)
        if not differences:
            return architecture, theirs
        if closest is None or len(differences) < len(closest[1]):
            closest = architecture, differences
    if closest is None:
        raise UserError(f"lmzoo knows no architecture of Hugging Face like {type(net).__name__}")
    nearest, differences = closest
    raise UserError(f"lmzoo knows no architecture of Hugging Face that is this net: the nearest, {nearest.classes[0]}, "
                    f"differs: {differences[0]}")  # fmt: skip


def fit(architecture: Architecture, net: nn.Module) -> tuple[dict, list[str]]:
    """The words of a config.json that come nearest to `net`, and what still differs: each choice is tried by itself."""

    def attempt(choices: dict) -> tuple[dict, list[str]]:
        theirs = describe(architecture, net, choices)
        return theirs, compare(net, translate(architecture, theirs))

    choices = {word: next(iter(choice)) for word, choice in architecture.choices.items()}
    theirs, differences = attempt(choices)
    for word, value in [(word, value) for word, choice in architecture.choices.items() for value in [*choice][1:]]:
        if not differences:
            break
        other, left = attempt(choices | {word: value})
        if len(left) < len(differences):
            choices, theirs, differences = choices | {word: value}, other, left
    return theirs, differences


def describe(architecture: Architecture, net: nn.Module, choices: Mapping) -> dict:
    """The words of a config.json with these choices and the numbers of `net`."""
    theirs = OmegaConf.create({"model_type": architecture.model_type, "architectures": [architecture.classes[0]]})
    for word, value in choices.items():
        OmegaConf.update(theirs, word, value)
    for _, word, place in architecture.words:
        with suppress(AttributeError):  # a part without such a setting: `compare` will name it
            value = attrgetter(place)(net)
            if word not in architecture.implied or value != architecture.implied[word](theirs):
                OmegaConf.update(theirs, word, value)
    return OmegaConf.to_container(theirs)


# What may differ between two nets that compute the same in eval mode: dropout, and the kernel of attention
FREE = {"training", "p", "dropout", "backend"}


def compare(net: nn.Module, config: dict) -> list[str]:
    """A sentence for each way in which `net` isn't the net of `config`, parts first, then their settings."""
    try:
        with torch.device("meta"):
            twin = checkpoint.build(config)
    except UserError as error:
        return [f"there {error}"]
    ours, theirs = _facts(net), _facts(twin)
    return [
        f"{name} is {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in ours | theirs
        if ours.get(name, "absent") != theirs.get(name, "absent")
    ]


def _facts(net: nn.Module) -> dict[str, object]:
    """The class of each part, then each plain attribute of each part, then the shape of each parameter."""
    facts: dict[str, object] = {name or "the model": _working_class(part) for name, part in net.named_modules()}
    for name, part in net.named_modules():
        for word, value in vars(part).items():
            if isinstance(value, bool | int | float | str | None) and not word.startswith("_") and word not in FREE:
                facts[f"{name}.{word}".lstrip(".")] = value
    return facts | {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}


def _working_class(part: nn.Module) -> str:
    """The class that says what `part` does: one that only adds a constructor does what its parent does."""
    return next(c.__name__ for c in type(part).__mro__ if any(not word.startswith("__") for word in vars(c)))


def template(name: str) -> DictConfig:
    """conf/model/NAME.yaml with its parts, under the key `model`; sizes and interpolations are still open."""
    model = option(name).copy()
    for default in model.pop("defaults"):
        for kind, part in default.items():
            if not kind.startswith("override "):  # of another group than the model's
                model[kind] = option(f"{kind}/{part}")
    return OmegaConf.create({"model": model})


@cache
def option(name: str) -> DictConfig:
    """conf/model/NAME.yaml as it stands."""
    return OmegaConf.create((files("lmzoo.conf") / f"model/{name}.yaml").read_text(encoding="utf-8"))


def _look(tree: Mapping, word: str):
    """tree[a][b] for the word a.b, or None."""
    return reduce(lambda node, key: (node or {}).get(key), word.split("."), tree)
