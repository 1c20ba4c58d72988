import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from metaphrase.corpus.code_switching import (
    NLI,
    PARAPHRASES,
    QUESTION_ANSWERING,
    CodeSwitchingCollator,
    PairedTexts,
    code_switched,
)
from tests.conftest import shape


def nli(premise, hypothesis, label=0):
    """An item whose English twins are told by their brackets."""
    english = {"premise_en": f"[{premise}]", "hypothesis_en": f"[{hypothesis}]"}
    return {"premise": premise, "hypothesis": hypothesis, **english, "label": label}


ENGLISH = {"premise": "a", "hypothesis": "b", "premise_en": None, "hypothesis_en": None, "label": 1}

CONTEXT_EN = "Ada Lovelace wrote the first program in 1843."
CONTEXT_ES = "En 1843, Ada Lovelace escribió el primer programa."
QUESTION = {
    "id": "q1",
    "question": "¿Cuándo?",
    "question_en": "When?",
    "context": CONTEXT_ES,
    "context_en": CONTEXT_EN,
    "answers": {"text": ["1843"], "answer_start": [CONTEXT_ES.index("1843")]},
    "answers_en": {"text": ["1843"], "answer_start": [CONTEXT_EN.index("1843")]},
}


def test_one_item_becomes_two_and_is_gone():
    variants = code_switched(nli("p", "h", 2), NLI)
    assert variants == [
        {"premise": "p", "hypothesis": "[h]", "label": 2},
        {"premise": "[p]", "hypothesis": "h", "label": 2},
    ]


def test_the_item_is_left_as_it_is():
    item = nli("p", "h")
    before = dict(item)
    code_switched(item, NLI)
    assert item == before


@pytest.mark.parametrize(("premise", "hypothesis"), [(None, None), ("a", "b"), (None, "b")])
def test_english_items_are_untouched(premise, hypothesis):
    item = {**ENGLISH, "premise_en": premise, "hypothesis_en": hypothesis}
    assert code_switched(item, NLI) == [{"premise": "a", "hypothesis": "b", "label": 1}]


def test_a_text_that_reads_the_same_in_english_is_switched_with_the_other():
    item = {**nli("Ada", "h"), "premise_en": "Ada"}
    assert [v["hypothesis"] for v in code_switched(item, NLI)] == ["[h]", "h"]


def test_answers_are_in_the_language_of_their_context():
    variants = code_switched(QUESTION, QUESTION_ANSWERING)
    assert [(v["question"], v["context"]) for v in variants] == [("¿Cuándo?", CONTEXT_EN), ("When?", CONTEXT_ES)]
    assert variants[0]["answers"] != variants[1]["answers"]
    for variant in variants:
        assert variant.keys() == {"id", "question", "context", "answers"}
        for text, start in zip(*variant["answers"].values(), strict=True):
            assert variant["context"][start : start + len(text)] == text


def test_columns_may_have_other_names():
    columns = PairedTexts("a", "b", with_first=("lang_a",), with_second=("lang_b",), suffix="_english")
    item = {"a": "x", "b": "y", "lang_a": "fr", "lang_b": "fr"}
    item |= {"a_english": "X", "b_english": "Y", "lang_a_english": "en", "lang_b_english": "en"}
    assert code_switched(item, columns) == [
        {"a": "x", "b": "Y", "lang_a": "fr", "lang_b": "en"},
        {"a": "X", "b": "y", "lang_a": "en", "lang_b": "fr"},
    ]
    assert PARAPHRASES.switched == ("sentence1", "sentence2")


def test_a_missing_original_is_said():
    with pytest.raises(ValueError, match=r"'hypothesis_en' is missing .*Join the translated items with their English"):
        code_switched({"premise": "p", "premise_en": "[p]", "hypothesis": "h"}, NLI)


def test_a_trainer_sees_both_variants_in_one_batch(tokenizer, tmp_path):
    """Sixteen couples are a batch of 32; shuffling moves couples, never halves."""
    rows = [nli(f"p{n}", f"h{n}", n % 3) for n in range(40)]
    batches = []

    def collate(items):
        batches.append(items)
        texts = tokenizer([i["premise"] for i in items], [i["hypothesis"] for i in items], padding=True)
        return {
            **{name: torch.tensor(texts[name]) for name in ("input_ids", "attention_mask")},
            "labels": torch.tensor([i["label"] for i in items]),
        }

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        max_steps=2,
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    Trainer(
        model=BertForSequenceClassification(BertConfig(**shape(tokenizer), num_labels=3)),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        data_collator=CodeSwitchingCollator(collate, NLI),
    ).train()
    assert [len(batch) for batch in batches[:2]] == [32, 32]
    seen = []
    for batch in batches[:2]:
        for one, other in zip(batch[::2], batch[1::2], strict=True):
            seen.append(one["premise"])
            assert other["premise"] == f"[{one['premise']}]"
            assert one["hypothesis"] == f"[{other['hypothesis']}]"
            assert one["label"] == other["label"]
    assert seen != sorted(seen)
    assert len(set(seen)) == 32
