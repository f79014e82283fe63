"""A mistake on the command line is one line that names the word and the right one, in no time and without torch."""

import subprocess
import sys

import pytest

import lmzoo
from lmzoo import UserError, checks
from lmzoo.errors import few
from lmzoo.literal import plain, save

GPT = ("model=gpt", "task=clm")
CLASSES = ("model=bert", "task=classification")
MISTAKES = [
    # a word that is not there, and the nearest that is
    ((*GPT, "optim.lrr=1"), "optim.lrr: there is no such word; did you mean lr?"),
    ((*GPT, "trainer.max_step=3"), "trainer.max_step: there is no such word; did you mean max_steps?"),
    ((*GPT, "model.n_head=8"), "model.n_head: Decoder has no such word; did you mean n_heads?"),
    ((*GPT, "model.attention.windw=8"), "model.attention.windw: Attention has no such word; did you mean window?"),
    ((*GPT, "schedule.warmup_step=8"), "schedule.warmup_step: cosine has no such word; did you mean warmup_steps?"),
    ((*GPT, "task.z_los=1"), "task.z_los: CausalLM has no such word; did you mean z_loss?"),
    ((*GPT, "data.reader.splitt=1"), "data.reader.splitt: read_pydoc has no such word"),
    ((*GPT, "callbacks.metrics.tag=1"), "callbacks.metrics.tag: Metrics has no such word; did you mean tags?"),
    (("modell=gpt",), "modell: there is no such word; did you mean model?"),
    ((*GPT, "lr=1e-3"), "lr: there is no such word; did you mean optim.lr?"),
    ((*GPT, "max_steps=3"), "max_steps: there is no such word; did you mean trainer.max_steps?"),
    ((*GPT, "+batch_size=3"), "batch_size: there is no such word; did you mean data.batch_size?"),
    ((*GPT, "path=x"), "path: there is no such word; did you mean data.path or tokenizer.path?"),
    ((*GPT, "modul/position=rotary"), "modul/position: there is no such word; did you mean model/position?"),
    ((*GPT, "model/positio=rotary"), "model/positio: there is no such word; did you mean model/position?"),
    # a word of another program
    (("--model", "gpt"), "--model: write words as model=gpt"),
    (("--model=gpt", "task=clm"), "--model=gpt: write words as model=gpt"),
    ((*GPT, "-lr", "--x"), "-lr: write words as lr=VALUE"),
    # an option that is not there
    (("model=gptt",), "model=gptt: there is no such option; did you mean gpt?"),
    ((*GPT, "model/position=rotry"), "model/position=rotry: there is no such option; did you mean rotary?"),
    ((*GPT, "size=bse"), "size=bse: there is no such size of gpt; did you mean base?"),
    (("model=bert", "task=mlm", "size=xl"), "size=xl: there is no such size of bert; choose from base, large, small,"),
    ((*GPT, "tokenizer=_training"), "tokenizer=_training: "),
    *[((f"{group}={value}",), f"{group}={value}: there is no such option") for group in ("model", "optim", "data")
      for value in ("-1", "1.5", ".5", "1e3", "nan", "-inf", "true", "null", "{a: 1}", "[1]", "")],
    ((*GPT, "hydra/launcher=foo"), "hydra/launcher=foo: there is no such option; choose from joblib, submitit_local"),
    (("=3",), "=3: write word=value"),
    ((*GPT, "hydra.run.dir=x"), "hydra.run.dir=x: a run's folder is run_dir="),
    # values of the wrong type, above and below _target_
    *[((*GPT, f"{word}={value}"), f"{word}={value} should be true or false") for value in ("-1", "3")
      for word in ("compile", "trainer.overfit", "checkpoint.sharded", "data.deduplicate", "logger.tensorboard")],
    ((*GPT, "optim.freeze=blocks*"), "optim.freeze should be a list: optim.freeze=[one, another]"),
    ((*GPT, "data=mixture", "data.sources=c.txt"), "data.sources=c.txt: give each source a name"),
    ((*GPT, "model.ffn.activation=null"), "model.ffn.activation=None should be a part, words with a _target_"),
    ((*GPT, "optim.lr=abc"), "optim.lr='abc' should be a number"),
    ((*GPT, "seed=x"), "seed='x' should be a whole number"),
    ((*GPT, "compile=maybe"), "compile='maybe' should be true or false"),
    ((*GPT, "optim.lr="), "optim.lr='' should be a number"),
    ((*GPT, "model.n_heads=8.5"), "model.n_heads=8.5 should be a whole number"),
    ((*GPT, "model.dropout=high"), "model.dropout='high' should be a number"),
    ((*GPT, "task.label_smoothing=high"), "task.label_smoothing='high' should be a number"),
    (("model=bert", "task=mlm", "task.rate=high"), "task.rate='high' should be a number"),
    (("model=bert", "task=mlm", "task.whole_word=1"), "task.whole_word=1 should be true or false"),
    ((*GPT, "schedule.warmup_steps=x"), "schedule.warmup_steps='x' should be a whole number or null"),
    # + and ~ open what Hydra closes
    ((*GPT, "+foo=1"), "foo: there is no such word"),
    ((*GPT, "+optim.foo=1"), "optim.foo: there is no such word"),
    ((*GPT, "++model.foo=1"), "model.foo: Decoder has no such word"),
    ((*GPT, "~callbacks.foo"), "~callbacks.foo: there is no such word"),
    ((*GPT, "+optim.lr=3"), "optim.lr is there already: write optim.lr=VALUE, without the +"),
    ((*GPT, "~optim"), "~optim: only a callback can be taken away"),
    ((*GPT, "~model"), "~model: only a callback can be taken away"),
    ((*GPT, "~optim.lr"), "~optim.lr: only a callback can be taken away"),
    # nothing where a part belongs
    ((*GPT, "model.attention=null"), "model.attention=None is no part: choose by model/attention=NAME, one of"),
    ((*GPT, "model.norm=abc"), "model.norm='abc' is no part: choose by model/norm=NAME"),
    ((*GPT, "model._target_=null"), "model._target_=None is no part: choose by model=NAME"),
    ((*GPT, "tokenizer.kind=null"), "tokenizer.kind=None is no part: choose by tokenizer=NAME"),
    ((*GPT, "data.reader=5"), "data.reader=5 is no part: choose by data=NAME"),
    ((*GPT, "optim.optimizer=null"), "optim.optimizer=None is no part: choose by optim=NAME"),
    ((*GPT, "callbacks.metrics=null"), "callbacks.metrics=None is no part"),
    (("model=gpt", "task=classification", "task.head=null"), "task.head=None is no part"),
    (("model=gpt", "task=classification", "task/head=text"), "the task/head that is chosen needs a model of family "
     "encoder-decoder, but gpt is of family decoder: models for it are t5, t5_v1_0, transformer"),
    (("model=t5", "task=classification", "task/head=text", "task.labels=classes"), "for any number of them "
     "take task/head=classifier"),
    (("model=t5", "task=classification", "task/head=text", "task.head.pool=mean"), "task.head.pool: nothing is chosen "
     "here that has this word"),
    (("model=t5", "task=classification", "task.words.pos=great"), "task.words: Classification has no such word; choose "
     "from class_weights, label_smoothing, prompts, z_loss"),
    (("model=t5", "task=regression", "task/head=text"), "task/head: the task has no such choice; there it is with "
     "task=classification"),
    (("model=t5", "task=classification", "task/head=texts"), "task/head=texts: there is no such option; did you mean "
     "text?"),
    ((*GPT, "model.attention=[1]"), "model.attention: words with values belong here, not a list"),
    ((*GPT, "schedule=[1]"), "schedule=[1]: there is no such option"),
    ((*GPT, "trainer.precision=null"), "trainer.precision: null is no value for it"),
    ((*GPT, "task.family=0"), "task.family=0 should be one of encoder, decoder, encoder-decoder"),
    # heads that no language model ends in
    (("model=bert", "task=mlm", "model/head=pooler"), "task=mlm needs a head over the vocabulary, and bert ends in a "
     "Pooler: choose another by model/head=NAME"),
    # interpolations of what isn't there
    *[((*GPT, f"{word}=${{nope}}"), f"{word}: Interpolation key 'nope' not found")
      for word in ("optim.lr", "trainer.max_steps", "model.dropout")],
    # values of the wrong type inside
    ((*GPT, "task.prompts=[1,2]"), "task.prompts=[1, 2] should be a list (each a text)"),
    ((*GPT, "callbacks.metrics.folder=5"), "callbacks.metrics.folder=5 should be a text"),
    ((*GPT, "callbacks.metrics.wandb=5"), "callbacks.metrics.wandb=5 should be a mapping or null"),
    ((*GPT, "model.ffn.activation=5"), "model.ffn.activation=5 should be a part, words with a _target_"),
    ((*GPT, "model.attention.qk_norm={eps: 1}"), "model.attention.qk_norm={'eps': 1} should be a part"),
    # what a part is handed by the run
    ((*GPT, "model.attention.d_model=8"), "model.attention.d_model: Attention is given this by other words"),
    ((*GPT, "model.ffn.dropout=0.5"), "model.ffn.dropout: FeedForward is given this by other words"),
    ((*GPT, "task.seed=8"), "task.seed: CausalLM is given this by other words"),
    ((*GPT, "schedule.total_steps=8"), "schedule.total_steps: cosine is given this by other words"),
    ((*GPT, "optim.optimizer.lr=8"), "optim.optimizer.lr: AdamW is given this by other words"),
    ((*GPT, "tokenizer.kind.vocab_size=8"), "tokenizer.kind.vocab_size: train_bpe is given this by other words"),
    (("model=gpt", "task=classification", "task.head.n_classes=3"), "task.head.n_classes: Classifier is given this"),
    ((*GPT, "model._partial_=true"), "model._partial_: leave it out"),
    ((*GPT, "model.attention._partial_=5"), "model.attention._partial_: leave it out"),
    ((*GPT, "model._args_=[1]"), "model._args_: leave it out"),
    # code of others
    ((*GPT, "model._target_=os.system"), "torch.nn, or trust=[os] if it is yours or you trust its code"),
    ((*GPT, "model.attention._target_=mine.A", "trust=min"), "model.attention._target_=mine.A: take a class of"),
    ((*GPT, "data.reader._target_=os.remove"), "_target_=os.remove: take a class of lmzoo that belongs there"),
    ((*GPT, "task._target_=lmzoo.checkpoint.remove"), "_target_=lmzoo.checkpoint.remove: this is no part for task"),
    ((*GPT, "task._target_=lmzoo.tasks.base.Task"), "task._target_=lmzoo.tasks.base.Task: this is no part for task"),
    ((*GPT, "model.head._target_=lmzoo.blocks.head.nn"), "there is no such class or function"),
    ((*GPT, "model.head._target_=lmzoo.blocks.head.nn.Linear"), "there is no such class or function"),
    # words of the data that its reader would not look at
    ((*GPT, "data=text", "data.field=x"), "data.field: Text has no such word; it is one of data=jsonl"),
    ((*GPT, "data=jsonl", "data.text_column=x"), "data.text_column: Jsonl has no such word; it is one of data="),
    ((*GPT, "data.label_column=x"), "data.label_column: read_pydoc has no such word; it is one of data="),
    ((*GPT, "data=csv", "data.pair_column=x"), "data.pair_column: the task does not look at it (its labels are none)"),
    ((*GPT, "data=jsonl", "data.words_column=x"), "does not look at it (its labels are none); a task of labels tags"),
    ((*CLASSES, "data=csv", "data.target_column=x"), "its labels are class); a task of labels text does"),
    ((*CLASSES, "data=csv", "data.label_separator=x"), "its labels are class); a task of labels classes does"),
    ((*CLASSES, "data=csv", "task.labels=tags", "data.text_column=x"), "data.text_column: the task does not look at"),
    ((*CLASSES, "data=csv", "task.labels=text", "data.label_column=x"), "data.label_column: the task does not look at"),
    ((*CLASSES, "task.labels=clases"), "task.labels=clases: there are no such labels; did you mean classes?"),
    ((*CLASSES, "data=text", "data.pair_column=x"), "data.pair_column: Text has no such word; it is one of data=arrow"),
    ((*CLASSES, "data=csv", "data.reader.kind=x"), "data.reader.kind: Csv is given this by other words of the run"),
    ((*CLASSES, "data=csv", "data.pair_column="), "data.pair_column=: nothing follows the sign"),
    ((*CLASSES, "data=mixture", "data.sources.a.weight=1", "data.sources.a.kind=csv", "data.sources.a.tags_column=x"),
     "data.sources.a.tags_column: the task does not look at it"),
    ((*GPT, "data.path=x"), "data.path=x: say which kind of source it is, data=text (or jsonl, csv) data.path=x"),
    (("model=gpt", "task=classification", "data.path=x"), "data.path=x: say which kind of source it is"),
    *[((*GPT, f"data={own}", f"data.path={file}"), f"data={own} reads no such files; did you mean data={kind}?")
      for own, file, kind in (("text", "c.jsonl", "jsonl"), ("text", "[a.txt,c.csv]", "csv"), ("jsonl", "c.tsv", "csv"),
                              ("csv", "c.jsonl.gz", "jsonl"), ("text", "c/*.parquet", "parquet"))],
    ((*GPT, "data=mixture", "data.sources.a.weight=1", "data.sources.a.path=x.csv"),
     "data.sources.a.path=x.csv: kind=text reads no such files; did you mean kind=csv?"),
    ((*GPT, "data=csv", "data.reader.delimiter=ab"), "data.reader.delimiter='ab' is not a single character"),
    # nothing after the sign
    (("ckpt=",), "ckpt=: nothing follows the sign"),
    (("task=clm", "init_from="), "init_from=: nothing follows the sign"),
    ((*GPT, "run_dir="), "run_dir=: nothing follows the sign"),
    ((*GPT, "data=text", "data.val_path.x="), "data.val_path.x='' should be a path or a list of them"),
    ((*GPT, "data=text", "data.val_path.x=null"), "data.val_path.x=None should be a path or a list of them"),
    ((*GPT, "data.val_path.x=y"), "data.val_path.x=y: say which kind of source it is, data=text"),
    ((*GPT, "data=text", "data.path="), "data.path=: nothing follows the sign"),
    # folders
    ((*GPT, f"run_dir={__file__}"), "test_config.py is a file; give another folder"),
    ((*GPT, f"run_dir={__file__}/x"), "test_config.py is a file; give another folder"),
    # grammar
    ((*GPT, "optim.lr=1e-3,3e-4"), "optim.lr=1e-3,3e-4: several values make a sweep: add -m"),
    (("model=gpt,llama", "task=clm"), "model=gpt,llama: several values make a sweep: add -m"),
    ((*GPT, "foo"), "can't read 'foo': write word=value"),
    ((*GPT, "optim.lr=[1"), "can't read 'optim.lr=[1'"),
    # pairs
    (("model=bert", "task=clm"), "task=clm needs a model of family decoder, but bert is of family encoder: tasks"),
    (("model=gpt", "task=mlm"), "models for mlm are bert"),
    (("model=t5", "task=mlm"), "tasks for it are classification, regression, seq2seq, span_corruption"),
    ((), "no model: say model=NAME (one of bert, gpt, llama"),
    (("model=gpt",), "no task: say task=NAME (for gpt: chat, classification, clm, regression, seq2seq, token_"),
    (("task=clm",), "no model: say model=NAME"),
    (("task=clm", "init_from=/nowhere"), "init_from=/nowhere does not exist"),
    (("ckpt=/nowhere", "optim.lr=1"), "optim.lr: ckpt=/nowhere goes on with that run as it is"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes(words, line):
    with pytest.raises(UserError) as refusal:
        lmzoo.compose(*words)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def run(*words, command="train"):
    return subprocess.run([sys.executable, "-m", f"lmzoo.{command}", *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "words", [("model=gpt", "task=mlm"), ("optim.lr=abc",), ("-m", "model=gpt,gptt", "task=clm"), ("-m", "seed=1,b")]
)
def test_one_line_and_exit_code_2(words, tmp_path, monkeypatch):
    """In a sweep too, where a mistake shows before the first job."""
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("lmzoo: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.glob("**/*-gpt")) == []


MISFIT = "task=clm needs a model of family decoder"


def test_a_sweep_runs_all_jobs_and_exits_with_1(tmp_path, monkeypatch):
    """What shows in a job of its own doesn't keep the others from running."""
    monkeypatch.chdir(tmp_path)
    done = run("-m", "model=bert,t5", "task=clm", "run_dir=sweep")
    assert done.returncode == 1
    said = [line for line in done.stdout.splitlines() if line]
    assert said[:3] == ["job 0: model=bert task=clm", "job 1: model=t5 task=clm", "job  words       val/loss"]
    jobs = [f"  0  model=bert  {MISFIT}", f"  1  model=t5    {MISFIT}"]
    assert [line[: len(jobs[0])] for line in said[3:]] == jobs
    assert [line[:20] for line in done.stderr.splitlines()] == ["lmzoo: task=clm need"] * 2
    assert not [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]  # nothing to keep


@pytest.mark.parametrize("words", [("--help",), ("model=gpt", "task=mlm"), (*GPT, "model.n_heads=x")])
def test_refusals_import_nothing_that_is_slow_to_import(words):
    """How long they take, the benchmark of the startup reports."""
    code = f"""
import sys
sys.argv = ["lmzoo.train", *{words!r}]
from lmzoo import train
try:
    train.main()
finally:
    assert not {{"torch", "lightning", "wandb", "numpy"}} & set(sys.modules), "slow"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "slow" not in done.stderr and done.returncode == (0 if words == ("--help",) else 2)


@pytest.mark.parametrize("command", ["train", "evaluate", "generate"])
def test_help(command):
    text = run("--help", command=command).stdout
    assert f"python -m lmzoo.{command}" in text and "ckpt: null" in text
    assert (command == "train") == ("size=175b, base, large, medium, xl  (published, of gpt)" in text)
    assert ("\nParts:\n" in text) == ("PART=OPTION" in text) == (command != "generate")
    assert max(map(len, text.splitlines())) <= 100


def test_composed_values():
    config = lmzoo.compose(*GPT, "optim.lr=3e-4", "model.attention.window=64", "tags=a,b")
    assert (config.optim.lr, config.model.attention.window, config.tags) == (3e-4, 64, ["a", "b"])
    assert config.name == "gpt-clm" and config.run_dir.startswith("runs/") and config.run_dir.endswith("gpt-clm")


def test_words_that_the_yaml_leaves_out_are_open_if_the_class_has_them():
    assert lmzoo.compose(*GPT, "model.attention.scale=1.0").model.attention.scale == 1.0
    assert lmzoo.compose(*GPT, "optim.optimizer.amsgrad=true").optim.optimizer.amsgrad is True


def test_a_typed_length_takes_the_place_of_the_recipes():
    assert lmzoo.compose(*GPT).trainer.max_steps
    trainer = lmzoo.compose(*GPT, "trainer.max_tokens=1e6").trainer
    assert (trainer.max_steps, trainer.max_tokens, trainer.max_epochs) == (None, 1e6, None)
    capped = lmzoo.compose(*GPT, "trainer.max_time=00:01:00:00").trainer
    assert capped.max_steps and capped.max_time == "00:01:00:00"


def test_the_command_line_wins_over_what_a_model_or_task_chooses():
    assert lmzoo.compose("model=bert", "task=mlm").tokenizer.kind._target_.endswith("train_wordpiece")
    assert lmzoo.compose("model=bert", "task=mlm", "tokenizer=char").tokenizer.kind._target_.endswith("char")
    assert lmzoo.compose("model=bert", "task=classification").data.packing == "single"
    assert lmzoo.compose("model=bert", "task=classification", "data=csv").data.reader._target_.endswith("Csv")


def test_a_class_that_is_named_keeps_the_words_it_takes(tmp_path, monkeypatch):
    """Of those in the file of the part whose place it takes; what is typed stays, and is refused if it is none."""
    (tmp_path / "my_parts.py").write_text("def ffn(d_model, d_ff, dropout, *, bias=True, slope=0.1): ...")
    monkeypatch.syspath_prepend(tmp_path)
    words = (*GPT, "model.ffn._target_=my_parts.ffn", "trust=[my_parts]")
    assert lmzoo.compose(*words).model.ffn == {"_target_": "my_parts.ffn", "_partial_": True, "bias": True}
    assert lmzoo.compose(*words, "model.ffn.slope=0.3").model.ffn.slope == 0.3
    assert "activation" in lmzoo.compose(*words, "model.ffn.activation=3").model.ffn


def test_a_task_may_start_from_another(monkeypatch):
    files = {"task/mine": {"defaults": ["clm"], "_target_": "mine.Task"}, "task/open": {"_target_": "mine.Open"}}
    others = checks.content
    monkeypatch.setattr(checks, "content", lambda name: files[name] if name in files else others(name))
    assert checks.task_families("mine") == ["decoder"]
    assert checks.task_families("open") == ["encoder", "decoder", "encoder-decoder"]


def test_long_lists_of_names_are_cut():
    assert few(["a", "b"]) == "a, b"
    assert few(range(15)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more"
    assert few(["x" * 50]) == "x" * 40 + "..."


@pytest.mark.parametrize("task", ["mlm", "classification"])
def test_a_classifier_is_no_language_model(task, tmp_path):
    """But another task of texts may start from it."""
    run = lmzoo.compose(*CLASSES)
    run.model.head = {**run.task.head, "n_classes": 2}
    save(run, tmp_path / "config.yaml")
    if task == "classification":
        assert lmzoo.compose(f"task={task}", f"init_from={tmp_path}")
        return
    with pytest.raises(UserError, match="the net of init_from ends in a Classifier: start from the one that it was"):
        lmzoo.compose(f"task={task}", f"init_from={tmp_path}")


def test_an_interpolation_of_another_word_is_that_words_value():
    assert lmzoo.compose(*GPT, "optim.lr=${optim.weight_decay}").optim.lr == 0.1


def test_callbacks_can_be_taken_away():
    assert "progress" not in lmzoo.compose(*GPT, "~callbacks.progress").callbacks


def test_published_sizes_win_over_the_ladder():
    config = lmzoo.compose("model=gpt", "task=clm", "size=xl")
    assert (config.model.d_model, config.model.n_layers, config.tokenizer.vocab_size) == (1600, 48, 50257)


def test_modules_that_are_trusted_are_a_list():
    for word in ("trust=mine,yours", "trust=[mine, yours]"):
        config = lmzoo.compose(*GPT, word, "model.attention._target_=yours.parts.Attention")
        assert config.trust == ["mine", "yours"]


def test_words_that_hold_words_are_open():
    assert lmzoo.compose(*GPT, "tokenizer.special={pad: x}").tokenizer.special == {"pad": "x"}


def test_composed_text_is_literal():
    config = lmzoo.compose(*GPT, "data=text", "data.path=${x}, it's", "run_dir=[a] ${b}")
    assert plain(config)["data"]["path"] == "${x}, it's" and config.run_dir == "[a] ${b}"
