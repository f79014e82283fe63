"""One of lmzoo's benchmarks; NAME --help says what it measures: python -m lmzoo.tools.benchmark NAME"""

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from lmzoo.tools import answer, benchmark, new_file, parser


def measure(name: str, given: argparse.Namespace) -> str:
    """Run a benchmark: each row is shown as soon as it is there, all of them are written to the file of `--json`."""
    if given.json:
        new_file(given.json)
    if png := getattr(given, "png", None):
        new_file(png, ".png")
    rows = []
    for row in import_module(f".{name}", benchmark.__name__).run(given):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return "\n".join(map(str, rows))


def main() -> None:
    name = next(iter(sys.argv[1:]), None)
    arguments = parser(import_module(f".{name}", benchmark.__name__).__doc__ if name in benchmark.NAMES else __doc__)
    arguments.add_argument("name", choices=benchmark.NAMES)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a new file as well")
    if name in benchmark.NAMES:
        import_module(f".{name}", benchmark.__name__).options(arguments)
    given = arguments.parse_args()
    answer(measure, given.name, given)


if __name__ == "__main__":
    main()
