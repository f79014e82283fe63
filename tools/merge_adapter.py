"""Make one checkpoint of an adapter and the base that it was trained on: a net like any other.

python -m lmzoo.tools.merge_adapter RUN FILE
"""

from pathlib import Path

from lmzoo.tools import answer, new_file, parser, trusting

from lmzoo import UserError, checkpoint


def merge(run: str, file: Path, base: str | None = None, trust: tuple[str, ...] = ()) -> str:
    """Write the net of the adapter `run` (a run's folder or a checkpoint) to a new `file`; what to do with it then."""
    found = checkpoint.find(run)
    state = checkpoint.read(found)
    identity = checkpoint.identify(state, found)
    if not identity["config"].get("adapter"):
        raise UserError(f"{found} is a net of its own, without an adapter: there is nothing to merge")
    new_file(file)
    net = checkpoint.load(found, trust, base)
    whole = identity | {"config": identity["config"] | {"adapter": None}, "base": {}}
    weights = {f"net.{name}": weight for name, weight in net.state_dict().items()}
    checkpoint.write({"state_dict": weights, "global_step": state["global_step"], "lmzoo": whole}, file, listed=False)
    return f"{file}: give it to lmzoo.load, evaluate and generate, or start a run from it, init_from={file}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", help="a run's folder, or a checkpoint file")
    arguments.add_argument("file", type=Path, help="where to write; must not be there yet")
    arguments.add_argument("--base", help="where the base is, if it has moved (default: where the adapter says)")
    trusting(arguments)
    given = arguments.parse_args()
    answer(merge, given.run, given.file, given.base, tuple(given.trust))


if __name__ == "__main__":
    main()
