"""Processes that torchrun starts: one configuration, one folder, the run of one process."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import DistBackendError, TCPStore

import lmzoo
from lmzoo import UserError, parts, ranks
from lmzoo.literal import plain
from marks import slow_but


@pytest.fixture
def torchrun(monkeypatch):
    """Its environment with its store; `torchrun(rank)` makes this process one of three on two machines."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(store.port), "WORLD_SIZE": "3"}  # fmt: skip
    monkeypatch.delenv(ranks.RANK_CONFIG, raising=False)

    def become(rank: int) -> None:
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
        for name, value in (words | places).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(ranks, "_runs", iter(range(9)))

    yield become
    os.environ.pop(ranks.RANK_CONFIG, None)


def test_the_others_take_over_what_the_first_hands_over_run_by_run(torchrun, tmp_path):
    """Rank 2 is the first of its machine, but not of the run; a text with `${` stays what it is."""
    torchrun(0)
    assert ranks.on_first_rank() and not ranks.follows()
    configs = [lmzoo.compose("model=gpt", "task=clm", f"run_dir={name}") for name in ("it's ${one}", "\u4e8c")]
    for config in configs:
        lmzoo.literal.save(config, tmp_path / "config.yaml")
        ranks.hand_over(tmp_path / "config.yaml")
        del os.environ[ranks.RANK_CONFIG]
    for rank in (1, 2):
        torchrun(rank)
        assert not ranks.on_first_rank() and ranks.follows()
        assert [plain(ranks.take_over()) for _ in configs] == [plain(config) for config in configs]


def test_a_number_of_processes_that_torchrun_has_not_started_is_refused(torchrun):
    with pytest.raises(UserError, match="start the run by torchrun on each"):
        parts.check_processes(devices=1, nodes=2)
    parts.check_processes(devices=7, nodes=1)
    torchrun(0)
    parts.check_processes(devices=3, nodes=1)
    for devices, nodes in ((1, 1), (2, 2), (2, 1)):
        with pytest.raises(UserError, match="is not the 3 processes that torchrun has started"):
            parts.check_processes(devices, nodes)


def test_a_sweep_is_refused_on_the_first_rank():
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a", "RANK": "0"}
    command = [sys.executable, "-m", "lmzoo.train", "-m", "model=gpt,llama", "task=clm"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "leave torchrun out" in done.stderr


@pytest.mark.slow
def test_two_processes_of_torchrun_are_the_run_of_one(words, tmp_path, monkeypatch):
    """BEHAVIOUR 4, with dropout, and with one batch of validation for two ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held_out.txt").write_text("the old cat saw one dog and a rat")
    given = words(None, "model=gpt", "task=clm", "data.micro_batch_size=2", "trainer.accelerator=cpu",
                  "trainer.log_every_n_steps=2", f"data.val_path={tmp_path / 'held_out.txt'}")  # fmt: skip
    given.remove("run_dir=None")
    lmzoo.fit(lmzoo.compose(*given, "run_dir=one"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run([*launcher, "-m", "lmzoo.train", *given, "trainer=ddp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder:") == done.stdout.count("parameters") == 1
    (folder,) = tmp_path.glob("runs/*/*")
    tables = []
    for run in (tmp_path / "one", folder):
        with open(run / "metrics.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    assert [row["step"] for row in tables[0]] == ["2", "3", "4", "6"]
    for one, two in zip(*tables, strict=True):
        for column in ("tokens", "train/loss", "val/loss", "grad_norm"):
            assert one[column] == two[column] or float(one[column]) == pytest.approx(float(two[column]), abs=1e-6)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of SLURM, number 17, and an `scontrol` that notes what it is told to do; returns the notes' file.

    It shows of a job what stands in the file `job` beside the notes.
    """
    told, program = tmp_path / "told", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nif [ $1 = show ]; then cat {tmp_path}/job; else echo "$@" >> {told}; fi\n')
    (tmp_path / "job").write_text("   JobState=RUNNING Reason=None Dependency=(null)\n")
    program.chmod(0o755)
    for name, value in {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "training"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return told


def test_a_job_goes_on_in_its_folder_only_after_it_was_queued_again(slurm, words, monkeypatch):
    """Whether the folder is its own or typed, and from its newest checkpoint whatever `ckpt` said at first."""
    given = [word for word in words(None, "model=gpt", "task=clm") if not word.startswith("run_dir")]
    config = lmzoo.compose(*given)
    assert config.run_dir == "runs/slurm/17-gpt-clm" and config.ckpt is None
    lmzoo.fit(lmzoo.compose(*given, "trainer.max_steps=2", "checkpoint.every_n_steps=1", "checkpoint.keep_last=2"))
    assert lmzoo.compose(*given).run_dir == "runs/slurm/17-gpt-clm-2"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for more in ([], ["run_dir=runs/slurm/17-gpt-clm"]):
        config = lmzoo.compose(*given, *more)
        assert (config.run_dir, config.trainer.max_steps) == ("runs/slurm/17-gpt-clm", 2)
        assert config.ckpt == "runs/slurm/17-gpt-clm/checkpoints/last.ckpt"
    assert lmzoo.compose("ckpt=runs/slurm/17-gpt-clm/checkpoints/step-000001.ckpt").ckpt.endswith("last.ckpt")
    assert lmzoo.compose(*given, "run_dir=elsewhere").ckpt is None
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert lmzoo.compose(*given).ckpt is None


def test_what_scontrol_says_of_a_refusal_is_handed_on(slurm, monkeypatch):
    assert ranks.requeue() == "scontrol requeue 17: the job is in the queue again"
    assert slurm.read_text() == "requeue 17\n"
    (slurm.parent / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Requested operation is disabled' >&2; exit 1\n")
    assert ranks.requeue() == "scontrol requeue 17: Requested operation is disabled"
    monkeypatch.setenv("PATH", str(slurm.parent))
    assert "No such file" in ranks.requeue()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert ranks.requeue() == ""


@pytest.mark.parametrize(
    "state, reason, again",
    [
        ("RUNNING", "None", True),  # preempted, but not yet ended, or a signal that somebody sent
        ("COMPLETING", "TimeLimit", True),
        ("COMPLETING", "None", False),  # by scancel
        ("CANCELLED", "None", False),
    ],
)
def test_a_job_that_was_cancelled_stays_out_of_the_queue(slurm, state, reason, again):
    (slurm.parent / "job").write_text(f"JobId=17 JobName=training\n   JobState={state} Reason={reason}\n")
    said = ranks.requeue()
    assert slurm.exists() == again
    assert said == ("scontrol requeue 17: the job is in the queue again" if again else
                    f"job 17 is being ended (JobState={state}): it is not put into the queue again")  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["SIGUSR1"], ["SIGUSR1", "SIGTERM"]))
def test_a_job_that_is_told_to_go_while_it_prepares_queues_itself_again(slurm, name):
    """A reader of the user's own is at work, for as long as it takes."""
    (slurm.parent / "mine.py").write_text("import pathlib, time\n\ndef read(path):\n    pathlib.Path('begun').touch()\n"
                                          "    time.sleep(600)\n    yield\n")  # fmt: skip
    words = ["model=gpt", "task=clm", "tokenizer=byte", "data.reader._target_=mine.read", "trust=[mine]",
             "data.cache_dir=cache"]  # fmt: skip
    run = subprocess.Popen([sys.executable, "-m", "lmzoo.train", *words], stderr=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": str(slurm.parent)})  # fmt: skip
    deadline = time.monotonic() + 120
    while not (slurm.parent / "begun").exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(getattr(signal, name))
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 75, said
    assert said.splitlines() == ["lmzoo: stopped by a signal outside of training; what was prepared is kept",
                                 "scontrol requeue 17: the job is in the queue again"]  # fmt: skip
    assert slurm.read_text() == "requeue 17\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_a_job_that_is_told_to_go_queues_itself_again_and_ends_as_the_whole_run(slurm, words, name):
    """The same command twice. Ctrl-C saves too, but the job stays where it is."""
    given = words(None, "model=gpt", "task=clm", "trainer.max_steps=60", "trainer.val_every_n_steps=20",
                  "checkpoint.every_n_steps=5", "data.num_workers=0")  # fmt: skip
    command = [sys.executable, "-m", "lmzoo.train", *(word for word in given if not word.startswith("run_dir"))]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    folder = slurm.parent / "runs" / "slurm" / "17-gpt-clm"
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(getattr(signal, name))
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 75 and "stopped by a signal" in said
    assert slurm.exists() == (name != "SIGINT")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SLURM_RESTART_COUNT": "1"})
    assert done.returncode == 0 and "going on from step" in done.stdout, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["17-gpt-clm"]
    net, _ = lmzoo.fit(lmzoo.compose(*(word for word in given if word != "run_dir=None"), "run_dir=whole"))
    again = lmzoo.load(folder).state_dict()
    assert all((weight == again[key]).all() for key, weight in net.state_dict().items())


def test_of_a_collective_that_has_lost_a_rank_no_traceback_is_left(tmp_path):
    """By gloo's own words, and by what nccl raises; any other error stays what it is."""
    gloo = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    for error in (gloo, DistBackendError("NCCL error")):
        with pytest.raises(UserError, match="^another process of this run has died .*memory[?][)]$") as told:
            with parts.outspoken(tmp_path):
                raise error
        assert told.value.exit_code == 1
    with pytest.raises(RuntimeError, match="^other$"), parts.outspoken(tmp_path):
        raise RuntimeError("other")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_with_a_line(words, tmp_path, rank):
    """By the rank that is left, with how to go on."""
    given = words("run", "model=gpt", "task=clm", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu",
                  "trainer.max_steps=100000", "checkpoint.every_n_steps=5", "data.num_workers=0")  # fmt: skip
    command, said = [sys.executable, "-m", "lmzoo.train", *given], tmp_path / "said"
    with open(said, "w") as file:
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(first.pid), "-f", "lmzoo.train"], capture_output=True).stdout
    os.kill(int(children.split()[-1]) if rank else first.pid, signal.SIGKILL)
    assert first.wait(timeout=60) == (1 if rank else -9)
    while not said.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    (line,) = said.read_text().splitlines()
    assert line.startswith("lmzoo: another process of this run has died")
    assert line.endswith("saved: python -m lmzoo.train ckpt=run")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
