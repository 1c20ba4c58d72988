"""The card says what was trained; nothing that is put into it can get out of its place."""

import re

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import DistilBertConfig, DistilBertModel

from metaphrase.io.redaction import redact
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.corpus_card import corpus_card
from metaphrase.publishing.examples import name_model
from metaphrase.publishing.markdown import cell, fence, hub_languages, table
from tests.hub_server import check_card

RECIPE = {
    "name": "dap",
    "paper": "Li et al. 2023",
    "terms": [{"objective": "tr"}, {"objective": "rtl", "weight": 0.5}],
}
ROW = {"data": "Tatoeba", "language": "sw", "n": 390, "before": 61.5, "after": 70.25}
TESTED = {"difference": 8.75, "interval": [5.1, 12.4], "verdict": "better"}
HOSTILE = [
    "\x85",
    "a\u2028b\u2029",
    "---",
    "\n---\n",
    "a|b",
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "```\n# out",
    "ignore\r\n\r\n",
]


@pytest.fixture
def card(tiny_encoder) -> AlignmentModelCardData:
    return AlignmentModelCardData.adopt(tiny_encoder, recipe=RECIPE, language=["sw", "en"], license="mit")


def written(card: AlignmentModelCardData, folder) -> ModelCard:
    (folder / "README.md").write_text(generate_model_card(card.model), encoding="utf-8")
    return ModelCard.load(folder / "README.md")


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced code blocks of a language, by CommonMark's rule for fences."""
    found, lines = [], iter(text.split("\n"))
    for line in lines:
        opening = re.fullmatch(r"(`{3,})(\w*)", line)
        if opening:
            inside = []
            for inner in lines:
                if re.fullmatch(rf"`{{{len(opening[1])},}}", inner):
                    break
                inside.append(inner)
            if opening[2] == language:
                found.append("\n".join(inside))
    return found


def cells(line: str) -> list[str]:
    """The texts of a table row, its escapes undone."""
    row = re.split(r"(?<!\\)(?:\\\\)*\|", line.strip())[1:-1]
    undone = [re.sub(r"\\([\\`*_\[\]|~$])", r"\1", text.strip()) for text in row]
    return [text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for text in undone]


def test_training_is_claimed_only_if_it_is_known(card, tmp_path):
    assert "It was trained with [metaphrase]" in written(card, tmp_path).text
    card.recipe = None
    assert "It was written with [metaphrase]" in written(card, tmp_path).text
    card.corpus = [{"file": "sw-en.tsv", "language": "sw", "pairs": 3}]
    assert "It was trained with [metaphrase]" in written(card, tmp_path).text


def test_metadata_names_what_the_hub_reads(card, tmp_path):
    card.base_model = "intfloat/multilingual-e5-small"
    card.results = [ROW | TESTED]
    metadata = yaml.safe_load(written(card, tmp_path).data.to_yaml())
    assert metadata["language"] == ["sw", "en"]
    assert metadata["license"] == "mit"
    assert metadata["base_model"] == "intfloat/multilingual-e5-small"
    assert metadata["pipeline_tag"] == "sentence-similarity"
    assert metadata["library_name"] == "sentence-transformers"
    assert {"metaphrase", "cross-lingual", "dap"} <= set(metadata["tags"])


def test_results_are_model_index_entries(card, tmp_path):
    card.results = [ROW | TESTED, ROW | {"language": "te", "after": 40.0}]
    results = written(card, tmp_path).data.eval_results
    assert [(r.dataset_name, r.dataset_config, r.metric_type, r.metric_value) for r in results] == [
        ("Tatoeba", "sw", "accuracy", 70.25),
        ("Tatoeba", "te", "accuracy", 40.0),
    ]


def test_result_rows_show_intervals_and_verdicts(card, tmp_path):
    card.results = [ROW | TESTED]
    assert "| Tatoeba | sw | 390 | 61.5 | 70.2 | +8.8 (+5.1 … +12.4) | better |" in written(card, tmp_path).text


def test_a_comparison_becomes_rows_with_the_pooled_one_last(card):
    test = {"before": 60.0, "after": 65.0} | TESTED
    card.add_comparison("UDHR", {"languages": {"sw": test | {"n": 50, "p_value": 0.01}}, "pooled": test})
    assert [row["language"] for row in card.results] == ["sw", "all"]
    assert card.results[0] == {"data": "UDHR", "language": "sw", "n": 50} | test


def test_ties_on_few_shared_items_are_too_few_to_tell(card, tmp_path):
    tie = {
        "n": 160,
        "clusters": 40,
        "before": 80.0,
        "after": 79.0,
        "difference": -1.0,
        "interval": [-3.0, 1.0],
        "verdict": "tie",
    }
    card.add_comparison("UDHR", {"languages": {}, "pooled": tie})
    card.add_ability("mlqa", tie | {"languages": {"de": -1.0}})
    rows = [
        cells(line) for line in written(card, tmp_path).text.splitlines() if line.startswith(("| UDHR", "| other"))
    ]
    assert ["too few to tell" in row for row in rows] == [True, True]


def test_languages_without_training_data_show_what_was_kept(card, tmp_path):
    card.results = [
        *(ROW | {"language": language} for language in ("sw", "fr", "all")),
        *(ROW | {"data": "Far", "language": language} for language in ("fi", "all")),
    ]
    text = written(card, tmp_path).text
    before, after = text.split("### Retention")
    rows = (
        re.findall(r"^\| (Tatoeba|Far) \| (\w+) ", before, re.M),
        re.findall(r"^\| (Tatoeba|Far) \| (\w+) ", after, re.M),
    )
    assert rows == ([("Tatoeba", "sw"), ("Tatoeba", "all")], [("Tatoeba", "fr"), ("Far", "fi"), ("Far", "all")])


def test_retention_is_a_row_for_each_test_set(card, tmp_path):
    pooled = {"n": 130, "before": 80.0, "after": 79.5, "difference": -0.5, "interval": [-0.9, -0.1]}
    rows = [{"language": language, "difference": loss} for language, loss in (("a|b", -4.0), ("fr", -0.5), ("de", 3))]
    found = {"limit": 1.0, "verdict": "kept", "pooled": pooled, "languages": rows, "worst": ["a|b", "fr"]}
    card.add_retention("UDHR", found)
    text = written(card, tmp_path).text
    (row,) = [line for line in text.split("### Retention")[1].splitlines() if line.startswith("| other")]
    numbers = ["3", "130", "80.0", "79.5", "-0.50 (-0.90 … -0.10)", "-1", "kept", "a|b -4.0, fr -0.5"]
    assert cells(row) == ["other languages: UDHR", *numbers]


def test_retention_of_other_abilities_is_a_row_of_its_own(card, tmp_path):
    found = {"n": 90, "before": 100.0, "after": 88.0, "difference": -12.0, "interval": [-13.0, -11.0], "limit": 4.0}
    found |= {"verdict": "lost", "holds": False, "languages": {"de": -3.0, "sw": -20.0, "th": -13.0}}
    card.add_ability("similarity structure", found)
    card.add_ability("stsb", {name: value for name, value in found.items() if name != "limit"} | {"verdict": "worse"})
    card.verdict = "Better at UDHR; worse at similarity structure, stsb."
    text = written(card, tmp_path).text
    assert "**Better at UDHR; worse at similarity structure, stsb.**" in text
    row, labelled = [line for line in text.split("### Retention")[1].splitlines() if line.startswith("| other")]
    numbers = ["3", "90", "100.0", "88.0", "-12.00 (-13.00 … -11.00)", "-4", "lost", "sw -20.0, th -13.0"]
    assert cells(row) == ["other abilities: similarity structure", *numbers]
    numbers[-3:] = ["", "worse", "sw -20.0, th -13.0, de -3.0"]
    assert cells(labelled) == ["other abilities: stsb", *numbers]
    assert "both without the directions" not in text
    card.debias = {"directions": 20}
    assert "both without the directions that the model projects out" in written(card, tmp_path).text


def test_leakage_is_told_or_said_to_be_unknown(card, tmp_path):
    card.results = [ROW]
    assert "The test sets were not checked" in written(card, tmp_path).text
    card.leakage = [{"data": "Tatoeba", "pairs": 390, "shared": 0}]
    text = written(card, tmp_path).text
    assert "| Tatoeba | 390 | 0 |" in text
    assert "The test sets were not checked" not in text


def test_origin_and_licence_of_the_data_are_told(card, tmp_path):
    row = {"file": "/data/sw-en.tsv.gz", "language": "sw", "pairs": 3, "origin": "lafand", "license": "cc-by-nc-4.0"}
    card.corpus = [row, {"file": "hf:acme/corpus:sw-en@train", "language": "sw", "pairs": 2}]
    made = written(card, tmp_path)
    assert "| sw-en.tsv.gz | sw | 3 | lafand | cc-by-nc-4.0 |" in made.text
    assert "Files without a licence in this table" in made.text
    assert made.data.datasets == ["acme/corpus"]
    card.corpus = [row]
    assert "Files without a licence in this table" not in written(card, tmp_path).text


def test_the_data_of_all_runs_that_made_the_base_are_told(card, tmp_path):
    """The card of a model that is the sum of two runs records both."""
    rows = [{"file": f"{code}-en.tsv.gz", "language": code, "pairs": 5} for code in ("de", "fr", "te")]
    card.source = {"runs": [{"data": rows[:1]}, {"data": rows[:2]}], "source": {"data": rows[2:]}}
    text = written(card, tmp_path).text.partition("Training data of the models that it was made from:")[2]
    assert [text.count(row["file"]) for row in rows] == [1, 1, 1]


def test_front_matter_records_what_makes_the_model_again(card, tmp_path):
    card.corpus = [{"file": "/data/sw-en.tsv.gz", "language": "sw", "pairs": 3, "sha256": "ab"}]
    card.command, card.seed, card.hardware = "metaphrase train --recipe dap", 0, "cpus 2"
    card.weights = {"model.safetensors": "cd"}
    facts = written(card, tmp_path).data.to_dict()["metaphrase"]
    assert {key: facts[key] for key in ("recipe", "command", "seed", "hardware")} == {
        **{"recipe": "dap", "command": "metaphrase train --recipe dap"},
        **{"seed": 0, "hardware": "cpus 2"},
    }
    assert facts["data"] == [{"file": "sw-en.tsv.gz", "language": "sw", "pairs": 3, "sha256": "ab"}]
    assert facts["weights"] == {"model.safetensors": "cd"}
    assert "metaphrase" in facts["versions"]


@settings(max_examples=60)
def as_metadata(text: str) -> str:
    """`text` without secrets and without the line breaks that YAML would fold."""
    return re.sub("[\x85\u2028\u2029]", " ", redact(text))


@given(data=st.data())
def test_hostile_names_stay_in_the_card_of_a_corpus(data):
    text = st.text(max_size=40) | st.sampled_from(HOSTILE)
    language, column, license = (data.draw(text) for _ in range(3))
    made = corpus_card("acme/corpus", pairs=3, columns=["source", column], languages=[language], license=license)
    front, body = made.removeprefix("---\n").split("\n---\n", 1)
    metadata = yaml.safe_load(front)
    assert metadata["language"] == list(map(as_metadata, hub_languages([language])["language"]))
    assert metadata.get("license", "") == as_metadata(license)
    (row,) = [
        line
        for line in body.split("\n")
        if line.startswith("| ") and "Column" not in line and "A sentence" not in line and ":--" not in line
    ]
    assert cells(row)[0] == escaped_back(column)


def test_text_tells_recipe_data_seed_command_and_head(card, tmp_path):
    card.corpus = [{"file": "/data/private/sw-en.tsv.gz", "language": "sw", "pairs": 30782, "sha256": "ab" * 32}]
    card.command, card.seed = "metaphrase train --recipe dap", 1234
    card.mlm_head = "a fresh dense–GELU–LayerNorm transform"
    text = written(card, tmp_path).text
    assert yaml.safe_load(blocks(text, "yaml")[0]) == RECIPE
    assert blocks(text, "bash") == ["metaphrase train --recipe dap"]
    assert f"| sw-en.tsv.gz | sw | 30,782 | {'ab' * 32} |" in text
    assert "**Seed:** 1234" in text
    assert "Layers before the vocabulary: a fresh dense–GELU–LayerNorm transform." in text
    assert "/data/private" not in text


def test_usage_examples_run(card, tmp_path, capsys):
    first, second = blocks(written(card, tmp_path).text, "python")
    card.model.save_pretrained(str(tmp_path))
    for example in (first, second):
        exec(example.replace("sentence_transformers_model_id", str(tmp_path)), {})
    assert capsys.readouterr().out.count("tensor(") == 2


def test_only_the_models_own_name_is_replaced():
    text = 'SentenceTransformer("runs/sw")\nSentenceTransformer("runs/sw", truncate_dim=8)\n'
    others = 'SentenceTransformer("intfloat/e5")\nAutoTokenizer.from_pretrained("xlm-roberta-base")\n'
    wanted = text.replace("runs/sw", "me/sw") + others
    assert name_model(text + others, "me/sw") == wanted
    assert name_model(others + text, "me/sw", ["runs/sw"]) == others + text.replace("runs/sw", "me/sw")
    assert name_model(wanted, "copy", ["me/sw"]) == wanted.replace("me/sw", "copy")


def test_usage_examples_are_in_the_language_of_the_model(card, tmp_path):
    card.language, card.results = ["en", "yo"], []
    text = written(card, tmp_path).text
    assert text.count("Ẹnì kọ̀ọ̀kan ló ní ẹ̀tọ́ láti jẹ́ ọmọ orílẹ̀‐èdè kan.") == 2
    card.results = [{"data": "held-out", "language": "eu", "before": 1.0, "after": 2.0}]
    text = written(card, tmp_path).text
    assert text.count("Pertsona orok du herritartasuna izateko eskubidea.") == 2
    assert text.count("Everyone has the right to a nationality.") == 2


def test_the_cosines_of_a_model_without_normalisation_are_cosines(card, tmp_path):
    second = blocks(written(card, tmp_path).text, "python")[1]
    card.model.save_pretrained(str(tmp_path))
    names = {}
    exec(second.replace("sentence_transformers_model_id", str(tmp_path)), names)
    assert torch.allclose((names["embeddings"] ** 2).sum(dim=1), torch.ones(2), atol=1e-5)


def test_an_adopted_card_goes_on_from_the_present_one(tiny_encoder):
    tiny_encoder.model_card_data.add_tags("kept")
    tiny_encoder.model_card_data.license = "mit"
    card = AlignmentModelCardData.adopt(tiny_encoder, seed=7)
    assert tiny_encoder.model_card_data is card
    assert (card.license, card.seed, card.model) == ("mit", 7, tiny_encoder)
    assert {"kept", "metaphrase"} <= set(card.tags)
    assert AlignmentModelCardData.adopt(tiny_encoder, seed=8) is card
    with pytest.raises(TypeError, match="no field sede"):
        AlignmentModelCardData.adopt(tiny_encoder, sede=7)


def test_a_checkpoint_gets_the_card(card, tmp_path):
    card.add_tags("generated_from_trainer")
    card.model.save_pretrained(str(tmp_path))
    assert "## Training" in ModelCard.load(tmp_path / "README.md").text
    SentenceTransformer(str(tmp_path), device="cpu")


def test_the_default_name_follows_what_is_learned_later(card, tmp_path):
    written(card, tmp_path)
    card.base_model = "xlm-roberta-base"
    assert written(card, tmp_path).text.lstrip().startswith("# xlm-roberta-base aligned with dap")


def test_a_local_base_model_is_named_but_not_linked(card, tmp_path):
    card.base_model = str(tmp_path / "starter")
    made = written(card, tmp_path)
    assert "base_model" not in made.data.to_dict()
    assert "**Base model:** starter" in made.text
    assert str(tmp_path) not in made.content


def test_the_teacher_of_a_distilled_model_is_named_with_its_licence(card, tmp_path):
    card.teacher = {
        "name": "acme/large",
        "revision": "v2",
        "license": "cc-by-4.0",
        "sides": "both",
        "toward": "target",
    }
    made = written(card, tmp_path)
    assert made.data.to_dict()["metaphrase"]["teacher"] == card.teacher
    assert (
        "- **Distilled from:** [acme/large](https://huggingface.co/acme/large), revision v2, licence cc-by-4.0. Both sides "
        "of a pair were trained towards its embedding of the target sentence.\n"
    ) in made.text
    card.teacher = {"name": str(tmp_path / "mine|x"), "sides": "source", "toward": "itself"}
    made = written(card, tmp_path)
    assert made.data.to_dict()["metaphrase"]["teacher"]["name"] == "mine|x"
    assert (
        "- **Distilled from:** mine\\|x, which states no licence. Source sentences were trained towards its embedding of the "
        "same sentence.\n"
    ) in made.text
    assert str(tmp_path) not in made.content


def test_samples_are_the_first_pairs_shortened(card, tmp_path):
    rows = [{"source": "a|b" * 100, "target": "x", "alignment": None}] * 5
    info = card.extract_dataset_metadata(Dataset.from_list(rows), [], loss=None, dataset_type="train")
    card.train_datasets = info
    text = written(card, tmp_path).text
    assert info[0]["size"] == 5
    assert text.count("| a\\|b") == 3
    assert "…" in text


def test_neither_tokens_nor_the_home_folder_reach_the_card(card, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("HF_TOKEN", "hf_CANARY")
    secret = "hf_CANARY hf_abcdefghijklmnopqrstuvwxyz /home/ada/runs"
    card.command, card.model_name, card.mlm_head = secret, secret, secret
    card.recipe = {"name": "x", "note": secret}
    card.all_hyperparameters = card.non_default_hyperparameters = {"output": secret}
    content = written(card, tmp_path).content
    assert "hf_CANARY" not in content
    assert "abcdefghij" not in content
    assert "/home/ada" not in content
    assert "~/runs" in content


@settings(max_examples=200)
@given(st.text() | st.sampled_from(HOSTILE))
def test_a_cell_is_one_cell_and_reads_back(text):
    escaped = cell(text)
    assert "\n" not in escaped
    assert "<" not in escaped
    assert cells(f"| {escaped} | end |") in ([escaped_back(text), "end"],)


def escaped_back(text: str) -> str:
    """What can be read back: the text without control characters, its white space collapsed."""
    return " ".join("".join(c if c.isprintable() or c in "\u200c\u200d" else " " for c in redact(text)).split())


@given(st.text() | st.sampled_from([*HOSTILE, "a: b\xa0", "\n", " \n\n"]))
def test_a_fence_holds_its_text(text):
    fenced = fence(text, "bash")
    if text:
        assert blocks(fenced, "bash") == [re.sub(r"\r\n?", "\n", text).rstrip("\n")]


def test_hostile_data_stay_in_their_places(card, tmp_path, fault):
    tried = 0

    @settings(max_examples=15)
    @given(data=st.data())
    def explore(data):
        nonlocal tried
        tried += 1
        assert_data_stay_in_their_places(card, tmp_path, data)

    explore()
    fault("H5", "hostile names, languages, commands and licences in a card", tried=tried, survived=tried)


def assert_data_stay_in_their_places(card, tmp_path, data):
    text = st.text(max_size=40) | st.sampled_from(HOSTILE)
    name, language, command, note, base = (data.draw(text) for _ in range(5))
    card.base_model = card.base_model_revision = card.license = base
    card.model_name, card.language = name or None, [language]
    card.recipe = {"name": name, "note": note}
    card.results = [ROW | {"data": name, "language": language, "verdict": note}]
    card.corpus = [{"file": "f", "language": language, "pairs": 1, "license": note, "origin": name}]
    card.leakage = [{"data": name, "pairs": 1, "shared": 0}]
    card.command = command
    card.tags = ["metaphrase", note]
    made = written(card, tmp_path)
    metadata = yaml.safe_load(made.content.split("\n---\n")[0].removeprefix("---\n"))
    assert metadata["language"] == list(map(as_metadata, hub_languages([language])["language"]))
    assert metadata["metaphrase"]["data"][0]["license"] == as_metadata(note)
    assert metadata["metaphrase"].get("command", "") == as_metadata(command)
    assert metadata.get("license", "") == as_metadata(base)
    assert metadata.get("base_model") in (None, base)  # only ids of the Hub
    assert metadata["tags"][:2] == ["metaphrase", as_metadata(note)]
    assert metadata["model-index"][0]["results"][0]["dataset"]["config"] == as_metadata(language)
    assert yaml.safe_load(blocks(made.text, "yaml")[0]) == {"name": as_metadata(name), "note": as_metadata(note)}
    headings = re.findall(r"^## (.*)$", re.sub(r"^(`{3,}).*?^\1$", "", made.text, flags=re.S | re.M), re.M)
    assert headings == ["Use", "Results", "Training", "Limitations"]


def test_tables_take_the_union_of_columns():
    assert table([{"a": 1}, {"b": "x"}]).split("\n") == ["| a | b |", "| --: | :-- |", "| 1 |  |", "|  | x |"]
    assert table([]) == ""


def test_languages_with_a_script_are_metadata_that_the_hub_accepts(card, tmp_path):
    card.language = ["zh-Hant", "sr-Latn", "sw"]
    made = written(card, tmp_path)
    metadata = made.data.to_dict()
    assert (metadata["language"], metadata["language_bcp47"]) == (["zh", "sr", "sw"], ["zh-Hant", "sr-Latn"])
    assert "- **Languages:** zh-Hant, sr-Latn, sw" in made.text
    made = corpus_card("me/x", pairs=2, columns=["source"], languages=["zh-Hant", "en"])
    assert check_card(made) == []
    assert check_card((tmp_path / "README.md").read_text(encoding="utf-8")) == []


def test_prompts_are_code_on_one_line(card, tmp_path):
    card.model.prompts = {"query": "Instruct: find `x`\n\n# Title\nQuery: ", "p": "<b>: "}
    text = written(card, tmp_path).text
    assert "The model stores prompts: `query` (`` Instruct: find `x`  # Title Query:  ``), `p` (`<b>: `)." in text


def test_only_encoders_with_an_optional_pooler_have_a_note_about_it(card, tmp_path, tokenizer):
    assert "`pooler.dense`" in written(card, tmp_path).text
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=8, n_layers=1, n_heads=1, hidden_dim=8)
    DistilBertModel(config).save_pretrained(tmp_path / "distil")
    tokenizer.save_pretrained(tmp_path / "distil")
    modules = [Transformer(str(tmp_path / "distil")), Pooling(8, "mean")]
    text = written(AlignmentModelCardData.adopt(SentenceTransformer(modules=modules, device="cpu")), tmp_path).text
    assert "With 🤗 Transformers alone" in text
    assert "pooler" not in text


def test_a_red_line_of_0_has_no_sign(card, tmp_path):
    pooled = {"n": 130, "before": 80.0, "after": 79.5, "difference": -0.5, "interval": [-0.9, -0.1]}
    card.add_retention("UDHR", {"limit": 0.0, "verdict": "lost", "pooled": pooled, "languages": [], "worst": []})
    assert "| 0 | lost |" in written(card, tmp_path).text
