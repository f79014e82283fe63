"""What happens around training: checkpoints, the record of metrics, the progress bar, preemption.

Every interval counts optimizer steps, since one batch of the train loader is one step. Name the callbacks in
`conf/callbacks/`; Lightning calls a `Checkpoint` after all others, so what they keep is in the file it writes.
"""

from .closing import EarlyStopping, Ended, FirstValidation, LastValidation
from .guards import Guard
from .metrics import Metrics
from .progress import Progress
from .saving import AtomicIO, Checkpoints, Preemption
from .tracking import Wandb
from .trial import LargestMicroBatch

__all__ = [
    "AtomicIO", "Checkpoints", "EarlyStopping", "Ended", "FirstValidation", "Guard", "LargestMicroBatch",
    "LastValidation", "Metrics", "Preemption", "Progress", "Wandb",
]  # fmt: skip
