import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from metaphrase.corpus import load_corpus
from metaphrase.exceptions import ModelFileError
from tests.conftest import mostly_slow, wordpiece

SCRIPT = Path(__file__).parents[2] / "scripts" / "back_translate.py"


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> str:
    """A random model of translation, whose tokenizer knows two codes of languages."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("translator")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=wordpiece().backend_tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        additional_special_tokens=["deu_Latn", "__en__"],
    )
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        init_std=1.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
    )
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def options(script, bitext_path, translator, tmp_path):
    def make(name: str = "out.tsv", **changes):
        settings = {"to_source": translator, "to_target": translator, "num": 2, "beams": 2, "max_length": 12}
        settings |= {"batch_size": 7, "shard_size": 10, "device": "cpu", **changes}
        return script.Options(corpus=[str(bitext_path)], output=str(tmp_path / name), **settings)

    return make


def columns(dataset):
    return dataset["source_bt"][:], dataset["target_bt"][:]


@pytest.mark.parametrize("name", mostly_slow(["out.tsv", "out.tsv.gz", "out.jsonl", "out.parquet"], ["out.jsonl"]))
def test_the_corpus_gains_its_columns(script, options, bitext, tmp_path, name):
    script.back_translate(options(name))
    dataset = load_corpus(tmp_path / name, cleaning=None).dataset
    for column in ("source", "target", "source_lang", "target_lang", "alignment"):
        assert dataset[column][:] == [row[column] for row in bitext]
    for column in columns(dataset):
        alternatives = [text.split(" ||| ") for text in column]
        assert all(1 <= len(texts) == len(set(texts)) <= 2 for texts in alternatives)
        assert any(len(texts) == 2 for texts in alternatives)
        assert all(text == " ".join(text.split()) for texts in alternatives for text in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_beam_search_is_what_the_model_says_one_sentence_at_a_time(script, options, translator, bitext):
    dataset = script.back_translate(options())
    job = script.jobs_of(options(to_target=None))[0]
    model = AutoModelForSeq2SeqLM.from_pretrained(translator).eval()
    for row in (0, 6, 23):
        inputs = job.tokenizer(bitext[row]["target"], truncation=True, max_length=12, return_tensors="pt")
        ids = model.generate(
            input_ids=inputs["input_ids"], num_beams=2, num_return_sequences=2, max_new_tokens=12, do_sample=False
        )
        wanted = [" ".join(text.split()) for text in job.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        assert dataset[row]["source_bt"].split(" ||| ") == list(dict.fromkeys(wanted))


def test_only_safetensors_and_complete_models_are_loaded(script, options, translator, tmp_path, fault):
    broken = Path(shutil.copytree(translator, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    torch.save(weights, broken / "pytorch_model.bin")
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="has no weights in safetensors format"):
        script.back_translate(options(to_source=str(broken)))
    weights["model.encoder.layers.7.fc1.bias"] = weights.pop("model.encoder.layers.0.fc1.bias")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 missing \(model\.encoder\.layers\.0\.fc1\.bias\)"):
        script.back_translate(options(to_source=str(broken)))
    assert not (tmp_path / "out.tsv").exists()
    fault("J3", "a model of translation with a pickle, or a renamed weight", tried=2, survived=2)


def test_the_settings_of_generation_are_those_of_the_model(script, options, translator, tmp_path):
    changed = Path(shutil.copytree(translator, tmp_path / "changed"))
    settings = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.7}))
    (job,) = script.jobs_of(options(to_source=str(changed), to_target=None))
    assert job.model.generation_config.repetition_penalty == 1.7


def test_each_direction_reads_its_side(script, options, monkeypatch):
    read = {}

    def translate(job, texts, options, settings):
        read.setdefault(job.column, []).extend(texts)
        return [f"{job.column} of {text}" for text in texts]

    monkeypatch.setattr(script, "translate", translate)
    dataset = script.back_translate(options())
    assert dataset["source_bt"][:] == [f"source_bt of {text}" for text in dataset["target"]]
    assert dataset["target_bt"][:] == [f"target_bt of {text}" for text in dataset["source"]]
    assert read == {"source_bt": dataset["target"][:], "target_bt": dataset["source"][:]}


@pytest.mark.long
@pytest.mark.parametrize("method", mostly_slow(["beam", "top-k"], ["beam"]))
def test_a_stopped_run_goes_on(script, options, tmp_path, monkeypatch, method):
    whole = columns(script.back_translate(options("whole.tsv", method=method)))
    calls = []
    translate_shard = script.translate_shard

    def stopping(jobs, rows, *rest):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return translate_shard(jobs, rows, *rest)

    monkeypatch.setattr(script, "translate_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        script.back_translate(options(method=method))
    assert not (tmp_path / "out.tsv").exists()
    parts = tmp_path / "out.tsv.partial"
    assert sorted(path.name for path in parts.iterdir()) == ["000000.json", "manifest.json"]
    with pytest.raises(ValueError, match="which differs in: num, seed"):
        script.back_translate(options(method=method, num=3, seed=1))
    assert columns(script.back_translate(options(method=method))) == whole
    assert calls == [10, 10, 10, 4]
    assert not parts.exists()


def test_other_models_and_corpora_have_other_manifests(script, options, bitext_path):
    corpus = load_corpus(bitext_path, cleaning=None)
    hub = [replace(corpus, files=[{"path": "hf:org/a", "sha256": None, "revision": one}]) for one in ("old", "new")]
    jobs = script.jobs_of(options())
    manifests = [script.manifest_of(options(), one, jobs) for one in (corpus, *hub)]
    with torch.no_grad():
        next(jobs[0].model.parameters()).add_(1)
    manifests.append(script.manifest_of(options(), corpus, jobs))
    assert len(set(map(json.dumps, manifests))) == 4


@pytest.mark.slow
def test_sampling_follows_the_seed(script, options):
    one, again, other = (
        columns(script.back_translate(options(method="top-k", seed=seed, shard_size=24))) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other
    assert one[0] != columns(script.back_translate(options(method="beam", seed=1)))[0]


def test_one_direction_leaves_the_other_as_it_was(script, options, bitext, tmp_path):
    script.back_translate(options(to_target=None))
    dataset = load_corpus(tmp_path / "out.tsv", cleaning=None).dataset
    source_bt = dataset["source_bt"][:]
    assert all(source_bt)
    assert dataset["target_bt"][:] == [""] * len(bitext)
    second = options("second.tsv", to_source=None)
    second.corpus = [str(tmp_path / "out.tsv")]
    dataset = script.back_translate(second)
    assert dataset["source_bt"][:] == source_bt
    assert all(dataset["target_bt"])


def test_codes_of_a_model_of_many_languages(script, options, monkeypatch):
    said = []

    def translate(job, texts, options, settings):
        said.append((job.column, job.tokenizer.src_lang, settings))
        return list(texts)

    monkeypatch.setattr(script, "translate", translate)
    script.back_translate(options(codes=["de=deu_Latn", "en=en"], shard_size=100))
    vocabulary = script.jobs_of(options())[0].tokenizer.get_vocab()
    assert said == [
        ("source_bt", "en", {"forced_bos_token_id": vocabulary["deu_Latn"]}),
        ("target_bt", "deu_Latn", {"forced_bos_token_id": vocabulary["__en__"]}),
    ]


def test_forced_language_is_written(script, options, translator):
    job = script.jobs_of(options(to_target=None))[0]
    settings = script.language_settings(job, ("en", "de"), {"en": "en", "de": "deu_Latn"})
    ids = []
    generate = job.model.generate

    def recording(**given):
        ids.append(generate(**given))
        return ids[-1]

    job.model.generate = recording
    script.translate(job, ["the dog"], options(), settings)
    assert (ids[0][:, 1] == settings["forced_bos_token_id"]).all()


def test_a_prefix_stands_before_the_text(script, options, monkeypatch):
    job = script.jobs_of(options(to_target=None, to_source_prefix="today "))[0]
    plain = script.jobs_of(options(to_target=None))[0]
    assert script.translate(job, ["the dog"], options(), {}) == script.translate(
        plain, ["today the dog"], options(), {}
    )


def test_a_translation_is_one_line_without_the_separator(script):
    assert script.clean(" a |||  b\n c\t") == "a b c"


def test_wrong_options(script, options, tmp_path):
    for changes, message in (
        ({"method": "greedy"}, "method.* must be one of 'beam', 'top-k', but is 'greedy'"),
        ({"to_source": None, "to_target": None}, "pass --to_source, --to_target or both"),
        ({"num": 0}, "num.* must be a whole number from 1 .*, but is 0"),
        ({"batch_size": -1}, "batch_size.* must be a whole number from 1 .*, but is -1"),
        ({"shard_size": -1}, "shard_size.* must be a whole number from 1 .*, but is -1"),
        ({"dtype": "float33"}, "--dtype expects a data type of torch"),
        ({"codes": ["deu_Latn"]}, "the form sw=swh_Latn, got 'deu_Latn'"),
        ({"codes": ["de=deu_Latn"]}, "has no code for 'en'"),
        ({"codes": ["de=deu_Latn", "en=eng_Latn"]}, "does not know the language code 'eng_Latn'"),
        ({"name": "out.txt"}, "Cannot write .*the format is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            script.back_translate(options(**changes))
        assert not (tmp_path / "out.tsv").exists()
        shutil.rmtree(tmp_path / "out.tsv.partial", ignore_errors=True)


def test_the_command_line(script, options, bitext_path, translator, tmp_path, capsys):
    arguments = ["--corpus", str(bitext_path), "--output", str(tmp_path / "out.jsonl"), "--num", "2", "--beams", "2"]
    assert script.main([*arguments, "--to_source", translator, "--max_length", "8", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("source_bt: ")
    with (tmp_path / "out.jsonl").open(encoding="utf-8") as lines:
        assert all(json.loads(line)["source_bt"] for line in lines)
    assert script.main(arguments) == 2
    assert capsys.readouterr().err.startswith("back_translate: Nothing to do")
