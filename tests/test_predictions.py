"""Predictions of a split: any order, any rank, no memory to speak of."""

import json
import tracemalloc

from lmzoo.tasks.predictions import IN_MEMORY, Predictions


def test_records_come_out_in_the_order_of_their_texts(tmp_path):
    predictions = Predictions()
    predictions.add((place, {"text": f"text {place} ü\n"}) for place in (3, 0, 7))
    predictions.add([(1, {"text": "späť"})])
    predictions.write(tmp_path / "new" / "predictions.jsonl", first_rank=True)
    lines = (tmp_path / "new" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["text 0 ü\n", "späť", "text 3 ü\n", "text 7 ü\n"]


def test_some_are_spread_over_all():
    predictions = Predictions()
    assert not predictions and list(predictions.some()) == []
    predictions.add((place, {"place": place}) for place in range(23, -1, -1))
    assert [row["place"] for row in predictions.some()] == [0, 4, 8, 12, 16]
    few = Predictions()
    few.add([(5, {"place": 5}), (2, {"place": 2})])
    assert [row["place"] for row in few.some()] == [2, 5]


def test_memory_does_not_grow_with_the_texts(tmp_path):
    predictions, record = Predictions(), {"text": "x" * 10_000}
    tracemalloc.start()
    for place in range(2_000):  # 20 MB
        predictions.add([(place, record)])
    predictions.write(tmp_path / "predictions.jsonl", first_rank=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "predictions.jsonl").stat().st_size > 20_000_000
    assert peak < 5 * IN_MEMORY
