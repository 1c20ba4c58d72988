"""Merging: an encoder between a base and models tuned from it, as a plain folder or as a task vector in a small file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from sentence_transformers import SentenceTransformer

from metaphrase.corpus.monolingual import load_monolingual
from metaphrase.encoders.debiasing import language_directions
from metaphrase.encoders.folders import VECTOR_FILE, is_local, public_name
from metaphrase.encoders.installed import installed_model
from metaphrase.encoders.loading import has_pooling, load_encoder, pooling_of
from metaphrase.encoders.names import (
    PLUS,
    encoder_files,
    find_folder,
    full_name,
    is_starter,
    split_vectors,
    vector_file,
)
from metaphrase.evaluation.encoding import EncodingOptions
from metaphrase.evaluation.guard_data import GUARD_FOLDERS, load_guard_data
from metaphrase.evaluation.guards import (
    ALPHAS,
    MAX_STRUCTURE_LOSS,
    AlphaCurve,
    check_guard_folders,
    choose_alpha,
    data_guard,
    structure_guard,
)
from metaphrase.evaluation.similarity_structure import structure_texts
from metaphrase.exceptions import ModelFileError, UsageError
from metaphrase.io.arguments import AtLeast0, Count, CountOr0, Finite, Range, checked
from metaphrase.io.configuration import option
from metaphrase.io.counts import counted
from metaphrase.io.environment import versions
from metaphrase.io.files import read_json, write_json
from metaphrase.io.outputs import check_files
from metaphrase.io.progress import Begin, no_progress
from metaphrase.merging import TaskVector, combine
from metaphrase.merging.files import is_vector
from metaphrase.merging.pooling import replace_pooling
from metaphrase.merging.quantization import Bits
from metaphrase.postprocessing.debiasing import (
    DECLARATION,
    SAMPLED_TEXTS,
    check_direction_count,
    debias,
    embed_languages,
    parallel_texts,
)
from metaphrase.publishing.card import AlignmentModelCardData, change_in_words
from metaphrase.publishing.contents import CURVE
from metaphrase.publishing.drafts import check_destination, drafted, how_to_load, part_folders, stored_recipe
from metaphrase.publishing.plots import alpha_chart, save_picture
from metaphrase.publishing.provenance import (
    earlier_runs,
    earlier_training,
    hub_base,
    named_base,
    stated,
    stated_in,
    trained_languages,
)
from metaphrase.publishing.vector_card import SUFFIX, license_of, parameter_count, vector_card

#: Weight of a tuned model if none is given.
ALPHA = 0.5


@checked
@dataclass
class MergeOptions:
    """The models, their weight, and what is written."""

    models: list[str] = option(
        help="The base, and models that were tuned from it: folders, Hub ids, 'starter', or files of task vectors "
        f"(*{SUFFIX}). Can be passed as the first arguments.",
        first=True,
    )
    alpha: Finite | Literal["auto"] | None = option(
        None,
        "Weight of the tuned models: 0 is the base, 1 the tuned model. The changes of several models are added, each with "
        "this weight. auto: the weight with the largest gain on --dev for which all guards hold. "
        f"Default: {ALPHA} for models; a task vector has its own.",
    )
    output_dir: str | None = option(None, "New folder for the merged encoder.", aliases=["-o"])
    vector: str | None = option(
        None, f"File for the difference from the base, a task vector (*{SUFFIX}); alpha is stored with it."
    )
    bits: Bits = option(
        16, "Bits for each value of --vector: 16, 8 or 4. With 8 or 4, blocks of 64 values share a scale."
    )
    dev: str | None = option(
        None,
        f"With --alpha auto: folder of development data on which the result should improve: {GUARD_FOLDERS}.",
    )
    guard: list[str] = option(
        [],
        "With --alpha auto: folders of data on which the result must not get worse, in addition to similarity structure: "
        f"{GUARD_FOLDERS}.",
    )
    texts: list[str] = option(
        [],
        "With --alpha auto: text for similarity structure, a file for each language, one sentence per line; also .gz. "
        "Default: the packaged Universal Declaration of Human Rights in nine languages, and English interface strings.",
    )
    debias: CountOr0 = option(
        0,
        "Number of directions of language identity to project out of the merged encoder, as `metaphrase debias` does. With "
        "--alpha auto, they are projected out before an encoder is measured.",
    )
    max_structure_loss: AtLeast0 = option(
        MAX_STRUCTURE_LOSS, "With --alpha auto: acceptable loss of similarity structure, in points of correlation."
    )
    max_items: Annotated[int, Range(3, 2**31 - 1)] = option(
        300, "With --alpha auto: maximum number of pairs, or sentences, of a language in each folder or text."
    )
    curve: str | None = option(
        None,
        "With --alpha auto: JSON file for gain and cost of each alpha, with a plot next to it (.png). Default: in "
        "--output_dir.",
    )
    prompt: str | None = option(
        "auto",
        "With --alpha auto: text before each sentence. auto: the prompt that each encoder stores for sentences, "
        "questions or passages; none: no prompt. On --dev and --guard, the base is also measured without a prompt, "
        "and its better result counts.",
    )
    batch_size: Count = option(32, "With --alpha auto: sentences per forward pass.")


@dataclass(frozen=True)
class Merge:
    """What was merged and written.

    Attributes:
        base: Name of the base.
        tuned: Names of the tuned models or files.
        alpha: Weight of the tuned models, a list with one for each if the weights differ; 0 if no weight gains
            anything without a loss, and nothing was written.
        directions: Number of directions of language identity that were projected out.
        curve: Gain and cost by weight, if the weight was chosen; see `metaphrase.evaluation.guards.AlphaCurve`.
        weights: Number of weights (tensors) that changed.
        parameters: Number of their values.
        output_dir: The folder of the merged encoder, if it was written.
        vector: The file of the task vector, if it was written.
        bytes: Size of that file.
        versions: Versions of the packages.
    """

    base: str
    tuned: list[str]
    alpha: float | list[float]
    directions: int
    curve: dict[str, Any] | None
    weights: int
    parameters: int
    output_dir: str | None
    vector: str | None
    bytes: int | None
    versions: dict[str, str]


def merge(
    options: MergeOptions,
    *,
    command: str | None = None,
    without_prompts: bool = False,
    note: Callable[[str], None] = lambda message: None,
    begin: Begin = no_progress,
) -> Merge:
    """Merge models with their base, and write the result.

    Args:
        options: The models, their weight, and what is written.
        command: The command line, for the card.
        without_prompts: Whether a tuned model that stores no prompts removes those of the base.
        note: Called with a line about each stage.
        begin: Starts a progress bar: takes a text and a total, and returns a function that advances it.

    Raises:
        UsageError: There is nothing to merge or to write, the folder exists, or a model was tuned from another starter.
        ModelError: The models do not have the weights of the base, in number and shape.
    """
    _check(options)
    base_name, *tuned = options.models
    note(f"Loading {base_name} …")
    base = load_encoder(base_name)
    check_direction_count(options.debias, base)
    vectors = []
    for name in tuned:
        note(f"Loading {name} …")
        vector = _vector(base, base_name, name, without_prompts=without_prompts)
        if not (vector.differences or vector.directions is not None or vector.prompts or vector.settings):
            raise UsageError(
                f"{name} changed nothing: the weights are those of {base_name}. Name the base first, then models that were "
                "tuned from it."
            )
        if options.debias and vector.directions is not None:
            raise UsageError(
                f"{name} already projects out directions of language identity. Omit --debias to keep them."
            )
        vectors.append(vector)
    curve = None
    if options.alpha == "auto":
        vector = combine(vectors, 1.0)
        curve = _choose(options, base, vector, begin)
        vector = replace(vector, alpha=curve.alpha)
        if options.curve is not None:
            write_curve(curve, Path(options.curve))
    else:
        vector = combine(vectors, options.alpha)
    alpha: float | list[float] = vector.alpha
    if options.alpha is None and len({one.alpha for one in vectors}) > 1:
        alpha = [one.alpha for one in vectors]
    written = curve is None or curve.gains
    if written:
        if options.debias:
            note("Estimating directions of language identity …")
            embeddings = embed_languages(vector.apply(base), parallel_texts())
            vector = replace(vector, directions=language_directions(embeddings, options.debias)[0])
        _write(options, base, vector, alpha, command, curve)
    return Merge(
        base=base_name,
        tuned=tuned,
        alpha=alpha if written else 0.0,
        directions=0 if vector.directions is None else len(vector.directions),
        curve=None if curve is None else curve.to_dict(),
        weights=len(vector.differences),
        parameters=parameter_count(vector),
        output_dir=options.output_dir if written else None,
        vector=options.vector if written else None,
        bytes=Path(options.vector).stat().st_size if options.vector and written else None,
        versions=versions(),
    )


def _choose(options: MergeOptions, base: SentenceTransformer, vector: TaskVector, begin: Begin) -> AlphaCurve:
    """Choose the weight of a vector by its gain and the guards."""
    encoding: EncodingOptions = {
        "prompt": None if options.prompt == "none" else options.prompt,
        "batch_size": options.batch_size,
    }
    own = {Path(path).name: "\n".join(load_monolingual(path)).split("\n") for path in options.texts}
    texts: Mapping[str, Any] = {name: list(dict.fromkeys(one))[: options.max_items] for name, one in own.items()}
    if not texts:
        texts = {name: dict(islice(one.items(), options.max_items)) for name, one in structure_texts().items()}
    structure = structure_guard(base, texts, max_loss=options.max_structure_loss, **encoding)
    gain, *guards = (
        data_guard(base, load_guard_data(folder, max_items=options.max_items), prompts=[None], **encoding)
        for folder in (str(options.dev), *options.guard)
    )
    advance = begin("Measuring alpha from 0 to 1", len(ALPHAS))
    sample = parallel_texts(most=SAMPLED_TEXTS) if options.debias else {}

    def finish(model: SentenceTransformer) -> SentenceTransformer:
        return debias(model, sample, options.debias)[0] if options.debias else model

    return choose_alpha(base, vector, gain, [structure, *guards], finish=finish, advance=advance)


def _write(
    options: MergeOptions,
    base: SentenceTransformer,
    vector: TaskVector,
    alpha: float | list[float],
    command: str | None,
    curve: AlphaCurve | None,
) -> None:
    """Write the encoder, with the curve of its weight, and the vector."""
    base_name, *tuned = options.models
    own = {language for name in tuned for language in stated(name, "language")} | {*stated_in(vector.card, "language")}
    earlier = {*trained_languages(base_name)}
    license = license_of(vector, options.models)
    names = [public_name(name) for name in tuned]
    card = AlignmentModelCardData(
        recipe=dict(vector.recipe) if vector.recipe and alpha else None,
        merge={"alpha": alpha, "tuned": names} | ({} if curve is None else {"chosen": str(curve)}),
        command=command,
        source=earlier_training(base_name, tuned if alpha else ()),
        language=sorted(earlier | own if alpha else earlier) or None,
        **license,
    )
    if vector.directions is not None:
        card.debias = {"directions": len(vector.directions)}
        if options.debias:
            card.debias |= {"languages": len(parallel_texts()), "data": DECLARATION}
    card.base_model, card.base_model_revision = hub_base(base, base_name)
    card.merge = named_base(card.merge, base_name, card.base_model)
    with ExitStack() as stack:
        draft = None
        if options.output_dir is not None:
            merged = vector.apply(base)
            source, *added = [folder for name in options.models for folder in part_folders(name)]
            draft = stack.enter_context(drafted(merged, options.output_dir, source=source, tuned=added, card=card))
        if options.vector is not None:
            file = Path(options.vector).name
            loaded = f"{vector.base_name or 'BASE'} + {file}"
            runs = earlier_runs(tuned)
            text = vector_card(vector, file, loaded, languages=sorted(earlier | own), license=license, runs=runs)
            replace(vector, card=text).save(options.vector, bits=options.bits)
        if draft is not None:
            draft.publish()
    if curve is not None and options.output_dir is not None and options.curve is None:
        write_curve(curve, Path(options.output_dir) / CURVE)


def remove_curve(folder: Path) -> None:
    """Delete a curve and its plot from a folder."""
    for file in (folder / CURVE, (folder / CURVE).with_suffix(".png")):
        file.unlink(missing_ok=True)


def write_curve(curve: AlphaCurve, path: Path) -> None:
    """Write a curve as JSON, with its plot next to it."""
    write_json(path, curve.to_dict())
    save_picture(alpha_chart(curve.to_dict()), path.with_suffix(".png"))


def _check(options: MergeOptions) -> None:
    if len(options.models) < 2:
        raise UsageError(f"Merging needs a base and at least one tuned model, but got {options.models}.")
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in options.models]
    if len(set(places)) < len(places):
        raise UsageError(
            f"A model is named twice: {', '.join(options.models)}. Name the base and each tuned model once."
        )
    if options.output_dir is None and options.vector is None:
        raise UsageError(
            "Nothing is written. Pass a folder for the encoder with --output_dir, or a file with --vector."
        )
    if options.vector is None and options.bits != 16:
        raise UsageError(
            "--bits applies to the file of --vector, which is not written. Pass --vector, or omit --bits."
        )
    if options.vector is not None and not options.vector.endswith(SUFFIX):
        raise UsageError(f"A task vector is a file *{SUFFIX}, but --vector is {options.vector}.")
    if options.output_dir is not None:
        check_destination(options.output_dir)
        for name, file in (("vector", options.vector), ("curve", options.curve)):
            place = Path(file or "").resolve()
            if file and Path(options.output_dir).resolve() in (place, *place.parents):
                raise UsageError(
                    f"--{name} {file} is in the folder of the encoder, {options.output_dir}. Write it elsewhere."
                )
    _check_choice(options)
    _check_files(options)
    base, *tuned = options.models
    for name in tuned:
        _check_starter(base, name)


def _check_files(options: MergeOptions) -> None:
    """Refuse to overwrite what is read, and files of another kind."""
    read: list[Path] = [*map(Path, (*options.models, *options.texts))]
    read += chain.from_iterable(map(encoder_files, options.models))
    read += chain.from_iterable(Path(folder).glob("*") for folder in (options.dev, *options.guard) if folder)
    plot = Path(options.curve).with_suffix(".png") if options.curve else None
    check_files([options.vector, options.curve, plot], [path for path in read if path.is_file()])
    for file, is_one, kind in ((options.vector, is_vector, "task vector"), (options.curve, _is_curve, "curve")):
        if file is not None and Path(file).is_file() and not is_one(Path(file)):
            raise UsageError(f"{file} exists but is not a {kind}, so it is not replaced. Choose another file.")


def _is_curve(path: Path) -> bool:
    """Whether a file is a curve that `write_curve` wrote."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"alpha", "points"} <= content.keys()


def _check_choice(options: MergeOptions) -> None:
    """Refuse data that are missing, not used or of the same name when alpha is chosen."""
    auto = options.alpha == "auto"
    if auto and options.dev is None:
        raise UsageError("--alpha auto needs data to measure the gain. Pass a folder of development sets with --dev.")
    if not auto and (options.dev or options.guard or options.texts or options.curve):
        raise UsageError(
            "--dev, --guard, --texts and --curve choose alpha. Pass them with --alpha auto, or omit them."
        )
    settings = ("max_structure_loss", "max_items", "prompt", "batch_size")
    given = [name for name in settings if getattr(options, name) != getattr(MergeOptions, name)]
    if given and not auto:
        raise UsageError(f"--{given[0]} is a setting of --alpha auto. Pass it with --alpha auto, or omit it.")
    if options.dev is not None:
        check_guard_folders(options.guard, options.dev)
    names = [Path(path).name for path in options.texts]
    if len(set(names)) < len(names):
        raise UsageError(
            f"Files of --texts have the same name: {', '.join(options.texts)}. Rename one, or join those of one language."
        )


def _vector(base: SentenceTransformer, base_name: str, name: str, *, without_prompts: bool) -> TaskVector:
    """The task vector in a file, or between the base and a tuned model.

    A base that has no pooling of its own gets that of the tuned model, so that they differ in their weights only.
    """
    if (file := vector_file(name)) is not None:
        vector = TaskVector.load(file)
        if pooling := (vector.settings or {}).get("pooling"):
            replace_pooling(base, pooling)
        return vector
    tuned = load_encoder(name, device=str(base.device))
    pooling = pooling_of(tuned)
    is_new = "+" not in pooling and not has_pooling(base_name)
    if is_new:
        replace_pooling(base, pooling)
    own = stated(name, "license")  # without it, the licence of the result is unknown, too
    licenses = dict.fromkeys([*stated(base_name, "license"), *own]) if own else {}
    part, files = split_vectors(base_name)
    vector = TaskVector.between(
        base,
        tuned,
        base_name=PLUS.join(map(_full_public_name, (part, *files))),
        alpha=ALPHA,
        recipe=None if split_vectors(name)[1] else stored_recipe(find_folder(name)[1]),
        license=" AND ".join(licenses) or None,
    )
    if without_prompts and vector.prompts is None and tuned.prompts != base.prompts:
        vector = replace(vector, prompts={name: text or "" for name, text in tuned.prompts.items()})
    return replace(vector, settings={**(vector.settings or {}), "pooling": pooling}) if is_new else vector


def _check_starter(base_name: str, name: str) -> None:
    """Refuse a run of the starter if the base is a starter from another source, whose weights are rounded differently."""
    file = Path(name) / "run.json"
    if not is_starter(base_name) or not file.is_file():
        return
    try:
        start = str(dict(read_json(file)).get("base"))
    except (OSError, ValueError, TypeError) as error:
        raise ModelFileError(
            f"{file} is damaged ({error}). Delete it to merge without the facts of this run."
        ) from error
    if is_starter(start) and start != full_name(base_name):
        raise UsageError(
            f"{name} was tuned from {start}, but the base is {full_name(base_name)}. Name {start} as the base."
        )


def write_vector_of_run(run: Path, folder: Path, bits: Literal[16, 8, 4]) -> str:
    """Write the task vector of a run to a folder.

    Raises:
        UsageError: The folder does not say which encoder the run started from.
    """
    try:
        facts = read_json(run / "run.json")
    except (OSError, ValueError):
        facts = None
    base = facts.get("base") if isinstance(facts, dict) else None
    if not isinstance(base, str):
        raise UsageError(
            f"{run} has no readable run.json, which names the encoder before training. Write the vector with `metaphrase "
            "merge BASE TUNED --vector FILE.safetensors --alpha 1`, and push the file."
        )
    file = str(folder / VECTOR_FILE)
    merge(MergeOptions([base, str(run)], alpha=1.0, vector=file, bits=bits), without_prompts=True)
    return file


def _full_public_name(name: str) -> str:
    """The name of a model or file without its folder; with its source, version or commit if it is known."""
    if is_starter(name) or installed_model(name):
        return full_name(name)
    if is_local(name):
        return public_name(name)
    found, folder = find_folder(name)
    return f"{found}@{folder.name}"


def describe(result: Merge) -> Sequence[str]:
    """Sentences about what was written."""
    sentences = []
    removed = f", without {counted(result.directions, 'direction')} of language identity" if result.directions else ""
    if result.curve is not None:
        curve = AlphaCurve(**result.curve)
        sentences.append(str(curve) if curve.gains else f"{curve.without_gain()} No encoder was written.")
    if result.output_dir is not None:
        change = change_in_words(result.alpha, result.tuned)
        sentences.append(
            f"Wrote {result.output_dir}: {result.base} plus {change}{removed}. {how_to_load(result.output_dir)}"
        )
    if result.vector is not None:
        held = f"{result.parameters:,} differences in {result.weights} weights"
        if result.directions:
            held += f", and {counted(result.directions, 'direction')} to project out"
        sentences.append(
            f"Wrote {result.vector}, {(result.bytes or 0) / 1e6:,.1f} MB: {held}. "
            f'Load it with load_encoder("{result.base} + {result.vector}").'
        )
    return sentences
