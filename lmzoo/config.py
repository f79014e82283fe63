"""From what a user types to a checked configuration; imports no torch, so that a mistake is refused within a second.

Hydra composes `conf/` and the command line into the typed root of `schema.py`. Around it: free text and paths are
quoted before Hydra's grammar sees them (`literal.py`), errors become one line (`checks.py`, `signatures.py`), and what
was composed is completed into the configuration of one run (`runs.py`).
"""

import logging
import math
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from . import checks, ranks, sweep
from .errors import STOPPED, UserError
from .literal import prepared
from .runs import finish
from .schema import register

MULTIRUN = {"-m", "--multirun"}
MISTAKES = (UserError, HydraException, OmegaConfBaseException, OSError)  # OSError: what the disk refuses


def compose(*overrides: str) -> DictConfig:
    """The checked configuration of a training run, e.g. `compose("model=gpt", "task=clm", "optim.lr=3e-4")`.

    Raises UserError, one line, for a word that does not exist, a value of the wrong type, or a pair that does not fit.
    """
    if not all(isinstance(word, str) for word in overrides):
        raise UserError('compose takes words, as compose("model=gpt", "task=clm"); of a list compose(*words)')
    register()
    try:
        with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
            checks.check_typed(overrides)
            composed = hydra.compose("train", prepared(overrides), return_hydra_config=True)
        settings = composed.hydra
        with open_dict(composed):
            del composed["hydra"]
        return finish(composed, settings)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise UserError(checks.explain(error)) from None


def command(name: str, job: Callable[[DictConfig], object]) -> None:
    """Run `job(config)` as the command line says, once or as a sweep; a user's mistake exits with 2 (in a sweep 1)."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra.main hands errors on instead of printing them
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # what it logs it raises too
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    failed = []

    def once(composed: DictConfig) -> object:
        settings = HydraConfig.get()
        if in_sweep := settings.mode.name == "MULTIRUN":
            words = list(settings.overrides.task)
            print("\n" * bool(settings.job.num) + f"job {settings.job.num}: {' '.join(words)}", flush=True)
        result, mistake = None, ""
        try:
            result = job(finish(composed, settings, name))
        except SystemExit as end:
            if in_sweep and end.code == STOPPED:
                sweep.record(Path(settings.sweep.dir), sweep.Job(settings.job.num, words, None, "stopped by a signal"))
                folder = next(Path(settings.sweep.dir).glob(f"{settings.job.num}-*"))
                print(f"lmzoo: job {settings.job.num} was stopped by a signal and goes on by ckpt={folder}; the jobs "
                      "after it did not run", file=sys.stderr)
            raise
        except MISTAKES as error:  # reported here, since a sweep goes on with its next job
            mistake = checks.explain(error)
            failed.extend([] if in_sweep else [getattr(error, "exit_code", 2)])
        except Exception as error:
            if not in_sweep:
                raise
            traceback.print_exc()
            mistake = f"{type(error).__name__}: {checks.one_line(error)}"
        if mistake:
            print(f"lmzoo: {mistake}", file=sys.stderr)
        if in_sweep:
            sweep.record(Path(settings.sweep.dir), sweep.Job(settings.job.num, words, result, mistake))
            return math.inf if result is None or math.isnan(result) else result  # the worst, for one that minimises
        return result

    try:
        if name != "generate" and ranks.follows():
            job(None)
        elif {"-h", "--help"} & set(sys.argv[1:]):
            print(manual(name, sys.modules[job.__module__].__doc__))
        else:
            sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in MULTIRUN)  # Hydra takes it first or last
            if ranks.by_torchrun() and MULTIRUN & set(sys.argv[1:]):
                raise UserError("-m: a sweep starts its own processes; leave torchrun out and say trainer=ddp")
            checks.check_typed(sys.argv[1:])
            sys.argv[1:] = prepared(sys.argv[1:])
            hydra.main(config_path="pkg://lmzoo.conf", config_name=name, version_base="1.3")(once)()
    except MISTAKES as error:
        print(f"lmzoo: {checks.explain(error)}", file=sys.stderr)
        failed.append(getattr(error, "exit_code", 2))
    except SystemExit as end:
        if sweep.Sweep.folder is None:
            raise
        failed.append(end.code)
    except KeyboardInterrupt as end:
        if ranks.on_first_rank():
            print(f"lmzoo: {str(end) or 'interrupted'}", file=sys.stderr)
        failed.append(getattr(end, "exit_code", 130))
    if jobs := sweep.jobs(sweep.Sweep.folder):
        print(f"\n{sweep.table(jobs)}")
        if sum(job.loss is not None for job in jobs) > 1:
            print(f"all metrics, means over seeds: python -m lmzoo.tools.summarise_sweep {sweep.Sweep.folder}")
        failed.extend(1 for job in jobs if job.mistake)
    if failed:
        sys.exit(failed[0])


def manual(name: str, examples: str) -> str:
    """What `--help` prints: examples, the parts if there are some with their options, the words of `conf/NAME.yaml`."""
    text = checks.read(name)
    entries = [entry for entry in checks.content(name)["defaults"] if isinstance(entry, dict)]
    chosen = {part.removeprefix("optional ") for entry in entries for part in entry}
    parts = [f"  {part}={', '.join(options)}" for part, options in checks.groups().items()
             if part.split("/")[0] in chosen - {"published", "recipe"}]
    if "model" in chosen:
        parts += [f"  size={', '.join(sizes)}  (published, of {model})" for model, sizes in checks.published().items()]
    words = text[text.index("\n\n"):text.index("\nhydra:")].strip()
    words = "\n".join(fold(line, " " * line.find("#") + "# ") for line in words.splitlines())
    if not parts:
        return "\n\n".join([examples.strip(), "Words:", words])
    parts = "\n".join(fold(part, " " * (part.find("=") + 1)) for part in parts)
    footer = f"The words of chosen parts too: python -m lmzoo.{name} --cfg job PART=OPTION ..."
    return "\n\n".join([examples.strip(), "Parts:", parts, "Words:", words, footer])


def fold(line: str, indent: str) -> str:
    """A line of at most 100 columns, what is more on others below `indent`."""
    return textwrap.fill(line, 100, subsequent_indent=indent)
