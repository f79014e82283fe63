"""The wheel, unpacked elsewhere, is enough: it composes and trains from another folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """site-packages with what the wheel holds, and nothing of the repository on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves folders beside the source
    keep = ["pyproject.toml", "README.md", "lmzoo", "tasks", "tools", "conf"]
    source.mkdir()
    for name in keep:
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    (source / "README.md").touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site, folder, code):
    """Python code run in `folder`, with the unpacked wheel before everything else."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=environment)


def test_one_name_in_site_packages(unpacked):
    assert sorted(path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")) == ["lmzoo"]


def test_every_file_is_in_the_wheel(unpacked):
    for folder, inside in (("lmzoo", "."), ("tasks", "tasks"), ("tools", "tools"), ("conf", "conf")):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".html"):
                assert (unpacked / "lmzoo" / inside / file.relative_to(ROOT / folder)).is_file(), file


@pytest.mark.slow
def test_the_folder_that_holds_a_checkout_is_a_folder_like_any(tmp_path):
    """Python finds the checkout in it, ahead of the package that is installed; its runs/ is not lmzoo/runs.py."""
    (tmp_path / "lmzoo").mkdir()
    for name in ("__init__.py", "lmzoo", "tasks", "tools", "conf"):
        (tmp_path / "lmzoo" / name).symlink_to(ROOT / name)
    (tmp_path / "lmzoo" / "runs").mkdir()
    code = """
import lmzoo, lmzoo.tasks.clm, lmzoo.tools.count
from lmzoo.errors import UserError
assert lmzoo.UserError is UserError
print(lmzoo.compose("model=gpt", "task=clm").model.n_layers)
"""
    done = run("", tmp_path, code)
    assert done.stdout == "4\n", done.stderr


@pytest.mark.slow
def test_it_trains_from_another_folder(unpacked, words, tmp_path):
    given = list(words(tmp_path / "run", "model=gpt", "task=clm", "trainer.max_steps=2"))
    code = f"""
import lmzoo
assert lmzoo.__file__.startswith({str(unpacked)!r}), lmzoo.__file__
model, metrics = lmzoo.fit(lmzoo.compose(*{given!r}))
print(metrics["val/loss"])
"""
    done = run(unpacked, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) > 0
