from pathlib import Path

import pytest

from metaphrase.cli import parse
from metaphrase.evaluation.transfer import (
    SMALL_SCALE_CONFIGS,
    ClassificationOptions,
    FineTuningArguments,
    QuestionAnsweringOptions,
    TaggingOptions,
)
from metaphrase.evaluation.transfer.translation import TranslationOptions

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "finetune"
SMALL = SMALL_SCALE_CONFIGS
OPTIONS = {
    "xnli": ClassificationOptions,
    "pawsx": ClassificationOptions,
    "xquad": QuestionAnsweringOptions,
    "mlqa": QuestionAnsweringOptions,
    "pos": TaggingOptions,
    "ud": TaggingOptions,
    "translation": TranslationOptions,
}

# rows of a batch, learning rate, epochs, length, schedule, warm-up, weight decay
PAPERS = {
    "dap-xnli": (256, 5e-5, 2, 128, "linear", 0, 0),
    "wacse-xnli": (256, 7e-5, 2, 128, "linear", 0, 0),
    "ppa-xnli": (32, 5e-5, 2, 128, "linear", 1000, 0.01),
    "ppa-mlqa": (32, 3e-5, 2, 386, "linear", 1000, 0.01),
    "mgc-xnli": (32, 2.5e-5, 5, 128, "constant", 0, 0),
    "amber-pos": (32, 2e-5, 10, 128, "constant", 0, 0),
    "amber-pawsx": (32, 2e-5, 5, 128, "constant", 0, 0),
    "amber-xnli": (32, 2e-5, 5, 128, "constant", 0, 0),
    "xtreme-xnli": (32, 2e-5, 5, 128, "linear", 0, 0),
    "xtreme-pawsx": (32, 2e-5, 5, 128, "linear", 0, 0),
    "xtreme-pos": (32, 2e-5, 10, 128, "linear", 0, 0),
    "xtreme-xquad": (32, 3e-5, 3, 384, "linear", 500, 1e-4),
    "xtreme-mlqa": (32, 3e-5, 3, 384, "linear", 500, 1e-4),
}


def read(name, folder=CONFIGS):
    types = [OPTIONS[name.rpartition("-")[2]], FineTuningArguments]
    return parse("test", types, ["--config", str(folder / f"{name}.yaml"), "--output_dir", "out"])


@pytest.mark.parametrize("path", sorted([*CONFIGS.glob("*.yaml"), *SMALL.glob("*.yaml")]), ids=lambda path: path.stem)
def test_every_config_is_understood(path):
    options, arguments = read(path.stem, path.parent)
    assert arguments.seed in (1, 42)
    assert arguments.save_strategy == arguments.eval_strategy or isinstance(options, TranslationOptions)


@pytest.mark.parametrize("name", PAPERS)
def test_hyperparameters_of_the_papers(name):
    options, arguments = read(name)
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    schedule = (arguments.lr_scheduler_type.value, arguments.warmup_steps, arguments.weight_decay)
    found = (batch, arguments.learning_rate, arguments.num_train_epochs, options.max_length, *schedule)
    assert found == PAPERS[name]


def test_translation_of_mgc():
    options, arguments = read("mgc-translation")
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.learning_rate) == (0.9, 0.98, 1e-4)
    assert (arguments.lr_scheduler_type.value, arguments.warmup_steps) == ("inverse_sqrt", 4000)
    assert (options.decoder_layers, options.average_checkpoints, options.num_beams) == (6, 10, 5)
    assert (options.length_penalty, options.dropout, options.decoder_vocabulary) == (1.0, 0.1, "full")
