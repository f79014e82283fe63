"""A checkpoint as a folder to which each rank writes its share: torch.distributed.checkpoint, and beside it the rest.

What is spread over ranks is the net's weights and the optimizer's moments; they lie in the folder under the names that
`tensors` gives them. All else is small, and is one file, REST. Any number of ranks reads the folder, none included.
"""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

REST = "rest.pt"
LIST = ".metadata"  # torch's own, a pickle of what lies where
LISTED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "bfloat16", "float16", "float32", "float64", "int64", "int32", "uint8", "bool"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip


def tensors(state: dict) -> dict[str, Tensor]:
    """{name in a folder: tensor} of the weights, `weights/KEY`, and the moments, `moments/OPTIMIZER/NUMBER/KIND`."""
    found = {f"weights/{key}": weight for key, weight in state["state_dict"].items()}
    for i, optimizer in enumerate(state["optimizer_states"]):
        for number, moments in optimizer["state"].items():
            found |= {f"moments/{i}/{number}/{kind}": value for kind, value in moments.items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def put(state: dict, name: str, tensor: Tensor) -> None:
    """Set the tensor of this name in `state`."""
    kind, _, key = name.partition("/")
    if kind == "weights":
        state["state_dict"][key] = tensor
    else:
        i, number, moment = key.split("/")
        state["optimizer_states"][int(i)]["state"].setdefault(int(number), {})[moment] = tensor


def rest(state: dict) -> dict:
    """A copy of `state` without its `tensors`."""
    optimizers = [
        optimizer | {"state": {number: {kind: value for kind, value in moments.items() if not isinstance(value, Tensor)}
                               for number, moments in optimizer["state"].items()}}
        for optimizer in state["optimizer_states"]
    ]  # fmt: skip
    return state | {"state_dict": {}, "optimizer_states": optimizers}


def save(state: dict, folder: Path) -> None:
    """Write `state` to a `folder` that is not there yet; called on all ranks; it fails on all, or on the first."""
    dcp.save(tensors(state), checkpoint_id=folder, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(folder / LIST, "rb+") as file:  # which torch syncs before all of it has left Python's buffer
            os.fsync(file.fileno())
        with open(folder / REST, "wb") as file:
            torch.save(rest(state), file)
            file.flush()
            os.fsync(file.fileno())


def load(folder: Path, empty: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None) -> dict:
    """What `save` wrote. `empty(name, shape, dtype)`: a tensor to fill, called on all ranks; None: whole ones, here."""
    state = torch.load(folder / REST, map_location="cpu", weights_only=True)
    with open(folder / LIST, "rb") as file:
        listed = _ListOnly(file).load().state_dict_metadata
    make = empty or (lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    found = {name: make(name, about.size, about.properties.dtype) for name, about in listed.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, checkpoint_id=folder, no_dist=empty is None)
    for name, tensor in found.items():
        put(state, name, tensor)
    return state


class _ListOnly(pickle.Unpickler):
    """Opens LIST, before torch does, without calling anything but what such a list is made of."""

    def find_class(self, module: str, name: str) -> object:
        if name not in LISTED.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)
