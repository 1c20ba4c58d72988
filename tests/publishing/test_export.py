"""Trimmed and pruned encoders do what they did before on what they kept, and load with sentence-transformers alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)

import metaphrase.encoders.starter
from metaphrase.exceptions import MissingExtraError, ModelError, UsageError
from metaphrase.publishing import export
from metaphrase.publishing.export import (
    check_runtime,
    convert,
    drafted,
    footprint,
    prune_layers,
    spread,
    trim_vocabulary,
)
from tests.conftest import as_sentence_transformer, shape

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
ROBERTA = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
ROBERTA |= {"pad_token": "<pad>", "unk_token": "<unk>"}


def in_a_process_of_its_own(folder: Path, texts: list[str]) -> np.ndarray:
    """Embeddings by sentence-transformers where this package is not imported."""
    code = (
        "import json, sys; from sentence_transformers import SentenceTransformer; "
        "model = SentenceTransformer(sys.argv[1], device='cpu'); "
        "assert not [name for name in sys.modules if name.startswith('metaphrase')]; "
        "print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))"
    )
    command = [sys.executable, "-c", code, str(folder), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def texts(bitext) -> list[str]:
    return [row[side] for row in bitext for side in ("source", "target")]


def unigram(texts) -> tuple[Tokenizer, list[tuple[str, float]]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    return tokenizer, [*pieces, ("<mask>", 0.0)]


def xlmr_tokenizer(texts, kind: str) -> PreTrainedTokenizerFast:
    tokenizer, pieces = unigram(texts)
    if kind == "own class":
        return XLMRobertaTokenizer(vocab=pieces, model_max_length=64)
    tokenizer.model = models.Unigram(pieces, unk_id=3, byte_fallback=False)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask, model_max_length=64, **ROBERTA)


def bpe_tokenizer(texts) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIAL, "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>", model_max_length=64, **ROBERTA)
    made.add_tokens(["[new]"])  # not among the pieces, but behind them
    return made


def encoder_of(tokenizer: PreTrainedTokenizerFast, folder: Path) -> SentenceTransformer:
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        **shape(tokenizer, type_vocab_size=1, max_position_embeddings=82, vocab_size=len(tokenizer) + 7)
    )
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return as_sentence_transformer(folder, "mean")


@pytest.fixture(params=["wordpiece", "unigram", "own class", "bpe", "roberta positions"])
def encoder(request, tmp_path, texts, tiny_encoder, tiny_xlmr) -> SentenceTransformer:
    if request.param == "wordpiece":
        return tiny_encoder
    if request.param == "roberta positions":
        return tiny_xlmr
    tokenizer = bpe_tokenizer(texts) if request.param == "bpe" else xlmr_tokenizer(texts, request.param)
    return encoder_of(tokenizer, tmp_path / "encoder")


# ------------------------------------------------------------------------------------------------------------- vocabulary


def test_kept_texts_are_cut_and_embedded_as_before(encoder, texts, tmp_path):
    few = texts[:8]
    before = encoder.encode(few), encoder.encode(texts)
    size = len(encoder.tokenizer)
    trimmed = trim_vocabulary(encoder, few)

    assert len(trimmed.tokenizer) < size
    assert trimmed[0].auto_model.get_input_embeddings().num_embeddings == len(trimmed.tokenizer)
    assert trimmed[0].auto_model.config.vocab_size == len(trimmed.tokenizer)
    for text in few:
        assert trimmed.tokenizer.tokenize(text) == encoder.tokenizer.tokenize(text)
        assert trimmed.tokenizer.decode(trimmed.tokenizer(text)["input_ids"]) == encoder.tokenizer.decode(
            encoder.tokenizer(text)["input_ids"]
        )
    assert np.array_equal(trimmed.encode(few), before[0])
    assert not np.array_equal(trimmed.encode(texts), before[1])  # others fall apart into smaller pieces
    assert footprint(trimmed) < footprint(encoder)
    assert len(encoder.tokenizer) == size  # the model itself stays
    assert np.array_equal(encoder.encode(texts), before[1])

    with drafted(trimmed, tmp_path / "out") as draft:
        assert np.array_equal(draft.model.encode(few), before[0])
        assert draft.model.tokenizer.get_vocab() == trimmed.tokenizer.get_vocab()
        ids = draft.model.tokenizer(texts)["input_ids"]
        assert ids == trimmed.tokenizer(texts)["input_ids"]


def test_special_tokens_keep_their_parts(encoder, texts):
    trimmed = trim_vocabulary(encoder, texts[:4])
    old, new = encoder.tokenizer, trimmed.tokenizer
    assert new.special_tokens_map == old.special_tokens_map
    assert all(new.convert_ids_to_tokens(new.convert_tokens_to_ids(t)) == t for t in old.all_special_tokens)
    assert trimmed[0].auto_model.config.pad_token_id == new.pad_token_id
    assert new.get_added_vocab().keys() == old.get_added_vocab().keys()
    rows = trimmed[0].auto_model.get_input_embeddings().weight
    table = encoder[0].auto_model.get_input_embeddings().weight
    for piece, id_ in new.get_vocab().items():
        assert torch.equal(rows[id_], table[old.convert_tokens_to_ids(piece)])


def test_every_character_stays_readable(encoder, texts):
    trimmed = trim_vocabulary(encoder, ["a"])
    for text in texts:
        unknown = [
            tokenizer.tokenize(text).count(tokenizer.unk_token) for tokenizer in (encoder.tokenizer, trimmed.tokenizer)
        ]
        assert unknown[1] <= unknown[0]


def test_prompts_are_kept(encoder, texts):
    encoder.prompts = {"query": f"{texts[20]} "}
    trimmed = trim_vocabulary(encoder, ["a"])
    assert trimmed.tokenizer.tokenize(texts[20]) == encoder.tokenizer.tokenize(texts[20])


def test_merges_of_a_kept_piece_are_kept(tmp_path, texts):
    encoder = encoder_of(bpe_tokenizer(texts), tmp_path)
    trimmed = trim_vocabulary(encoder, texts[:2])
    state = json.loads(trimmed.tokenizer.backend_tokenizer.to_str())["model"]
    assert 0 < len(state["merges"]) < len(json.loads(encoder.tokenizer.backend_tokenizer.to_str())["model"]["merges"])
    assert {part for merge in state["merges"] for part in (*merge, "".join(merge))} <= state["vocab"].keys()


def test_a_tokenizer_of_words_is_left_alone(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    BertModel(BertConfig(**shape(fast)), add_pooling_layer=False).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="this one is WordLevel"):
        trim_vocabulary(as_sentence_transformer(tmp_path), ["a"])


def test_plain_sentence_transformers_loads_it(tmp_path, texts):
    encoder = encoder_of(xlmr_tokenizer(texts, "generic"), tmp_path / "encoder")
    trimmed = trim_vocabulary(prune_layers(encoder, [1]), texts[:8])
    with drafted(trimmed, tmp_path / "out") as draft:
        draft.publish("# Card\n")
    assert np.allclose(in_a_process_of_its_own(tmp_path / "out", texts[:8]), trimmed.encode(texts[:8]), atol=1e-6)


def test_the_page_can_be_pasted(tiny_encoder_dir, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "exporting.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda: tiny_encoder_dir)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert (tmp_path / "out" / "tiny" / "README.md").read_text() == "# Tiny\n"


@pytest.mark.slow
def test_the_starter_is_trimmed_to_swahili_and_english(tmp_path):
    from metaphrase.cli.export import PACKAGED
    from metaphrase.corpus.parallel import load_parallel_folder
    from metaphrase.encoders.loading import load_encoder

    model = load_encoder("starter", device="cpu")
    pairs = load_parallel_folder(PACKAGED / "demo", ["sw"], "train")["sw"]
    trimmed = trim_vocabulary(model, [*pairs.sources, *pairs.targets])
    few = [*pairs.sources[:20], *pairs.targets[:20]]
    assert np.array_equal(trimmed.encode(few), model.encode(few))
    assert len(model.tokenizer) == 250002
    assert len(trimmed.tokenizer) < 25_000
    with drafted(trimmed, tmp_path / "sw") as draft:
        assert draft.size < 0.26 * footprint(model)
        assert np.allclose(draft.model.encode(few), model.encode(few), atol=1e-6)
        draft.publish("# sw\n")


# ------------------------------------------------------------------------------------------------------------------ layers


def test_layers_are_kept_in_their_order(tiny_encoder, tmp_path):
    layers = tiny_encoder[0].auto_model.encoder.layer
    swapped = prune_layers(tiny_encoder, [1, 0, 1])
    assert np.array_equal(swapped.encode(["a dog"]), tiny_encoder.encode(["a dog"]))
    pruned = prune_layers(tiny_encoder, [1])
    (left,) = pruned[0].auto_model.encoder.layer
    assert pruned[0].auto_model.config.num_hidden_layers == 1
    assert left.output.dense.weight is layers[1].output.dense.weight
    assert len(layers) == tiny_encoder[0].auto_model.config.num_hidden_layers == 2
    with drafted(pruned, tmp_path / "out") as draft:
        assert draft.model[0].auto_model.config.num_hidden_layers == 1
        assert np.array_equal(draft.model.encode(["a dog"]), pruned.encode(["a dog"]))


@pytest.mark.parametrize("keep", [[2], [-1], [0, 5]])
def test_layers_that_do_not_exist_are_named(tiny_encoder, keep):
    with pytest.raises(ModelError, match=f"no layer {keep[-1]}: the encoder has 2 layers, 0 to 1"):
        prune_layers(tiny_encoder, keep)


def test_an_encoder_keeps_a_layer(tiny_encoder):
    with pytest.raises(UsageError, match="at least one layer, and none of its 2 is to be kept"):
        prune_layers(tiny_encoder, [])


def test_layers_that_are_no_list_are_not_guessed(tiny_encoder):
    tiny_encoder[0].auto_model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="of type bert were not found"):
        prune_layers(tiny_encoder, [0])


@pytest.mark.parametrize("layers", [1, 2, 6, 12, 24])
def test_layers_are_spread(layers):
    for count in range(1, layers + 1):
        kept = spread(layers, count)
        assert len(set(kept)) == count
        assert kept == sorted(kept)
        assert kept[-1] == layers - 1
        assert count == 1 or kept[0] == 0


# ------------------------------------------------------------------------------------------------------------------- files


def test_what_is_not_published_is_removed(tiny_encoder, tmp_path):
    with drafted(tiny_encoder, tmp_path / "out") as draft:
        assert draft.folder.parent == tmp_path
        assert not (tmp_path / "out").exists()
    with pytest.raises(RuntimeError, match="in between"), drafted(tiny_encoder, tmp_path / "out"):
        raise RuntimeError("in between")
    assert list(tmp_path.iterdir()) == []


def test_prompts_recipe_and_licence_go_along(tiny_encoder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "recipe.yaml").write_text("name: dap\n")
    (source / "LICENSE").write_text("Be kind.\n")
    tiny_encoder.prompts, tiny_encoder.default_prompt_name = {"query": "the dog "}, "query"
    wanted = tiny_encoder.encode(["sleeps"])
    with drafted(tiny_encoder, tmp_path / "out", source=source) as draft:
        draft.publish("# A card\n")
    out = tmp_path / "out"
    assert (out / "recipe.yaml").read_text() == "name: dap\n"
    assert (out / "LICENSE").read_text() == "Be kind.\n"
    assert (out / "README.md").read_text() == "# A card\n"
    assert np.array_equal(SentenceTransformer(str(out), device="cpu").encode(["sleeps"]), wanted)


def test_nothing_is_overwritten(tiny_encoder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists"), drafted(tiny_encoder, tmp_path / "out"):
        pass
    with drafted(tiny_encoder, tmp_path / "late") as draft:
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "thesis.txt").write_text("mine")
        with pytest.raises(UsageError, match="exists"):
            draft.publish("")
    assert (tmp_path / "late" / "thesis.txt").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------------- runtimes


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_what_a_runtime_lacks_is_said(format, tiny_encoder, tmp_path, monkeypatch):
    module, _, known = export.RUNTIMES[format]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=rf"pip install 'sentence-transformers\[{format}\]'`, but {known}".replace(".", r"\.")
    ):
        check_runtime(format)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))  # there, but of another version
    with pytest.raises(MissingExtraError, match=f"cannot be used here: module '{module}' has no attribute"):
        check_runtime(format)
    with pytest.raises(MissingExtraError), drafted(tiny_encoder, tmp_path / "out", format=format):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "quantize", "files"),
    [
        ("onnx", None, ["model.onnx"]),
        ("onnx", "int8", ["model.onnx"]),
        ("onnx", "avx512_vnni", ["model.onnx"]),
        ("openvino", None, ["openvino_model.bin", "openvino_model.xml"]),
        ("openvino", "int8", ["openvino_model.bin", "openvino_model.xml"]),
    ],
)
def test_weights_of_a_runtime_take_the_place_of_the_others(
    format, quantize, files, tiny_encoder, tmp_path, monkeypatch
):
    """Sentence-transformers' exporters are stood in for: they need an older transformers."""
    calls = []
    folder = tmp_path / "model"
    tiny_encoder.save_pretrained(str(folder), create_model_card=False)

    class Converted:
        def __init__(self, path, **settings):
            calls.append(settings.get("model_kwargs"))

        def save_pretrained(self, path, **_):
            for name in files:
                Path(path, format).mkdir(exist_ok=True)
                Path(path, format, name).write_text("32 bits")

    def quantised(model, config, path, *calibration):
        calls.append((config, *calibration[1:]))
        if calibration:
            assert json.loads(Path(calibration[0], "train.jsonl").read_text()) == {"sentence": "a dog"}
        for name in files:
            stem, _, suffix = name.partition(".")
            Path(path, format, f"{stem}_qint8.{suffix}").write_text("8 bits")

    monkeypatch.setattr(export, "SentenceTransformer", Converted)
    monkeypatch.setattr(export, "export_dynamic_quantized_onnx_model", quantised)
    monkeypatch.setattr(export, "export_static_quantized_openvino_model", quantised)
    monkeypatch.setattr(export.platform, "machine", lambda: "x86_64")
    convert(folder, format, quantize, ["a dog"])
    assert sorted(path.name for path in (folder / format).iterdir()) == files
    assert {path.read_text() for path in (folder / format).iterdir()} == {"8 bits" if quantize else "32 bits"}
    assert not (folder / "model.safetensors").exists()
    assert calls[0] == {"export": True}
    if quantize and format == "onnx":
        assert calls[1] == ({"int8": "avx2"}.get(quantize, quantize),)
    elif quantize:
        assert calls[1] == (None, "default", "train", "sentence")
