"""MTEB for local encoders, and local test sets as MTEB tasks. Requires ``metaphrase[mteb]``.

MTEB caches results under the name and revision of the model card. Two checkpoints of one base model are thus the same
model, and the second would get the scores of the first. Here the revision is a digest of the content of the model, and
each prompt is a separate experiment, so that a cached result always belongs to the same model.

Results are written to ``results/<organisation>__<name>/<digest>/<task>.json`` in the format of MTEB, each with
its digest in ``<task>.sha256``: a result that was altered is measured again.

Reference: Muennighoff et al. 2023, "MTEB: Massive Text Embedding Benchmark"; Enevoldsen et al. 2025, "MMTEB".
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import langcodes
import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTask, AbsTaskBitextMining
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.languages.iso_mappings import ISO_TO_LANGUAGE
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.types import PromptType
from numpy.typing import NDArray
from rich.console import Console
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, sets_digest
from metaphrase.encoders.folders import is_local
from metaphrase.encoders.prompts import USES, resolve_prompt
from metaphrase.evaluation.answer_retrieval import AnswerSet
from metaphrase.evaluation.encoding import Encode, EncodingOptions, encode_texts, encoder_settings
from metaphrase.evaluation.result import Measurement, Result, mean_of
from metaphrase.evaluation.sib200 import TopicSet, measured
from metaphrase.evaluation.sts import STSSet
from metaphrase.exceptions import DataError, MissingFileError, UsageError
from metaphrase.io.arguments import checked
from metaphrase.io.digests import encoder_digest, file_sha256, json_digest, text_digest
from metaphrase.io.environment import versions
from metaphrase.io.files import replace_text
from metaphrase.io.progress import Begin, no_progress, progress_bars
from metaphrase.io.work_folders import read_kept
from metaphrase.modeling.functional import check_finite_rows

#: Further ISO 639-3 codes that MTEB tasks use for a two-letter code.
_INDIVIDUAL = {
    **{"ar": ["arb"], "az": ["azj"], "et": ["ekk"], "fa": ["pes"], "ku": ["kmr"], "lv": ["lvs"], "mg": ["plt"]},
    **{"mn": ["khk"], "ne": ["npi"], "no": ["nob", "nno"], "ps": ["pbt"], "qu": ["quy"], "sq": ["als"], "sw": ["swh"]},
    **{"tl": ["fil"], "uz": ["uzn"], "zh": ["cmn"]},
}
#: Number of texts between two updates of a progress bar.
_CHUNK = 1 << 12


def mteb_languages(languages: Sequence[str]) -> list[str]:
    """MTEB codes (ISO 639-3) of languages with two-letter codes, three-letter codes, or a script (``swh_Latn``).

    >>> mteb_languages(["sw", "eng", "prs_Arab"])
    ['swa', 'swh', 'eng', 'prs-Arab']
    """
    codes: list[str] = []
    for language in languages:
        language = language.replace("_", "-")
        code = language.partition("-")[0]
        three = _three_letters(code)
        if three not in ISO_TO_LANGUAGE:
            raise UsageError(f"Unknown language {language!r}. Languages have codes such as sw, swh or swh-Latn.")
        codes += [language] if three == code else [three, *_INDIVIDUAL.get(code, [])]
    return codes


def language_script(language: str) -> str:
    """Code of a language with its script, as in MTEB: the script that the code names, or else the usual one there.

    >>> language_script("sw"), language_script("zh"), language_script("zh-Hant"), language_script("ace_Arab")
    ('swa-Latn', 'zho-Hans', 'zho-Hant', 'ace-Arab')
    >>> language_script("pt-BR"), language_script("zh_TW"), language_script("es-419")
    ('por-Latn', 'zho-Hant', 'spa-Latn')
    """
    code = language.replace("_", "-").partition("-")[0]
    script = langcodes.Language.get(language).maximize().script or "Latn"
    return f"{_three_letters(code)}-{script}"


def _three_letters(code: str) -> str:
    """ISO 639-3 code of a two-letter code, which is not replaced by another one first: tl would be fil."""
    try:
        return langcodes.Language.get(code, normalize=False).to_alpha3() if len(code) == 2 else code
    except LookupError:
        return code


def bitext_task(name: str, sets: Mapping[str, ParallelSet]) -> AbsTaskBitextMining:
    """Create a bitext mining task from parallel sentences, in both directions: subsets ``sw-en`` and ``en-sw``.

    MTEB measures top-1 retrieval by cosine. Its F1 is an average over the targets, weighted by their support.

    Args:
        name: Name of the task, under which its result is cached.
        sets: Parallel sentences per language, from `load_parallel_folder`. Their digest is the revision of the data, so
            that results of other data are not reused.

    Returns:
        The task, with its data in memory.
    """
    data: dict[str, DatasetDict] = {}
    scripts: dict[str, list[str]] = {}
    for language, parallel in sets.items():
        sides = {language: parallel.sources, TARGET_LANGUAGE: parallel.targets}
        for one, other in ((language, TARGET_LANGUAGE), (TARGET_LANGUAGE, language)):
            rows = Dataset.from_dict({"sentence1": list(sides[one]), "sentence2": list(sides[other])})
            data[f"{one}-{other}"] = DatasetDict({"test": rows})
            scripts[f"{one}-{other}"] = [language_script(one), language_script(other)]
    described = TaskMetadata(
        name=name,
        description=f"Retrieval of translations in {len(sets)} languages, from and to English.",
        dataset={"path": name, "revision": sets_digest(sets)},
        type="BitextMining",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=scripts,
        main_score="f1",
    )

    class ParallelTexts(AbsTaskBitextMining):
        metadata = described

        def load_data(self, *args: Any, **kwargs: Any) -> None:
            self.dataset, self.data_loaded = data, True

    return ParallelTexts()


def topic_task(name: str, sets: Mapping[str, TopicSet], first: int | None = None) -> AbsTask:
    """Create MTEB's ``SIB200Classification`` from local sentences.

    MTEB trains ten classifiers in each language, each on eight sentences of each topic, which it draws by their place in the
    data: the order of the files must be kept to draw the same ones.

    Args:
        name: Name of the task, under which its result is cached.
        sets: Sentences per language, from `load_topic_folder` without ``by_id``. Languages that MTEB lacks are skipped.
        first: Number of sentences that are measured, of ``test``, or ``dev`` without ``test``; None measures all.

    Raises:
        DataError: The sentences to train on or to measure are missing.
        MissingFileError: MTEB has none of the languages.
    """
    split = measured(next(iter(sets.values())))
    topics = sorted(set(chain.from_iterable(one.topics for one in sets.values())))
    theirs = {"dev": "validation"}.get(split, split)
    data = {}
    for language, one in sets.items():
        parts = {"train": one.split_only("train"), theirs: one.split_only(split).first_sentences(first)}
        data[language] = {
            key: {"text": part.texts, "label": [topics.index(topic) for topic in part.topics]}
            for key, part in parts.items()
        }
    return _local_task(
        "SIB200Classification",
        name,
        theirs,
        data,
        lambda splits: DatasetDict({key: Dataset.from_dict(rows) for key, rows in splits.items()}),
    )


def answer_task(name: str, sets: Mapping[str, AnswerSet]) -> AbsTask:
    """Create MTEB's ``XQuADRetrieval`` from local questions, with the sentences of their language as candidates.

    The candidates of MTEB's own data are paragraphs, of which there are fewer.

    Args:
        name: Name of the task, under which its result is cached.
        sets: Questions and candidates per language, from `load_answer_folder`. Languages that MTEB lacks are skipped.

    Raises:
        MissingFileError: MTEB has none of the languages.
    """
    split = "validation"
    data = {
        language: {
            "queries": {"id": one.ids, "text": one.questions},
            "corpus": {"id": [str(row) for row in range(len(one.sentences))], "text": one.sentences},
            "relevant_docs": {id_: {str(row): 1} for id_, row in zip(one.ids, one.answers, strict=True)},
        }
        for language, one in sets.items()
    }

    def filled(one: Mapping[str, Any]) -> dict[str, Any]:
        texts = {key: Dataset.from_dict(one[key]) for key in ("queries", "corpus")}
        return {split: {**texts, "relevant_docs": one["relevant_docs"], "top_ranked": None}}

    return _local_task("XQuADRetrieval", name, split, data, filled)


def _local_task(theirs: str, name: str, split: str, data: Mapping[str, Any], fill: Callable[[Any], Any]) -> AbsTask:
    """A task of MTEB with the data of its languages in memory, under another name and with their digest as revision."""
    known = mteb.get_task(theirs).hf_subsets
    kept = {language: one for language, one in data.items() if language in known}
    if not kept:
        raise MissingFileError(f"MTEB's {theirs} has none of the languages {', '.join(data)}.")
    task = mteb.get_task(theirs, eval_splits=[split], hf_subsets=list(kept))
    dataset = {"path": name, "revision": json_digest(kept)}
    task.metadata = task.metadata.model_copy(update={"name": name, "dataset": dataset, "superseded_by": None})
    task.dataset, task.data_loaded = {language: fill(one) for language, one in kept.items()}, True
    return task


def get_tasks(names: Sequence[str], languages: Sequence[str] | None = None) -> list[AbsTask]:
    """Return MTEB tasks by name, restricted to the subsets of some languages.

    Raises:
        ValueError: A task is unknown, or has none of the languages.
    """
    tasks = []
    for name in names:
        try:
            tasks.append(mteb.get_task(name, languages=mteb_languages(languages) if languages else None))
        except KeyError as error:
            raise UsageError(f"MTEB has no task {name!r}: {str(error.args[0]).removeprefix('KeyError: ')}") from error
    return tasks


def sts_sets(task: AbsTask) -> dict[str, STSSet]:
    """The subsets of an STS task, such as those of ``mteb.get_task("STS22")``."""
    task.load_data()
    sets = {}
    for subset in task.hf_subsets:
        rows = (task.dataset or {})[subset]["test"]
        sets[subset] = STSSet(
            subset, tuple(rows["sentence1"]), tuple(rows["sentence2"]), tuple(map(float, rows["score"]))
        )
    return sets


def model_meta(model: SentenceTransformer, name: str, prompt: str | None = None) -> ModelMeta:
    """Metadata of a model for MTEB.

    The revision is :func:`metaphrase.io.digests.encoder_digest`, the organisation of names without one is ``local``.
    """
    prompts = [resolve_prompt(model, prompt, use) for use in USES]
    text = json.dumps(prompts, ensure_ascii=False) if any(prompts) else ""
    organisation, _, last = name.strip("/").rpartition("/")
    organisation = organisation if re.fullmatch(r"[\w.-]+", organisation) and not is_local(name) else "local"
    words, digest = re.sub(r"[^0-9A-Za-z]+", "-", text).strip("-")[:40], text_digest(text)[:6]
    return ModelMeta.create_empty(
        {
            "name": f"{organisation}/{last}",
            "revision": encoder_digest(model),
            "framework": ["Sentence Transformers", "PyTorch"],
            "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "max_tokens": model.max_seq_length,
            "embed_dim": model.get_embedding_dimension(),
            "experiment_kwargs": {"prompt": f"{words}-{digest}"} if text else None,
        }
    )


class MTEBEncoder(AbsEncoder):
    """An encoder with the interface of MTEB, without padding and with one prompt.

    With the prompt ``"auto"``, queries and documents have the model's prompts for questions and passages.
    """

    def __init__(
        self, model: SentenceTransformer, meta: ModelMeta, *, prompt: str | None = None, encode: Encode | None = None
    ) -> None:
        self.model = model
        self.mteb_model_meta = meta
        self.prompt = prompt
        self.encode_with = encode
        self.begin: Begin = no_progress

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> NDArray[np.float32]:
        """Embeddings of the texts of a data loader, shape ``(texts, hidden)``."""
        uses: dict[Any, Any] = {PromptType.query: "question", PromptType.document: "passage"}
        prompt = resolve_prompt(self.model, self.prompt, uses.get(prompt_type, "sentence"))
        texts = [text for batch in inputs for text in batch["text"]]
        advance = self.begin(f"Embedding {hf_subset}", len(texts))
        rows_nh = []
        for first in range(0, max(len(texts), 1), _CHUNK):
            chunk = texts[first : first + _CHUNK]
            size = kwargs.get("batch_size", 32)
            rows_nh.append(encode_texts(self.model, chunk, prompt=prompt, batch_size=size, encode=self.encode_with))
            advance(len(chunk))
        embeddings_nh = np.concatenate(rows_nh)
        check_finite_rows(embeddings_nh)
        return embeddings_nh


@checked
def evaluate_mteb(
    model: SentenceTransformer,
    tasks: Sequence[AbsTask],
    folder: str | Path,
    *,
    name: str,
    **encoding: Unpack[EncodingOptions],
) -> dict[str, Result]:
    """Run MTEB tasks, except those with cached results.

    Args:
        model: The model.
        tasks: From `get_tasks`, `bitext_task`, `topic_task`, `answer_task` or ``mteb.get_tasks``.
        folder: Folder of the cached results, in the format of MTEB's ``ResultCache``.
        name: Name of the model.
        **encoding: See :class:`metaphrase.evaluation.encoding.EncodingOptions`, and `MTEBEncoder` for the prompt ``"auto"``.

    Returns:
        The result of each task, by name. The languages of a task with several splits are ``de (dev)`` and ``de (test)``;
        ``facts`` has the revisions of the model and of the data, and the file in the folder.

    Raises:
        OSError: The data of a task cannot be read from the Hub.
    """
    cache = mteb.ResultCache(folder)
    prompt, batch_size = encoding.get("prompt"), encoding.get("batch_size", 32)
    meta = model_meta(model, name, prompt)
    # The console keeps the current stderr, because the output of MTEB is discarded below.
    console = Console(file=sys.stderr)
    encoder = MTEBEncoder(model, meta, prompt=prompt, encode=encoding.get("encode"))
    results: dict[str, Result] = {}
    for task in tasks:
        start = time.perf_counter()
        path = cache.get_task_result_path(task.metadata.name, meta)
        kept = read_kept(path, _verified)
        # MTEB itself compares only the subsets of a cached result.
        is_current = kept is not None and kept.dataset_revision == task.metadata.revision
        # MTEB draws many progress bars, warns of superseded data sets and of classes that no item has, and copies tensors.
        with (
            progress_bars(encoding.get("show_progress", False), console) as encoder.begin,
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.filterwarnings("ignore", message=".*superseded|.*ill-defined|lbfgs failed|To copy construct")
            mteb.evaluate(
                encoder,
                task,
                cache=cache,
                overwrite_strategy="only-missing" if is_current else "always",
                co2_tracker=False,
                encode_kwargs={"batch_size": batch_size},
                show_progress_bar=False,
            )
        replace_text(_digest_of(path), file_sha256(path))
        found = mteb.TaskResult.from_disk(path)
        languages = {
            f"{row['hf_subset']} ({split})" if len(found.scores) > 1 else row["hf_subset"]: Measurement(
                None, 100 * float(row["main_score"])
            )
            for split, rows in found.scores.items()
            for row in rows
            if row["hf_subset"] in task.hf_subsets
        }
        results[task.metadata.name] = Result(
            suite="mteb",
            model=name,
            measure=task.metadata.main_score,
            languages=languages,
            average=mean_of(list(languages.values())),
            settings={"prompt": prompt, **encoder_settings(model), "batch_size": batch_size},
            versions=versions() | {"mteb": mteb.__version__},
            seconds=round(time.perf_counter() - start, 3),
            facts={
                "data_revision": found.dataset_revision,
                "file": str(path.relative_to(folder)),
                "revision": meta.revision,
            },
        )
    return results


def _verified(path: Path) -> mteb.TaskResult:
    if _digest_of(path).read_text(encoding="utf-8") != file_sha256(path):
        raise DataError("its content does not match its digest")
    return mteb.TaskResult.from_disk(path)


def _digest_of(path: Path) -> Path:
    """The file with the digest of a cached result, next to it."""
    return path.with_suffix(".sha256")
