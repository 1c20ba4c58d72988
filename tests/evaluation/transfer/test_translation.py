import copy
import gzip
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders
from transformers import XLMRobertaConfig, XLMRobertaModel

from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.tasks import encoder_source
from metaphrase.evaluation.transfer.translation import (
    TargetPieces,
    TranslationOptions,
    TranslationTrainer,
    average_checkpoints,
    collate_translations,
    load_pairs,
    make_translator,
    translate,
    translation_scores,
)
from metaphrase.exceptions import UsageError
from metaphrase.modeling.views import UNSCORED
from tests.conftest import shape
from tests.evaluation.transfer.conftest import program, read_json


@pytest.fixture
def bitext_dir(bitext, tmp_path):
    folder = tmp_path / "bitext"
    folder.mkdir()
    for split in ("train", "test"):
        with gzip.open(folder / f"de-en.{split}.tsv.gz", "wt", encoding="utf-8", newline="\n") as file:
            file.write("source\ttarget\n" + "".join(f"{row['source']}\t{row['target']}\n" for row in bitext))
    return folder


@pytest.fixture
def pieces(tokenizer):
    ids = torch.tensor(sorted({*tokenizer.all_special_ids, *tokenizer("the dog sleeps")["input_ids"]}))
    return TargetPieces(ids, len(tokenizer), tokenizer.unk_token_id)


def test_pieces_of_the_corpus_and_no_others(tokenizer, pieces):
    ids = torch.tensor(tokenizer("the dog sleeps")["input_ids"])
    assert pieces.decode(pieces.encode(ids)).tolist() == ids.tolist()
    other = next(i for i in range(len(tokenizer)) if i not in pieces.ids)
    assert pieces.decode(pieces.encode(torch.tensor([other]))).item() == tokenizer.unk_token_id
    whole = TargetPieces(torch.arange(len(tokenizer)), len(tokenizer), tokenizer.unk_token_id)
    assert torch.equal(whole.encode(ids), ids)


def test_labels_are_one_ahead_of_the_decoder(tokenizer, pieces):
    rows = [{"source": "der Hund schläft", "target": "the dog sleeps"}, {"source": "ja", "target": "the"}]
    batch = collate_translations(tokenizer, pieces, 48, rows)
    for row, target in enumerate(("the dog sleeps", "the")):
        ids = tokenizer(target)["input_ids"]
        size = len(ids) - 1
        assert pieces.decode(batch["decoder_input_ids"][row, :size]).tolist() == ids[:-1]
        assert pieces.decode(batch["labels"][row, :size]).tolist() == ids[1:]
        assert (batch["labels"][row, size:] == UNSCORED).all()
    assert batch["input_ids"].tolist() == tokenizer(["der Hund schläft", "ja"], padding=True)["input_ids"]


@pytest.fixture(params=["bert", "xlmr"])
def translator(request, tiny_encoder_dir, tokenizer, pieces, tmp_path):
    folder = tiny_encoder_dir
    if request.param == "xlmr":
        folder = tmp_path / "xlmr"
        config = XLMRobertaConfig(**shape(tokenizer, type_vocab_size=1, max_position_embeddings=82))
        XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    return make_translator(encoder_source(folder), tokenizer, pieces, TranslationOptions(decoder_layers=3)).eval()


def test_the_decoder_has_the_shape_of_the_encoder_and_other_weights(translator, pieces):
    encoder, decoder = translator.encoder, translator.decoder
    assert decoder.config.num_hidden_layers == 3
    assert decoder.config.hidden_size == encoder.config.hidden_size
    assert decoder.get_input_embeddings().weight.shape[0] == len(pieces)
    assert decoder.get_output_embeddings().weight is decoder.get_input_embeddings().weight
    theirs, ours = (model.base_model.encoder.layer[0] for model in (encoder, decoder))
    assert not torch.allclose(theirs.output.dense.weight, ours.output.dense.weight)
    assert hasattr(ours, "crossattention")


def test_the_decoder_starts_as_transformers_do(translator):
    hidden = translator.decoder.config.hidden_size
    for name, module in translator.decoder.named_modules():
        if isinstance(module, torch.nn.Embedding):
            assert module.weight.std().item() == pytest.approx(hidden**-0.5, rel=0.5), name
        elif isinstance(module, torch.nn.Linear) and module is not translator.decoder.get_output_embeddings():
            bound = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.9 * bound < module.weight.abs().max().item() <= bound, name
    assert translator.decoder.get_output_embeddings().weight is translator.decoder.get_input_embeddings().weight


def test_the_decoder_sees_only_the_source_and_the_past(translator, tokenizer, pieces):
    rows = [{"source": "der Hund schläft", "target": "the dog sleeps"}]
    inputs = collate_translations(tokenizer, pieces, 48, rows)
    inputs.pop("labels")
    logits = translator(**inputs).logits
    changed = dict(inputs)
    changed["decoder_input_ids"] = inputs["decoder_input_ids"].clone()
    changed["decoder_input_ids"][0, 2] = 0
    after = translator(**changed).logits
    torch.testing.assert_close(after[:, :2], logits[:, :2])
    assert not torch.allclose(after[:, 2], logits[:, 2])
    other = collate_translations(tokenizer, pieces, 48, [rows[0] | {"source": "die Katze trinkt"}])
    other.pop("labels")
    assert not torch.allclose(translator(**other).logits[:, 0], logits[:, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_equals_a_loop(translator, tokenizer, pieces, tmp_path, smoothing):
    arguments = FineTuningArguments(
        output_dir=str(tmp_path), label_smoothing_factor=smoothing, eval_strategy="no", use_cpu=True
    )
    trainer = TranslationTrainer(model=translator, args=arguments)
    rows = [{"source": "der Hund schläft", "target": "the dog sleeps"}, {"source": "ja", "target": "the"}]
    batch = collate_translations(tokenizer, pieces, 48, rows)
    translator.eval()
    total, count = 0.0, 0
    for row in range(2):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        labels = one.pop("labels")[0].tolist()
        logs = translator(**one).logits[0].log_softmax(-1)
        for place, label in enumerate(labels):
            if label != UNSCORED:
                uniform = -sum(logs[place].tolist()) / len(pieces)
                total += (1 - smoothing) * -logs[place, label].item() + smoothing * uniform
                count += 1
    assert trainer.compute_loss(translator, dict(batch)).item() == pytest.approx(total / count, rel=1e-5)


def test_beam_search_scores_at_least_as_greedy_search(translator, tokenizer, pieces):
    translator.double()  # batches round differently, and a beam of a random model is full of near-ties
    sources = ["der Hund schläft", "ja", "die Katze trinkt Milch"]
    options = TranslationOptions(max_length=10, num_beams=4)
    translations = translate(translator, sources, tokenizer, pieces, options, batch_size=2)
    alone = [translate(translator, [text], tokenizer, pieces, options, batch_size=1)[0] for text in sources]
    assert translations == alone
    inputs = tokenizer(sources[0], return_tensors="pt")

    def score(beams):
        found = translator.generate(**inputs, max_length=10, num_beams=beams, do_sample=False, length_penalty=0.0)[
            :, 1:
        ]
        start = torch.tensor([[translator.config.decoder_start_token_id]])
        logits = translator(**inputs, decoder_input_ids=torch.cat([start, found[:, :-1]], 1)).logits
        return logits.log_softmax(-1).gather(2, found[..., None]).sum().item()

    assert score(5) >= score(1) - 1e-4


def test_average_of_checkpoints(tmp_path):
    for number in (1, 2, 6):
        (tmp_path / f"checkpoint-{number}").mkdir()
        save_file({"w": torch.full((2,), float(number))}, tmp_path / f"checkpoint-{number}" / "model.safetensors")
    folders = sorted(tmp_path.iterdir())
    assert average_checkpoints(folders)["w"].tolist() == [3.0, 3.0]
    assert average_checkpoints(folders[-1:])["w"].tolist() == [6.0, 6.0]
    with pytest.raises(ValueError, match="no checkpoint"):
        average_checkpoints([])


def test_scores_name_their_tokenisation():
    scores, signatures = translation_scores(["the dog sleeps today ."], ["the dog sleeps now ."], "en")
    # 4 of 5 words, 2 of 4 pairs, 1 of 3 triples, none of 2 quadruples: counted as half of one
    assert scores["bleu"] == pytest.approx(
        100 * math.exp(sum(map(math.log, (4 / 5, 2 / 4, 1 / 3, 0.5 / 2))) / 4), abs=1e-4
    )
    assert "tok:13a" in signatures["bleu"]
    for language in ("zh", "zho_Hant", "zh-CN", "yue"):
        assert "tok:zh" in translation_scores(["你好"], ["你好"], language)[1]["bleu"]
    assert "tok:intl" in translation_scores(["a"], ["a"], "zh", "intl")[1]["bleu"]
    assert (
        translation_scores(["你 好"], ["你好"], "zh")[0]["bleu"]
        == translation_scores(["你好"], ["你好"], "zh")[0]["bleu"]
    )


def test_direction(bitext_dir):
    into = load_pairs(str(bitext_dir), "de", split="train", direction="to-english", limit=3)
    out = load_pairs(str(bitext_dir), "de", split="train", direction="from-english", limit=3)
    assert into["source"] == out["target"] == ["der Hund schläft", "die Katze schläft", "der Hund trinkt Wasser"]
    assert into["target"] == out["source"]


def command(model: Path, bitext: Path, output: Path, **changes):
    options = {
        "model": model,
        "train": bitext,
        "test": bitext,
        "language": "de",
        "output_dir": output,
        "use_cpu": "true",
        "max_length": 40,
        "decoder_layers": 2,
        "decoder_vocabulary": "corpus",
        "lr_scheduler_type": "inverse_sqrt",
        "warmup_steps": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 6,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "average_checkpoints": 2,
        "num_beams": 2,
        **changes,
    }
    return [token for name, value in options.items() for token in (f"--{name}", str(value))]


def test_program(tiny_encoder_dir, bitext_dir, tmp_path, capsys):
    arguments = command(tiny_encoder_dir, bitext_dir, tmp_path / "out")
    assert program("finetune_translation").main(arguments) == 0
    printed = capsys.readouterr().out
    assert "bleu" in printed
    assert "tok:13a" in printed
    results = read_json(tmp_path / "out" / "results.json")
    assert results["averaged"] == ["checkpoint-4", "checkpoint-6"]
    assert results["steps"] == 6
    assert len(results["loss"]) == 6
    assert results["data"]["train"]["n"] == 24
    averaged = load_file(tmp_path / "out" / "model.safetensors")
    kept = [load_file(tmp_path / "out" / name / "model.safetensors") for name in results["averaged"]]
    name = next(name for name in kept[0] if "crossattention" in name)
    torch.testing.assert_close(averaged[name], (kept[0][name] + kept[1][name]) / 2)
    capsys.readouterr()
    assert program("finetune_translation").main(arguments) == 0  # finished: the table again
    assert "bleu" in capsys.readouterr().out
    with pytest.raises(ValueError, match="started with num_beams 2, not 3"):
        program("finetune_translation").main([*arguments, "--num_beams", "3"])
    path = bitext_dir / "de-en.train.tsv.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"dog", b"cat")))
    with pytest.raises(ValueError, match=r"The data have changed since \S+/out was started"):
        program("finetune_translation").main(arguments)


def test_an_unknown_tokenisation_is_refused_before_training(tiny_encoder_dir, bitext_dir, tmp_path):
    arguments = command(tiny_encoder_dir, bitext_dir, tmp_path / "out", tokenisation="words")
    with pytest.raises(UsageError, match=r"cannot tokenise 'en' with 'words'.* Pass another --tokenisation"):
        program("finetune_translation").main(arguments)
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.slow
def test_an_interrupted_run_resumes(tiny_encoder_dir, bitext_dir, tmp_path, monkeypatch):
    program("finetune_translation").main(command(tiny_encoder_dir, bitext_dir, tmp_path / "whole"))
    step, calls = TranslationTrainer.training_step, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TranslationTrainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program("finetune_translation").main(command(tiny_encoder_dir, bitext_dir, tmp_path / "torn"))
    program("finetune_translation").main(command(tiny_encoder_dir, bitext_dir, tmp_path / "torn"))
    whole, torn = (read_json(tmp_path / name / "results.json") for name in ("whole", "torn"))
    assert torn["loss"] == whole["loss"]
    assert torn["examples"] == whole["examples"]


@pytest.mark.long
def test_learning_rate_is_an_inverse_square_root(tiny_encoder_dir, bitext_dir, tmp_path, monkeypatch):
    rates = []
    step = TranslationTrainer.training_step

    def recorded(self, *args):
        rates.append(self.lr_scheduler.get_last_lr()[0])
        return step(self, *args)

    monkeypatch.setattr(TranslationTrainer, "training_step", recorded)
    arguments = command(
        tiny_encoder_dir, bitext_dir, tmp_path / "out", max_steps=17, save_steps=17, learning_rate=1e-4
    )
    program("finetune_translation").main(arguments)
    assert rates[:5] == pytest.approx([0.0, 0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
    assert rates[16] == pytest.approx(1e-4 * (4 / 16) ** 0.5)


@pytest.mark.slow
def test_learns_a_bitext_by_heart(tiny_encoder_dir, tokenizer, bitext_dir, tmp_path):
    joining = copy.deepcopy(tokenizer)
    joining.backend_tokenizer.decoder = decoders.WordPiece()
    folder = shutil.copytree(tiny_encoder_dir, tmp_path / "encoder")
    joining.save_pretrained(folder)
    changes = {
        "decoder_vocabulary": "full",
        "dropout": 0,
        "max_steps": 150,
        "save_steps": 150,
        "learning_rate": 3e-3,
        "warmup_steps": 20,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 12,
    }
    program("finetune_translation").main(command(folder, bitext_dir, tmp_path / "out", **changes))
    results = read_json(tmp_path / "out" / "results.json")
    assert results["decoder_vocabulary"] == len(tokenizer)
    assert results["loss"][-1][1] < 1 < 4 < results["loss"][0][1]
    assert results["metrics"]["bleu"] > 50
