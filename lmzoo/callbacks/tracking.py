"""wandb and TensorBoard behind objects that can't end a run: the first failure is reported, then they are quiet."""

import importlib.util
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from ..errors import UserError

log = logging.getLogger(__name__)


class Tracker:
    """A view of metrics.csv, which is the record. No call of it raises; after the first that fails it does nothing."""

    name: str

    def __init__(self):
        self.quiet = False

    def watch(self, net: nn.Module, step: int) -> None:
        """Look into the net after a step, before its row is logged."""

    def _attempt(self, call: Callable[[], object]) -> object:
        if self.quiet:
            return None
        try:
            return call()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self.quiet = True
        log.warning("%s failed (%s); training goes on, metrics.csv has every row", self.name, reason)


class Wandb(Tracker):
    """One wandb run of one job, offline unless asked, its files under `folder`/wandb.

    Offline, wandb writes in blocks of 32 KiB, and a killed run loses the last. The id lives in the checkpoint; a
    resumed run keeps it, with each row's step given explicitly. Where online fails, the run is kept offline.

    Args:
        folder: the run folder.
        id: wandb's id of the run; None: a new one.
        config: the resolved configuration, shown as it is.
        environment: what the run was started in, shown in the summary.
        mode: offline, online or disabled.
        project, group, name, notes, tags: as wandb shows them.
        watch: histograms of "gradients" (clipped, as the step took them), "parameters" or "all"; None: of neither.
        watch_every_n_steps: their interval.
    """

    name = "wandb"

    def __init__(
        self,
        folder: str | Path,
        id: str | None = None,
        config: Mapping | None = None,
        environment: Mapping | None = None,
        mode: str = "offline",
        project: str = "lmzoo",
        group: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
        watch: str | None = None,
        watch_every_n_steps: int = 100,
    ):
        super().__init__()
        self.open = mode != "disabled"
        self.quiet = not self.open
        self.watched = {None: (), "all": ("gradients", "parameters")}.get(watch, (watch,))
        self.watch_every_n_steps = watch_every_n_steps

        def start(mode: str) -> object:
            import wandb

            Path(folder).mkdir(parents=True, exist_ok=True)
            settings = wandb.Settings(console="off", silent=True)
            wandb.setup(settings)  # silent before it looks for an account, for which it would ask on a terminal
            with _deaf_to_its_log():
                return wandb.init(
                    dir=str(folder), id=id, config=dict(config or {}), mode=mode, project=project, group=group,
                    name=name, notes=notes, tags=list(tags), resume="allow" if id else None, reinit="finish_previous",
                    settings=settings,
                )  # fmt: skip

        def start_online() -> object:
            try:
                return start("online")
            except Exception as error:
                run, reason = start("offline"), str(error).partition("\n")[0]
                log.warning("wandb is not online (%s): the run is kept offline, and wandb sync sends it later", reason)
                return run

        self.run = self._attempt(start_online if mode == "online" else lambda: start(mode))
        if environment:
            self._attempt(lambda: self.run.summary.update({"environment": environment}))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Logs `row` at the optimizer step `step`."""
        self._attempt(lambda: self.run.log(dict(row), step=step))

    def watch(self, net: nn.Module, step: int) -> None:
        """Adds the histograms that were asked for to the step's row, where they are due."""
        if self.watched and step % self.watch_every_n_steps == 0:
            self._attempt(lambda: self.run.log(self._histograms(net), step=step))

    def _histograms(self, net: nn.Module) -> dict[str, object]:
        import wandb

        found = {}
        for name, weight in net.named_parameters():
            for kind, tensor in (("gradients", weight.grad), ("parameters", weight.detach())):
                if kind in self.watched and tensor is not None and (numbers := _finite(tensor)).numel():
                    found[f"{kind}/{name}"] = wandb.Histogram(numbers.numpy())
        return found

    def finish(self) -> None:
        """Writes what is left, ends the run, and looks whether all of it reached the disk."""
        self._attempt(lambda: self.run.finish())
        if self.open:
            with suppress(Exception):  # waits for wandb's process; one that is gone would be missed at Python's exit
                import wandb

                wandb.teardown()
        self._attempt(self._check)
        self.open, self.quiet = False, True

    def _check(self) -> None:
        """wandb says nothing of a full disk: what did not fit is missing at the end of its file."""
        from wandb.proto.wandb_internal_pb2 import Record

        path = Path(self.run.settings.sync_file)
        if not any(Record.FromString(record).HasField("exit") for record in records(path)):
            raise OSError(f"{path} has no end, is the disk full?")


class TensorBoard(Tracker):
    """The rows as TensorBoard's event files, in `folder`/tensorboard; a run that goes on hides those beyond `step`."""

    name = "TensorBoard"

    def __init__(self, folder: str | Path, step: int = 0):
        super().__init__()
        self.writer = self._attempt(lambda: self._open(Path(folder) / "tensorboard", step))

    @staticmethod
    def require() -> None:
        """Refuse to begin where the package is missing."""
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("logger.tensorboard=true needs a package more: pip install 'lmzoo[tensorboard]'")

    @staticmethod
    def _open(folder: Path, step: int) -> object:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Logs `row` at the optimizer step `step`."""
        for name, value in row.items():
            self._attempt(lambda name=name, value=value: self.writer.add_scalar(name, value, step))

    def finish(self) -> None:
        """Writes what is left."""
        self._attempt(lambda: self.writer.close())
        self.quiet = True


def records(path: Path) -> Iterator[bytes]:
    """The serialised records of a .wandb file (LevelDB's log format), as far as a torn file goes."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # of a block, too few for a header
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        body = content[at + 7 : at + 7 + length]
        at += 7 + length
        parts = body if kind in (1, 2) else parts + body  # whole, first; middle 3, last 4
        if kind in (1, 4) and body and len(body) == length:
            yield parts


@contextmanager
def _deaf_to_its_log() -> Iterator[None]:
    """While wandb opens its own log, and for that log ever after: no traceback for a line that a full disk refuses."""
    shown, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = shown
        for handler in logging.getLogger("wandb").handlers:
            handler.handleError = lambda record: None


def _finite(tensor: Tensor) -> Tensor:
    """This process's share of a tensor as float32 numbers on the CPU, without those that no histogram can hold."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    numbers = own.detach().float().cpu()
    return numbers[numbers.isfinite()]
