"""Hand a run to Hugging Face: a folder that transformers opens, with its logits and tokenizer.

python -m lmzoo.tools.export RUN FOLDER
"""

from lmzoo.tools import answer, parser

from lmzoo import hf, load


def export(run: str, folder: str) -> str:
    """Write the net of `run` (a run's folder or a checkpoint) to the new `folder`; what to do with it then."""
    hf.check_folder(folder)
    hf.to_hf(load(run), folder)
    return f"{folder}: open it by transformers' AutoModel...from_pretrained and AutoTokenizer"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", help="a run's folder, or a checkpoint file")
    arguments.add_argument("folder", help="where to write; must not hold anything yet")
    given = arguments.parse_args()
    answer(export, given.run, given.folder)


if __name__ == "__main__":
    main()
