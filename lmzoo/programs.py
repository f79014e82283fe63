"""A net as a program of its own, which runs without lmzoo: torch.export's, ONNX's, and ONNX's with weights in int8.

One graph takes any number of rows of any length (of learned positions: up to as many). It is called by the names of
`inputs`, those that the exported tokenizer gives, and answers with logits; padding may stand anywhere. In int8 each
weight is w = scale * q, and what it meets is rounded so as it comes, by a scale of its own (Jacob et al. 2018,
arXiv:1712.05877); the rest stays fp32.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .blocks.head import Pooler
from .errors import UserError

FILES = {"torch_export": "model.pt2", "onnx": "model.onnx", "onnx_int8": "model.onnx"}
Run = Callable[[dict[str, Tensor]], Tensor]  # from a program's inputs to its logits


def inputs(net: nn.Module) -> list[str]:
    """What a program of `net` takes, all of them rows of int64: (B, T), of a decoder's beside an encoder (B, S)."""
    if net.family == "encoder-decoder" and not isinstance(net.head, Pooler):
        return ["input_ids", "attention_mask", "decoder_input_ids"]
    tells_pairs = net.family != "encoder-decoder" and net.embed.tells_pairs
    return ["input_ids", "attention_mask"] + ["token_type_ids"] * tells_pairs


def sizes(net: nn.Module) -> dict[str, dict]:
    """The sizes of the inputs that may be any, by name."""
    batch, longest = torch.export.Dim("batch", min=1), net.max_positions
    lengths = [torch.export.Dim(name, min=1, max=longest) for name in ("length", "decoder_length")]
    return {name: {0: batch, 1: lengths["decoder" in name]} for name in inputs(net)}


def example(net: nn.Module, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random rows for a program of `net`; the last of several is padded."""
    draw = torch.Generator().manual_seed(seed)
    answer = max(1, length - 2)  # another length, which tracing must not take for the same
    rows = {name: torch.randint(net.vocab_size, (batch, answer if "decoder" in name else length), generator=draw)
            for name in inputs(net)}  # fmt: skip
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    rows["attention_mask"][1:, length // 2 + 1 :] = 0
    if "token_type_ids" in rows:
        rows["token_type_ids"] %= net.embed.types.num_embeddings
    return rows


@torch.no_grad()
def trace(net: nn.Module) -> torch.export.ExportedProgram:
    """The program of `net`, which is in eval mode. Raises UserError for a net of which none can be made."""
    net = copy.deepcopy(net)  # each weight in a piece of memory of its own, as the archive wants them
    with refusing(net, "torch.export"):
        return torch.export.export(net, (), example(net, 2, 5), dynamic_shapes=sizes(net), strict=False)


@torch.no_grad()  # as it was traced: attention with a learned bias takes another kernel where it has a gradient
def to_onnx(net: nn.Module, program: torch.export.ExportedProgram):
    """The same as torch's ONNXProgram. Raises UserError for what ONNX has no words for."""
    with refusing(net, "torch.onnx"):
        return torch.onnx.export(program, dynamic_shapes=sizes(net), output_names=["logits"], verbose=False)


def to_int8(onnx: Path, file: Path) -> None:
    """Write the ONNX program of a file again, its weights in int8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet():
        quantize_dynamic(onnx, file, weight_type=QuantType.QInt8)


@contextmanager
def refusing(net: nn.Module, exporter: str) -> Iterator[None]:
    """Make a line of what an exporter can't follow, which may be of any kind: a part may be somebody's own."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise UserError(f"this {net.family} ({parts(net)}) can't be exported, {exporter} says: "
                        f"{' '.join(str(error).split())[:200]}") from error


def parts(net: nn.Module) -> str:
    """The kinds of a net's parts, by the names of their classes."""
    nodes = chain.from_iterable(value if isinstance(value, list) else [value] for value in net.config.values())
    kinds = (node["_target_"] for node in nodes if isinstance(node, dict) and "_target_" in node)
    return ", ".join(dict.fromkeys(kind.rpartition(".")[2] for kind in kinds))


def check_packages() -> None:
    """UserError where one of those that ONNX needs is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs {error.name}: pip install 'lmzoo[onnx]'") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the notes of exporters on their own matters; their errors still come."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def opened(file: Path) -> Run:
    """The program in a file of torch.export or ONNX."""
    if file.suffix == ".pt2":
        program = torch.export.load(file).module()
        return lambda rows: program(**rows)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda rows: torch.from_numpy(session.run(None, {name: row.numpy() for name, row in rows.items()})[0])


def described(net: nn.Module, file: Path) -> tuple[dict[str, str], str, str]:
    """What a card says of the program of `net` in `file`: words at its head, what the net is, how it is used."""
    tokenizer, of_torch = getattr(net, "tokenizer", None), file.suffix == ".pt2"
    library, array = ("torch", "torch.tensor") if of_torch else ("numpy", "numpy.array")
    answer = f"{array}([[{getattr(tokenizer, 'start', None) or 0}]])"
    values = {"input_ids": "ids", "attention_mask": f"{library}.ones_like(ids)", "decoder_input_ids": answer,
              "token_type_ids": f"{library}.zeros_like(ids)"}
    given = ", ".join(f"{name}={values[name]}" for name in inputs(net))
    lines = [f"import {library}"] + ["import onnxruntime"] * (not of_torch)
    if tokenizer:
        lines += ["from tokenizers import Tokenizer",
                  f"tokenizer = Tokenizer.from_file({str(file.with_name('tokenizer.json'))!r})"]
    row = "tokenizer.encode('Some text').ids" if tokenizer else "[0, 1, 2]"
    lines.append(f"ids = {array}([{row}])")
    if of_torch:
        lines += [f"model = torch.export.load({str(file)!r}).module().requires_grad_(False)", f"print(model({given}))"]
    else:
        lines += [f"model = onnxruntime.InferenceSession({str(file)!r})", f"print(model.run(None, dict({given}))[0])"]
    head = {"library_name": "pytorch" if of_torch else "onnx"}
    return head, f"{net.family} of {parts(net)}", "\n".join(lines)


class Program(nn.Module):
    """A program in the place of the net that it is of, where a task asks for its loss: all but documents in one row it
    reads as they are, and those each in a row of its own."""

    def __init__(self, net: nn.Module, run: Run):
        super().__init__()
        self.names, self.run, self.family = inputs(net), run, net.family

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, decoder_input_ids: Tensor | None = None,
                decoder_attention_mask: Tensor | None = None, *, document_ids: Tensor | None = None,
                token_type_ids: Tensor | None = None, readout: Callable) -> Tensor:  # fmt: skip
        """What `readout(head, hidden)` makes of logits (B, T, V), with a head that leaves them as they are."""
        every = torch.ones_like(input_ids)
        given = {"input_ids": input_ids, "attention_mask": every if attention_mask is None else attention_mask,
                 "decoder_input_ids": decoder_input_ids,
                 "token_type_ids": torch.zeros_like(every) if token_type_ids is None else token_type_ids}
        rows = {name: given[name] for name in self.names}
        if document_ids is None:
            return readout(unchanged, self.run(rows))
        lengths = [n for row in document_ids for n in row.unique_consecutive(return_counts=True)[1].tolist()]
        apart = {name: pad_sequence(row.flatten().split(lengths), batch_first=True) for name, row in rows.items()}
        there = pad_sequence(every.flatten().split(lengths), batch_first=True).bool()
        return readout(unchanged, self.run(apart)[there].unflatten(0, input_ids.shape))


def unchanged(logits: Tensor, *mask: Tensor) -> Tensor:
    return logits
