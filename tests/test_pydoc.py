import sys
from collections import Counter, defaultdict

import pytest

from lmzoo.data import pydoc
from lmzoo.data.pydoc import read_docstrings, read_pydoc
from lmzoo.errors import UserError

MODULE = '''"""Module of {name}, with a docstring of more than forty characters."""
class A:
    """Class of {name}, with a docstring of more than forty characters."""
    def f(self):
        "Shared by every package, and longer than forty characters."
    async def g(self):
        """
        Indented.

            more
        """
raise SystemExit("nothing here may run")
'''


@pytest.fixture
def library(tmp_path):
    for name in ("one.py", "two/__init__.py", "two/b.py", "test/t.py", "site-packages/s.py", "config-x/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MODULE.format(name=name))
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'b': 'Topic b\\n', 'a': 'Topic ' 'a'}\nraise OSError")
    return tmp_path


def test_topics_and_docstrings_are_parsed_never_run(library):
    texts = [document.text for document in read_pydoc(library)]
    assert texts[:2] == ["Topic a", "Topic b"]
    assert texts[2:6] == ["Module of one.py, with a docstring of more than forty characters.",
                          "Class of one.py, with a docstring of more than forty characters.",
                          "Shared by every package, and longer than forty characters.", "Indented.\n\n    more"]
    assert len(texts) == 2 + 3 * 2 + 2 == len(set(texts))  # what three files share is there once


def test_docstrings_are_labelled_without_shared_or_short_ones(library):
    documents = list(read_docstrings(library))
    assert Counter(document.label for document in documents) == {"one": 2, "two": 4}
    assert {document.label for document in read_docstrings(library, n_classes=1)} == {"two"}
    assert all("Shared" not in document.text and "Indented" not in document.text for document in documents)


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no Python sources"):
        list(read_pydoc(tmp_path))


def test_running_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    parsed = list(pydoc._docstrings(pydoc._library(None)))  # the slow part, once for both sources
    monkeypatch.setattr(pydoc, "_docstrings", lambda library: parsed)
    texts = [document.text for document in read_pydoc()]
    assert 1.5e6 < sum(len(text.encode()) for text in texts) < 4e6 and len(texts) == len(set(texts))
    assert any(text.startswith("The \"with\" statement") for text in texts)
    documents = list(read_docstrings())
    assert {"turtle", "tkinter", "antigravity", "pydoc_data.topics"}.isdisjoint(set(sys.modules) - before)
    labels, splits = Counter(d.label for d in documents), defaultdict(set)
    assert len(labels) == 20 and "test" not in labels
    for document in documents:
        splits[document.text].add(document.split)
    assert len(splits) == len(documents)  # no text twice
    shares = {name: count / len(documents) for name, count in Counter(d.split for d in documents).items()}
    assert shares == pytest.approx({"train": 0.8, "val": 0.1, "test": 0.1}, abs=0.02)
