"""Each weight is measured in the form of the release, and the texts of all measurements are counted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from metaphrase import RunConfig
from metaphrase.corpus.parallel import ParallelSet, load_parallel_folder
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.guard_data import load_guard_data
from metaphrase.evaluation.guards import AlphaCurve
from metaphrase.io.files import UDHR
from metaphrase.merging.projection import find_projection, project_out
from metaphrase.postprocessing import debiasing
from metaphrase.training import finishing
from metaphrase.training.finishing import (
    COARSE_ALPHAS,
    SAMPLED_TEXTS,
    encoded_texts,
    finish,
    release_guards,
    training_guards,
)
from metaphrase.training.planning import count_prompts

PROMPTS = {"query": "ask: ", "passage": "tell: "}


@pytest.fixture
def start(tiny_encoder, tmp_path) -> Path:
    """The folder of an encoder that stores prompts."""
    tiny_encoder.prompts = dict(PROMPTS)
    tiny_encoder.save_pretrained(str(tmp_path / "start"))
    return tmp_path / "start"


@pytest.fixture
def trained(start) -> SentenceTransformer:
    """The encoder after training, which has no prompts."""
    model = load_encoder(start, device="cpu")
    with torch.no_grad():
        for parameter in model[0].auto_model.encoder.parameters():
            parameter.mul_(1.01)
    model.prompts = {}
    return model


@pytest.fixture
def dev(bitext) -> dict[str, ParallelSet]:
    return {"de": ParallelSet("de", *(tuple(row[side] for row in bitext) for side in ("source", "target")))}


@pytest.fixture
def small(bitext, monkeypatch) -> None:
    """Few texts for similarity structure and directions."""
    texts = {"de": [row["source"] for row in bitext], "en": [row["target"] for row in bitext]}
    monkeypatch.setattr(finishing, "structure_texts", lambda **_: texts)
    parallel = {str(at): [f"{row['source']} {at}", row["target"]] for at, row in enumerate(bitext[:12])}
    few = {language: texts[:1] for language, texts in parallel.items()}
    monkeypatch.setattr(finishing, "parallel_texts", lambda most=None: few if most else parallel)


def test_the_few_texts_of_all_languages_have_the_same_content():
    texts, pairs = debiasing.parallel_texts(most=SAMPLED_TEXTS), load_parallel_folder(UDHR)
    assert texts.keys() == {*pairs, "en"} == debiasing.parallel_texts().keys()
    for language, one in pairs.items():
        english = dict(zip(one.sources, one.targets, strict=True))
        assert [english[text] for text in texts[language]] == texts["en"]
    assert len(set(texts["en"])) == SAMPLED_TEXTS


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("directions", [0, 5])
def test_each_weight_is_measured_in_the_form_of_the_release(start, trained, dev, tmp_path, monkeypatch, directions):
    measured = []

    def choose(base, vector, gain, guards, *, alphas, finish):
        measured.extend(finish(vector.apply(base, alpha) if alpha else base) for alpha in alphas)
        assert base.prompts == {**base.prompts, **PROMPTS}
        return AlphaCurve(0.5, "dev", [{"alpha": 0.5, "gain": gain.measure(measured[0]), "guards": {}, "holds": True}])

    sampled = []
    remove = finishing.debias
    monkeypatch.setattr(finishing, "choose_alpha", choose)
    monkeypatch.setattr(finishing, "debias", lambda *args: sampled.append(args[1]) or remove(*args))
    config = RunConfig(model=str(start), merge="auto", debias=directions, output_dir=str(tmp_path))
    finish(trained, config, pooling="cls", dev=dev)
    assert len(measured) == len(COARSE_ALPHAS)
    few = finishing.parallel_texts(most=SAMPLED_TEXTS)
    assert sampled == ([few] * len(COARSE_ALPHAS) if directions else [])
    for model in measured:
        assert model.prompts == search_prompts(PROMPTS)
        assert (find_projection(model) is not None) == bool(directions)


def test_a_merge_with_an_encoder_in_half_precision_is_in_float32(start, trained, tmp_path):
    load_encoder(start, device="cpu").half().save_pretrained(str(start))
    finished = finish(trained, RunConfig(model=str(start), merge=0.5, output_dir=str(tmp_path)), pooling="cls", dev={})
    assert {weight.dtype for weight in finished.encoder.parameters()} == {torch.float32}


def language(code: str, number: int) -> ParallelSet:
    return ParallelSet(code, *(tuple(f"{text} {at}" for at in range(number)) for text in ("hund", "dog")))


@pytest.mark.usefixtures("small")
def test_similarity_structure_covers_languages_of_the_dev_sets(start, trained, dev):
    """Those that the packaged texts lack, up to a number of languages and of sentences."""
    original, config = load_encoder(start, device="cpu"), RunConfig(model=str(start))
    further = {f"x{at}": language(f"x{at}", 19 + at) for at in range(8)} | {"y": language("y", 300)}
    covered, packaged = (
        release_guards(original, config, "dev", sets)[0].measure(trained) for sets in (dev | further, None)
    )
    assert packaged["languages"].keys() == {"de", "en"}
    assert covered["languages"].keys() == {"de", "en", "x1", "x3", "x5", "x6", "y"}
    assert covered["n"] == packaged["n"] + 20 + 22 + 24 + 25 + 100


@pytest.mark.usefixtures("small")
def test_the_limit_of_the_structure_decides_about_the_weight(start, trained, dev, tmp_path):
    """Every weight of an unlimited loss is allowed, and none of no loss at all."""
    options = {"model": str(start), "merge": "auto", "output_dir": str(tmp_path)}
    for limit, held in ((100, {True}), (0, {False})):
        config = RunConfig(**options, max_structure_loss=limit)
        curve = finish(trained, config, pooling="cls", dev=dev).curve
        assert curve is not None
        assert {point["holds"] for point in curve.points[1:]} == held


@pytest.mark.usefixtures("small")
def test_guards_with_many_texts_are_not_measured_during_training(start, dev, sts, monkeypatch, caplog):
    original, config = load_encoder(start, device="cpu"), RunConfig(model=str(start), guard=[str(sts)])
    count = len(load_guard_data(sts, "dev", halved=True).texts)
    for most, names in ((count, ["similarity structure", "sts"]), (count - 1, ["similarity structure"])):
        monkeypatch.setattr(finishing, "TRAINING_TEXTS", most)
        with caplog.at_level("INFO"):
            assert [one.name for one in training_guards(original, config, dev)] == names
        assert (f"Skipped during training, because they have more than {count - 1} texts: sts." in caplog.text) == (
            len(names) < 2
        )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("chosen", [4, 0])
def test_the_number_of_directions_is_chosen_after_the_weight(start, trained, dev, sts, tmp_path, monkeypatch, chosen):
    """The choice itself depends on the encoder, so that both of its outcomes are forced."""
    choose = finishing.choose_directions

    def forced(model, embeddings, gain, guards):
        assert model.prompts == search_prompts(PROMPTS)
        assert find_projection(model) is None
        curve = choose(model, embeddings, gain, guards)
        assert [point["directions"] for point in curve.points] == [0, 10]
        assert [point["guards"].keys() for point in curve.points] == [{"sts"}, {"sts"}]
        assert curve.points[0]["gain"]["difference"] == 0
        _, own = finishing.release_guards(load_encoder(start, device="cpu"), config, "dev")
        assert guards[0].measure(model)["before"] == pytest.approx(own.measure(model)["before"])  # before training
        curve.points[1]["directions"] = 4
        return replace(curve, directions=chosen)

    monkeypatch.setattr(finishing, "choose_directions", forced)
    settings = {"merge": 0.5, "debias": "auto", "guard": [str(sts)], "output_dir": str(tmp_path)}
    config = RunConfig(model=str(start), **settings)
    finished = finish(trained, config, pooling="cls", dev=dev)
    facts = finished.facts["debias"]
    assert (facts["directions"], facts["languages"]) == (chosen, 12)
    assert facts["chosen"].endswith(" over 0 directions; the guards compare with the encoder before training.")
    projection = find_projection(finished.encoder)
    if chosen:
        assert re.match(
            "4 directions were chosen. Gain and cost: 0 directions: dev .*, sts .*; 4 dir", facts["chosen"]
        )
        assert projection is not None
        assert len(projection[1]) == 4
    else:
        assert facts["chosen"].startswith("Nothing can be gained without a loss. Gain and cost: 0 directions: dev ")
        assert projection is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("wanted", "modules"), [(3, 3), (5, 4)])
def test_directions_that_were_removed_before_count(trained, dev, tmp_path, caplog, wanted, modules):
    project_out(trained, torch.eye(32)[:3])
    with caplog.at_level("INFO"):
        finished = finish(trained, RunConfig(debias=wanted, output_dir=str(tmp_path)), pooling="cls", dev=dev)
    assert len(finished.encoder) == modules
    assert len(find_projection(finished.encoder, 2)[1]) == wanted
    assert ("--debias 3 removes nothing: the encoder projects out as many" in caplog.text) == (wanted == 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("merge", "directions", "guarded"),
    [("auto", 0, False), ("auto", 5, True), (0.5, 5, True), (None, 0, True), ("auto", "auto", True)],
)
def test_the_texts_of_all_measurements_are_counted(
    start, trained, dev, sts, tmp_path, monkeypatch, merge, directions, guarded
):
    dev |= {"xx": language("xx", 30)}
    for module in (finishing, debiasing):
        monkeypatch.setattr(module, "MEASURED", (2, 4))
    original, again = (load_encoder(start, device="cpu") for _ in range(2))  # encodes a few sentences, as a check
    monkeypatch.setattr(finishing, "load_encoder", lambda *_, **options: again)
    encoded = []
    encode = SentenceTransformer.encode
    monkeypatch.setattr(
        SentenceTransformer,
        "encode",
        lambda self, texts, **options: encoded.extend(texts) or encode(self, texts, **options),
    )
    settings = {"model": str(start), "merge": merge, "debias": directions, "output_dir": str(tmp_path)}
    config = RunConfig(**settings, guard=[str(sts)] if guarded else [])
    during = training_guards(original, config, dev)
    for one in [*during, *during]:
        one.measure(trained)
    guards = release_guards(original, config, "test")
    released = finish(trained, config, pooling="cls", dev=dev).encoder
    for one in guards:
        one.measure(released)
    groups = encoded_texts(config, dev, prompts=count_prompts(original), evaluations=2)
    assert len(encoded) == sum(number * len(texts) for texts, number in groups) > 0


@pytest.mark.usefixtures("small")
def test_weights_are_measured_with_the_length_of_the_trained_encoder(start, trained, dev, tmp_path, monkeypatch):
    """The encoder before training, too, with which they are compared."""
    lengths, choose = [], finishing.choose_alpha
    monkeypatch.setattr(
        finishing,
        "choose_alpha",
        lambda base, *rest, **options: lengths.append(base.max_seq_length) or choose(base, *rest, **options),
    )
    trained.max_seq_length = 17
    finished = finish(
        trained, RunConfig(model=str(start), merge="auto", output_dir=str(tmp_path)), pooling="cls", dev=dev
    )
    assert [*lengths, finished.encoder.max_seq_length] == [17, 17]


def test_the_weight_and_the_release_are_measured_on_other_articles(start, dev, bitext, monkeypatch):
    """Otherwise, what the weight is chosen by would also judge the release."""
    read, texts = [], {"de": [row["source"] for row in bitext], "en": [row["target"] for row in bitext]}
    monkeypatch.setattr(finishing, "structure_texts", lambda **options: read.append(options["articles"]) or texts)
    original, config = load_encoder(start, device="cpu"), RunConfig(model=str(start))
    for part in ("dev", "test"):
        release_guards(original, config, part)
    training_guards(original, config, dev)
    assert read == ["odd", "even", "odd"]
