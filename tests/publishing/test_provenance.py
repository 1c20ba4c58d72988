"""What is known of origins and licences, and that nothing fails where nothing is."""

from itertools import pairwise

import pytest
from huggingface_hub import constants

from metaphrase.merging import TaskVector
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.provenance import (
    DEMO,
    PACKAGED,
    earlier_training,
    hub_licenses,
    named_base,
    provenance,
    stated,
    stated_in,
)
from metaphrase.training.card_facts import fill_card
from metaphrase.training.recipe import Recipe
from tests.hub_server import reach, serve_hub

ROW = {"file": "hf:acme/corpus:sw-en", "path": "hf:acme/corpus:sw-en", "language": "sw", "languages": ["en", "sw"]}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve_hub() as server:
        reach(server, monkeypatch.setattr, tmp_path / "client")
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield server


def card(licenses: str) -> dict[str, bytes]:
    return {"README.md": f"---\n{licenses}\n---\n# A card\n".encode()}


@pytest.mark.parametrize(
    ("front", "found"),
    [
        ("license: mit", ["mit"]),
        ("license: [mit, apache-2.0]", ["mit", "apache-2.0"]),
        ("license: other\nlicense_name: NLLB", ["other"]),
        ("language: sw", []),
        ("license: [", []),
        ("- license", []),
    ],
)
def test_a_folder_states_its_licence(front, found, tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "README.md").write_bytes(card(front)["README.md"])
    assert stated(str(tmp_path), "license") == found
    assert stated(str(tmp_path / "nothing"), "license") == []


def test_the_card_of_a_data_set_is_read_at_its_commit_and_once(hub):
    commit = hub.put("acme/corpus", card("license: other\nlicense_name: NLLB"), "dataset")
    hub.put("acme/corpus", card("license: mit"), "dataset")
    hub.requests.clear()
    rows = [ROW | {"revision": commit}, ROW | {"file": "hf:acme/corpus:fi-en", "revision": commit}]
    origins = hub_licenses(rows)
    assert origins == {"acme/corpus": {"license": "NLLB"}}
    assert len([one for one in hub.requests if "README.md" in str(one)]) <= 2
    assert provenance(rows[1], origins=origins, data_license="cc0-1.0") == {"license": "NLLB"}
    assert hub_licenses([ROW]) == {"acme/corpus": {"license": "mit"}}


def test_a_base_model_of_the_hub_has_its_licence_in_its_card(hub, tiny_encoder):
    commit = hub.put("acme/base", card("license: cc-by-sa-4.0"))
    facts = {"command": "x", "seed": 1, "files": [ROW], "leakage": None, "transforms": {}}
    facts |= {"hardware": {}, "log_history": []}
    for model, license, wanted in (
        ("acme/base", None, "cc-by-sa-4.0"),
        (f"acme/base@{commit}", None, "cc-by-sa-4.0"),
        ("acme/base", "mit", "mit"),
        ("acme/nothing", None, None),
        ("starter", None, "mit"),
    ):
        made = AlignmentModelCardData.adopt(tiny_encoder, license=None)
        fill_card(made, facts | {"model": model}, license=license)
        assert made.license == wanted, model


@pytest.mark.parametrize(
    ("front", "license", "name"),
    [
        ("license: [mit, apache-2.0]", ["mit", "apache-2.0"], None),
        ("license: other\nlicense_name: ours", "other", "ours"),
    ],
)
def test_a_release_has_the_whole_licence_of_its_base(front, license, name, tiny_encoder, tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "README.md").write_bytes(card(front)["README.md"])
    facts = {"command": "x", "seed": 1, "files": [], "leakage": None, "transforms": {}}
    facts |= {"hardware": {}, "log_history": []}
    made = AlignmentModelCardData.adopt(tiny_encoder)
    fill_card(made, facts | {"model": str(tmp_path)})
    assert (made.license, made.license_name) == (license, name)


@pytest.mark.parametrize(("front", "base"), [("base_model: acme/base", "acme-sw"), ("license: mit", None)])
def test_a_merge_names_the_base_that_was_trained_and_not_the_one_on_the_hub(front, base, tiny_encoder, tmp_path):
    folder = tmp_path / "acme-sw"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "README.md").write_bytes(card(front)["README.md"])
    facts = {"command": "x", "seed": 1, "files": [], "leakage": None, "transforms": {}, "merge": {"alpha": 0.5}}
    facts |= {"hardware": {}, "log_history": []}
    made = AlignmentModelCardData.adopt(tiny_encoder, base_model=None)
    fill_card(made, facts | {"model": str(folder)})
    assert made.merge == {"alpha": 0.5} | ({"base": base} if base else {})
    fill_card(made, facts | {"model": "starter"})
    assert made.merge == {"alpha": 0.5}


def test_languages_of_a_base_that_was_not_trained_are_not_those_of_a_run_with_its_vectors(tiny_encoder, tmp_path):
    """Results in them are results in other languages."""
    folder, vector = tmp_path / "base", tmp_path / "te.safetensors"
    folder.mkdir()
    (folder / "config.json").touch()
    TaskVector({}, "0" * 32, card="---\nlanguage: te\nmetaphrase: {runs: [{seed: 1}]}\n---\n").save(vector)
    facts = {"command": "x", "seed": 1, "files": [{"file": "fi.tsv", "languages": ["fi"]}], "leakage": None}
    facts |= {"transforms": {}, "hardware": {}, "log_history": [], "model": f"{folder} + {vector}"}
    made = AlignmentModelCardData.adopt(tiny_encoder)
    for record, languages in (("", ["fi", "te"]), ("\nmetaphrase: {seed: 1}", ["de", "fi", "fr", "te"])):
        (folder / "README.md").write_bytes(card(f"language: [de, fr]{record}")["README.md"])
        fill_card(made, facts)
        assert made.language == languages


def test_a_merge_names_a_base_of_the_hub_with_its_vectors():
    merge = {"alpha": 0.5}
    for name in ("acme/sw", "acme/sw@main"):
        assert named_base(merge, name, "acme/sw") == merge
        assert named_base(merge, f"{name} + v.safetensors", "acme/sw")["base"] == f"{name} + v.safetensors"


def test_the_licence_of_a_teacher_is_in_its_card(hub, tiny_encoder, tmp_path):
    commit = hub.put("acme/large", card("license: cc-by-nc-4.0"))
    (tmp_path / "config.json").touch()
    (tmp_path / "README.md").write_bytes(card("license: [mit, apache-2.0]")["README.md"])
    facts = {"command": "x", "seed": 1, "files": [], "leakage": None, "transforms": {}}
    facts |= {"hardware": {}, "log_history": []}
    distill = Recipe.load("distill").to_dict()
    learned = {"sides": "both", "toward": "target"}

    def teacher(recipe):
        made = AlignmentModelCardData.adopt(tiny_encoder)
        fill_card(made, facts | {"model": "starter", "recipe": recipe})
        return made.teacher

    def taught_by(name):
        (term,) = distill["terms"]
        return teacher({"name": "mine", "terms": [{**term, "args": {**term["args"], "teacher": name}}]})

    assert teacher(distill) == {"name": "intfloat/multilingual-e5-small", "license": "mit", **learned}
    assert taught_by(f"acme/large@{commit}") == {
        "name": "acme/large",
        "revision": commit,
        "license": "cc-by-nc-4.0",
        **learned,
    }
    assert taught_by("acme/nothing") == {"name": "acme/nothing", **learned}
    assert taught_by(str(tmp_path)) == {"name": str(tmp_path), "license": "mit, apache-2.0", **learned}
    assert teacher(Recipe.load("metaphrase").to_dict()) is None


def test_a_model_with_vectors_has_the_licences_of_all(tmp_path):
    text = "---\nlanguage: [sw, te]\n---\n# A card\n"
    TaskVector({}, "0" * 32, license="cc-by-nc-4.0 AND mit", card=text).save(tmp_path / "v.safetensors")
    for base in ("starter", "starter@hub"):
        name = f"{base} + {tmp_path}/v.safetensors"
        assert stated(name, "license") == ["mit", "cc-by-nc-4.0"]
        assert stated(name, "language") == ["sw", "te"]


def test_without_a_network_nothing_is_stated(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "acme" / "corpus").mkdir(parents=True)
    (tmp_path / "acme" / "corpus" / "README.md").write_bytes(card("license: mit")["README.md"])
    monkeypatch.chdir(tmp_path)  # the name of a data set is not that of a folder
    assert stated("acme/corpus", "license", repo_type="dataset") == []
    assert hub_licenses([ROW]) == {}
    assert provenance(ROW) == {}


def test_what_is_known_of_a_file():
    file = {"file": "sw-en.tsv", "path": "/data/sw-en.tsv"}
    assert provenance(file) == {}
    assert provenance(file, data_license="mit") == {"license": "mit"}
    assert provenance(file, origins={"sw-en.tsv": PACKAGED}, data_license="mit") == PACKAGED
    assert provenance(file, origins={"sw-en.tsv": {"origin": "us"}}, data_license="mit") == {
        "origin": "us",
        "license": "mit",
    }
    assert provenance(file | {"path": str(DEMO / "sw-en.train.tsv.gz")}) == PACKAGED


def test_languages_keep_their_scripts(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlanguage: [zh, no, sw]\nlanguage_bcp47: [zh-Hant]\n---\n", encoding="utf-8")
    (tmp_path / "modules.json").write_text("[]")
    assert stated(str(tmp_path), "language") == ["zh-Hant", "no", "sw"]
    assert stated_in(card.read_text(encoding="utf-8"), "language") == ["zh-Hant", "no", "sw"]


def test_what_a_card_records_has_bounded_size_and_depth(tmp_path):
    """YAML may refer to itself, and aliases may expand without bound."""
    bomb = "x: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdef"))
    cases = {
        "metaphrase: {recipe: tr, seed: 1}": {"recipe": "tr", "seed": 1},
        "metaphrase: &a\n  data: []\n  source: *a": None,
        f"{bomb}metaphrase: {{data: *f}}": None,
        f"metaphrase: {{data: {'[' * 60}{']' * 60}}}": None,
        "metaphrase: [tr]": None,
        "date: 2024-02-30\nmetaphrase: {seed: 1}": None,
    }
    (tmp_path / "config.json").touch()
    for metadata, expected in cases.items():
        (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n", encoding="utf-8")
        assert earlier_training(str(tmp_path)) == expected
