"""Translation: an encoder with a randomly initialised decoder of the same architecture.

Encoder and decoder are trained together. The weights of the last checkpoints are averaged. Translations are decoded with
beam search and scored with sacreBLEU, whose signature names the tokenisation.

Reference: Li et al. 2021 (MGC), section 3.2.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from datasets import Dataset
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF
from safetensors.torch import load_file, load_model, save
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    EncoderDecoderModel,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from metaphrase.checkpoints.folders import checkpoints
from metaphrase.corpus.codes import bare_language
from metaphrase.corpus.loading import load_corpus
from metaphrase.encoders.loading import used_piece_ids
from metaphrase.encoders.pooler import remove_pooler
from metaphrase.encoders.positions import check_length
from metaphrase.evaluation.transfer.data import ENGLISH, digest
from metaphrase.evaluation.transfer.options import FineTuningArguments
from metaphrase.evaluation.transfer.running import FineTuner, run_once
from metaphrase.evaluation.transfer.tasks import EncoderSource, encoder_source, load_tokenizer, load_with_head, predict
from metaphrase.exceptions import DataError, UsageError
from metaphrase.io.arguments import BelowOne, Count, Layers, Length, Range, checked
from metaphrase.io.configuration import option
from metaphrase.io.counts import counted
from metaphrase.io.environment import versions
from metaphrase.io.tables import titled_table
from metaphrase.modeling.views import UNSCORED

#: Tokenisation of sacreBLEU for languages with a special one; the others use 13a.
TOKENISATIONS = {"zh": "zh", "yue": "zh", "wuu": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}


@checked
@dataclass
class TranslationOptions:
    """Options of fine-tuning and measuring an encoder on a bitext."""

    model: str = option("starter", "Encoder: 'starter', a Hub id or a folder.")
    train: str | None = option(None, "Training bitext: a file, a folder or hf:org/name.")
    train_split: str = option("train", "Split of the training bitext (xx-en.train.tsv.gz, xx-en.dev.tsv.gz, …).")
    test: str | None = option(None, "Test bitext.")
    test_split: str = option("test", "Split of the test bitext.")
    language: str | None = option(None, "The other language of the bitext, besides English.")
    direction: Literal["to-english", "from-english"] = option("to-english", "Translate into English or from English.")
    decoder_layers: Layers = option(6, "Number of layers of the decoder.")
    decoder_vocabulary: Literal["full", "corpus"] = option(
        "full",
        "full: the vocabulary of the tokenizer; corpus: only the pieces of the training targets, because a "
        "randomly initialised decoder learns no others.",
    )
    max_length: Length = option(128, "Maximum number of pieces of a sentence, including special tokens.")
    dropout: BelowOne | None = option(None, "Dropout; default: the encoder's.")
    freeze_word_embeddings: bool = option(False, "Freeze the word embeddings of the encoder.")
    freeze_encoder: bool = option(False, "Freeze the encoder and train only the decoder.")
    average_checkpoints: Count = option(10, "Number of last checkpoints to average.")
    num_beams: Annotated[int, Range(1, 1000)] = option(5, "Width of the beam.")
    length_penalty: Annotated[float, Range(-100, 100)] = option(
        1.0, "Exponent of the length by which a score is divided."
    )
    tokenisation: str | None = option(
        None, "Tokenisation of sacreBLEU: 13a, zh, intl, …; default: by the target language."
    )
    limit_train: Count | None = option(None, "Maximum number of training pairs.")
    limit_test: Count | None = option(None, "Maximum number of test pairs.")


class TargetPieces:
    """Vocabulary of the decoder: some pieces of the tokenizer, in the same order.

    The unknown token replaces all pieces that are not among the sorted ``ids``.
    """

    def __init__(self, ids: Tensor, size: int, unknown: int) -> None:
        self.ids = ids
        self._place = torch.full((size,), int(torch.searchsorted(ids, unknown)))
        self._place[ids] = torch.arange(len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def encode(self, ids: Tensor) -> Tensor:
        """Convert ids of the tokenizer to ids of the vocabulary, any shape."""
        return self._place[ids]

    def decode(self, places: Tensor) -> Tensor:
        """Convert ids of the vocabulary to ids of the tokenizer, any shape."""
        return self.ids[places]


def padded(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Callable[[list[str]], Mapping[str, Tensor]]:
    """Tokenisation of sentences into a padded batch."""
    return partial(tokenizer, truncation=True, max_length=max_length, padding=True, return_tensors="pt")


def collate_translations(
    tokenizer: PreTrainedTokenizerBase, pieces: TargetPieces, max_length: int, rows: Sequence[Mapping[str, str]]
) -> dict[str, Tensor]:
    """Inputs of the encoder, ``decoder_input_ids``, and ``labels``, which are shifted by one piece.

    A side has at most ``max_length`` pieces, including special tokens.
    """
    tokenize = padded(tokenizer, max_length)
    source, target = (tokenize([row[side] for row in rows]) for side in ("source", "target"))
    ids_bt = pieces.encode(target["input_ids"])
    labels_bt = ids_bt.masked_fill(target["attention_mask"] == 0, UNSCORED)
    decoder = {"decoder_input_ids": ids_bt[:, :-1], "decoder_attention_mask": target["attention_mask"][:, :-1]}
    return {**source, **decoder, "labels": labels_bt[:, 1:]}


def make_translator(
    source: EncoderSource, tokenizer: PreTrainedTokenizerBase, pieces: TargetPieces, options: TranslationOptions
) -> EncoderDecoderModel:
    """Build a model of an encoder and a randomly initialised decoder of the same architecture.

    The layers of the decoder have the width, heads, inner size and activation of the encoder, with cross-attention to its
    states. Input and output embeddings are tied. The weights are initialised as in Transformers for translation (Glorot),
    about three times larger than BERT's. With the initialisation of BERT, cross-attention is too weak at the start: the
    decoder memorises the targets and ignores the source.
    """
    frozen = options.freeze_word_embeddings
    encoder = load_with_head(source, AutoModel, dropout=options.dropout, freeze_word_embeddings=frozen)
    remove_pooler(encoder)
    if options.freeze_encoder:
        encoder.requires_grad_(False)
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    start, end, pad = pieces.encode(torch.tensor([first, last, tokenizer.pad_token_id])).tolist()
    config = copy.deepcopy(encoder.config)
    config.update({"is_decoder": True, "add_cross_attention": True, "use_cache": True})
    config.num_hidden_layers = options.decoder_layers
    config.update({"vocab_size": len(pieces), "bos_token_id": start, "eos_token_id": end, "pad_token_id": pad})
    decoder = AutoModelForCausalLM.from_config(config)
    initialise_decoder(decoder)
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.eos_token_id, model.config.pad_token_id = start, end, pad
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start, bos_token_id=start, eos_token_id=end, pad_token_id=pad
    )
    return model


def initialise_decoder(decoder: PreTrainedModel) -> None:
    """Initialise a decoder in place, as Transformers for translation: Glorot-uniform weights, N(0, 1/hidden) embeddings.

    Reference: Glorot and Bengio 2010. tensor2tensor and fairseq initialise the models of Vaswani et al. 2017 in this way.
    """
    output = decoder.get_output_embeddings()
    for module in decoder.modules():
        if isinstance(module, nn.Linear) and module is not output:
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


class TranslationTrainer(FineTuner):
    """Trains on the cross-entropy of the target pieces, with the label smoothing of the arguments."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean loss over the pieces of a batch."""
        labels_bt = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1).float(),
            labels_bt.flatten(),
            ignore_index=UNSCORED,
            label_smoothing=self.args.label_smoothing_factor,
        )
        return (loss, outputs) if return_outputs else loss


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of checkpoints, each a folder with ``model.safetensors``."""
    if not checkpoints:
        raise ValueError("There is no checkpoint to average.")
    mean: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            mean[name] = mean.get(name, 0.0) + tensor.double() / len(checkpoints)
    return {name: tensor.float() for name, tensor in mean.items()}


def translate(
    model: PreTrainedModel,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    pieces: TargetPieces,
    options: TranslationOptions,
    *,
    batch_size: int,
) -> list[str]:
    """Translate with beam search."""
    search = {name: getattr(options, name) for name in ("max_length", "num_beams", "length_penalty")}
    return predict(
        model,
        texts,
        collate=padded(tokenizer, options.max_length),
        forward=partial(model.generate, **search, do_sample=False),
        read=lambda ids, rows: tokenizer.batch_decode(pieces.decode(ids.cpu()), skip_special_tokens=True),
        length=len,
        batch_size=batch_size,
    )


def load_pairs(source: str, language: str, *, split: str, direction: str, limit: int | None) -> Dataset:
    """Read pairs without cleaning. ``source`` is the side that is translated."""
    corpus = load_corpus(source, languages=[language], split=split, cleaning=None, limit=limit)
    data = corpus.dataset.select_columns(["source", "target"])
    if not len(data):
        raise DataError(f"{source} has no pairs of {language}.")
    if direction == "from-english":
        data = data.rename_columns({"source": "target", "target": "source"})
    return data


def finetune_translation(options: TranslationOptions, arguments: FineTuningArguments) -> dict[str, Any]:
    """Fine-tune an encoder on translation and measure BLEU and chrF.

    An interrupted run resumes from its last checkpoint. A finished run is not repeated.

    Returns:
        The content of ``results.json``: ``metrics``, ``signatures``, settings, data with their digests, the loss curve,
        some translations, and seconds.

    Raises:
        UsageError: Options are missing, or the folder belongs to other settings.
    """
    if not (arguments.output_dir and options.train and options.test and options.language):
        raise UsageError("Pass --train, --test, --language and --output_dir.")
    source = encoder_source(options.model)
    train, test = (
        load_pairs(place, options.language, split=split, direction=options.direction, limit=limit)
        for place, split, limit in (
            (options.train, options.train_split, options.limit_train),
            (options.test, options.test_split, options.limit_test),
        )
    )
    into = ENGLISH if options.direction == "to-english" else options.language
    data = {name: {"n": len(pairs), "sha256": digest(pairs)} for name, pairs in (("train", train), ("test", test))}
    run = partial(_train_and_translate, source, train, test, into, options, arguments)
    return run_once("translation", source, options, arguments, data, run)


def _train_and_translate(
    source: EncoderSource,
    train: Dataset,
    test: Dataset,
    into: str,
    options: TranslationOptions,
    arguments: Any,
    folder: Path,
) -> dict[str, Any] | None:
    started = time.time()
    bleu(into, options.tokenisation)  # an error before training, not after it
    tokenizer = load_tokenizer(source)
    full = options.decoder_vocabulary == "full"
    ids = torch.arange(len(tokenizer)) if full else used_piece_ids(train["target"], tokenizer)
    pieces = TargetPieces(ids, len(tokenizer), tokenizer.unk_token_id)
    set_seed(arguments.seed)
    model = make_translator(source, tokenizer, pieces, options)
    check_length(model.encoder, options.max_length)
    trainer = TranslationTrainer(
        model=model,
        args=replace(arguments, eval_strategy="no", save_total_limit=options.average_checkpoints),
        train_dataset=train,
        data_collator=partial(collate_translations, tokenizer, pieces, options.max_length),
    )
    trainer.train_or_resume()
    if arguments.process_index != 0:
        return None
    averaged = checkpoints(folder)[-options.average_checkpoints :]
    weights = save(average_checkpoints(averaged), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)
    load_model(trainer.model, folder / "model.safetensors")
    trained = time.time()
    batch_size = arguments.per_device_eval_batch_size
    translations = translate(trainer.model, test["source"], tokenizer, pieces, options, batch_size=batch_size)
    metrics, signatures = translation_scores(translations, test["target"], into, options.tokenisation)
    return {
        "decoder_vocabulary": len(pieces),
        "metrics": metrics,
        "signatures": signatures,
        "averaged": [path.name for path in averaged],
        "steps": trainer.state.global_step,
        "loss": trainer.losses,
        "examples": [
            {"source": row["source"], "target": row["target"], "translation": translation}
            for row, translation in zip(test.select(range(min(20, len(test)))), translations, strict=False)
        ],
        "training_seconds": round(trained - started, 1),
        "seconds": round(time.time() - started, 1),
        "versions": versions() | {"sacrebleu": version("sacrebleu")},
    }


def bleu(language: str, tokenisation: str | None = None) -> BLEU:
    """BLEU of texts in a language.

    Raises:
        UsageError: sacreBLEU does not know the tokenisation, or lacks a package for it.
    """
    tokenisation = tokenisation or TOKENISATIONS.get(bare_language(language), "13a")
    try:
        return BLEU(tokenize=tokenisation)
    except (KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"sacreBLEU cannot tokenise {language!r} with {tokenisation!r} ({type(error).__name__}: {reason}). Pass another "
            "--tokenisation."
        ) from error


def translation_scores(
    translations: Sequence[str], references: Sequence[str], language: str, tokenisation: str | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """BLEU and chrF, with sacreBLEU's signatures.

    >>> translation_scores(["It rains in the town."], ["It rains in the town."], "en")[0]["bleu"]
    100.0
    """
    metrics = {"bleu": bleu(language, tokenisation), "chrf": CHRF()}
    scores = {
        name: round(metric.corpus_score(list(translations), [list(references)]).score, 6)
        for name, metric in metrics.items()
    }
    return scores, {name: str(metric.get_signature()) for name, metric in metrics.items()}


def translation_table(results: Mapping[str, Any]) -> Table:
    """Table of the scores for the console."""
    settings = results["settings"]
    title = f"{results['model']}: translation of {settings['language']}, {settings['direction']}"
    table = titled_table(title, "", "score", "signature")
    for name, score in results["metrics"].items():
        table.add_row(name, f"{score:.1f}", results["signatures"][name])
    pairs, checkpoints = results["data"]["test"]["n"], len(results["averaged"])
    table.caption = f"{counted(pairs, 'pair')}; mean of {counted(checkpoints, 'checkpoint')}."
    return table
