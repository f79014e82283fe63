"""What is damaged in the cache, a store, a finished part or a tokenizer, is made again; nothing reads wrong tokens."""

import os
from pathlib import Path

import pytest

from lmzoo.data import corpus as readers
from lmzoo.data import preparation, sources, workers
from lmzoo.data.mixture import prepare_tokenizer
from lmzoo.data.preparation import prepare
from lmzoo.errors import UserError
from small_store import settings, texts
from test_preparation import TOKENIZER, counted
from test_sources import LINES


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A corpus of 9 parts."""
    monkeypatch.setattr(readers, "PIECE_MB", 0.0005)
    monkeypatch.setattr(sources, "PART_MB", (0.001, 0.001))
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    return settings(tmp_path, path=str(tmp_path / "corpus.txt"))


def flip(place):
    """Another bit at a place of a file."""
    def spoil(file):
        content = bytearray(file.read_bytes())
        content[place] ^= 0x40
        file.write_bytes(content)
    return spoil


def fill(begin, value):
    """Bytes of one value from a place of a file on."""
    return lambda file: file.write_bytes(file.read_bytes()[:begin] + value * (file.stat().st_size - begin))


DAMAGE = {  # of a shard: in its header, its tokens, its ends; of its file
    "header": flip(20), "token": flip(70), "tokens": fill(64, b"\xff"), "ends": fill(-300, b"\xff"), "last": flip(-1),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-9]), "empty": lambda file: file.write_bytes(b""),
    "gone": os.remove}
TORN = {"torn": lambda file: file.write_text(file.read_text()[:-20]), "empty": lambda file: file.write_text(""),
        "object": lambda file: file.write_text("{}"), "list": lambda file: file.write_text("[]"),
        "binary": fill(0, b"\xff"), "digit": lambda file: file.write_text(file.read_text().replace("1", "2", 1))}


@pytest.mark.parametrize(("file", "damage"), [
    *(("train-00000.shard", spoil) for spoil in DAMAGE.values()), ("val-00000.shard", flip(70)),
    *(("meta.json", spoil) for spoil in TORN.values())])
def test_a_damaged_store_is_prepared_again(config, caplog, file, damage):
    store = prepare(config, TOKENIZER)
    expected = texts(store, TOKENIZER)
    damage(store.folder / file)
    again = prepare(config, TOKENIZER)
    again.verify()
    assert texts(again, TOKENIZER) == expected and again.folder == store.folder
    message, = caplog.messages
    assert message.startswith(f"{store.folder / file} ") and message.endswith(": it is made again")
    prepare(config, TOKENIZER)
    assert len(caplog.messages) == 1


def test_of_a_large_store_only_the_headers_are_looked_at(config, monkeypatch, caplog):
    folder = prepare(config, TOKENIZER).folder
    size = sum(file.stat().st_size for file in folder.glob("*.shard"))
    flip(70)(folder / "train-00000.shard")
    monkeypatch.setattr(preparation, "VERIFIED_MB", (size - 1) / 1e6)
    with pytest.raises(UserError, match="train-00000.shard is damaged"):
        prepare(config, TOKENIZER).verify()
    assert not caplog.messages
    flip(20)(folder / "val-00000.shard")
    prepare(config, TOKENIZER).verify()
    assert "val-00000.shard is damaged" in caplog.text


@pytest.mark.parametrize(("file", "damage"), [
    *(("train-00003.shard", spoil) for spoil in DAMAGE.values()),
    *(("part-00003.json", spoil) for spoil in TORN.values()), ("part-00003.json", os.remove)])
@pytest.mark.parametrize("unique", [False, True])
def test_a_finished_part_is_believed_if_its_files_are_whole(config, monkeypatch, file, damage, unique):
    config["data"]["deduplicate"] = unique
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_meta", None)  # everything but the last step
        with pytest.raises(TypeError):
            prepare(config, TOKENIZER)
    partial, = (path for path in (Path(config["data"]["cache_dir"]) / "stores").iterdir() if path.is_dir())
    damage(partial / file)
    with counted(monkeypatch) as parts:
        store = prepare(config, TOKENIZER)
    store.verify()
    assert parts == [3] and sum(map(len, texts(store, TOKENIZER).values())) == len(LINES)


@pytest.mark.parametrize("damage", [flip(0), flip(20), fill(16, b"\0"), DAMAGE["torn"], DAMAGE["empty"]])
def test_digests_are_believed_if_they_are_whole(config, tmp_path, monkeypatch, caplog, damage):
    """Of a text that comes twice, throughout: one wrong digest would drop a document or keep it twice."""
    (tmp_path / "corpus.txt").write_text("\n".join(LINES + LINES))
    config["data"]["deduplicate"] = True
    with monkeypatch.context() as patch:
        patch.setattr(workers.Workshop, "_tokenise", None)
        with pytest.raises(TypeError):
            prepare(config, TOKENIZER)
    *_, file = sorted((Path(config["data"]["cache_dir"]) / "stores").glob("*.partial/*.digests"))
    damage(file)
    store = prepare(config, TOKENIZER)
    assert sorted(sum(texts(store, TOKENIZER).values(), [])) == sorted(LINES)
    assert store.left_out["documents"] == len(LINES) and f"{file} is damaged: it is made again" in caplog.text


@pytest.mark.parametrize("damage", [*TORN.values(), flip(1000), os.remove])
def test_a_damaged_tokenizer_is_trained_again(config, caplog, damage):
    first = prepare_tokenizer(config)
    kept, = (Path(config["data"]["cache_dir"]) / "tokenizers").glob("*.json")
    damage(kept)
    assert prepare_tokenizer(config).hash == first.hash == prepare_tokenizer(config).hash
    assert [message.startswith(f"{kept} ") for message in caplog.messages] == [True] * (damage is not os.remove)
