"""Sweeps: which jobs the words of a grid make, wherever they run and however they end; and the table after them."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lmzoo.checks import groups
from lmzoo.sweep import Job, jobs, record, table
from marks import slow_but

SCRIPT = """
import json, os
from pathlib import Path
from lmzoo.config import command

def job(config):
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "seen.json").write_text(json.dumps([config.seed, config.logger.wandb.group, os.getpid()]))
    if config.seed == 75:
        raise SystemExit(75)
    if config.seed == 13:
        raise RuntimeError("unlucky")
    return None if config.seed == 4 else config.optim.lr

if __name__ == "__main__":
    command("train", job)
"""
GPT = ("model=gpt", "task=clm")


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """The command with a job that takes no time, as a sweep in `folder`/s."""
    (folder / "job.py").write_text(SCRIPT)
    command = [sys.executable, "job.py", *GPT, "-m", "run_dir=s", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def found(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "s").iterdir() if path.is_dir() and path.name[0].isdigit())


def lines(done: subprocess.CompletedProcess) -> list[str]:
    """The rows of the table, the last thing that is printed."""
    lines = done.stdout[done.stdout.index("job  words") :].splitlines()[1:]
    return [line for line in lines if not line.startswith("all metrics, means over seeds: python -m")]


GRIDS = [
    (("optim.lr=1e-3,3e-4", "seed=1,2"), 4),
    (("seed=range(1,4)",), 3),
    (("optim.lr=choice(1e-3,3e-4,1e-4)",), 3),
    (("schedule=glob(*)",), len(groups()["schedule"])),
    (("model=gpt,llama", "model/position=rotary,alibi"), 4),
]


@pytest.mark.parametrize(("words", "n"), slow_but(GRIDS[:2], GRIDS))
def test_a_grid_makes_a_folder_for_each_job(tmp_path, words, n):
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert len(found(tmp_path)) == len(lines(done)) == n
    assert {name.split("-")[0] for name in found(tmp_path)} == {str(i) for i in range(n)}
    assert {json.loads(file.read_text())[1] for file in tmp_path.glob("s/*/seen.json")} == {"s"}  # wandb's group


def test_whatever_ends_a_job_is_reported_and_the_others_run(tmp_path):
    """A refused word, an error nobody thought of, no loss; a second sweep in the folder tells of itself alone."""
    done = sweep(tmp_path, "optim.lr=0.001", "seed=12,13,4,-1")
    assert done.returncode == 1 and found(tmp_path) == ["0-gpt", "1-gpt", "2-gpt"]
    assert [line.split()[2:] for line in lines(done)][0:3:2] == [["0.001"], ["none"]]
    assert lines(done)[1].endswith("RuntimeError: unlucky") and "seed=-1 must be between" in lines(done)[3]
    assert "lmzoo: RuntimeError: unlucky" in done.stderr and "Traceback" in done.stderr
    again = sweep(tmp_path, "seed=-2,-3")
    assert again.returncode == 1 and len(lines(again)) == 2


def test_a_job_that_is_told_to_go_ends_the_sweep_which_says_so(tmp_path):
    done = sweep(tmp_path, "seed=1,75,2")
    assert done.returncode == 75 and found(tmp_path) == ["0-gpt", "1-gpt"]
    line = "job 1 was stopped by a signal and goes on by ckpt=s/1-gpt; the jobs after it did not run"
    assert done.stderr == f"lmzoo: {line}\n"
    assert [line.split()[2:] for line in lines(done)] == [["0.003"], ["stopped", "by", "a", "signal"]]


def test_a_text_with_signs_that_others_take_for_a_line_s_end(tmp_path):
    job = Job(0, ["tags=[\u2028,\x85,\f,\x1e]"], 1.0, "")
    record(tmp_path, job)
    record(tmp_path, job)
    assert jobs(tmp_path) == [job, job]


@pytest.mark.parametrize(("word", "extra", "plugin"), [
    ("sweep=optuna", "optuna", "hydra_optuna_sweeper"),
    ("hydra/launcher=joblib", "joblib", "hydra_joblib_launcher"),
    ("hydra/launcher=submitit_local", "submitit", "hydra_submitit_launcher"),
])  # fmt: skip
def test_a_plugin_that_is_not_there_is_named(tmp_path, word, extra, plugin):
    if there(plugin):
        pytest.skip(f"{plugin} is there")
    done = sweep(tmp_path, word, "seed=1,2")
    assert done.returncode == 2 and not (tmp_path / "s").exists()
    (line,) = done.stderr.splitlines()
    assert line.endswith(f" needs a package more: pip install 'lmzoo[{extra}]'")


def there(plugin: str) -> bool:
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{plugin}") is not None


@pytest.mark.parametrize(("launcher", "plugin"), [
    (("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), "hydra_joblib_launcher"),
    (("hydra/launcher=submitit_local",), "hydra_submitit_launcher"),
])  # fmt: skip
def test_jobs_in_other_processes_are_told_of_alike(tmp_path, launcher, plugin):
    if not there(plugin):
        pytest.skip(f"{plugin} is not installed")
    done = sweep(tmp_path, *launcher, "seed=1,13,2")
    assert done.returncode == 1 and found(tmp_path) == ["0-gpt", "1-gpt", "2-gpt"]
    assert [line.split()[1] for line in lines(done)] == ["seed=1", "seed=13", "seed=2"]
    assert lines(done)[1].endswith("RuntimeError: unlucky")


@pytest.mark.skipif(not there("hydra_optuna_sweeper"), reason="hydra_optuna_sweeper is not installed")
@pytest.mark.parametrize(("seeds", "code"), [("1", 0), ("choice(1,13)", 1), ("13", 1)])
def test_optuna_looks_for_the_lowest_loss_and_goes_on_over_failures(tmp_path, seeds, code):
    """The job's loss is its learning rate; a job that failed is worse than any."""
    words = ("sweep=optuna", "hydra.sweeper.n_trials=8", "optim.lr=tag(log, interval(1e-4, 1e-2))", f"seed={seeds}")
    done = sweep(tmp_path, *words)
    assert done.returncode == code and len(lines(done)) == len(found(tmp_path)) == 8, done.stderr
    best = yaml.safe_load((tmp_path / "s" / "optimization_results.yaml").read_text())
    words = [sys.executable, "job.py", *GPT, "sweep=optuna"]
    alone = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (alone.returncode, alone.stderr) == (2, "lmzoo: sweep=optuna: this is one run; add -m to make it a sweep\n")
    losses = [json.loads(line) for line in (tmp_path / "s" / "jobs.jsonl").read_text().splitlines()]
    assert best["best_value"] == min((job["loss"] for job in losses if job["loss"]), default=float("inf"))


def test_a_line_a_job_with_the_words_that_vary():
    jobs = [
        Job(2, ["task=clm", "optim.lr=nan"], None, "optim.lr=nan is not a finite number"),
        Job(0, ["task=clm", "optim.lr=0.001"], 3.98765, ""),
        Job(1, ["task=clm", "optim.lr=0.01"], None, ""),
    ]
    assert table(jobs).splitlines() == [
        "job  words           val/loss",
        "  0  optim.lr=0.001  3.988",
        "  1  optim.lr=0.01   none",
        "  2  optim.lr=nan    optim.lr=nan is not a finite number",
    ]


def test_one_job_shows_all_its_words():
    assert table([Job(0, ["task=clm"], 1.0, "")]).splitlines()[1] == "  0  task=clm  1"


def test_long_words_and_mistakes_are_cut_to_100_columns():
    lines = table([Job(n, [f"data.path={'x' * 200}{n}"], None, "y" * 300) for n in range(1000)]).splitlines()
    assert max(map(len, lines)) <= 100 and lines[1].count("...") == 2
