"""A checkout named lmzoo, from the folder that holds it: Python finds it there ahead of what is installed.

So it stands for the package: the same rooms, found in the folders that `pyproject.toml` says.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parent / "lmzoo"), str(Path(__file__).parent)]
exec(compile((Path(__path__[0]) / "__init__.py").read_text(encoding="utf-8"), f"{__path__[0]}/__init__.py", "exec"))
