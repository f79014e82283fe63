"""Benchmarks: lmzoo beside what else does the same work, on this machine, in one run, by turns.

A benchmark is a module of this package with `options(parser)`, which adds its own arguments, and `run(given)`, which
yields a `measure.Row` for each result; its docstring is its help. Its name stands in `NAMES`.
"""

NAMES = ("attention", "data", "generate", "packing", "recompute", "scale", "startup", "train")
