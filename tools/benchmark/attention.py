"""Attention's kernels beside each other, on this machine: what `choose_backend` decides by.

python -m lmzoo.tools.benchmark attention --dtype fp32,bf16 --lengths 128,512,2048

One attention layer, forward and backward, over as many tokens for each length, in rows of a decoder
(causal), of an encoder (full) and of several documents each that see only themselves (documents).
The kernels take turns; the note says which one lmzoo takes by itself, and what the others cost
beside it. Flex is for documents on a GPU.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial

from .measure import Row, by_turns, positive, ratio, some_of, spread

KINDS = ("causal", "full", "documents")
N_DOCUMENTS = 4  # in a row


def lengths(text: str) -> list[int]:
    """The type of an option that takes whole numbers, with commas between."""
    return [positive(one) for one in text.split(",")]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", type=some_of(*KINDS), default=list(KINDS), metavar=",".join(KINDS))
    parser.add_argument("--dtype", type=some_of("fp32", "bf16"), default=["fp32", "bf16"], metavar="fp32,bf16")
    parser.add_argument("--lengths", type=lengths, default=[64, 128, 256, 512, 1024, 2048], metavar="64,128,...")
    parser.add_argument("--tokens", type=positive, default=4096, help="in all rows; rows that are longer are one")
    parser.add_argument("--width", type=positive, default=256, help="d_model, in heads of --d-head")
    parser.add_argument("--d-head", type=positive, default=32, help="width of a head")
    parser.add_argument("--steps", type=positive, default=4, help="of a kernel's turn")
    parser.add_argument("--rounds", type=positive, default=5, help="in which the kernels take turns")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All kinds of rows, dtypes and lengths."""
    import torch

    from .arm import DTYPES

    torch.set_num_threads(given.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind in given.kinds:
        for dtype in given.dtype:
            for length in given.lengths:
                yield from compare(kind, dtype, DTYPES[dtype], length, device, given)


def compare(kind: str, name: str, dtype, length: int, device, given: argparse.Namespace) -> Iterator[Row]:
    """All kernels on rows of one kind, dtype and length."""
    from lmzoo.blocks.attention import choose_backend

    chosen = choose_backend(device, dtype, length)
    if chosen == "flex" and kind != "documents":
        chosen = "sdpa"  # as flex does by itself
    backends = ["matmul", "sdpa", *["flex"] * (device.type == "cuda" and kind == "documents")]
    arms = {backend: partial(steps, layer(backend, kind, dtype, length, device, given), given.steps)
            for backend in backends}  # fmt: skip
    for arm in arms.values():
        arm()  # warm
    times = by_turns(arms, given.rounds)
    tokens = max(1, given.tokens // length) * length
    for backend in backends:
        seconds = [spent / given.steps for spent in times[backend]]
        note = ""
        if backend == chosen:
            others = (other for other in backends if other != backend)
            beside = [f"{other} / this: {ratio(times[other], times[backend])}" for other in others]
            note = "; ".join(["lmzoo's own choice", *beside])
        yield Row(f"{kind} {name}", f"lmzoo {backend}, rows of {length}", dtype=name,
                  tokens_per_s=tokens / spread(seconds)[0], seconds=spread(seconds), note=note)


def layer(backend: str, kind: str, dtype, length: int, device, given: argparse.Namespace) -> Callable[[], None]:
    """A pass, forward and backward, through one layer."""
    import torch

    from lmzoo.blocks.attention import Attention
    from lmzoo.blocks.layout import Layout

    n_heads = given.width // given.d_head
    attn = Attention(given.width, n_heads, n_heads, given.d_head, backend=backend).to(device)
    x = torch.randn(max(1, given.tokens // length), length, given.width, device=device, requires_grad=True)
    documents = (torch.arange(length, device=device) * N_DOCUMENTS // length).expand(len(x), length)

    def once() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            layout = Layout.of(x, None, documents if kind == "documents" else None, causal=kind != "full")
            out = attn(x, layout)
        out.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return once


def steps(once: Callable[[], None], n: int) -> None:
    for _ in range(n):
        once()
