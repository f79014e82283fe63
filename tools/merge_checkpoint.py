"""Make one file of a checkpoint that several ranks wrote, each its share (checkpoint.sharded=true).

python -m lmzoo.tools.merge_checkpoint RUN
"""

from pathlib import Path

from lmzoo.tools import answer, new_file, parser

from lmzoo import UserError, checkpoint


def merge(run: str) -> str:
    """Write the newest checkpoint of `run` (or the one that it names) as a file beside it; what to do with it then."""
    folder = checkpoint.find(run)
    if folder.is_file():
        raise UserError(f"{folder} is one file already")
    step = checkpoint.read(folder, tensors=False)["global_step"]
    file = new_file(folder.with_name(f"merged-{step:06d}.ckpt"))
    checkpoint.write(checkpoint.read(folder), file)
    return f"{file}: give it, or its run, to lmzoo.load, train and evaluate; {folder.name} may go"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", type=Path, help="a run's folder, or the folder of a checkpoint")
    answer(merge, arguments.parse_args().run)


if __name__ == "__main__":
    main()
