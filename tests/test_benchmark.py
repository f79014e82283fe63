"""The benchmarks' own instruments, on cases whose result is known; and a small run of the whole."""

import json
import random
import subprocess
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from lmzoo.tools.benchmark import NAMES, arm, attention, data, measure, packing, peers, scale, startup, train
from lmzoo.tools.benchmark import __main__ as command
from lmzoo.tools.benchmark.measure import Row, by_turns, disk, peak_memory, ratio, spread

import lmzoo

KEYS = {"family", "arm", "dtype", "tokens_per_s", "peak_memory_mb"}


def test_arms_take_turns(monkeypatch):
    calls, clock = [], [0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def arm(name, seconds):
        calls.append(name)
        clock[0] += seconds

    assert by_turns({"a": lambda: arm("a", 1), "b": lambda: arm("b", 5)}, 3) == {"a": [1, 1, 1], "b": [5, 5, 5]}
    assert "".join(calls) == "abbaab"


def test_ratios_are_taken_round_by_round():
    assert spread([3, 1, 2]) == (2, 1, 3)
    assert ratio([2, 4, 9], [1, 4, 3], "at least 1") == "2.00 [1.00 - 3.00], wanted: at least 1"


def test_peak_memory_is_that_of_the_largest_process_of_the_tree():
    ballast = bytearray(300_000_000)  # of this process, which is none of the command's
    used = "x = bytearray({n}); x[::4096] = b'1' * len(x[::4096])"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {used.format(n=150_000_000)!r}])"
    ballast[::4096] = b"1" * len(ballast[::4096])
    alone, larger, inner = (peak_memory([sys.executable, "-c", code]) for code in
                            ("pass", used.format(n=150_000_000), child))
    assert alone < 50 and 150 < larger < 200 and 150 < inner < 200


def test_a_command_that_fails_is_no_measurement():
    with pytest.raises(subprocess.CalledProcessError):
        peak_memory([sys.executable, "-c", "raise SystemExit(3)"])


def test_disk_counts_every_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(1500))
    (tmp_path / "c").write_bytes(bytes(500))
    assert disk(tmp_path) == 0.002


def test_the_text_is_the_same_each_time_and_its_repetitions_are_not():
    draws = [data.sample(data.documents(), 0.3) for _ in range(2)]
    texts = list(draws[0])
    assert texts == list(draws[1]) and not any("\n\n" in text or not text.strip() for text in texts)
    assert data.rotate("abcdef", 2) == "cdefab" and data.rotate("abcdef", 8) == "cdefab"


def test_a_text_is_cut_into_whole_lines():
    lines = [f"line {i}" for i in range(5000)]
    pieces = list(data.cut("\n".join(lines), random.Random(0)))
    assert "\n".join(pieces) == "\n".join(lines)
    assert all(data.SHORTEST <= len(piece) <= data.LONGEST + 20 for piece in pieces[:-1])


def test_datasets_and_lmzoo_read_the_same_tokens(tmp_path):
    pytest.importorskip("datasets")
    texts = list(data.sample(data.documents(), 0.1))[:-1]  # the last is cut, perhaps before a space
    arms = {row.arm: row for row in prepared(tmp_path, texts)}
    n_tokens = {arm: round(row.tokens_per_s * row.seconds[0]) for arm, row in arms.items()}
    assert n_tokens["lmzoo data.prepare"] == n_tokens["datasets map"]
    assert n_tokens["datasets map"] == n_tokens["tokenizers encode_batch"] + 2 * len(texts)  # bos and eos
    assert arms["lmzoo data.prepare"].disk_mb > 0 and "at most 0.5" in arms["datasets map"].note


def test_a_missing_peer_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    arms = {row.arm: row for row in prepared(tmp_path, list(data.sample(data.documents(), 0.05)))}
    assert arms["datasets map"].note.startswith("skipped") and len(arms) == 3


def prepared(folder, texts):
    """The rows of `prepare` over these texts."""
    tokenizer = data.train_bpe(texts, 400)
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    data.VOCABULARY, vocabulary = 400, data.VOCABULARY
    try:
        return list(data.prepare(folder, texts, processes=1, rounds=1))
    finally:
        data.VOCABULARY = vocabulary


def test_rows_as_json(tmp_path, monkeypatch):
    rows = [Row("open", "lmzoo one", seconds=(1.0, 0.5, 2.0)), Row("memory", "other", peak_memory_mb=3.5)]
    monkeypatch.setattr(data, "run", lambda given: iter(rows))
    said = command.measure("data", SimpleNamespace(json=tmp_path / "new.json"))
    read = json.loads((tmp_path / "new.json").read_text())
    assert all(set(row) >= KEYS for row in read) and read[0]["seconds"] == [1.0, 0.5, 2.0]
    assert "1 s [0.5 - 2]" in said and "4 MB of memory" in said


@pytest.mark.parametrize("words", [[], *([name] for name in NAMES)])
def test_the_command_says_how_it_is_used(words):
    asked = [sys.executable, "-m", "lmzoo.tools.benchmark", *words, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0 and "--json" in done.stdout
    assert all(name in done.stdout for name in NAMES)


LIBRARIES = {"transformers": "transformers", "litgpt": "litgpt.model", "x-transformers": "x_transformers"}
KINDS = [(family, library, kind) for family in train.FAMILIES for library in peers.PEERS[family]
         for kind in peers.ATTENTIONS[library]]


@pytest.mark.parametrize(("family", "library", "kind"), KINDS)
def test_peers_are_of_the_same_size_and_read_the_same_batch(family, library, kind, tmp_path):
    """As many parameters as lmzoo's net, biases and scales apart; a finite loss whose gradient reaches them all."""
    pytest.importorskip(LIBRARIES[library])
    shape = train.SHAPES["cpu"][family]
    with torch.device("meta"):
        net = lmzoo.build(lmzoo.compose(*train.words(family, train.SHAPES["cpu"][family], "cpu", tmp_path)).model)
    ours = sum(weight.numel() for weight in net.parameters())
    torch.manual_seed(0)
    net, loss = peers.attentions(family, library)[str(kind)](shape)
    assert sum(weight.numel() for weight in net.parameters()) == pytest.approx(ours, rel=0.015)
    labels = torch.randint(shape["vocab_size"], (1, 8))
    value = loss(net, {"input_ids": labels.flip(1), "decoder_input_ids": labels.roll(1, 1), "labels": labels})
    value.backward()
    assert value.isfinite() and all(weight.grad is not None for weight in net.parameters())


def test_a_window_is_handed_out_for_each_step_that_is_asked_for():
    asked = []

    def turns():
        for number in range(5):
            asked.append(number)
            yield

    windows = iter(arm.Paced([[{"targets": 1}], [{"targets": 2}, {"targets": 3}]], turns()))
    for number, expected in enumerate([1, 2, 1]):
        assert next(windows)[0]["targets"] == expected and asked == list(range(number + 1))


def test_the_tables_differ_in_the_allocator_only(tmp_path):
    default, tuned = (train.environment(kind, 2, tmp_path / kind) for kind in ("default", "tuned"))
    differing = {name for name in {*default, *tuned} if default.get(name) != tuned.get(name)}
    assert differing - {"TORCHINDUCTOR_CACHE_DIR"} in ({"LD_PRELOAD"}, {"GLIBC_TUNABLES"})
    assert default["OMP_NUM_THREADS"] == "2"


def test_a_command_is_followed_to_its_line(tmp_path):
    startup.until(["--help"], "Parts:", tmp_path)
    with pytest.raises(RuntimeError, match="ended without a line"):
        startup.until(["--help"], "no such line", tmp_path)


@pytest.mark.slow
def test_a_small_run_of_training(tmp_path):
    small = ["train", "--families", "bert", "--dtype", "fp32", "--peers", "none", "--no-compile", "--rounds", "1",
             "--steps", "1", "--png", tmp_path / "train.png", "--json", tmp_path / "train.json"]
    subprocess.run([sys.executable, "-m", "lmzoo.tools.benchmark", *small], check=True)
    rows = json.loads((tmp_path / "train.json").read_text())
    assert [row["arm"] for row in rows] == ["lmzoo", "lmzoo keep_memory", "ceiling", "lmzoo", "ceiling"]
    assert all(set(row) >= KEYS for row in rows) and (tmp_path / "train.png").stat().st_size > 5000
    assert all(row["mfu"] > 0 and row["first_s"] > 0 and row["peak_memory_mb"] > 100 for row in rows if row["mfu"])


def test_along_an_axis_one_size_grows():
    assert scale.shape("d_model", 512) == scale.BASE | {"d_model": 512, "d_ff": 2048, "n_heads": 16}
    assert all(size in scale.AXES[axis] for axis, size in scale.BASE.items() if axis in scale.AXES)
    tokens = {scale.shape("max_len", size)["batch_size"] * size for size in scale.AXES["max_len"]}
    assert tokens == {scale.BASE["batch_size"] * scale.BASE["max_len"]}


@pytest.mark.slow
def test_a_small_run_of_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "BASE", scale.BASE | {"d_model": 64, "n_layers": 2, "batch_size": 2})
    monkeypatch.setattr(scale, "AXES", {"n_layers": [1, 2]})
    given = {"family": "gpt", "dtype": "fp32", "axes": ["n_layers"], "steps": 1, "rounds": 1, "threads": 1}
    rows = list(scale.run(SimpleNamespace(**given, png=tmp_path / "scale.png")))
    assert [row.arm for row in rows] == ["lmzoo n_layers=1", "lmzoo n_layers=2"]
    assert all(row.tokens_per_s > 0 and row.mfu > 0 for row in rows) and rows[1].note.startswith("1.00 ")
    assert (tmp_path / "scale.png").stat().st_size > 5000


@pytest.mark.slow
def test_sentences_are_lines_of_some_words():
    lines = list(islice(packing.sentences(), 1000))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert {len(line.split()) for line in lines} == set(range(packing.FEWEST, packing.MOST + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arms"), [
    ("packing", ["single", "fit", "isolate"]), ("recompute", ["none", "selective", "full"]),
])  # fmt: skip
def test_a_small_run_of_lmzoo_beside_itself(tmp_path, name, arms):
    small = ["--families", "bert", "--dtype", "fp32", "--rounds", "1", "--steps", "1", "--threads", "1"]
    command = [sys.executable, "-m", "lmzoo.tools.benchmark", name, *small, "--json", tmp_path / "rows.json"]
    subprocess.run(command, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["arm"] for row in rows] == [f"lmzoo {arm}" for arm in arms]
    assert all(set(row) >= KEYS and row["tokens_per_s"] > 0 for row in rows)
    memory = [row["peak_memory_mb"] for row in rows]
    assert name == "packing" or memory == sorted(memory, reverse=True)


def test_a_small_run_of_attention():
    """Each kernel is measured on each kind of rows, and one of each pair is lmzoo's own choice."""
    words = {
        "kinds": attention.KINDS, "dtype": ["fp32", "bf16"], "lengths": [8], "tokens": 16, "width": 16, "d_head": 8,
    }  # fmt: skip
    rows = list(attention.run(SimpleNamespace(**words, steps=1, rounds=1, threads=1)))
    assert len(rows) == 3 * 2 * 2 and all(row.tokens_per_s > 0 for row in rows)
    chosen = {(row.dtype, row.arm.split()[1].strip(",")) for row in rows if row.note.startswith("lmzoo's own choice")}
    assert chosen == {("fp32", "sdpa"), ("bf16", "matmul")}


@pytest.mark.slow
def test_a_small_run_of_generation(tmp_path):
    pytest.importorskip("transformers")
    small = ["generate", "--batch", "2", "--tokens", "4", "--rounds", "1", "--json", tmp_path / "generate.json"]
    subprocess.run([sys.executable, "-m", "lmzoo.tools.benchmark", *small], check=True)
    rows = json.loads((tmp_path / "generate.json").read_text())
    assert [row["arm"] for row in rows] == ["lmzoo", "transformers"] * 3 and all(set(row) >= KEYS for row in rows)
    assert all("the same tokens" in row["note"] for row in rows[::2])


@pytest.mark.slow
def test_a_small_run_of_the_startup():
    done = subprocess.run([sys.executable, "-m", "lmzoo.tools.benchmark", "startup", "--rounds", "1"],
                          capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["first", "help", "mistake", "loop"]


@pytest.mark.slow
def test_a_small_run(tmp_path):
    small = [sys.executable, "-m", "lmzoo.tools.benchmark", "data", "--mb", "1", "--rounds", "1", "--json"]
    subprocess.run([*small, tmp_path / "data.json"], check=True)
    rows = json.loads((tmp_path / "data.json").read_text())
    assert {row["what"] for row in rows} == {"prepare", "memory", "collate", "open"}
    assert all(set(row) >= KEYS for row in rows) and {row["family"] for row in rows} >= {"encoder", "decoder"}
