"""From what a user types to a checked configuration; imports no torch, so that a mistake is refused within a second.

Hydra composes `conf/` and the command line into the typed root of `schema.py`. Around it: free text and paths are
quoted before Hydra's grammar sees them (`literal.py`), errors become one line (`checks.py`, `signatures.py`), and what
was composed is completed into the configuration of one run (`runs.py`).
"""

import os
import sys
import warnings
from collections.abc import Callable

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from . import checks
from .errors import UserError
from .literal import load, prepared
from .runs import finish
from .schema import register

RANK_CONFIG = "LMZOO_RANK_CONFIG"  # in the environment of a process that is handed its parent's resolved config
MISTAKES = (UserError, HydraException, OmegaConfBaseException, OSError)  # OSError: what the disk refuses


def compose(*overrides: str) -> DictConfig:
    """The checked configuration of a training run, e.g. `compose("model=gpt", "task=clm", "optim.lr=3e-4")`.

    Raises UserError, one line, for a word that does not exist, a value of the wrong type, or a pair that does not fit.
    """
    register()
    try:
        with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
            checks.check_typed(overrides)
            composed = hydra.compose("train", prepared(overrides), return_hydra_config=True)
        settings = composed.hydra
        with open_dict(composed):
            del composed["hydra"]
        return finish(composed, settings)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(checks.explain(error)) from None


def command(name: str, job: Callable[[DictConfig], object]) -> None:
    """Run `job(config)` as the command line says, once or as a sweep; a user's mistake exits with 2 (in a sweep 1)."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra.main hands errors on instead of printing them
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    failed = []

    def once(composed: DictConfig) -> object:
        settings = HydraConfig.get()
        if sweep := settings.mode.name == "MULTIRUN":
            print(f"job {settings.job.num}: {settings.job.override_dirname}", flush=True)
        try:
            return job(finish(composed, settings, name))
        except MISTAKES as error:  # reported here, since a sweep goes on with its next job
            print(f"lmzoo: {checks.explain(error)}", file=sys.stderr)
            failed.append(1 if sweep else 2)

    try:
        if path := os.environ.get(RANK_CONFIG):
            job(load(path))
        elif {"-h", "--help"} & set(sys.argv[1:]):
            print(manual(name, sys.modules[job.__module__].__doc__))
        else:
            checks.check_typed(sys.argv[1:])
            sys.argv[1:] = prepared(sys.argv[1:])
            hydra.main(config_path="pkg://lmzoo.conf", config_name=name, version_base="1.3")(once)()
    except MISTAKES as error:
        print(f"lmzoo: {checks.explain(error)}", file=sys.stderr)
        failed.append(2)
    except KeyboardInterrupt:
        print("lmzoo: interrupted", file=sys.stderr)
        failed.append(130)
    if failed:
        sys.exit(failed[0])


def manual(name: str, examples: str) -> str:
    """What `--help` prints: examples, every part with its options, and the words of `conf/NAME.yaml`."""
    text = (checks.CONF / f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    entries = [entry for entry in content["defaults"] if isinstance(entry, dict)]
    chosen = {part.removeprefix("optional ") for entry in entries for part in entry}
    parts = [f"  {part}={', '.join(options)}" for part, options in checks.groups().items()
             if part.split("/")[0] in chosen - {"published", "recipe"}]
    words = text[text.index("\n\n"):text.index("\nhydra:")].strip()
    footer = f"The words of chosen parts too: python -m lmzoo.{name} --cfg job PART=OPTION ..."
    return "\n\n".join([examples.strip(), "Parts:", "\n".join(parts), "Words:", words, footer])
