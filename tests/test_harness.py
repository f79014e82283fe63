"""A decoder in EleutherAI's lm-eval: the numbers of its own hf model on the exported folder, request by request."""

import json

import pytest

import models
from lmzoo import UserError, hf
from spoken import TEXT, bpe, net

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval isn't installed: pip install 'lmzoo[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(ours, theirs), of one exported folder."""
    HFLM = pytest.importorskip("lm_eval.models.huggingface", reason="its hf model: pip install 'lm-eval[hf]'",
                               exc_type=ImportError).HFLM  # fmt: skip

    from lmzoo.likelihood.harness import Harness

    folder = tmp_path_factory.mktemp("net") / "exported"
    hf.to_hf(net("gpt", bpe(), max_len=24), folder)
    return Harness(str(folder), batch_size=3), HFLM(pretrained=str(folder), device="cpu", batch_size=3)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_log_likelihoods(both):
    """Of texts with and without a context, at a border inside a word, and longer than the net."""
    given = requests("loglikelihood", ("the cat", " sat"), ("", "the mat"), ("the c", "at sat"), ("one ", "dog"),
                     (" ".join(TEXT * 3), " over hills"), ("a", " mat and then it saw"))  # fmt: skip
    ours, theirs = (model.loglikelihood(given, disable_tqdm=True) for model in both)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_rolling_log_likelihoods(both):
    given = requests("loglikelihood_rolling", *((" ".join((TEXT * 4)[:n]),) for n in (1, 9, 30, 61)))
    ours, theirs = (model.loglikelihood_rolling(given, disable_tqdm=True) for model in both)
    assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-6)


def test_answers(both):
    """Greedy, of unequal lengths, with and without a stop string that does come."""
    (first,) = both[1].generate_until(requests("generate_until", ("the cat", {"max_gen_toks": 9})), disable_tqdm=True)
    settings = [{"until": ["\n\n"], "max_gen_toks": 9}, {"until": [first[3:5]], "max_gen_toks": 12}]
    prompts = ["the cat", "a", "one dog run over old hills while rain fell " * 3]
    given = requests("generate_until", *((prompt, setting) for prompt in prompts for setting in settings))
    ours, theirs = (model.generate_until(given, disable_tqdm=True) for model in both)
    assert ours == theirs and ours[1] == first[: first.index(first[3:5])]


def test_a_task_of_ones_own(both, tmp_path):
    """By its name in the registry, from a YAML file and JSON lines."""
    rows = [{"q": "the cat", "choices": ["sat on", "rain", "it"], "gold": 1},
            {"q": "a", "choices": ["dog", "mat and"], "gold": 0}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "cats.yaml").write_text(f"""
task: cats
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_bytes}}]
""")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = []
    for model in both:
        told = lm_eval.simple_evaluate(model=model, tasks=["cats"], task_manager=manager, bootstrap_iters=0)
        found.append([sample["filtered_resps"] for sample in told["samples"]["cats"]])
        metrics = told["results"]["cats"]
    for ours, theirs in zip(*found, strict=True):
        assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=1e-4)

    from lmzoo.likelihood.multiple_choice import MultipleChoice

    mine = MultipleChoice("q", "choices", "gold")(both[0].net, str(tmp_path / "rows.jsonl"))
    assert (mine["accuracy"], mine["accuracy_per_byte"]) == (metrics["acc,none"], metrics["acc_bytes,none"])


def test_it_is_known_by_name():
    from lm_eval.api.registry import get_model

    from lmzoo.likelihood.harness import Harness

    assert get_model("lmzoo") is Harness


def test_mistakes(both, tmp_path):
    from lmzoo.likelihood.harness import Harness

    hf.to_hf(net("bert"), tmp_path / "bert")
    with pytest.raises(UserError, match="of the family encoder"):
        Harness(str(tmp_path / "bert"))
    hf.to_hf(models.make("gpt"), tmp_path / "without")
    with pytest.raises(UserError, match="holds no tokenizer"):
        Harness(str(tmp_path / "without"))
    with pytest.raises(UserError, match="max_gen_toks=24 must be less than the model's 24 positions"):
        both[0].generate_until(requests("generate_until", ("a", {"max_gen_toks": 24})))
    with pytest.raises(UserError, match="tokens, more than the 24 positions"):
        both[0].loglikelihood(requests("loglikelihood", ("a", " ".join(TEXT * 9))), disable_tqdm=True)
