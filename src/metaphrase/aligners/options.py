"""Options of word alignment, with the same names in Python, on the command line and in YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from metaphrase.aligners import ALIGNERS, STATISTICAL
from metaphrase.aligners.base import Level, Method, Segmentation
from metaphrase.corpus.codes import language_code
from metaphrase.corpus.options import BitextOptions
from metaphrase.corpus.writing import check_format
from metaphrase.exceptions import UsageError
from metaphrase.io.arguments import Count, CountOr0, Positive, Range, checked
from metaphrase.io.configuration import option
from metaphrase.io.outputs import check_files, check_folder

#: The options of each kind of aligner.
SETTINGS = {
    "statistical": ("heuristic", "iterations", "lowercase", "strip_punctuation"),
    "embedding": ("model", "layer", "method", "level", "threshold", "temperature", "batch_size"),
    "span": ("model", "threshold", "batch_size", "force_bidirectional", "align_to_words"),
}


@checked
@dataclass
class AlignOptions(BitextOptions):
    """The bitext to align, the aligner, and the output."""

    files: list[str] = option(
        [],
        "Bitext to align: TSV, CSV, JSONL, Parquet, TMX, Moses 'x.sw,x.en', a folder, or hf:org/name. Can be passed as the "
        "first arguments. '-' or no files: lines of stdin, 'source<TAB>target', with or without a header, or "
        "'a b ||| x y'.",
        first=True,
    )
    output: str | None = option(
        None,
        "Output file, the bitext with its links: .tsv, .tsv.gz, .jsonl, .jsonl.gz or .parquet. Columns of the files other "
        "than texts, languages, links, back-translations and negatives are not written. Lines of stdin are written to "
        "stdout by default, with all columns.",
        aliases=["-o"],
    )
    aligner: str = option("fast_align", f"{', '.join(ALIGNERS)} (default: fast_align).")
    heuristic: str | None = option(
        None,
        "Symmetrisation of a statistical aligner's two directions: none, union, intersection, och, grow, grow-diag, "
        "grow-diag-final or grow-diag-final-and (default).",
    )
    iterations: Annotated[int, Range(1, 1000)] | None = option(
        None, "Training iterations of each statistical model (default: 5)."
    )
    model: str | None = option(
        None, "Encoder of the embedding aligner (default: starter), or checkpoint of the span aligner."
    )
    layer: CountOr0 | None = option(
        None, "Hidden layer that the embedding aligner compares (default: two thirds of the layers)."
    )
    method: Method | None = option(
        None, "Method of the embedding aligner: argmax, itermax, csls or softmax (default: itermax)."
    )
    level: Level | None = option(None, "Units that the embedding aligner compares: piece or word (default: piece).")
    threshold: Annotated[float, Range(0, 2)] | None = option(
        None,
        "Minimum score of a link: of the span aligner (default: 0.9), or of --method softmax (default: 0.001, or 0.2 with "
        "--temperature).",
    )
    temperature: Positive | None = option(
        None, "Temperature at which --method softmax compares cosines (default: it compares dot products)."
    )
    lowercase: bool | None = option(None, "Lowercase words in statistical aligners (default: true).")
    strip_punctuation: bool | None = option(
        None, "Strip punctuation around words in statistical aligners (default: true)."
    )
    force_bidirectional: bool | None = option(
        None, "Keep only the links of the span aligner that both directions find."
    )
    align_to_words: bool | None = option(
        None, "Extend the answers of the span aligner to whole words (default: true)."
    )
    batch_size: Count | None = option(None, "Texts per forward pass of a neural aligner.")
    segmenter: Segmentation = option(
        "auto",
        "whitespace: split words at spaces. icu: find the words of languages written without spaces (zh, ja, th, …) "
        "with ICU; the column 'segmenter' marks such pairs. auto: icu, except in texts whose words are separated by "
        "spaces already.",
    )
    overwrite: bool = option(False, "Also align pairs that already have links, and replace these.")
    pharaoh: bool = option(False, "For lines of stdin: write only the links, as '0-0 1-2'.")
    save: str | None = option(None, "Folder for the trained statistical aligners, one for each pair of languages.")
    load: str | None = option(
        None, "Load statistical aligners that --save wrote; lines of stdin are then aligned as they arrive."
    )
    phrase_table: str | None = option(None, "File to write the phrase pairs of the aligned bitext to (.tsv.gz).")
    summary: str | None = option(None, "File to write the summary to, as JSON.")

    @property
    def reads_lines(self) -> bool:
        """Whether lines of stdin are aligned instead of files."""
        return self.files in ([], ["-"])

    @property
    def settings(self) -> dict[str, Any]:
        """The aligner's settings among the options."""
        names = sorted({name for names in SETTINGS.values() for name in names})
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        """Check that the options are consistent."""
        self._check_aligner()
        self._check_saving()
        if self.reads_lines:
            selecting = ("languages", "source_column", "target_column", "limit", "phrase_table")
            if given := [name for name in selecting if getattr(self, name)]:
                raise UsageError(
                    f"--{given[0]} requires files. All lines of stdin are aligned; --source_lang states their language."
                )
            for language in filter(None, (self.source_lang, self.target_lang)):
                language_code(language)
            if self.output and self.output.endswith((".jsonl", ".jsonl.gz", ".parquet")):
                raise UsageError(
                    f"Lines of stdin are written as TSV, not as {self.output}. Pass -o FILE.tsv, or files."
                )
        else:
            self._check_files()
        self._check_outputs()

    def _check_aligner(self) -> None:
        if self.aligner not in ALIGNERS:
            raise UsageError(f"Unknown aligner {self.aligner!r}; choose from {', '.join(ALIGNERS)}.")
        kind = "statistical" if self.aligner in STATISTICAL else self.aligner
        if others := self.settings.keys() - set(SETTINGS[kind]):
            raise UsageError(f"--{min(others)} is not an option of the aligner {self.aligner!r}.")
        if kind == "embedding" and self.method != "softmax":
            for name in ("threshold", "temperature"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"--{name} requires --method softmax; the other methods of the embedding aligner have none."
                    )
        if kind == "span" and self.model is None:
            raise UsageError("The span aligner requires --model, a question answering checkpoint such as WSPAlign's.")

    def _check_saving(self) -> None:
        if self.aligner not in STATISTICAL and (self.save or self.load):
            raise UsageError("--save and --load require a statistical aligner; other aligners are not trained.")
        if self.load and self.aligner != AlignOptions.aligner:
            raise UsageError("--load uses an aligner as trained: remove --aligner.")
        trained = {"iterations", "lowercase", "strip_punctuation"} & self.settings.keys()
        if self.load and (self.save or trained):
            raise UsageError(f"--load uses an aligner as trained: remove --{min(trained) if trained else 'save'}.")

    def _check_outputs(self) -> None:
        read = [Path("/dev/stdin")] if self.reads_lines else self.input_files(self.files)
        read += Path(self.load).rglob("*") if self.load else ()
        check_files([self.output, self.summary, self.phrase_table], read)
        if self.save:
            check_folder(self.save)

    def _check_files(self) -> None:
        if "-" in self.files:
            raise UsageError("stdin ('-') cannot be combined with files.")
        if self.output is None:
            raise UsageError("Files require -o FILE. Without files, the bitext is read from stdin.")
        if self.pharaoh:
            raise UsageError("--pharaoh requires lines of stdin; files keep their pairs.")
        check_format(self.output)
