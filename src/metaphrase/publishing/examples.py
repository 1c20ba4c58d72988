"""Python that uses a release, with example sentences of its language, for cards and reports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.readers import read_parallel
from metaphrase.io.files import UDHR

#: Name of the model in a card until the model is pushed; sentence-transformers uses it as well.
MODEL_ID_PLACEHOLDER = "sentence_transformers_model_id"

_LOADS = re.compile(r"""\b((?:SentenceTransformer|from_pretrained)\()("(?:[^"\\\n]|\\.)*")(?=[),])""")
_LOADS_PACKAGE = re.compile(r'load_encoder\("([^"\n]+)"\)')
_FEWEST, _MOST = 25, 110

_USAGE = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
embeddings = model.encode([
    {sentences},
])
print(model.similarity(embeddings, embeddings))"""

_USAGE_TRANSFORMERS = """\
import torch
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}")
sentences = {sentences}
batch = tokenizer(sentences, padding=True, truncation=True, max_length={length}, return_tensors="pt")
with torch.no_grad():
    hidden = model(**batch).last_hidden_state
{pooling}
embeddings = torch.nn.functional.normalize(embeddings)  # their products are cosines
print(embeddings @ embeddings.T)"""

_POOLINGS = {
    "cls": "embeddings = hidden[:, 0]",
    "mean": (
        'mask = batch["attention_mask"].unsqueeze(-1)\n'
        "embeddings = (hidden * mask).sum(1) / mask.sum(1)  # mean over the pieces of each sentence"
    ),
}


def example_pairs(languages: Iterable[str], default: str = "sw") -> tuple[str, list[tuple[str, str]]]:
    """Three short sentences of the Declaration of Human Rights with their English translations, and their language.

    It is the first of the languages, other than English, that the packaged texts have, or else the default.

    >>> example_pairs(["en", "eu"])[0], example_pairs(["xx"])[0]
    ('eu', 'sw')
    """
    codes = [code for code in map(bare_language, languages) if code != "en"]
    language = next((code for code in codes if re.fullmatch("[a-z]+", code) and _path(code).is_file()), default)
    return language, _shortest(language)


def quoted(sentences: Iterable[str]) -> str:
    """A list of sentences as Python.

    >>> quoted(["Tous les êtres humains"])
    '["Tous les êtres humains"]'
    """
    return json.dumps(list(sentences), ensure_ascii=False)


def usage_lines(release: str | Path, languages: Iterable[str] = ()) -> str:
    """Return eight lines of Python that load a release and match sentences of its language with English ones.

    >>> len(usage_lines("runs/demo", ["en", "eu"]).splitlines())
    8
    """
    _, pairs = example_pairs(languages)
    english = [pairs[at][1] for at in (1, 2, 0)]
    return f"""\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({str(release)!r})
sentences = {quoted(source for source, _ in pairs)}
english = {quoted(english)}
similarity = model.similarity(model.encode(sentences), model.encode(english))
for sentence, row in zip(sentences, similarity):
    print(sentence, "→", english[row.argmax()])"""


def usage_by_language(releases: Path, languages: Iterable[str]) -> str:
    """Python that loads the release of a language and the English one."""
    language = next((language for language in languages if language != "en"), "en")
    _, pairs = example_pairs([language])
    return f"""\
from sentence_transformers import SentenceTransformer

folder = {str(releases)!r}  # a model for each language
model = SentenceTransformer(f"{{folder}}/{language}")
english = SentenceTransformer(f"{{folder}}/en")
embeddings = model.encode({quoted(source for source, _ in pairs)})
print(model.similarity(embeddings, english.encode({quoted(target for _, target in pairs)})))"""


def card_usage(name: str, languages: Iterable[str]) -> str:
    """Python that compares a sentence in one of the languages with its translation."""
    return _USAGE.format(name=name, sentences=",\n    ".join(quoted([one])[1:-1] for one in _example(languages)))


def card_usage_of_transformers(name: str, model: SentenceTransformer | None, languages: Iterable[str]) -> str:
    """The same with transformers alone, for an encoder with CLS or mean pooling and optional normalisation."""
    kinds = [type(module) for module in model or ()]
    if model is None or model.truncate_dim or kinds not in ([Transformer, Pooling], [Transformer, Pooling, Normalize]):
        return ""
    pooling = _POOLINGS.get(model[1].pooling_mode)
    if pooling is None:
        return ""
    return _USAGE_TRANSFORMERS.format(
        name=name, pooling=pooling, length=model.max_seq_length, sentences=quoted(_example(languages))
    )


def name_model(text: str, name: str | Path, known: Iterable[str | Path] = ()) -> str:
    """Name the model in the examples of a card. Other models that the examples load keep their names.

    Args:
        text: The card.
        name: The new name of the model.
        known: Names that the model may have in the card. If it has none of them, its name is that of the first model that
            the card loads.

    >>> name_model('model = SentenceTransformer("runs/sw")', "me/sw")
    'model = SentenceTransformer("me/sw")'
    """
    loaded = [match[2] for match in _LOADS.finditer(text)]
    quoted_name, *quoted_known = (
        json.dumps(str(one), ensure_ascii=False) for one in (name, MODEL_ID_PLACEHOLDER, *known)
    )
    renamed = set(quoted_known) & set(loaded) or set(loaded[:1])
    return _LOADS.sub(lambda match: f"{match[1]}{quoted_name}" if match[2] in renamed else match[0], text)


def name_package(text: str, repo_id: str) -> str:
    """Name a repository in the examples of a model package's card, which name the package.

    >>> name_package('load_encoder("sw"), metaphrase pull sw my-encoder', "me/sw")
    'load_encoder("me/sw"), metaphrase pull me/sw my-encoder'
    """
    if (loaded := _LOADS_PACKAGE.search(text)) is None:
        return text
    package = re.escape(loaded[1])
    text = re.sub(rf" \./models/{package}(?=\s)", "", text)
    return re.sub(rf'(load_encoder\("|metaphrase \w+ (?:--model )?){package}(?=["`\s])', rf"\g<1>{repo_id}", text)


def _example(languages: Iterable[str]) -> tuple[str, str]:
    """The translation of a sentence, and the sentence."""
    return example_pairs(languages, default="fr")[1][0][::-1]


def _path(language: str) -> Path:
    return UDHR / f"{language}-en.tsv.gz"


@cache
def _shortest(language: str) -> list[tuple[str, str]]:
    distinct = {pair[0]: pair for pair in reversed(read_parallel(_path(language)))}
    pairs = sorted(distinct.values(), key=lambda pair: len(pair[0]) + len(pair[1]))
    long = [pair for pair in pairs if min(map(len, pair)) >= _FEWEST]
    return [pair for pair in long if max(map(len, pair)) <= _MOST][:3] or long[:3]
