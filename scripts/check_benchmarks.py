"""Compute benchmark scores a second time: from raw files and embeddings, with NumPy and scikit-learn alone.

    python scripts/embed_benchmarks.py MODEL DATA EMBEDDINGS --sib200 deu_Latn,swh_Latn
    metaphrase evaluate MODEL --suite sib200 --data DATA --languages deu_Latn swh_Latn --prompt none --output results.json
    python scripts/check_benchmarks.py DATA EMBEDDINGS --results results.json

Nothing here is imported from the package. The definitions come from the papers and their released code: SIB-200
(Adelani et al. 2024), LAReQA (Roy et al. 2020), SimAlign's itermax (Jalili Sabet et al. 2020), the alignment error rate (Och
and Ney 2003), and xsim++ (Chen et al. 2023) with LASER's ratio margin. With ``--results``, scores that differ by more than
0.1 are errors, and so are scores that none of the results has. Pass the results of all embedded suites.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize

TOLERANCE = 0.1
#: Suffix of scores that the package does not have: pieces without a character are linked, as in SimAlign's released code.
SPACES = ", spaces linked"
NEIGHBOURS = 4


def read(path: Path) -> str:
    """Text of a file, compressed or not."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")


# Raw files


def measured_split(data: Path) -> str:
    """Split of SIB-200 that is measured: ``test``, or ``dev`` if there is none."""
    return "test" if any((data / "sib200").glob("eng_Latn.test.tsv*")) else "dev"


def topics(data: Path, language: str, split: str) -> list[list[str]]:
    """Rows ``index_id, category, text`` of SIB-200."""
    text = read(next((data / "sib200").glob(f"{language}.{split}.tsv*")))
    return list(csv.reader(io.StringIO(text, newline=""), delimiter="\t"))[1:]


def questions(data: Path, language: str) -> tuple[list[str], list[int], list[str]]:
    """Questions of XQuAD-R, the number of the sentence that answers each, and all sentences."""
    asked, right, sentences = [], [], []
    for article in json.loads(read(next((data / "xquad-r").glob(f"{language}.json*"))))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                start = question["answers"][0]["answer_start"]
                breaks = paragraph["sentence_breaks"]
                (inside,) = [number for number, (first, end) in enumerate(breaks) if first <= start < end]
                asked.append(question["question"])
                right.append(len(sentences) + inside)
            sentences += paragraph["sentences"]
    return asked, right, sentences


def gold_links(path: Path) -> Iterator[tuple[set[tuple[int, int]], set[tuple[int, int]]]]:
    """Sure and possible links of each line; ``1-2`` is sure, ``1p2`` possible, words are counted from 1."""
    for line in read(path).splitlines():
        links: dict[str, set[tuple[int, int]]] = {"-": set(), "p": set()}
        for link in line.split():
            mark = "-" if "-" in link else "p"
            first, second = link.split(mark)
            links[mark].add((int(first) - 1, int(second) - 1))
        yield links["-"], links["-"] | links["p"]


# Scores


def topic_accuracy(data: Path, embeddings: Path) -> dict[str, float]:
    """Accuracy of a logistic regression on English embeddings of length 1, for each embedded language."""
    folder = embeddings / "sib200"
    english = [row[1] for row in topics(data, "eng_Latn", "train")]
    probe = LogisticRegression(max_iter=1000).fit(normalize(np.load(folder / "eng_Latn.train.npy")), english)
    scores, split = {}, measured_split(data)
    for path in sorted(folder.glob(f"*.{split}.npy")):
        language = path.name.partition(".")[0]
        gold = [row[1] for row in topics(data, language, split)]
        scores[language] = 100 * probe.score(normalize(np.load(path)), gold)
    return scores


def mean_average_precision(data: Path, embeddings: Path) -> dict[str, float]:
    """MAP of the questions of each language over one pool of the sentences of all embedded languages."""
    folder = embeddings / "xquad-r"
    languages = sorted(path.name.partition(".")[0] for path in folder.glob("*.questions.npy"))
    rights, pool, first = [], [], 0
    for language in languages:
        _, right, sentences = questions(data, language)
        rights.append(np.array(right) + first)
        pool.append(np.load(folder / f"{language}.sentences.npy"))
        first += len(sentences)
    pool_mh, right_nl = np.concatenate(pool), np.array(rights).T
    scores = {}
    for language in languages:
        similarity_nm = cosine_similarity(np.load(folder / f"{language}.questions.npy"), pool_mh)
        precisions = []
        for similarity_m, right_l in zip(similarity_nm, right_nl, strict=True):
            relevant_m = np.zeros(first, dtype=bool)
            relevant_m[right_l] = True
            precisions.append(average_precision_score(relevant_m, similarity_m))
        scores[language] = 100 * float(np.mean(precisions))
    return scores


def itermax(similarity_st: np.ndarray, rounds: int = 2, discount: float = 0.9) -> np.ndarray:
    """SimAlign's itermax, one pair and one cell at a time."""
    n, m = similarity_st.shape

    def mutual(matrix_st: np.ndarray) -> set[tuple[int, int]]:
        best_s, best_t = matrix_st.argmax(axis=1), matrix_st.argmax(axis=0)
        return {(s, int(best_s[s])) for s in range(n) if best_t[best_s[s]] == s}

    links = mutual(similarity_st)
    for _ in range(rounds - 1):
        linked_s, linked_t = {s for s, _ in links}, {t for _, t in links}
        if min(n, m) <= 2 or len(linked_s) == n or len(linked_t) == m:
            break
        weighted_st = similarity_st.copy()
        for s in range(n):
            for t in range(m):
                taken = (s in linked_s) + (t in linked_t)
                weighted_st[s, t] *= (1.0, discount, 0.0)[taken]
        links |= {(s, t) for s, t in mutual(weighted_st) if not (s in linked_s and t in linked_t)}
    return np.array(sorted(links), dtype=int).reshape(-1, 2)


def alignment_error(data: Path, embeddings: Path, *, spaces: bool = False) -> dict[str, float]:
    """AER of the links between words any of whose pieces itermax links, by gold file.

    SentencePiece can cut the space before a word off as a piece of its own, which has no character of the word. It is not
    linked here; with ``spaces`` it is a piece of the word, as in SimAlign's released code.
    """
    scores = {}
    for path in sorted((embeddings / "alignment-gold").glob("*.source.npy")):
        name = path.name.partition(".")[0]
        sides = []
        for side in ("source", "target"):
            states_ph = np.load(path.with_name(f"{name}.{side}.npy"))
            words_p3 = np.load(path.with_name(f"{name}.{side}.words.npy"))
            kept_p = words_p3[:, 2] == 1 if not spaces else np.ones(len(words_p3), dtype=bool)
            sides.append((states_ph[kept_p], words_p3[kept_p]))
        predicted = sure = right = allowed = 0
        for number, (surely, possibly) in enumerate(gold_links(data / "alignment-gold" / f"{name}.gold")):
            (source_sh, source_s), (target_th, target_t) = (
                (states_ph[words_p3[:, 0] == number], words_p3[words_p3[:, 0] == number, 1])
                for states_ph, words_p3 in sides
            )
            similarity_st = (1 + cosine_similarity(source_sh, target_th)) / 2
            links = {(int(source_s[s]), int(target_t[t])) for s, t in itermax(similarity_st)}
            predicted, sure = predicted + len(links), sure + len(surely)
            right, allowed = right + len(links & surely), allowed + len(links & possibly)
        scores[name] = 100 * (1 - (right + allowed) / (predicted + sure))
    return scores


def margin_errors(data: Path, embeddings: Path) -> dict[str, dict[str, float]]:
    """xsim++ errors: English sentences whose ratio margin with a source is larger than that of its own target.

    Of candidates with the same embedding, the first counts.

    The folder of a test set has ``pool.tsv``, the candidates with their kinds (empty for targets), their
    embeddings, and those of the sources.
    """
    scores: dict[str, dict[str, float]] = {}
    for path in sorted(embeddings.glob("xsim++/*/*.sources.npy")):
        name, language = path.parent.name, path.name.partition(".")[0]
        lines = [line.split("\t") for line in read(path.with_name(f"{language}.pool.tsv")).splitlines()]
        number = {text: at for at, (_, text) in enumerate(lines)}
        (file,) = (data / name).glob(f"{language}-en.tsv*")
        targets = [line.split("\t")[1] for line in read(file).splitlines()[1:]]
        pool = np.load(path.with_name(f"{language}.pool.npy"))
        _, first, distinct = np.unique(pool, axis=0, return_index=True, return_inverse=True)
        cosine_nm = cosine_similarity(np.load(path), pool)
        k = min(NEIGHBOURS, *cosine_nm.shape)
        nearest_n = np.sort(cosine_nm, axis=1)[:, -k:].mean(axis=1)
        nearest_m = np.sort(cosine_nm, axis=0)[-k:].mean(axis=0)
        wrong = []
        for cosine_m, mean, target in zip(cosine_nm, nearest_n, targets, strict=True):
            candidates = np.argsort(-cosine_m)[:k]
            margins = cosine_m[candidates] / ((mean + nearest_m[candidates]) / 2)
            wrong.append(first[distinct.ravel()[candidates[margins.argmax()]]] != number[target])
        scores.setdefault(f"{name} xsim++", {})[language] = 100 * float(np.mean(wrong))
    return scores


def compare(found: dict[str, dict[str, float]], results: list[dict[str, Any]]) -> int:
    """Print both scores side by side, and the scores that none of the results has.

    Returns the number of scores that differ or are missing. Links of pieces without a character have no results: their error
    is only shown without ``--results``.
    """
    wrong = 0
    for name, scores in found.items():
        for language, score in scores.items() if not name.endswith(SPACES) else ():
            rows = [one["scores"].get(name, {}).get("languages", {}).get(language) for one in results]
            ours = [row["score"] for row in rows if row is not None]
            for other in ours:
                differs = abs(other - score) > TOLERANCE
                wrong += differs
                print(f"{name:24} {language:16} {score:8.3f} {other:8.3f} {'DIFFERENT' if differs else 'equal'}")
            if not ours:
                wrong += 1
                print(f"{name:24} {language:16} {score:8.3f}          MISSING")
    return wrong


def scores(data: Path, embeddings: Path) -> dict[str, dict[str, float]]:
    """The scores of all embedded data sets, by the names that `metaphrase evaluate` gives them."""
    found: dict[str, dict[str, float]] = {}
    if (embeddings / "sib200").is_dir():
        found["sib200 topics"] = topic_accuracy(data, embeddings)
    if (embeddings / "xquad-r").is_dir():
        found["xquad-r mAP"] = mean_average_precision(data, embeddings)
    if (embeddings / "alignment-gold").is_dir():
        for spaces, suffix in ((False, ""), (True, SPACES)):
            for name, score in alignment_error(data, embeddings, spaces=spaces).items():
                found[f"alignment-gold {name}{suffix}"] = {f"alignment-gold {name}": score}
    found |= margin_errors(data, embeddings)
    return found


def main(argv: list[str]) -> int:
    """Print the scores, next to those of the package; 1 if they differ or are missing, 2 if nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="Folder of the data sets.")
    parser.add_argument("embeddings", type=Path, help="Folder that embed_benchmarks.py wrote.")
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="Output of `metaphrase evaluate`.")
    arguments = parser.parse_args(argv)
    found = scores(arguments.data, arguments.embeddings)
    if not arguments.results:
        print(json.dumps(found, indent=1))
        return 0
    try:
        results = [json.loads(read(path)) for path in arguments.results]
        names = {name for one in results for name in one["scores"]}
        if not found.keys() & names:
            raise ValueError(
                f"no score in common: found {', '.join(found) or 'nothing'}; results {', '.join(sorted(names))}"
            )
        return int(compare(found, results) > 0)
    except (OSError, ValueError) as error:
        print(f"check_benchmarks: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
