"""SIB-200: the same sentences with their topics in 205 languages.

Two benchmarks use these sentences: retrieval of translations, and the accuracy in each language of a topic classifier that is
trained on English embeddings, a transfer score without fine-tuning.

Reference: Adelani et al. 2024, "SIB-200: A Simple, Inclusive, and Big Evaluation Dataset for Topic Classification in 200+
Languages and Dialects". The sentences come from FLORES-200.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression

from metaphrase.corpus.codes import standard_code
from metaphrase.corpus.parallel import ParallelSet, add_file, rows_of
from metaphrase.corpus.text import open_text
from metaphrase.evaluation.encoding import EncodingOptions, embed_sides, encoding_settings
from metaphrase.evaluation.evaluator import EmbeddingEvaluator
from metaphrase.evaluation.measures import FEWER_RESAMPLES
from metaphrase.evaluation.result import Measurement, Result, conditions, with_intervals
from metaphrase.exceptions import DataError, DataMismatchError, MissingFileError
from metaphrase.io.arguments import Resamples, Seed, checked
from metaphrase.io.digests import text_digest
from metaphrase.mining.search import unit_rows

#: Code of English in SIB-200.
ENGLISH = "eng_Latn"
#: Files of SIB-200.
TOPIC_FILE = re.compile(r"(?P<language>[a-z]{3}_[A-Z][a-z]{3})\.(?P<split>train|dev|test)\.tsv(\.gz)?")
_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
#: Maximum number of iterations of the probe, which converges in fewer.
PROBE_ITERATIONS = 1_000


#: SIB-200's codes of the languages that XLM-R was trained on (Conneau et al. 2020, table 6), by their codes in other data.
#: SIB-200 lacks Breton, Western Frisian and Latin; spellings in Latin letters (``hi_rom``) are not counted.
_XLMR_CODES = (
    "af=afr_Latn am=amh_Ethi ar=arb_Arab as=asm_Beng az=azj_Latn be=bel_Cyrl bg=bul_Cyrl bn=ben_Beng bs=bos_Latn "
    "ca=cat_Latn cs=ces_Latn cy=cym_Latn da=dan_Latn de=deu_Latn el=ell_Grek en=eng_Latn eo=epo_Latn es=spa_Latn "
    "et=est_Latn eu=eus_Latn fa=pes_Arab fi=fin_Latn fr=fra_Latn ga=gle_Latn gd=gla_Latn gl=glg_Latn gu=guj_Gujr "
    "ha=hau_Latn he=heb_Hebr hi=hin_Deva hr=hrv_Latn hu=hun_Latn hy=hye_Armn id=ind_Latn is=isl_Latn it=ita_Latn "
    "ja=jpn_Jpan jv=jav_Latn ka=kat_Geor kk=kaz_Cyrl km=khm_Khmr kn=kan_Knda ko=kor_Hang ku=kmr_Latn ky=kir_Cyrl "
    "lo=lao_Laoo lt=lit_Latn lv=lvs_Latn mg=plt_Latn mk=mkd_Cyrl ml=mal_Mlym mn=khk_Cyrl mr=mar_Deva ms=zsm_Latn "
    "my=mya_Mymr ne=npi_Deva nl=nld_Latn no=nob_Latn om=gaz_Latn or=ory_Orya pa=pan_Guru pl=pol_Latn ps=pbt_Arab "
    "pt=por_Latn ro=ron_Latn ru=rus_Cyrl sa=san_Deva sd=snd_Arab si=sin_Sinh sk=slk_Latn sl=slv_Latn so=som_Latn "
    "sq=als_Latn sr=srp_Cyrl su=sun_Latn sv=swe_Latn sw=swh_Latn ta=tam_Taml te=tel_Telu th=tha_Thai tl=tgl_Latn "
    "tr=tur_Latn ug=uig_Arab uk=ukr_Cyrl ur=urd_Arab uz=uzn_Latn vi=vie_Latn xh=xho_Latn yi=ydd_Hebr zh=zho_Hans "
    "zh-Hant=zho_Hant"
)
XLMR_LANGUAGES = dict(pair.split("=") for pair in _XLMR_CODES.split())


@dataclass(frozen=True)
class TopicSet:
    """Sentences of one language with their topics, in the order of their ids or of the files.

    Attributes:
        language: Its code in SIB-200, such as ``"swh_Latn"``.
        split: ``"train"``, ``"dev"`` or ``"test"`` of each sentence.
        ids: Id of each sentence, the same in every language.
        topics: Topic of each sentence.
        texts: The sentences.
    """

    language: str
    split: tuple[str, ...]
    ids: tuple[str, ...]
    topics: tuple[str, ...]
    texts: tuple[str, ...]

    def first_sentences(self, n: int | None) -> TopicSet:
        """The first sentences of each split; None for all."""
        splits = dict.fromkeys(self.split)
        return self.rows(
            sorted(row for split in splits for row in [at for at, name in enumerate(self.split) if name == split][:n])
        )

    def split_only(self, split: str) -> TopicSet:
        """The sentences of a split."""
        return self.rows(at for at, name in enumerate(self.split) if name == split)

    def rows(self, chosen: Iterable[int]) -> TopicSet:
        """Some of the sentences, by number."""
        return rows_of(self, ("split", "ids", "topics", "texts"), chosen)


def find_language(language: str, available: Collection[str]) -> str | None:
    """SIB-200's code of a language among those of some files, by any of its codes; None if they lack it.

    >>> find_language("fa", ["pes_Arab", "prs_Arab"]), find_language("prs_Arab", ["pes_Arab", "prs_Arab"])
    ('pes_Arab', 'prs_Arab')
    >>> find_language("tt", ["tat_Cyrl"]), find_language("ceb", ["tat_Cyrl"])
    ('tat_Cyrl', None)
    """
    if language in available:
        return language
    codes = {standard_code(code) or code: code for code in available}
    # "fa" is pes_Arab, although prs_Arab has the same standard code.
    codes |= {code: named for code, named in XLMR_LANGUAGES.items() if named in available}
    return codes.get(standard_code(language) or language)


def is_variety(code: str) -> bool:
    """Whether a code of SIB-200 names a language whose standard code is that of another one, as prs_Arab that of Persian.

    >>> is_variety("prs_Arab"), is_variety("pes_Arab"), is_variety("ewe_Latn")
    (True, False, False)
    """
    return (
        _CODE.fullmatch(code) is not None
        and code not in XLMR_LANGUAGES.values()
        and standard_code(code) in XLMR_LANGUAGES
    )


def topic_files(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of each language and split of a folder, in alphabetical order."""
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.tsv*")):
        if match := TOPIC_FILE.fullmatch(path.name):
            add_file(files.setdefault(match["language"], {}), match["split"], path)
    return files


def load_topic_folder(
    path: str | Path, languages: Sequence[str] | None = None, *, by_id: bool = True
) -> dict[str, TopicSet]:
    """Read SIB-200: files ``xxx_Scpt.train.tsv[.gz]``, ``.dev.`` and ``.test.`` with the header ``index_id category text``.

    Args:
        path: The folder.
        languages: Languages to read besides English; None reads all.
        by_id: Sort the sentences by id; otherwise they have the order of the files.

    Returns:
        English and the other languages.

    Raises:
        FileNotFoundError: The folder lacks English or a language.
        DataError: A file has another format.
        DataMismatchError: The sentences of a language do not match the English ones, or without `by_id` their order.
    """
    folder = Path(path)
    files = topic_files(folder)
    wanted = dict.fromkeys([ENGLISH, *(languages or files)])
    if missing := [language for language in wanted if language not in files]:
        raise MissingFileError(
            f"{folder} has no files {missing[0]}.train.tsv.gz. It has: {', '.join(files) or 'no files of SIB-200'}."
        )
    return load_topics({language: files[language] for language in wanted}, by_id=by_id)


def load_topics(files: Mapping[str, Mapping[str, Path]], *, by_id: bool = True) -> dict[str, TopicSet]:
    """Read the files of English and of other languages by split; see `load_topic_folder`."""
    sets = {language: _read(language, splits, by_id=by_id) for language, splits in files.items()}
    english = sets[ENGLISH]
    for language, topic_set in sets.items():
        if (topic_set.split, topic_set.ids, topic_set.topics) != (english.split, english.ids, english.topics):
            folder = next(iter(files[language].values())).parent
            raise DataMismatchError(
                f"{folder} must have the same sentences in every language, but the ids, topics or splits of {language} "
                f"({len(topic_set.ids)} sentences) are not those of {ENGLISH} ({len(english.ids)})."
            )
    return sets


def _read(language: str, files: Mapping[str, Path], *, by_id: bool) -> TopicSet:
    rows = list(chain.from_iterable(_rows(split, path) for split, path in files.items()))
    if by_id:
        rows.sort(key=lambda row: (len(row[1]), row[1]))
    return TopicSet(language, *(tuple(column) for column in zip(*rows, strict=True)))


def _rows(split: str, path: Path) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    with open_text(path, newline="") as file:
        reader = csv.reader(file, delimiter="\t", strict=True)  # as pandas wrote it: texts with quotes are quoted
        try:
            if (header := next(reader, [])) != ["index_id", "category", "text"]:
                found = "\t".join(header)[:80]
                raise DataError(f"{path} must have the header index_id, category, text, but has {found!r}.")
            for fields in reader:
                if len(fields) != 3:
                    raise DataError(
                        f"{path}:{reader.line_num}: a line must have 3 columns, but has {len(fields)}: "
                        f"{' '.join(fields)[:80]!r}."
                    )
                rows.append((split, fields[0], fields[1], fields[2]))
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: {error}.") from error
    if not rows:
        raise DataError(f"{path} has no sentence after its header.")
    if len({row[1] for row in rows}) < len(rows):
        raise DataError(f"{path} has an id more than once. Each sentence must have its own.")
    return rows


def topic_pairs(sets: Mapping[str, TopicSet]) -> dict[str, ParallelSet]:
    """Return the sentences of each language except English, with their English translations."""
    english = sets[ENGLISH].texts
    return {
        language: ParallelSet(language, topic_set.texts, english)
        for language, topic_set in sets.items()
        if language != ENGLISH
    }


def language_groups(languages: Sequence[str], trained: Sequence[str] = ()) -> dict[str, list[str]]:
    """Groups of languages by resource (seen in training, in XLM-R, neither) and by script, each of two or more languages.

    >>> language_groups(["swh_Latn", "ewe_Latn", "deu_Latn", "fra_Latn", "tat_Cyrl"], ["sw"])
    {'in XLM-R': ['deu_Latn', 'fra_Latn'], 'not in XLM-R': ['ewe_Latn', 'tat_Cyrl'], \
'Latn': ['swh_Latn', 'ewe_Latn', 'deu_Latn', 'fra_Latn']}
    """
    seen = {find_language(language, languages) for language in trained}
    known = set(XLMR_LANGUAGES.values())
    groups: dict[str, list[str]] = {"trained": [], "in XLM-R": [], "not in XLM-R": []}
    for language in languages:
        groups["trained" if language in seen else "in XLM-R" if language in known else "not in XLM-R"].append(language)
    for language in languages:
        groups.setdefault(language.partition("_")[2], []).append(language)
    return {group: members for group, members in groups.items() if len(members) > 1}


def probe_hits(
    train_nh: NDArray[Any], topics: Sequence[str], embeddings: Mapping[str, NDArray[Any]], gold: Sequence[str]
) -> dict[str, NDArray[np.bool_]]:
    """Whether a logistic regression on embeddings predicts the topic of each sentence of other embeddings.

    The regression is scikit-learn's with its default settings (L2 penalty, C = 1) on embeddings of length 1, and has no
    random part. It is trained on ``train_nh``, shape ``(n, hidden)``; the hits of each language have shape ``(m,)``.
    """
    probe = LogisticRegression(max_iter=PROBE_ITERATIONS).fit(unit_rows(np.asarray(train_nh)), list(topics))
    return {
        language: probe.predict(unit_rows(np.asarray(test_mh))) == np.array(gold)
        for language, test_mh in embeddings.items()
    }


@checked
def find_topics(
    model: Any, sets: Mapping[str, TopicSet], train: TopicSet | None = None, **encoding: Unpack[EncodingOptions]
) -> dict[str, NDArray[np.bool_]]:
    """`probe_hits` in every language, trained on the English sentences of the split ``train``.

    The split ``test`` is measured, or ``dev`` if there is none. ``train`` replaces the English set for training.
    """
    trained, split = (train or sets[ENGLISH]).split_only("train"), measured(sets[ENGLISH])
    tested = {language: topic_set.split_only(split) for language, topic_set in sets.items()}
    sides = [trained.texts, *(topic_set.texts for topic_set in tested.values())]
    train_nh, *embeddings = embed_sides(model, sides, **encoding)
    by_language = dict(zip(tested, embeddings, strict=True))
    return probe_hits(train_nh, trained.topics, by_language, tested[ENGLISH].topics)


def measured(english: TopicSet) -> str:
    """The split that the probe is measured on."""
    for split in ("test", "dev"):
        if {"train", split} <= set(english.split):
            return split
    raise DataError(f"Topics need the split train and one of dev and test, but got {', '.join(set(english.split))}.")


@checked
def evaluate_topics(
    model: Any,
    sets: Mapping[str, TopicSet],
    *,
    name: str | None = None,
    train: TopicSet | None = None,
    trained: Sequence[str] = (),
    resamples: Resamples = FEWER_RESAMPLES,
    seed: Seed = 0,
    **encoding: Unpack[EncodingOptions],
) -> Result:
    """Measure a topic classifier that is trained on English embeddings, in every language.

    Args:
        model: A SentenceTransformer, or an object with its ``encode``.
        sets: English and other languages, from `load_topic_folder`.
        name: Name of the model in the result.
        train: English sentences to train on, if not those of ``sets``.
        trained: Languages that the model was trained on, for an average over them.
        resamples: Number of bootstrap samples of the intervals, over sentences, which are the same in all languages.
        seed: Seed of the bootstrap.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`.

    Returns:
        A result whose scores are accuracies; ``items`` are the hits of each sentence. Groups are those of
        `language_groups`, and ``"without English"``.

    Raises:
        DataError: The sentences to train on or to measure are missing.
    """
    start = time.perf_counter()
    split = measured(sets[ENGLISH])
    hits = find_topics(model, sets, train, **encoding)
    languages = {
        language: Measurement.of_items(hits_m.astype(int), _sha256(train or sets[ENGLISH], sets[language]))
        for language, hits_m in hits.items()
    }
    others = [language for language in languages if language != ENGLISH]
    return Result(
        suite="sib200",
        model=name or type(model).__name__,
        measure="topic accuracy",
        protocol=f"logistic regression on English embeddings of train, measured on {split}",
        **with_intervals(
            "shared_items",
            languages,
            groups=({"without English": others} if others else {}) | language_groups(others, trained),
            resamples=resamples,
            seed=seed,
        ),
        **conditions(
            start, resamples, seed, **encoding_settings(model, **encoding), split=split, trained=list(trained)
        ),
    )


def _sha256(*sets: TopicSet) -> str:
    """Digest of the sentences of some languages."""
    columns = [[topic_set.split, topic_set.ids, topic_set.topics, topic_set.texts] for topic_set in sets]
    return text_digest(json.dumps(columns, ensure_ascii=False))


class TopicEvaluator(EmbeddingEvaluator):
    """Topic classification by a probe on English embeddings, during training.

    The metrics are ``mean_accuracy``, over the languages without English, and ``{language}_accuracy``.

    Args:
        sets: English and other languages, from `load_topic_folder`.

    See `EmbeddingEvaluator` for the other arguments.

    Relations: `RetrievalEvaluator` with the pairs of `topic_pairs` measures the retrieval of translations.
    """

    kind = "topic"
    metric = "mean_accuracy"

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        """Measure a model."""
        hits = find_topics(model, self.sets, **self.encoding)
        accuracies = {language: float(hits_m.mean()) for language, hits_m in hits.items()}
        others = [accuracy for language, accuracy in accuracies.items() if language != ENGLISH]
        scores = {"mean_accuracy": float(np.mean(others or list(accuracies.values())))}
        return scores | {f"{language}_accuracy": accuracy for language, accuracy in accuracies.items()}
