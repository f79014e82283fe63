"""What every objective shares: how a window of micro-batches becomes one optimizer step, and batches become metrics.

A task returns sums over targets, never means; here, and only here, they are divided. One item of the loader is one
optimizer step, a list of micro-batches. Their targets are counted over all ranks before anything is run, so that the
gradient is that of the mean over all targets, however these are split. No random state is kept: torch is seeded from
(seed, step, micro-batch) before each micro-batch, and the learning rate is a function of the steps taken.
"""

import math
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, islice

import numpy as np
import torch
import torch.distributed as dist
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..blocks.loss import IGNORED, cross_entropy, perplexity
from ..decoding.filling import blanked
from ..optim import build as build_optimizer
from ..optim import freeze
from ..tokenizer import WORD


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Random numbers that belong to this sample in this epoch, whoever draws them and whatever was drawn before."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, sample]))


def stack(rows: Sequence[np.ndarray], fill: int) -> Tensor:
    """Rows of unequal length -> (B, longest row, at least 1) of int64, filled on the right."""
    stacked = np.full((len(rows), max(1, *map(len, rows))), fill, dtype=np.int64)
    for target, row in zip(stacked, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(stacked)


def kept(rows: Sequence[np.ndarray]) -> Tensor:
    """The attention mask of `stack(rows)`: 1 where a row has an item, whatever that item is."""
    lengths = torch.tensor([len(row) for row in rows])
    return (torch.arange(max(1, int(lengths.max()))) < lengths[:, None]).long()


def keys(examples: Sequence[dict]) -> np.ndarray:
    """The (seed, epoch, sample) of each row, uint64 (B, 3): what its random numbers are drawn from."""
    return np.array([row["key"] for row in examples], dtype=np.uint64)


class Task(LightningModule):
    """A net, what it is trained for, and how a step is taken.

    net: called through `forward(..., readout=...)` only; optim: lr, clip_norm (None or 0: no clipping), freeze, what
    the groups depend on and the optimizer's recipe; schedule: (steps taken, total_steps) -> multiplier of the learning
    rate. label_smoothing and z_loss act in training only. packing: the data's; prompts: what `show` works on in place
    of held-out text. A subclass sets `collator`, and defines `loss` where its nets read more than one row; `summed`
    names the sums that its evaluation needs.
    """

    summed: tuple[str, ...] = ("nll", "correct", "targets")

    def __init__(
        self,
        net: torch.nn.Module,
        tokenizer,
        optim: Mapping,
        schedule: Callable[[int, int], float],
        *,
        seed: int = 0,
        total_steps: int = 1,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        packing: str = "stream",
        prompts: list[str] | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.tokenizer, self.optim, self.schedule = net, tokenizer, optim, schedule
        self.seed, self.total_steps = seed, total_steps
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        freeze(net, optim.get("freeze", ()))  # before anything wraps the net and counts on gradients
        self.packing, self.isolated, self.prompts = packing, packing in ("isolate", "fit"), prompts
        self.identity: dict = {}  # what a checkpoint says of its run, set by the command that trains
        self.warnings: set[str] = set()
        self.steps_taken = 0  # falls behind the step's number where a step changed nothing

    def loss(self, batch: dict) -> dict[str, Tensor]:
        """Sums over the batch's targets: "loss" with its graph, "targets", and those named in `summed`.

        As it stands for nets that read one row; the head runs where there is a label, and nowhere else.
        """
        mask, documents = batch.get("attention_mask"), batch.get("document_ids")
        return self.net(batch["input_ids"], mask, document_ids=documents, readout=self.readout(batch["labels"]))

    def readout(self, labels: Tensor) -> Callable:
        """What the net's forward ends with: hidden (B, T, D) against labels (B, T) -> the sums of `loss`."""
        return lambda head, hidden: cross_entropy(
            head, hidden.flatten(0, 1), labels.flatten(), **self.cross_entropy_options()
        )

    def check(self, data) -> None:
        """Raise UserError for a data module that the task can't learn from, or be measured on."""

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """Metrics from the sums over a whole split, or over a set of it as "val/wiki": nats per target, perplexity,
        accuracy."""
        targets = max(sums["targets"], 1)
        nats = sums["nll"] / targets
        return {"loss": nats, "perplexity": perplexity(nats), "accuracy": sums["correct"] / targets}

    def show(self) -> str:
        """What was learned, in plain text of at most 100 columns."""
        return ""

    def blanks(self, n_words: int) -> list[tuple[str, list[str]]]:
        """Prompts, or held-out texts with blanks, each with the words (`n_words` a blank) that stood there."""
        if self.prompts:
            return [(prompt, []) for prompt in self.prompts]
        found = [blanked(text, n_words) for text in self.held_out(n_words=24)]
        return [(text, words) for text, words in found if words]

    def held_out(self, n_words: int, n_texts: int = 3) -> list[str]:
        """The first `n_words` words of `n_texts` validation documents that have so many, from all over the split."""
        data = self.trainer.datamodule
        if data is None or "val" not in data.store.splits:
            return []
        split, found = data.store["val"], []
        for document in np.linspace(0, split.n_documents - 1, 20 * n_texts, dtype=int).tolist():
            begin, end = split.span(document)
            text = self.tokenizer.decode(split.read(begin, min(end, begin + 8 * n_words))).strip()
            words = list(islice(WORD.finditer(text), n_words))
            if len(words) == n_words and "{" not in text and (text := text[: words[-1].end()]) not in found:
                found.append(text)
        return found[:: max(1, len(found) // n_texts)][:n_texts]

    # Training: one window is one step.

    def on_before_batch_transfer(self, batch: list[dict] | dict, dataloader_idx: int) -> list[dict] | dict:
        """Count a window's targets and tokens in host memory: on the device this would wait for the step before."""
        if isinstance(batch, list):
            for micro in batch:
                micro["targets"] = int((micro["labels"] != IGNORED).sum())
                micro["tokens"] = int(kept_tokens(micro)) if micro["targets"] else 0
        return batch

    def training_step(self, window: list[dict], index: int) -> dict:
        """One optimizer step; returns loss (the mean over all targets of all ranks), lr, grad_norm, targets, tokens,
        skipped, and under fp16 the loss_scale after it.

        tokens counts the kept tokens of `input_ids` over all ranks, without those of micro-batches that have no target.
        A step without any target on any rank is counted, but changes nothing. So is one whose loss or gradient is not
        finite: its loss and targets are then left out (0), and `nonfinite` names the weights with such gradients.
        `skipped` counts the run's steps so far that changed nothing.
        """
        step, optimizer, world = self.global_step, self.optimizers(), self.trainer.world_size
        multiplier = float(self.schedule(self.steps_taken, self.total_steps))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
        lr = self.optim["lr"] * multiplier
        optimizer.zero_grad()
        targets, tokens = self.reduce([sum(micro[name] for micro in window) for name in ("targets", "tokens")])
        if targets == 0:
            self.warn_once("a step had no target and changed nothing: its rows are too short, or all labels are -100")
            optimizer._on_before_step()  # Lightning's count of steps, moved without taking one:
            optimizer._on_after_step()  # decay and moments would change the weights even where the gradient is 0
            skipped = step + 1 - self.steps_taken
            return {"loss": torch.zeros(()), "lr": lr, "grad_norm": 0.0, "targets": 0, "tokens": 0, "skipped": skipped}
        losses = []
        for number, micro in enumerate(window, 1):
            last = number == len(window)
            with nullcontext() if last or world == 1 else self.trainer.strategy.block_backward_sync():
                loss = self.micro_loss(micro, step)
                self.manual_backward(loss * (world / targets))  # data-parallel training divides by world
                losses.append(loss.detach())
        self.total, self.nonfinite = torch.stack(losses).sum(), None
        if world > 1:
            dist.all_reduce(self.total)
        scale = self.loss_scale()
        with torch.autocast(self.device.type, enabled=False):  # Adafactor multiplies moments, which fp16 does not hold
            optimizer.step()
        if self.nonfinite is not None:
            self.total, targets = torch.zeros(()), 0
        elif self.loss_scale() < scale:
            rank_zero_warn(f"step {step + 1} was skipped: a gradient overflowed in fp16; the loss scale falls")
        else:
            self.steps_taken += 1
        output = {"loss": self.total / max(1, targets), "lr": lr, "grad_norm": self.grad_norm, "targets": targets,
                  "tokens": tokens, "skipped": step + 1 - self.steps_taken}  # fmt: skip
        output |= {} if self.nonfinite is None else {"nonfinite": self.nonfinite}
        return output if self.scaler() is None else output | {"loss_scale": self.loss_scale()}

    def micro_loss(self, micro: dict, step: int) -> Tensor:
        """The sum of a micro-batch's losses in a step, whose random numbers are those of the two, whoever asks."""
        seed = torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        seed(int(generator(self.seed, step, micro["micro"]).integers(2**63)))  # where there is no GPU, torch's is slow
        return self.loss(micro)["loss"]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, or give up a step that is not finite, alike on all ranks, since loss and gradient are sums over them.

        Under fp16 the gradients are unscaled first, which Lightning leaves to optimizers that fuse it; where one of
        them overflows it is the scaler that skips the step.
        """
        if self.scaler() is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler().unscale_(optimizer)
        weights = {name: weight for name, weight in self.net.named_parameters() if weight.grad is not None}
        norm = get_total_norm([weight.grad for weight in weights.values()])
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(self.total if self.scaler() else self.total + self.grad_norm):
            self.nonfinite = [name for name, weight in weights.items() if not weight.grad.isfinite().all()]
            optimizer.zero_grad()  # a step without gradients moves neither weights nor moments, and decays nothing
            return
        clip_grads_with_norm_(weights.values(), self.optim.get("clip_norm") or math.inf, self.grad_norm)

    def configure_model(self) -> None:
        """Leave each rank its slice of the net, under a strategy that spreads it."""
        if hasattr(self.trainer.strategy, "shard"):
            self.trainer.strategy.shard(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = build_optimizer(self.net, self.optim)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # goes into the checkpoint with the group
        return optimizer

    def on_fit_start(self) -> None:
        if self.net.family == "encoder-decoder" and str(self.trainer.precision).startswith("16"):
            rank_zero_warn("encoder-decoders often overflow in fp16: prefer trainer.precision=bf16-mixed or 32-true")
        if str(self.trainer.precision) == "bf16-true":
            rank_zero_warn("bf16-true keeps the weights themselves in bfloat16, where updates below 1/256 of a weight "
                           "are lost; bf16-mixed has them in fp32")  # fmt: skip

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["lmzoo"] = {**self.identity, "steps_taken": self.steps_taken}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.steps_taken = checkpoint["lmzoo"]["steps_taken"]

    def scaler(self):
        """The scaler of fp16's losses, or None."""
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def loss_scale(self) -> float:
        """What losses are multiplied with under fp16; it falls when a step is skipped. 1 in any other precision."""
        return 1.0 if self.scaler() is None else self.scaler().get_scale()

    # Evaluation: sums over the whole split, over all ranks, divided once.

    def on_validation_epoch_start(self) -> None:
        self.sums: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(self.summed, 0.0))

    def validation_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.add(self.loss(batch), dataloader_idx)

    def add(self, sums: dict[str, Tensor], source: int) -> None:
        """Add a batch's sums to those of its source, in float64."""
        for name in self.summed:
            self.sums[source][name] += float(sums[name])

    def on_validation_epoch_end(self) -> None:
        self.report("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, index, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.report("test")

    def report(self, split: str) -> None:
        """Log the metrics of a split that has been run through, in the place of all that it had before."""
        names, known = self.evaluated(split), self.trainer.callback_metrics
        numbers = self.reduce([self.sums[source][name] for source in range(len(names)) for name in self.summed])
        for name in [name for name in known if name.startswith(f"{split}/")]:
            del known[name]  # one that is not defined any more would keep its value
        self.log_dict(self.metrics(split, names, np.reshape(numbers, (len(names), -1))), sync_dist=True)

    def evaluated(self, split: str) -> list[str | None]:
        """The sources and named sets of a split; one, None, where there are no such."""
        data = self.trainer.datamodule
        return data.evaluated(split) if data else [None]

    def metrics(self, split: str, names: Sequence[str | None], numbers: np.ndarray) -> dict[str, float]:
        """Those of a split, and of each source and each named set of it (`names`), from the sums of each."""
        sums, found = defaultdict(float), {}
        for name, own in zip(names, numbers, strict=True):
            for place in accumulate([split, *(name.split("/") if name else ())], "{}/{}".format):
                sums[place] = sums[place] + own
        for place, all_of_it in sums.items():
            metrics = self.summarise(dict(zip(self.summed, all_of_it.tolist(), strict=True)), place)
            found |= {f"{place}/{name}": value for name, value in metrics.items()}
        return found

    def measured(self) -> list[str]:
        """The metrics that validation will have, before anything is measured."""
        names = self.evaluated("val")
        self.on_validation_epoch_start()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method")  # of a metric that has seen nothing
            return list(self.metrics("val", names, np.zeros((len(names), len(self.summed)))))

    def whole(self, split: str) -> bool:
        """Whether all of the split is evaluated, not a part of it as under `limit_val_batches`."""
        data = self.trainer.datamodule
        return data.n_evaluated(split) == data.n_rows(split)

    # What both use.

    def reduce(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers over all ranks, in float64."""
        if self.trainer.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def warn_once(self, message: str) -> None:
        """Warn, on the first rank, of what has not been warned of."""
        if message not in self.warnings:
            self.warnings.add(message)
            rank_zero_warn(message)

    def cross_entropy_options(self) -> dict[str, float]:
        """Label smoothing and z-loss: in training, not in evaluation."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss} if self.training else {}


def kept_tokens(micro: dict) -> Tensor | int:
    """How many tokens of `input_ids` are no padding."""
    return micro["attention_mask"].sum() if "attention_mask" in micro else micro["input_ids"].numel()


def wrap(text: str, indent: str = "") -> str:
    """Text on lines of at most 100 columns, each behind `indent`; blank space becomes single spaces."""
    return textwrap.fill(" ".join(text.split()), 100, initial_indent=indent, subsequent_indent=indent)
