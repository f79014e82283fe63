"""wandb behind one object that can't end a run: the first failure is reported, then it is quiet."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)


class Wandb:
    """One wandb run of one job, offline unless asked, its files under `folder`/wandb.

    metrics.csv is the record and this a view of it: offline, wandb writes in blocks of 32 KiB, and a killed run loses
    the last. The id lives in the checkpoint; a resumed run keeps it, with each row's step given explicitly.

    Args:
        folder: the run folder.
        id: wandb's id of the run; None: a new one.
        config: the resolved configuration, shown as it is.
        mode: offline, online or disabled.
        project, name, notes, tags: as wandb shows them.
    """

    def __init__(
        self,
        folder: str | Path,
        id: str | None = None,
        config: Mapping | None = None,
        mode: str = "offline",
        project: str = "lmzoo",
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ):
        self.run = None
        self.quiet = mode == "disabled"

        def start() -> object:
            import wandb

            Path(folder).mkdir(parents=True, exist_ok=True)
            return wandb.init(
                dir=str(folder), id=id, config=dict(config or {}), mode=mode, project=project, name=name, notes=notes,
                tags=list(tags), resume="allow" if id else None, reinit="finish_previous",
                settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip

        self.run = self._attempt(start)

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Logs `row` at the optimizer step `step`."""
        self._attempt(lambda: self.run.log(dict(row), step=step))

    def finish(self) -> None:
        """Writes what is left and ends the run."""
        self._attempt(lambda: self.run.finish())
        self.quiet = True

    def _attempt(self, call: Callable[[], object]) -> object:
        if self.quiet:
            return None
        try:
            return call()
        except Exception as error:
            self.quiet = True
            reason = f"{type(error).__name__}: {error}"
            log.warning("wandb failed (%s); training goes on, metrics.csv has every row", reason)
