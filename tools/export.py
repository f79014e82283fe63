"""Hand a run to Hugging Face: a folder that transformers opens, with its logits, its tokenizer
and a model card.

python -m lmzoo.tools.export RUN FOLDER

GPT-2, Llama, BERT, T5 v1.0 and v1.1 are exported; of nets trained on labelled data those of BERT,
read at the first token (classes, numbers) or at each (tags). The card, README.md, says what the
run's own files say.
"""

from lmzoo.tools import answer, parser

from lmzoo import checkpoint, hf, load
from lmzoo.hf import card


def export(run: str, folder: str) -> str:
    """Write the net of `run` (a run's folder or a checkpoint) to the new `folder`; what to do with it then."""
    folder = hf.check_folder(folder)
    net = load(run)
    if hf.is_hf_folder(run):
        hf.to_hf(net, folder)
    else:
        file = checkpoint.find(run)
        state = checkpoint.read(file, tensors=False)
        hf.to_hf(net, folder, card.label_words(checkpoint.identify(state, file)))
        card.write_card(net, folder, state, file)
    told = f"{folder}: open it by transformers' AutoModel...from_pretrained and AutoTokenizer"
    return "\n".join(filter(None, [told, card.note(net)]))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", help="a run's folder, or a checkpoint file")
    arguments.add_argument("folder", help="where to write; must not hold anything yet")
    arguments.add_argument("--to", choices=["hf"], default="hf", help="whose format (hf)")
    given = arguments.parse_args()
    answer(export, given.run, given.folder)


if __name__ == "__main__":
    main()
