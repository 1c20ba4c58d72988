"""Statistical word alignment with sil-thot: fast_align, the HMM and the IBM models, trained on the bitext itself."""

from __future__ import annotations

import json
import logging
import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from metaphrase.aligners.base import Aligner, Alignment, WordPair, check_word_pairs
from metaphrase.corpus.words import Link, Words
from metaphrase.exceptions import MissingExtraError, ModelFileError, StorageError, UsageError
from metaphrase.io.arguments import Range, checked
from metaphrase.io.digests import file_sha256
from metaphrase.io.environment import install_command
from metaphrase.io.files import read_json
from metaphrase.io.outputs import claim_folder
from metaphrase.io.progress import progress_bars

try:
    import thot.alignment as thot
except ImportError as error:
    raise MissingExtraError(f"Statistical aligners require sil-thot: {install_command('align')}.") from error

logger = logging.getLogger(__name__)

#: The training chain of each model; every model is initialised from the one before it.
MODELS = {
    "fast_align": ("fast_align",),
    "hmm": ("ibm1", "hmm"),
    "ibm1": ("ibm1",),
    "ibm2": ("ibm1", "ibm2"),
    "ibm3": ("ibm1", "hmm", "ibm3"),
    "ibm4": ("ibm1", "hmm", "ibm3", "ibm4"),
}
#: Symmetrisation heuristics; ``none`` uses only the direction from source to target.
HEURISTICS = tuple(name.lower().replace("_", "-") for name in thot.SymmetrizationHeuristic.__members__)

_CLASSES: dict[str, Any] = {
    "fast_align": thot.FastAlignModel,
    "ibm1": thot.Ibm1AlignmentModel,
    "ibm2": thot.Ibm2AlignmentModel,
    "hmm": thot.HmmAlignmentModel,
    "ibm3": thot.Ibm3AlignmentModel,
    "ibm4": thot.Ibm4AlignmentModel,
}
#: Reserved words of sil-thot.
_RESERVED = {"NULL", "UNKNOWN_WORD", "<UNUSED_WORD>"}
_DIRECTIONS = ("direct", "inverse")
_SETTINGS = ("model", "heuristic", "lowercase", "strip_punctuation", "iterations")
#: File of the settings and facts of an aligner, in its folder.
FILE = "aligner.json"
#: The facts in it, with their types.
_FACTS = {"settings": dict, "trained_pairs": int, "skipped_pairs": int, "training_seconds": float, "sha256": dict}


@checked
class StatisticalAligner(Aligner):
    """A word aligner that learns from a bitext which words translate each other.

    It is trained in both directions. Each direction links a word at most once, and a heuristic symmetrises the two. The
    score of a link is the geometric mean of the two lexical translation probabilities,
    ``sqrt(t(target | source) * t(source | target))``, between 0 and 1. For a word that did not occur in training, it is about
    1e-9 with ``fast_align``, and one over the size of the vocabulary with the other models. The IBM-4 model is trained
    without word classes.

    Training uses all cores and sums their counts in an undefined order: two trainings may differ in one link of 100,000.
    With the environment variable ``OMP_NUM_THREADS=1``, training is deterministic.

    Args:
        model: ``"fast_align"``, ``"hmm"`` or ``"ibm1"`` … ``"ibm4"``.
        heuristic: One of ``HEURISTICS``. The default suits phrases; ``"intersection"`` finds fewer and more precise links.
        lowercase: Lowercase words.
        strip_punctuation: Strip punctuation around words, so that ``cat.`` becomes ``cat``.
        iterations: Iterations of expectation maximisation for each model of the chain.

    Attributes:
        max_words: Pairs with a longer side are skipped in training and have no links.
        trained_pairs: Pairs used in training.
        skipped_pairs: Pairs of the training corpus that are too long or have an empty side.
        training_seconds: Training time.

    Raises:
        ValueError: The model or the heuristic is unknown.

    Reference: Dyer et al. 2013, "A Simple, Fast, and Effective Reparameterization of IBM Model 2"; Vogel et al. 1996 (the
    HMM); Brown et al. 1993 (the IBM models); Koehn et al. 2003 (grow-diag-final-and).
    """

    def __init__(
        self,
        model: str = "fast_align",
        *,
        heuristic: str = "grow-diag-final-and",
        lowercase: bool = True,
        strip_punctuation: bool = True,
        iterations: Annotated[int, Range(1, 1000)] = 5,
    ) -> None:
        heuristic = heuristic.replace("_", "-")
        if model not in MODELS:
            raise UsageError(f"Unknown statistical aligner {model!r}; choose from {', '.join(MODELS)}.")
        if heuristic not in HEURISTICS:
            raise UsageError(f"Unknown heuristic {heuristic!r}; choose from {', '.join(HEURISTICS)}.")
        self.name = self.model = model
        self.heuristic = heuristic
        self.lowercase, self.strip_punctuation, self.iterations = lowercase, strip_punctuation, iterations
        self.max_words: int = _CLASSES[model]().max_sentence_length
        self.trained_pairs = self.skipped_pairs = 0
        self.training_seconds = 0.0
        self._models: tuple[Any, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {name: getattr(self, name) for name in _SETTINGS}

    def train(self, pairs: Iterable[WordPair], *, show_progress: bool = False) -> StatisticalAligner:
        """Train on a bitext, which is read once, and discard earlier training. Returns the aligner itself.

        Raises:
            ValueError: No pair has words on both sides.
        """
        start = time.perf_counter()
        chain = MODELS[self.model]
        models = [_CLASSES[chain[0]]() for _ in _DIRECTIONS]
        self.trained_pairs = self.skipped_pairs = 0
        for source, target in pairs:
            check_word_pairs([(source, target)])
            if not self._fits(source, target):
                self.skipped_pairs += 1
                continue
            source_forms, target_forms = self._forms(source), self._forms(target)
            models[0].add_sentence_pair(source_forms, target_forms)
            models[1].add_sentence_pair(target_forms, source_forms)
            self.trained_pairs += 1
        if not self.trained_pairs:
            raise ValueError("Cannot train an aligner: no pair has words on both sides.")
        with progress_bars(show_progress) as begin:
            advance = begin(f"Training {self.model}", len(chain) * len(models) * self.iterations)
            for at, stage in enumerate(chain):
                for side, model in enumerate(models):
                    models[side] = model = _CLASSES[stage](model) if at else model
                    model.start_training()
                    for _ in range(self.iterations):
                        model.train()
                        advance(1)
                    model.end_training()
        self._models = models[0], models[1]
        self.training_seconds = time.perf_counter() - start
        return self

    def align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        """Align sentence pairs, from the training corpus or not, on all cores; see `Aligner.align`.

        A pair with an empty side, or with a side of more than ``max_words`` words, has no links.

        Raises:
            ValueError: The aligner is not trained.
        """
        if self._models is None:
            raise ValueError("This aligner is not trained: call `train`, or load one with `StatisticalAligner.load`.")
        check_word_pairs(pairs)
        symmetrised = thot.SymmetrizedAligner(*self._models)
        symmetrised.heuristic = thot.SymmetrizationHeuristic.__members__[self.heuristic.upper().replace("-", "_")]
        fitting = [at for at, (source, target) in enumerate(pairs) if self._fits(source, target)]
        sources = [self._forms(pairs[at][0]) for at in fitting]
        targets = [self._forms(pairs[at][1]) for at in fitting]
        alignments = [Alignment((), ())] * len(pairs)
        score = _scores(*self._models)
        found = symmetrised.get_best_alignments(sources, targets)
        for at, source, target, (_, matrix) in zip(fitting, sources, targets, found, strict=True):
            rows, columns = matrix.to_numpy().nonzero()
            links: tuple[Link, ...] = tuple(zip(rows.tolist(), columns.tolist(), strict=True))
            alignments[at] = Alignment(links, tuple(score(source[i], target[j]) for i, j in links))
        return alignments

    def _fits(self, source: Words, target: Words) -> bool:
        lengths = len(source), len(target)
        return min(lengths) > 0 and max(lengths) <= self.max_words

    def _forms(self, words: Words) -> list[str]:
        return [word_form(word, self.lowercase, self.strip_punctuation) for word in words]

    def save(self, folder: str | Path) -> Path:
        """Write the models and, last, ``aligner.json`` with the settings and the files' hashes, over an earlier aligner.

        Raises:
            ValueError: The aligner is not trained, or the folder holds files that this library did not write.
            StorageError: The folder cannot be written.
        """
        if self._models is None:
            raise ValueError("This aligner is not trained: call `train` before `save`.")
        folder = claim_folder(folder)
        remove_aligner(folder)
        for direction, model in zip(_DIRECTIONS, self._models, strict=True):
            if not model.print(str(folder / direction)):
                raise StorageError(f"Cannot write to {folder}. Check the free disk space and the permissions.")
        facts = {
            "format": "metaphrase.statistical",
            "settings": self.settings,
            "trained_pairs": self.trained_pairs,
            "skipped_pairs": self.skipped_pairs,
            "training_seconds": self.training_seconds,
            "sha256": _hashes(folder),
        }
        (folder / FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path, *, heuristic: str | None = None) -> StatisticalAligner:
        """Load an aligner from a folder that `save` wrote, with the heuristic that was saved or another one.

        Raises:
            ModelFileError: The folder holds no aligner, or a damaged one.
        """
        folder = Path(folder)
        facts = _read_facts(folder)
        if facts["sha256"] != _hashes(folder):
            raise ModelFileError(
                f"The aligner in {folder} is damaged: its files have changed since they were saved. Train it again."
            )
        aligner = cls(**facts["settings"] | ({} if heuristic is None else {"heuristic": heuristic}))
        models = [_CLASSES[aligner.model]() for _ in _DIRECTIONS]
        for direction, model in zip(_DIRECTIONS, models, strict=True):
            if not model.load(str(folder / direction)):
                raise ModelFileError(f"{folder} holds an aligner that sil-thot cannot read. Train it again.")
        aligner._models = models[0], models[1]
        aligner.trained_pairs, aligner.skipped_pairs = facts["trained_pairs"], facts["skipped_pairs"]
        aligner.training_seconds = facts["training_seconds"]
        return aligner


def _scores(direct: Any, inverse: Any) -> Callable[[str, str], float]:
    """The cached scores of a source and a target word."""
    source_index = cache(lambda word: (direct.get_src_word_index(word), inverse.get_trg_word_index(word)))
    target_index = cache(lambda word: (direct.get_trg_word_index(word), inverse.get_src_word_index(word)))

    @cache
    def score(source: str, target: str) -> float:
        (s_direct, s_inverse), (t_direct, t_inverse) = source_index(source), target_index(target)
        return math.sqrt(direct.translation_prob(s_direct, t_direct) * inverse.translation_prob(t_inverse, s_inverse))

    return score


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    if not path.exists():
        raise ModelFileError(f"{folder} holds no statistical aligner: {FILE} is missing. Save an aligner there first.")
    try:
        facts = dict(read_json(path))
        if wrong := [name for name, kind in _FACTS.items() if not isinstance(facts[name], kind)]:
            raise TypeError(f"{wrong[0]} is {facts[wrong[0]]!r}")
        StatisticalAligner(**facts["settings"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ModelFileError(
            f"{path} is damaged, or is another kind of file ({type(error).__name__}: {error}). Train the aligner again."
        ) from error
    return facts


def remove_aligner(folder: Path) -> None:
    """Delete the files of a saved aligner. Another model does not replace all of them."""
    for path in [folder / FILE, *_model_files(folder)]:
        path.unlink(missing_ok=True)


def _model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(tuple(f"{d}." for d in _DIRECTIONS)))


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in _model_files(folder)}


@lru_cache(maxsize=1 << 20)
def word_form(word: str, lowercase: bool = True, strip_punctuation: bool = True) -> str:
    """Normalise a word.

    >>> word_form("«Cat»,"), word_form("..."), word_form("o'clock")
    ('cat', '...', "o'clock")
    """
    inside = [at for at, character in enumerate(word) if unicodedata.category(character)[0] != "P"]
    form = word[inside[0] : inside[-1] + 1] if strip_punctuation and inside else word
    if lowercase:
        form = form.lower()
    return form if form not in _RESERVED else f"{form}_"
