"""Write the embeddings that check_benchmarks.py reads, with sentence-transformers and transformers alone.

python scripts/embed_benchmarks.py MODEL DATA EMBEDDINGS --languages en,de --sib200 eng_Latn,swh_Latn
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from check_benchmarks import measured_split, questions, read, topics
from sentence_transformers import SentenceTransformer


def embed_topics(model: SentenceTransformer, data: Path, folder: Path, languages: list[str]) -> None:
    """Sentences of SIB-200 by split, in the order of the files."""
    measured = measured_split(data)
    for language in dict.fromkeys(["eng_Latn", *languages]):
        for split in ("train", measured) if language == "eng_Latn" else (measured,):
            texts = [row[2] for row in topics(data, language, split)]
            save(folder / "sib200" / f"{language}.{split}.npy", model.encode(texts, prompt=""))


def embed_questions(model: SentenceTransformer, data: Path, folder: Path, languages: list[str]) -> None:
    """Questions and sentences of XQuAD-R."""
    for language in languages:
        asked, _, sentences = questions(data, language)
        save(folder / "xquad-r" / f"{language}.questions.npy", model.encode(asked, prompt=""))
        save(folder / "xquad-r" / f"{language}.sentences.npy", model.encode(sentences, prompt=""))


@torch.inference_mode()
def embed_words(model: SentenceTransformer, data: Path, folder: Path, layer: int) -> None:
    """States of the pieces of both sides of gold pairs; for each its pair, its word, and whether it is more than a space."""
    encoder, tokenizer = model[0].auto_model, model.tokenizer
    for path in sorted((data / "alignment-gold").glob("*.src-tgt")):
        pairs = [line.split("|||") for line in read(path).splitlines()]
        for at, side in enumerate(("source", "target")):
            states, words = [], []
            for number, pair in enumerate(pairs):
                inputs = tokenizer(pair[at].split(), is_split_into_words=True, return_tensors="pt")
                states_lh = encoder(**inputs, output_hidden_states=True).hidden_states[layer][0]
                for piece, word in enumerate(inputs.word_ids()):
                    if word is not None:
                        states.append(states_lh[piece].numpy())
                        words.append((number, word, inputs.tokens()[piece].strip("▁Ġ ") != ""))
            save(folder / "alignment-gold" / f"{path.stem}.{side}.npy", np.array(states))
            save(folder / "alignment-gold" / f"{path.stem}.{side}.words.npy", np.array(words))


def embed_distractors(
    model: SentenceTransformer, data: Path, folder: Path, languages: list[str], changed: Path
) -> None:
    """Sources of a test set, and its targets with the changed sentences: lines ``kind, original, changed``."""
    made: dict[str, list[tuple[str, str]]] = {}
    for line in read(changed).splitlines():
        kind, original, text = line.split("\t")
        made.setdefault(original, []).append((kind, text))
    for language in languages:
        (file,) = data.glob(f"{language}-en.tsv*")
        sources, targets = zip(*(line.split("\t")[:2] for line in read(file).splitlines()[1:]), strict=True)
        pool = dict.fromkeys(targets, "")
        pool |= {text: kind for target in targets for kind, text in made.get(target, ()) if text not in pool}
        out = folder / "xsim++" / data.name
        save(out / f"{language}.sources.npy", model.encode(list(sources), prompt=""))
        save(out / f"{language}.pool.npy", model.encode(list(pool), prompt=""))
        (out / f"{language}.pool.tsv").write_text("".join(f"{kind}\t{text}\n" for text, kind in pool.items()))


def save(path: Path, array: np.ndarray) -> None:
    """Write an array; the folder is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def main(argv: list[str]) -> int:
    """Embed the data sets that the folder contains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="A folder or a Hub id.")
    parser.add_argument("data", type=Path, help="Folder of the data sets.")
    parser.add_argument("embeddings", type=Path, help="Folder to write to.")
    parser.add_argument("--languages", default="en,de", help="Languages of XQuAD-R, separated by commas.")
    parser.add_argument("--sib200", default="swh_Latn", help="Languages of SIB-200, separated by commas.")
    parser.add_argument("--layer", type=int, default=8, help="Layer of word alignment.")
    parser.add_argument("--xsimpp", nargs=2, metavar=("SET", "FILE"), help="A test set, and its changed sentences.")
    arguments = parser.parse_args(argv)
    model = SentenceTransformer(arguments.model).eval()
    folder = arguments.embeddings
    if (arguments.data / "sib200").is_dir():
        embed_topics(model, arguments.data, folder, arguments.sib200.split(","))
    if (arguments.data / "xquad-r").is_dir():
        embed_questions(model, arguments.data, folder, arguments.languages.split(","))
    if (arguments.data / "alignment-gold").is_dir():
        embed_words(model, arguments.data, folder, arguments.layer)
    if arguments.xsimpp:
        name, file = arguments.xsimpp
        embed_distractors(model, arguments.data / name, folder, arguments.languages.split(","), Path(file))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
