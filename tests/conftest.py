"""What several test files share: a cache of their own, a text of a few thousand words, and a run of seconds over it."""

import os
import random

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, before its import: tests run side by side, one to a core

SMALL = (
    "size=tiny", "model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.d_ff=64", "model.max_len=64",
    "model.dropout=0.1", "tokenizer.vocab_size=400", "data=text", "data.batch_size=4", "trainer.precision=32-true",
    "trainer.max_steps=6", "trainer.val_every_n_steps=3", "trainer.log_every_n_steps=1", "logger.wandb.mode=disabled",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """No test reads or writes the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("LMZOO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """200 documents of 60 words each, drawn from 17 words."""
    words = "the cat sat on a mat and then it saw one dog run over old hills while rain fell".split()
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "small.txt"
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=60)) for _ in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def words(corpus):
    """words(folder, *more) -> the words of a run of seconds in `folder`; later ones win."""

    def all_words(folder, *more):
        given = {word.partition("=")[0]: word for word in (*SMALL, f"data.path={corpus}", f"run_dir={folder}", *more)}
        return list(given.values())

    return all_words


@pytest.fixture(scope="session")
def gpt_run(words, tmp_path_factory):
    """The folder of a small decoder's finished run."""
    import lmzoo

    folder = tmp_path_factory.mktemp("gpt") / "run"
    lmzoo.fit(lmzoo.compose(*words(folder, "model=gpt", "task=clm")))
    return folder
