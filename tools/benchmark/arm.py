"""One arm of the training benchmark: a process of its own, which takes as many steps as it is told to.

python -m lmzoo.tools.benchmark.arm JSON     the arm, as `train.Arm` describes it

A line of JSON says what it is, once it has taken its first step; so does another after every number on stdin, when that
many steps more are done. All else that is printed goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


class Turns:
    """The steps that are asked for, each an item; between turns the process waits. `loss` is to say the first one's."""

    def __init__(self, cuda: bool):
        self.cuda, self.loss, self.facts = cuda, float, {}
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def begin(self) -> None:
        """All is imported; from here on time and memory count."""
        self.begun, self.before = time.perf_counter(), memory("VmRSS")

    def __iter__(self) -> Iterator[None]:
        yield
        self.say(first_s=self.wait() - self.begun, loss=self.loss(), **self.facts)
        self.forget_peak()
        for line in sys.stdin:
            for _ in range(int(line)):
                yield
            self.wait()
            self.say(peak_memory_mb=self.peak())
        os._exit(0)  # nothing of what ends a run is wanted

    def wait(self) -> float:
        """The time at which all that was begun is done."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        """What it took to get here, compilers at work above all, does not count."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """MB at the peak of the steps: weights, moments, gradients, activations, and what the allocator keeps."""
        return torch.cuda.max_memory_allocated() / 1e6 if self.cuda else memory("VmHWM") - self.before

    def say(self, **words: object) -> None:
        print(json.dumps(words), file=self.out)


def memory(key: str) -> float:
    """MB of this process's memory: VmRSS now, VmHWM at its peak; nan where the system does not tell."""
    if sys.platform != "linux":
        return float("nan")
    status = Path("/proc/self/status").read_text().split(f"{key}:")[1]
    return int(status.split()[0]) * 1024 / 1e6


def take_ours(arm: dict, turns: Turns) -> None:
    """What `lmzoo.train` does with the same words, with its loop, loader, callbacks and logs."""
    from lmzoo import compose, parts
    from lmzoo.train import assemble

    config = parts.settled(compose(*arm["words"]))
    parts.build_trainer(config, steps=1)  # imports
    turns.begin()
    task, module = assemble(config)
    loader = module.train_dataloader
    module.train_dataloader = lambda: Paced(loader(), turns)
    turns.facts = {name: getattr(task.plan, name) for name in ("flops_per_token", "tokens_per_step")}
    turns.loss = lambda: float(task.total) / module.trainer.train_dataloader.targets
    parts.build_trainer(config, task.total_steps).fit(task, datamodule=module)


class Paced:
    """A train loader that hands a window out when a step is asked for."""

    def __init__(self, loader, turns: Turns):
        self.loader, self.turns = loader, turns

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[dict]]:
        for _, window in zip(self.turns, cycle(self.loader), strict=False):
            yield window
            self.targets = sum(micro["targets"] for micro in window)


def take_theirs(arm: dict, turns: Turns) -> None:
    """The loop that everyone writes, over batches that lie in memory: in favour of the peer."""
    from .peers import attentions

    device, dtype = torch.device(arm["device"]), DTYPES[arm["dtype"]]
    builds = attentions(arm["family"], arm["library"])
    for build in builds.values():
        build(arm["shape"])  # imports
    turns.begin()
    batches = torch.load(arm["batches"])
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]

    def gradient(net: nn.Module, loss: Callable, batch: dict) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            value = loss(net, batch)
        value.backward()
        return value.detach()

    kind = next(iter(builds))
    if len(builds) > 1:
        kind = min(builds, key=lambda kind: trial(builds[kind](arm["shape"]), batches[0], gradient))
    torch.manual_seed(0)
    net, loss = builds[kind](arm["shape"])
    net.to(device).train()
    turns.facts = {"attention": kind, "parameters": sum(weight.numel() for weight in net.parameters())}
    if arm["compile"]:
        for part in net.values() if isinstance(net, nn.ModuleDict) else [net]:
            part.compile()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _, batch in zip(turns, cycle(batches), strict=False):
        value = gradient(net, loss, batch)
        turns.loss = value.item
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trial(built: tuple, batch: dict, gradient: Callable) -> float:
    """Seconds of the quickest of three passes."""
    net, loss = built
    net.to(batch["input_ids"].device).train()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        gradient(net, loss, batch).item()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    arm = json.loads(sys.argv[1])
    turns = Turns(cuda=arm["device"] == "cuda")
    try:
        (take_ours if arm["library"] == "lmzoo" else take_theirs)(arm, turns)
    except ImportError as error:
        turns.say(missing=str(error))


if __name__ == "__main__":
    main()
