"""MTEB on encoders that have no name yet, and our test sets as tasks of it. Needs ``metaphrase[mteb]``.

MTEB keeps results under a model's name and revision, and takes both from the model's card: checkpoints of one base are one
model to it, and the second is given the scores of the first. Here a revision is a digest of the model's content, and a
prompt is an experiment of its own; so a result that is found again is always the same model's.

Results lie in ``results/<organisation>__<name>/<digest>/<task>.json``, in MTEB's own form.

Reference: Muennighoff et al. 2023, "MTEB: Massive Text Embedding Benchmark"; Enevoldsen et al. 2025, "MMTEB".
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTask, AbsTaskBitextMining
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.languages.iso_mappings import ISO_TO_LANGUAGE, ISO_TO_SCRIPT, _get_iso1_to_iso3
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.types import PromptType
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sentence_transformers import SentenceTransformer

from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet
from metaphrase.evaluation.encoding import Encode, encoder_settings, resolve_prompt
from metaphrase.evaluation.sts import STSSet
from metaphrase.io.digests import model_hash
from metaphrase.io.environment import versions
from metaphrase.modeling.packing import packed

#: Codes that tasks of MTEB also use for a language, beside the one that ISO 639-3 pairs with its two letters.
_INDIVIDUAL = {
    **{"ar": ["arb"], "az": ["azj"], "et": ["ekk"], "fa": ["pes"], "ku": ["kmr"], "lv": ["lvs"], "mg": ["plt"]},
    **{"mn": ["khk"], "ne": ["npi"], "no": ["nob", "nno"], "ps": ["pbt"], "qu": ["quy"], "sq": ["als"], "sw": ["swh"]},
    **{"tl": ["fil"], "uz": ["uzn"], "zh": ["cmn"]},
}
#: Scripts that are several of Unicode's.
_MIXED_SCRIPTS = {"ja": "Jpan", "ko": "Kore", "zh": "Hans"}
#: Texts that are embedded between two steps of a progress bar.
_CHUNK = 1 << 12
#: Codes of scripts by the first word of Unicode's names of their letters; plain names before variants.
_SCRIPTS = {
    name.split()[0].upper(): code
    for code, name in sorted(ISO_TO_SCRIPT.items(), key=lambda item: "(" in item[1], reverse=True)
} | {"CJK": "Hani"}


def mteb_languages(languages: Sequence[str]) -> list[str]:
    """Codes of MTEB (ISO 639-3) for languages that are given by two letters, by three, or with a script (``swh-Latn``).

    Raises:
        ValueError: There is no such language.

    >>> mteb_languages(["sw", "eng"])
    ['swa', 'swh', 'eng']
    """
    codes: list[str] = []
    for language in languages:
        code = language.partition("-")[0]
        three = _get_iso1_to_iso3().get(code, code)
        if three not in ISO_TO_LANGUAGE:
            raise ValueError(f"There is no language {language!r}; languages have codes such as sw, swh or swh-Latn.")
        codes += [language] if three == code else [three, *_INDIVIDUAL.get(code, [])]
    return codes


def language_script(language: str, texts: Iterable[str]) -> str:
    """A language with its script, as MTEB wants it; the script is the one that most letters are of.

    >>> language_script("sw", ["Habari ya asubuhi."]), language_script("zh", ["早上好"])
    ('swa-Latn', 'zho-Hans')
    """
    code, _, script = language.partition("-")
    if not script:
        letters = Counter(char for text in texts for char in text if char.isalpha())
        scripts: Counter[str] = Counter()
        for char, count in letters.items():
            scripts[unicodedata.name(char, "").split(" ")[0]] += count
        most = scripts.most_common(1)[0][0] if scripts else ""
        script = _MIXED_SCRIPTS.get(code) or _SCRIPTS.get(most, "Latn")
    return f"{_get_iso1_to_iso3().get(code, code)}-{script}"


def bitext_task(name: str, sets: Mapping[str, ParallelSet]) -> AbsTaskBitextMining:
    """Parallel sentences as a bitext mining task, in both directions: subsets ``sw-en`` and ``en-sw``.

    MTEB's measure is top-1 retrieval by cosine; its F1 is averaged over the targets by their support.

    Args:
        name: The task's name, under which its result is kept.
        sets: Parallel sentences per language, from `load_parallel_folder`. Their digest is the data's revision, so that other
            data are never taken for measured.

    Returns:
        A task with its data in memory.
    """
    data: dict[str, DatasetDict] = {}
    scripts: dict[str, list[str]] = {}
    english = language_script(TARGET_LANGUAGE, ())
    for language, parallel in sets.items():
        sides = {language: parallel.sources, TARGET_LANGUAGE: parallel.targets}
        codes = {language: language_script(language, parallel.sources), TARGET_LANGUAGE: english}
        for one, other in ((language, TARGET_LANGUAGE), (TARGET_LANGUAGE, language)):
            rows = Dataset.from_dict({"sentence1": list(sides[one]), "sentence2": list(sides[other])})
            data[f"{one}-{other}"] = DatasetDict({"test": rows})
            scripts[f"{one}-{other}"] = [codes[one], codes[other]]
    revision = hashlib.sha256("".join(sets[language].sha256 for language in sorted(sets)).encode()).hexdigest()
    described = TaskMetadata(
        name=name,
        description=f"Retrieval of translations in {len(sets)} languages, from and to English.",
        dataset={"path": name, "revision": revision},
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


def get_tasks(names: Sequence[str], languages: Sequence[str] | None = None) -> list[AbsTask]:
    """Tasks of MTEB by their names, their subsets limited to some languages.

    Raises:
        ValueError: MTEB has no such task, or a task has none of the languages.
    """
    tasks = []
    for name in names:
        try:
            tasks.append(mteb.get_task(name, languages=mteb_languages(languages) if languages else None))
        except KeyError as error:
            raise ValueError(f"MTEB has no task {name!r}: {str(error.args[0]).removeprefix('KeyError: ')}") from error
    return tasks


def sts_sets(task: AbsTask, split: str = "test") -> dict[str, STSSet]:
    """The subsets of an STS task, such as those of ``mteb.get_task("STS22")``.

    Raises:
        OSError: The task's data cannot be loaded: the Hub does not answer, and they are not in its cache.
    """
    task.load_data()
    sets = {}
    for subset in task.hf_subsets:
        rows = (task.dataset or {})[subset][split]
        sets[subset] = STSSet(
            subset, tuple(rows["sentence1"]), tuple(rows["sentence2"]), tuple(map(float, rows["score"]))
        )
    return sets


def model_meta(model: SentenceTransformer, name: str, prompt: str | None = None) -> ModelMeta:
    """Who a model is to MTEB.

    Args:
        model: The model.
        name: ``"starter"``, a folder or a Hub id; a name without an organisation is given ``local``.
        prompt: Text before each sentence, or ``"auto"``.

    Returns:
        Metadata whose revision is :func:`metaphrase.evaluation.identity.model_hash`.
    """
    prompts = getattr(model, "prompts", {})
    text = "|".join(sorted(filter(None, prompts.values()))) if prompt == "auto" else resolve_prompt(model, prompt)
    organisation, _, last = name.strip("/").rpartition("/")
    organisation = organisation if re.fullmatch(r"[\w.-]+", organisation) and not Path(name).exists() else "local"
    return ModelMeta.create_empty(
        {
            "name": f"{organisation}/{last}",
            "revision": model_hash(model),
            "framework": ["Sentence Transformers", "PyTorch"],
            "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "max_tokens": model.max_seq_length,
            "embed_dim": model.get_embedding_dimension(),
            "experiment_kwargs": {"prompt": _as_name(text)} if text else None,
        }
    )


def _as_name(text: str) -> str:
    """A text as a part of a path, unlike that of any other."""
    return f"{re.sub(r'[^0-9A-Za-z]+', '-', text).strip('-')[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class MTEBEncoder(AbsEncoder):
    """An encoder as MTEB calls it: packed, with one prompt, under a name that tells it from all others.

    Args:
        model: The model.
        meta: From `model_meta`.
        prompt: Text before each sentence: None for nothing; ``"auto"`` for the prompts that the model stores, ``passage`` for
            documents and ``query`` for all else.
        encode: Stands in for ``model.encode``, with its signature.
        progress: Where a bar for each subset is drawn; None draws none.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        meta: ModelMeta,
        *,
        prompt: str | None = None,
        encode: Encode | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.mteb_model_meta = meta
        self.prompt = prompt
        self.encode_texts = encode or model.encode
        self.progress = progress or Progress(disable=True)

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
        """Embeddings of a data loader's texts, shape ``(texts, hidden)``."""
        prompt = resolve_prompt(self.model, self.prompt)
        if self.prompt == "auto" and prompt_type is PromptType.document:
            prompt = self.model.prompts.get("passage") or prompt
        texts = [text for batch in inputs for text in batch["text"]]
        bar = self.progress.add_task(f"Embedding {hf_subset}", total=len(texts))
        rows_nh = []
        with packed(self.model) if isinstance(self.model, SentenceTransformer) else nullcontext():
            for first in range(0, max(len(texts), 1), _CHUNK):
                chunk = texts[first : first + _CHUNK]
                rows_nh.append(
                    self.encode_texts(
                        chunk,
                        prompt=prompt,
                        batch_size=kwargs.get("batch_size", 32),
                        show_progress_bar=False,
                        convert_to_numpy=True,
                    )
                )
                self.progress.advance(bar, len(chunk))
        self.progress.remove_task(bar)
        return np.concatenate(rows_nh)


def evaluate_mteb(
    model: SentenceTransformer,
    tasks: Sequence[AbsTask],
    folder: str | Path,
    *,
    name: str,
    prompt: str | None = None,
    batch_size: int = 32,
    show_progress: bool = False,
    encode: Encode | None = None,
) -> dict[str, Any]:
    """Run tasks of MTEB; those whose results are in the folder already are not run again.

    Args:
        model: The model.
        tasks: From `get_tasks`, `bitext_task` or ``mteb.get_tasks``.
        folder: Where results are kept, as MTEB's ``ResultCache`` does.
        name: The model's name.
        prompt: See `MTEBEncoder`.
        batch_size: Sentences per forward pass.
        show_progress: Show a progress bar while encoding.
        encode: Stands in for ``model.encode``, with its signature.

    Returns:
        A dictionary for JSON, scores ×100::

            {"suite": "mteb", "model": "local/sw", "revision": digest,
             "tasks": {"STS22": {"measure": "cosine_spearman", "average": 51.2, "languages": {"de": {"score": …}},
                                 "data_revision": …, "file": "results/local__sw/…/STS22.json"}},
             "unavailable": {"Tatoeba": "Couldn't reach 'mteb/tatoeba-bitext-mining' on the Hub"},
             "settings": {…}, "versions": {…}, "seconds": 12.3}

        Where a task has several splits, its languages are ``de (dev)`` and ``de (test)``.
    """
    start = time.perf_counter()
    cache = mteb.ResultCache(folder)
    meta = model_meta(model, name, prompt)
    # Its console keeps today's stderr: MTEB's own output is thrown away below.
    progress = Progress(
        console=Console(file=sys.stderr), transient=True, disable=not show_progress, redirect_stderr=False
    )
    encoder = MTEBEncoder(model, meta, prompt=prompt, encode=encode, progress=progress)
    measured: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for task in tasks:
        path = cache.get_task_result_path(task.metadata.name, meta)
        try:
            # MTEB draws a bar for each step of each subset, scolds who runs the data of a paper, and copies tensors.
            with progress, warnings.catch_warnings(), redirect_stderr(io.StringIO()):
                warnings.filterwarnings("ignore", message=".*superseded|To copy construct")
                mteb.evaluate(
                    encoder,
                    task,
                    cache=cache,
                    overwrite_strategy="only-missing" if _is_of(path, task) else "always",
                    co2_tracker=False,
                    encode_kwargs={"batch_size": batch_size},
                    show_progress_bar=False,
                )
        except OSError as error:
            unavailable[task.metadata.name] = str(error).partition("\n")[0]
            continue
        result = mteb.TaskResult.from_disk(path)
        rows = {
            f"{row['hf_subset']} ({split})" if len(result.scores) > 1 else row["hf_subset"]: {
                "score": 100 * float(row["main_score"])
            }
            for split, scores in result.scores.items()
            for row in scores
            if row["hf_subset"] in task.hf_subsets
        }
        measured[task.metadata.name] = {
            "measure": task.metadata.main_score,
            "average": float(np.mean([row["score"] for row in rows.values()])),
            "languages": rows,
            "data_revision": result.dataset_revision,
            "file": str(path.relative_to(folder)),
        }
    return {
        "suite": "mteb",
        "model": meta.name,
        "revision": meta.revision,
        "tasks": measured,
        "unavailable": unavailable,
        "settings": {"prompt": prompt, **encoder_settings(model), "batch_size": batch_size},
        "versions": versions() | {"mteb": mteb.__version__},
        "seconds": round(time.perf_counter() - start, 3),
    }


def _is_of(path: Path, task: AbsTask) -> bool:
    """Whether a result is of the task's data as they are now; MTEB compares only which subsets are there."""
    return path.is_file() and mteb.TaskResult.from_disk(path).dataset_revision == task.metadata.revision
