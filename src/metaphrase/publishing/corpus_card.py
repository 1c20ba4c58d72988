"""The card of a bitext that is pushed as a data set."""

from __future__ import annotations

from collections.abc import Sequence

from metaphrase.publishing.markdown import cell, dump_yaml, fence, hub_languages, table

COLUMN_CONTENT = {
    "source": "A sentence",
    "target": "Its translation",
    "source_lang": "Language of the sentence",
    "target_lang": "Language of the translation",
    "alignment": "Word links in Pharaoh format: 0-0 1-2",
    "alignment_scores": "A score for each link",
    "segmenter": "Segmenter of the words that the links count: whitespace, icu, or icu-source and icu-target for one side",
    "source_bt": "Back-translations of the target",
    "target_bt": "Back-translations of the source",
    "score": "Score of the pair",
    "negatives": "Sentences that are similar to the translation, but wrong",
}

CORPUS_USAGE = """\
from metaphrase.corpus import load_corpus

corpus = load_corpus("hf:{name}")
print(corpus.report)"""


def corpus_card(
    repo_id: str, *, pairs: int, columns: Sequence[str], languages: Sequence[str], license: str | None = None
) -> str:
    """Return the card of a bitext that is pushed as a data set."""
    metadata = {
        **hub_languages(languages),
        "license": license,
        "task_categories": ["translation"],
        "tags": ["metaphrase", "bitext", *(["word-alignment"] if "alignment" in columns else [])],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train.parquet"}]}],
    }
    head = dump_yaml({key: value for key, value in metadata.items() if value})
    rows = [{"Column": name, "Content": COLUMN_CONTENT.get(name, "")} for name in columns]
    return (
        f"---\n{head}---\n\n# {cell(repo_id)}\n\n"
        f"{pairs:,} sentence pairs{' in ' if languages else ''}{', '.join(map(cell, languages))}.\n\n"
        f"{table(rows)}\n\n{fence(CORPUS_USAGE.format(name=repo_id), 'python')}\n\n"
        f"Licence: {cell(license) or 'not stated; ask the owner of the text'}.\n"
    )
