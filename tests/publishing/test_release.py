"""Releases are stock folders: what is in them, and what becomes of a folder that holds one already."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard, parse_eval_result_entries
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from transformers import AutoModel, AutoTokenizer

from metaphrase.encoders.debiasing import without_directions
from metaphrase.exceptions import StorageError, UsageError
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.contents import MANIFEST, release_files
from metaphrase.publishing.release import release, verify
from metaphrase.training.recipe import Recipe
from tests.conftest import mostly_slow

RECIPE = {"name": "tr", "terms": [{"objective": "tr", "weight": 1.0}]}
TEXTS = ["the dog sleeps", "der Hund schläft tief und fest"]
STOCK_FILES = [
    *("1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors"),
    *("modules.json", "recipe.yaml", "reference.json", "sentence_bert_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
]


@pytest.fixture
def pooled_encoder(tiny_encoder_dir) -> SentenceTransformer:
    """As transformers loads it by default: with a pooler made up at random."""
    model = SentenceTransformer(str(tiny_encoder_dir), device="cpu")
    assert model[0].auto_model.pooler is not None
    return model


@pytest.fixture
def released(tiny_encoder, tmp_path) -> Path:
    return release(tiny_encoder, tmp_path / "out", recipe=RECIPE)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class TestRelease:
    def test_holds_the_stock_files_and_nothing_else(self, released):
        assert files_of(released) == sorted([*STOCK_FILES, MANIFEST])
        assert release_files(released) == STOCK_FILES
        assert list(released.parent.iterdir()) == [released]

    def test_loads_with_both_libraries_and_agrees(self, tiny_encoder, released):
        expected = tiny_encoder.encode(TEXTS)
        assert np.abs(SentenceTransformer(str(released), device="cpu").encode(TEXTS) - expected).max() <= 1e-5
        batch = AutoTokenizer.from_pretrained(released)(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(released)(**batch).last_hidden_state
        assert np.abs(hidden[:, 0].numpy() - expected).max() <= 1e-5

    def test_has_no_pooler_and_the_model_keeps_its_own(self, pooled_encoder, tmp_path):
        pooler = pooled_encoder[0].auto_model.pooler
        folder = release(pooled_encoder, tmp_path / "out", recipe=None)
        assert not any("pooler" in name for name in load_file(folder / "model.safetensors"))
        assert SentenceTransformer(str(folder), device="cpu")[0].auto_model.pooler is None
        assert pooled_encoder[0].auto_model.pooler is pooler

    def test_leaves_the_training_model_as_it_was(self, tiny_encoder, tmp_path):
        tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "query: "}, "query"
        tiny_encoder.train()
        before = {name: tensor.clone() for name, tensor in tiny_encoder.state_dict().items()}
        folder = release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        assert tiny_encoder.training
        assert tiny_encoder.prompts == {"query": "query: "}
        assert tiny_encoder.default_prompt_name == "query"
        assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_encoder.state_dict().items())
        assert json.loads((folder / "config_sentence_transformers.json").read_text())["default_prompt_name"] is None

    def test_stores_no_prompts_unless_asked(self, tiny_encoder, tmp_path):
        tiny_encoder.prompts = {"query": "query: "}
        plain = SentenceTransformer(str(release(tiny_encoder, tmp_path / "plain", recipe=None)), device="cpu")
        asked = release(tiny_encoder, tmp_path / "asked", recipe=None, prompts={"query": "query: "})
        assert not any(plain.prompts.values())
        assert SentenceTransformer(str(asked), device="cpu").prompts["query"] == "query: "

    def test_keeps_the_sequence_length(self, tiny_encoder, tmp_path):
        tiny_encoder.max_seq_length = 7
        folder = release(tiny_encoder, tmp_path / "out", recipe=None)
        assert SentenceTransformer(str(folder), device="cpu").max_seq_length == 7

    def test_tells_its_recipe_and_its_card(self, tiny_encoder, tmp_path):
        card = AlignmentModelCardData(language=["de", "en"], license="mit")
        folder = release(tiny_encoder, tmp_path / "modèle", recipe=RECIPE, card=card)
        assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert text.startswith("---\n")
        assert f'SentenceTransformer("{folder}"' in text
        assert {"tr", "metaphrase"} <= set(ModelCard.load(folder / "README.md").data.tags)

    def test_its_recipe_does_not_tell_the_home_folder(self, tiny_encoder, tmp_path):
        """The recipe is pushed; a phrase table is found again below ``~``."""
        recipe = {
            "terms": [{"objective": "span-contrast", "args": {"phrase_table": str(Path.home() / "own" / "p.tsv")}}]
        }
        text = (release(tiny_encoder, tmp_path / "out", recipe=recipe) / "recipe.yaml").read_text()
        assert "phrase_table: ~/own/p.tsv" in text

    def test_tells_its_training_arguments_its_benchmarks_and_its_digests(self, tiny_encoder, tmp_path):
        known = {"dataset_id": "mteb/tatoeba-bitext-mining", "task_id": "swh-eng", "dataset_revision": "69e8f12"}
        row = {"data": "Tatoeba", "language": "sw", "before": 61.5, "after": 70.256}
        card = AlignmentModelCardData(results=[row | known, row | {"data": "our own"}])
        card.all_hyperparameters = {"seed": 3, "output": str(Path.home() / "runs")}
        folder = release(tiny_encoder, tmp_path / "out", recipe=None, card=card)
        assert json.loads((folder / "training_args.json").read_text()) == {"seed": 3, "output": "~/runs"}
        (entry,) = parse_eval_result_entries(yaml.safe_load((folder / ".eval_results/metaphrase.yaml").read_text()))
        assert (entry.dataset_id, entry.task_id, entry.value) == ("mteb/tatoeba-bitext-mining", "swh-eng", 70.26)
        assert entry.dataset_revision == "69e8f12"
        facts = ModelCard.load(folder / "README.md").data.to_dict()["metaphrase"]
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert facts["weights"] == {"model.safetensors": digest}
        assert set(release_files(folder)) - set(STOCK_FILES) == {"training_args.json", ".eval_results/metaphrase.yaml"}

    def test_refuses_modules_that_only_this_code_knows(self, tiny_encoder, tmp_path):
        class Head(Module):
            def forward(self, features):
                return features

            def save(self, output_path, *args, **kwargs):
                pass

        tiny_encoder.append(Head())
        with pytest.raises(ValueError, match=r"Module \S+Head is not part of sentence-transformers"):
            release(tiny_encoder, tmp_path / "out", recipe=None)
        assert not (tmp_path / "out").exists()

    def test_refuses_embeddings_that_are_not_finite(self, tiny_encoder, tmp_path):
        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="NaN or infinite"):
            release(tiny_encoder, tmp_path / "out", recipe=None)
        assert list(tmp_path.iterdir()) == []

    def test_leaves_checkpoints_alone_and_replaces_an_earlier_release(self, tiny_encoder, released):
        for path in (
            "checkpoint-3/optimizer.pt",
            "heads/model.safetensors",
            "runs/log",
            "run.json",
            "training_args.bin",
        ):
            (released / path).parent.mkdir(exist_ok=True)
            (released / path).write_text("kept")
        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
        release(tiny_encoder, released, recipe=None)
        assert (released / "checkpoint-3/optimizer.pt").read_text() == "kept"
        assert (released / "run.json").read_text() == "kept"
        assert not (released / "recipe.yaml").exists()
        assert not (released / "training_args.bin").exists()
        loaded = SentenceTransformer(str(released), device="cpu")
        assert np.array_equal(loaded.encode(TEXTS), tiny_encoder.encode(TEXTS))

    def test_leaves_no_folder_of_a_module_that_it_lacks(self, tiny_encoder, tmp_path):
        folder = release(without_directions(tiny_encoder, torch.eye(32)[:2]), tmp_path / "out", recipe=RECIPE)
        assert (folder / "2_Dense").is_dir()
        release(tiny_encoder, folder, recipe=RECIPE)
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["1_Pooling"]

    @pytest.mark.parametrize("moved", mostly_slow(range(len(STOCK_FILES)), (0, 5, len(STOCK_FILES) - 1)))
    def test_interrupted_anywhere_never_leaves_a_half_model(self, tiny_encoder, released, monkeypatch, moved):
        before, calls, replace = tiny_encoder.encode(TEXTS), [], Path.replace

        def interrupted(self, target):
            if "_partial" in str(self):
                if len(calls) == moved:
                    raise KeyboardInterrupt
                calls.append(self)
            return replace(self, target)

        with torch.no_grad():
            tiny_encoder[0].auto_model.embeddings.word_embeddings.weight.mul_(2)
        monkeypatch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release(tiny_encoder, released, recipe=RECIPE)
        assert len(calls) == moved
        assert not np.array_equal(before, tiny_encoder.encode(TEXTS))
        with pytest.raises((OSError, ValueError)):
            SentenceTransformer(str(released), device="cpu", local_files_only=True)
        monkeypatch.undo()
        release(tiny_encoder, released, recipe=RECIPE)
        assert verify(released, device="cpu") == 0

    @pytest.mark.parametrize(
        "error",
        [
            SafetensorError("I/O error: No space left on device"),
            OSError(28, "No space left on device"),
            Exception("No space left on device (os error 28)"),  # of tokenizers
        ],
    )
    def test_a_full_disk_is_an_error_with_a_remedy(self, tiny_encoder, tmp_path, monkeypatch, error):
        def save(*args, **options):
            raise error

        monkeypatch.setattr(SentenceTransformer, "save_pretrained", save)
        with pytest.raises(StorageError, match=r"release cannot be written to \S+/out: .*No space.* Free some space"):
            release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        assert files_of(tmp_path / "out") == []

    def test_a_disk_that_fills_after_the_weights(self, tiny_encoder, tmp_path, monkeypatch):
        def full(folder):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("metaphrase.publishing.release.write_manifest", full)
        with pytest.raises(StorageError, match=r"Cannot write \S+/out: the disk is full. Free some space"):
            release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        assert files_of(tmp_path / "out") == []

    def test_what_a_killed_one_left_goes_with_the_next(self, tiny_encoder, released):
        """Until then it is no part of the release, nor a model among those of languages."""
        shutil.copytree(released, released / "_partial" / "release")
        (released / "_partial" / "release" / "old.txt").touch()
        assert release_files(released) == STOCK_FILES
        assert list(released.glob("*/modules.json")) == []
        release(tiny_encoder, released, recipe=RECIPE)
        assert files_of(released) == sorted([*STOCK_FILES, MANIFEST])

    def test_a_checkpoint_that_is_being_written_stays(self, tiny_encoder, released):
        (released / "_partial" / "checkpoint-3").mkdir(parents=True)
        release(tiny_encoder, released, recipe=RECIPE)
        assert list((released / "_partial").iterdir()) == [released / "_partial" / "checkpoint-3"]

    def test_a_release_that_fails_its_check_is_kept(self, tiny_encoder, tmp_path):
        length, tiny_encoder.max_seq_length = tiny_encoder.max_seq_length, 1000
        with pytest.raises(RuntimeError, match=r"files that were written are kept in \S+/out/_failed_release\."):
            release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        kept = SentenceTransformer(str(tmp_path / "out" / "_failed_release"), device="cpu")
        assert np.array_equal(kept.encode(TEXTS), tiny_encoder.encode(TEXTS))
        tiny_encoder.max_seq_length = length
        release(tiny_encoder, tmp_path / "out", recipe=RECIPE)
        assert files_of(tmp_path / "out") == sorted([*STOCK_FILES, MANIFEST])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_verified_in_float32(self, tiny_encoder, tmp_path, dtype):
        folder = release(tiny_encoder.to(dtype), tmp_path / "out", recipe=RECIPE)
        assert verify(folder, device="cpu") == 0
        assert load_file(folder / "model.safetensors").popitem()[1].dtype == dtype
        wide = SentenceTransformer(str(folder), device="cpu").float()
        embeddings = json.loads((folder / "reference.json").read_text())["embeddings"]
        texts = json.loads((folder / "reference.json").read_text())["texts"]
        assert np.array_equal(wide.encode(texts), np.array(embeddings, dtype=np.float32))

    def test_autocast_does_not_reach_the_references(self, tiny_encoder, tmp_path):
        """Neither that of the caller nor that of a trainer, which replaces the method `forward`."""
        plain = release(tiny_encoder, tmp_path / "plain", recipe=RECIPE)
        with torch.autocast("cpu", torch.bfloat16):
            inside = release(tiny_encoder, tmp_path / "inside", recipe=RECIPE)
        AcceleratorState._reset_state(reset_partial_state=True)  # another test may have set it up
        Accelerator(cpu=True, mixed_precision="bf16").prepare_model(tiny_encoder)
        AcceleratorState._reset_state(reset_partial_state=True)
        assert "forward" in vars(tiny_encoder)
        prepared = release(tiny_encoder, tmp_path / "prepared", recipe=RECIPE)
        assert len({(folder / "reference.json").read_text() for folder in (plain, inside, prepared)}) == 1

    def test_verify_finds_altered_weights(self, released):
        assert verify(released, device="cpu") == 0
        weights = load_file(released / "model.safetensors")
        name = next(name for name in weights if name.endswith("word_embeddings.weight"))
        weights[name] += 0.01 * torch.randn_like(weights[name])
        save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match="does not reproduce its reference embeddings"):
            verify(released, device="cpu")


def test_a_recipe_is_released_as_a_dictionary(tiny_encoder, tmp_path):
    with pytest.raises(UsageError, match=r"but is a Recipe. Pass `recipe.to_dict\(\)`"):
        release(tiny_encoder, tmp_path / "model", recipe=Recipe.load("tr"))


def test_reference_texts_are_required(tiny_encoder, tmp_path):
    with pytest.raises(ValueError, match="Pass at least one sentence as `texts`"):
        release(tiny_encoder, tmp_path / "out", recipe=None, texts=[])
    assert not (tmp_path / "out").exists()
