"""``metaphrase report RUN``: what training changed, as a page to look at.

Each model encodes every sentence once; accuracies, retention, margins and errors all come from those embeddings, word maps
and alignment matrices from the word states of a few pairs.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text
from sentence_transformers import SentenceTransformer

from metaphrase.cli import emit, notes, parse
from metaphrase.cli.output import progress
from metaphrase.corpus.parallel import TARGET_LANGUAGE, ParallelSet, load_parallel_folder
from metaphrase.encoders.loading import load_encoder, pooling_of
from metaphrase.evaluation.compare import compare
from metaphrase.evaluation.retrieval import evaluate_retrieval, resolve_prompt
from metaphrase.evaluation.significance import RESAMPLES
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.files import PACKAGED_DATA
from metaphrase.mining.bulk import encode
from metaphrase.publishing import plots
from metaphrase.publishing.report import describe_model, render_table, usage_lines, write_report

SUMMARY = "Look at a run: before and after, retention, maps, margins, errors"
EXAMPLES = [
    "metaphrase report runs/sw",
    "metaphrase report runs/sw --data tests/sw --pairs sw:12 sw:40 --red_line 0.5",
]

#: Test sets that come with the package: languages of the demo, and the Declaration of Human Rights in 88 languages.

#: Languages of a word map, English aside: more cannot be told apart.
_MAPPED = 4

Sets = dict[str, dict[str, ParallelSet]]
Models = Mapping[str, SentenceTransformer]


@dataclass
class ReportOptions:
    """Which run, against what, on what."""

    run: str = field(metadata={"help": "Folder that `metaphrase train` or `metaphrase demo` wrote. May stand first."})
    baseline: str | None = field(
        default=None,
        metadata={
            "help": "Encoder to compare with: a folder, a Hub id, 'starter'; 'none' for a report without one. Default: "
            "the one that the run started from."
        },
    )
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Folders of test sets (xx-en.test.tsv.gz or xx-en.tsv.gz). Default: those that the run was measured on, "
            "and the packaged ones."
        },
    )
    languages: list[str] | None = field(
        default=None,
        metadata={"help": "Languages of word map and alignments, four at most. Default: the largest gains."},
    )
    pairs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Pairs whose alignment is drawn, as language:number in the first test set, e.g. sw:12 te:3."
        },
    )
    red_line: float = field(
        default=1.0,
        metadata={"help": "Points that languages which were not trained on may lose on average (default: 1)."},
    )
    errors: int = field(default=12, metadata={"help": "Most rows of each list of errors."})
    baseline_prompt: str = field(
        default="auto",
        metadata={
            "help": "Text before each sentence for the baseline. auto: what the run found best, else the query prompt that "
            "the model stores; none: nothing."
        },
    )
    resamples: int = field(default=RESAMPLES, metadata={"help": "Bootstrap resamples of intervals and tests."})
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap."})
    output_dir: str | None = field(default=None, metadata={"help": "Where the report goes (default: RUN/report)."})


class Sentences:
    """Sentence embeddings of a model, or of a model for each language; each distinct sentence is encoded once.

    Args:
        name: What the model is called.
        models: The model as the one of ``""``, or one for each language.
        prompt: Text before each sentence.
    """

    def __init__(self, name: str, models: Models, prompt: str = "") -> None:
        self.name = name
        self.models = models
        self.prompt = prompt
        self.rows: dict[tuple[str, str], NDArray[Any]] = {}

    def model(self, language: str) -> SentenceTransformer:
        """The model of a language."""
        return self.models.get("") or self.models[language]

    def _key(self, language: str) -> str:
        return "" if "" in self.models else language

    def missing(self, texts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Distinct sentences that have no embedding yet, by the key of their model."""
        todo: dict[str, dict[str, None]] = {}
        for language, side in texts.items():
            known = todo.setdefault(self._key(language), {})
            known.update((text, None) for text in side if (self._key(language), text) not in self.rows)
        return {key: list(known) for key, known in todo.items() if known}

    def encode(self, texts: Mapping[str, Sequence[str]], advance: Callable[[int], None] = lambda n: None) -> None:
        """Embed the sentences of some languages."""
        for key, todo in self.missing(texts).items():
            model = self.models[key]
            for first in range(0, len(todo), 256):
                batch = todo[first : first + 256]
                embeddings_nh = encode(model, batch, prompt=self.prompt)
                self.rows.update(zip([(key, text) for text in batch], np.asarray(embeddings_nh), strict=True))
                advance(len(batch))

    def of(self, language: str, texts: Sequence[str]) -> NDArray[Any]:
        """Embeddings of sentences, shape ``(n, hidden)``."""
        return np.stack([self.rows[self._key(language), text] for text in texts])

    def measure(self, sets: Mapping[str, ParallelSet], **settings: Any) -> dict[str, Any]:
        """`evaluate_retrieval` from the embeddings that are there."""
        lookups: Any = {language: _Lookup(self, language) for language in (*sets, TARGET_LANGUAGE)}
        result = evaluate_retrieval(lookups, sets, name=self.name, **settings).to_dict()
        first = next(iter(self.models.values()))
        result["settings"] |= {
            "prompt": self.prompt,
            "pooling": pooling_of(first),
            "layer": first[0].auto_model.config.num_hidden_layers,
            "max_length": first.max_seq_length,
        }
        return result


class _Lookup:
    """The ``encode`` of a model, from embeddings that are there."""

    def __init__(self, sentences: Sentences, language: str) -> None:
        self.sentences = sentences
        self.language = language

    def encode(self, texts: Sequence[str], **kwargs: Any) -> NDArray[Any]:
        return self.sentences.of(self.language, texts)


def run(argv: Sequence[str]) -> int:
    """Measure both models, compute what the report shows, write it."""
    arguments = ["--run", *argv] if argv and not argv[0].startswith("-") else list(argv)
    (options,) = parse("metaphrase report", [ReportOptions], arguments, description=SUMMARY, examples=EXAMPLES)
    torch.set_flush_denormal(True)
    command = shlex.join(["metaphrase", "report", *argv])
    started = time.perf_counter()
    folder = Path(options.run)
    facts = _json(folder / "run.json")
    if facts is None:
        raise MissingFileError(
            f"{folder} holds no run.json, so it is no run. Give the --output_dir of a `metaphrase train`."
        )
    earlier = _json(folder / "report.json") or {}
    trained = languages_of(facts)
    sets = read_sets(options.data or default_folders(earlier))
    baseline = options.baseline or facts["model"]
    models = {"after": load_run(folder)}
    subjects: dict[str, Sentences] = {}
    if baseline != "none":
        model = load_encoder(baseline)
        prompt = baseline_prompt(options.baseline_prompt, model, earlier if baseline == facts["model"] else {})
        subjects["before"] = Sentences(baseline, {"": model}, prompt)
    subjects["after"] = Sentences(str(folder), models["after"])
    if "" not in models["after"]:  # a vector for each language: the others cannot be embedded
        sets = {
            name: {x: one for x, one in by_language.items() if x in models["after"]}
            for name, by_language in sets.items()
        }
    elif "before" not in subjects:  # without a baseline nothing can be retained
        sets = {name: {x: one for x, one in by_language.items() if x in trained} for name, by_language in sets.items()}
    sets = {name: by_language for name, by_language in sets.items() if by_language}
    focus = next((name for name, by_language in sets.items() if trained & by_language.keys()), None)
    if focus is None:
        raise UsageError(
            f"None of the test sets is in a language that was trained on ({', '.join(sorted(trained))}). Give --data."
        )
    _check_choices(options, sets[focus])
    encode_all(subjects, sets)
    settings = {"resamples": options.resamples, "seed": options.seed}
    results, others, comparisons = measure(subjects, sets, trained, settings)
    notes().print("Computing word maps, alignments, margins and errors …")
    analysis = analyse(subjects, sets, focus, trained, comparisons, options)
    analysis["retention"] = {
        name: plots.retention(compare(pair["before"], pair["after"], **settings), options.red_line)
        | {"models": {side: describe_model(one) for side, one in pair.items()}}
        for name, pair in others.items()
    }
    analysis["cost"] = {
        "command": command,
        "encoded": f"{sum(len(one.rows) for one in subjects.values())} sentences, each once for each model",
        "time": f"{time.perf_counter() - started:.0f} seconds on {torch.get_num_threads()} CPU threads"
        if all(one.model(TARGET_LANGUAGE).device.type == "cpu" for one in subjects.values())
        else f"{time.perf_counter() - started:.0f} seconds on an accelerator",
    }
    output = Path(options.output_dir) if options.output_dir else folder / "report"
    page = write_report(
        output,
        title=earlier.get("title") or f"{facts['model']} trained with {facts['recipe']['name']}",
        before={name: one["before"] for name, one in results.items()} if "before" in subjects else None,
        after={name: one["after"] for name, one in results.items()},
        comparisons=comparisons,
        run=facts,
        usage=earlier.get("usage") or usage_lines(folder),
        analysis=analysis,
    )
    written = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    pictures = plots.draw(written, output)
    files = f"Report: {page}, {page.with_suffix('.json').name} and {len(pictures)} pictures."
    emit(written, *_people(results, comparisons, analysis["retention"], options.red_line), files)
    return 0


def _people(
    results: Mapping[str, Any], comparisons: Mapping[str, Any], retained: Mapping[str, Any], red_line: float
) -> Iterator[RenderableType]:
    """What people read."""
    for name, one in results.items():
        yield Text(name, style="bold")
        yield render_table(one["after"], one.get("before"), comparisons.get(name))
    for name, one in retained.items():
        low, high = one["pooled"]["interval"]
        yield (
            f"{name}, {len(one['languages'])} languages not trained on: {one['pooled']['difference']:+.2f} points "
            f"[{low:+.2f}, {high:+.2f}] against a red line of {-red_line:g}: {one['verdict']}"
        )


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def languages_of(facts: Mapping[str, Any]) -> set[str]:
    """Languages that a run was trained on, English aside."""
    named = {language for file in facts["files"] for language in file.get("languages", ())}
    return (named | set(facts["corpus"]["languages"])) - {TARGET_LANGUAGE}


def load_run(folder: Path) -> dict[str, SentenceTransformer]:
    """The release of a run: one model as that of ``""``, or one for each language of a language embedding."""
    if (folder / "modules.json").is_file():
        return {"": load_encoder(folder)}
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/modules.json"))}
    found = {name: path for name, path in found.items() if not name.startswith("checkpoint-")}
    if not found:
        raise MissingFileError(f"{folder} holds no release; has the run ended?")
    return {language: load_encoder(path) for language, path in found.items()}


def default_folders(earlier: Mapping[str, Any]) -> list[str]:
    """Folders that a run was measured on, as far as they are still there, and the packaged ones."""
    patterns = [
        pattern
        for one in earlier.get("after", {}).values()
        for pattern in one["settings"]["data"].split(", ")
        if pattern
    ]
    folders = [Path(pattern).parent for pattern in patterns]
    kept = [folder for folder in folders if folder.is_dir()]
    names = {folder.name for folder in kept}
    kept += [folder for name in ("demo", "udhr") if name not in names and (folder := PACKAGED_DATA / name).is_dir()]
    return list(dict.fromkeys(map(str, kept)))


def read_sets(folders: Sequence[str]) -> Sets:
    """Test sets by the name of their folder; of a folder with splits the test split."""
    sets: Sets = {}
    for folder in folders:
        name = Path(folder).resolve().name
        if name in sets:
            raise UsageError(f"Two folders of test sets are named {name!r}; rename one.")
        split = "test" if any(Path(folder).glob("*.test.tsv*")) else None
        sets[name] = load_parallel_folder(folder, None, split)
    return sets


def baseline_prompt(asked: str, model: SentenceTransformer, earlier: Mapping[str, Any]) -> str:
    """What stands before the baseline's sentences."""
    found = {one["settings"]["prompt"] for one in (earlier.get("before") or {}).values()}
    if asked == "auto" and len(found) == 1:
        return str(found.pop())
    return resolve_prompt(model, None if asked == "none" else asked)


def _check_choices(options: ReportOptions, sets: Mapping[str, ParallelSet]) -> None:
    """Refuse what cannot be drawn before an hour of encoding."""
    if unknown := [language for language in options.languages or () if language not in sets]:
        raise UsageError(f"There are no pairs in {', '.join(unknown)}; there are in {', '.join(sets)}.")
    plots.choose_pairs(sets, options.pairs or [f"{next(iter(sets))}:1"])


def encode_all(subjects: Mapping[str, Sentences], sets: Sets) -> None:
    """Embed every sentence with each model, and say beforehand how many there are."""
    texts: dict[str, list[str]] = {TARGET_LANGUAGE: []}
    for by_language in sets.values():
        for language, one in by_language.items():
            texts.setdefault(language, []).extend(one.sources)
            texts[TARGET_LANGUAGE].extend(one.targets)
    console = notes()
    totals = {side: sum(map(len, one.missing(texts).values())) for side, one in subjects.items()}
    console.print(
        f"Encoding {' and '.join(f'{totals[side]:,} sentences with {one.name}' for side, one in subjects.items())}: "
        f"{sum(map(len, sets.values()))} test sets of {', '.join(sets)}.",
        markup=False,
        highlight=False,
    )
    with progress(console) as begin:
        for side, subject in subjects.items():
            start = time.perf_counter()
            subject.encode(texts, begin(side, totals[side]))
            console.print(f"{side}: {time.perf_counter() - start:.0f} seconds")


def measure(
    subjects: Mapping[str, Sentences], sets: Sets, trained: set[str], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Results of both models in the languages that were trained on, in the others, and comparisons of the former."""
    results: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, by_language in sets.items():
        for into, is_trained in ((results, True), (others, False)):
            chosen = {x: one for x, one in by_language.items() if (x in trained) == is_trained}
            if chosen and (is_trained or "before" in subjects):
                into[name] = {side: one.measure(chosen, **settings) for side, one in subjects.items()}
    comparisons = {
        name: compare(one["before"], one["after"], **settings) for name, one in results.items() if "before" in one
    }
    return results, others, comparisons


def analyse(
    subjects: Mapping[str, Sentences],
    sets: Sets,
    focus: str,
    trained: set[str],
    comparisons: Mapping[str, Any],
    options: ReportOptions,
) -> dict[str, Any]:
    """Word map, alignments, margins and errors on one test set."""
    shown = {language: one for language, one in sets[focus].items() if language in trained}
    embedded = {
        language: {
            side: (one.of(language, data.sources), one.of(TARGET_LANGUAGE, data.targets))
            for side, one in subjects.items()
        }
        for language, data in shown.items()
    }
    found = {
        language: {side: plots.nearest_found(*both) for side, both in sides.items()}
        for language, sides in embedded.items()
    }
    both_margins: dict[str, tuple[Any, Any]] = {}
    for side in subjects:
        of_language = [plots.margins(*embedded[language][side], data) for language, data in shown.items()]
        both_margins[side] = (np.concatenate([x for x, _ in of_language]), np.concatenate([x for _, x in of_language]))
    gains = comparisons[focus]["languages"] if focus in comparisons else {}
    ranked = sorted(shown, key=lambda language: -gains[language]["difference"] if gains else 0)
    mapped = (options.languages or ranked)[:_MAPPED]
    mapped_sets = {language: sets[focus][language] for language in mapped}
    analysis: dict[str, Any] = {
        "tokens": token_maps(subjects, mapped_sets) | {"data": focus},
        "alignments": [
            {
                "language": language,
                "number": number,
                **{
                    side: plots.alignment_matrix(one.model(language), one.model(TARGET_LANGUAGE), pair)
                    for side, one in subjects.items()
                },
            }
            for language, number, pair in plots.choose_pairs(
                sets[focus] if options.pairs else mapped_sets, options.pairs
            )
        ],
        "errors": plots.nearest_errors(shown, found, limit=options.errors) | {"data": focus},
    }
    if len(both_margins["after"][0]):
        analysis["margins"] = plots.margin_histogram(both_margins) | {"data": focus}
    return analysis


def token_maps(subjects: Mapping[str, Sentences], sets: Mapping[str, ParallelSet]) -> dict[str, Any]:
    """Maps of the same words before and after."""
    sample = plots.sample_words(sets)
    spelled = [(language, list(words)[at]) for language, words, chosen in sample for at in chosen]
    states: dict[str, list[list[NDArray[Any]]]] = {}
    kept = np.ones(len(spelled), dtype=bool)
    for side, one in subjects.items():
        rows: list[Any] = []
        for language in dict.fromkeys(language for language, _, _ in sample):
            sentences = [(words, chosen) for spoken, words, chosen in sample if spoken == language]
            of_words = plots.word_states(one.model(language), [words for words, _ in sentences])
            for (_, chosen), (at_n, states_nh) in zip(sentences, of_words, strict=True):
                known = dict(zip(at_n.tolist(), states_nh, strict=True))
                rows += [known.get(at) for at in chosen]
        kept &= np.array([row is not None for row in rows])
        states[side] = rows
    languages = [language for (language, _), keep in zip(spelled, kept, strict=True) if keep]
    return {
        "languages": [TARGET_LANGUAGE, *sets],
        "language_of": languages,
        "words": [word for (_, word), keep in zip(spelled, kept, strict=True) if keep],
        "neighbours": plots.WORD_NEIGHBOURS,
        "expected": plots.expected_share(languages),
        **{
            side: plots.token_map(np.stack([row for row, keep in zip(rows, kept, strict=True) if keep]), languages)
            for side, rows in states.items()
        },
    }
