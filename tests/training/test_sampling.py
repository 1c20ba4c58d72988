"""Batches of one language, and of shared targets: every pair once, full batches, the same batches after a resume."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from torch.utils.data import RandomSampler

from metaphrase.exceptions import CheckpointError, UsageError
from metaphrase.training.arguments import AlignmentTrainingArguments, check_arguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.sampling import LanguageBatchSampler, SharedTargetBatchSampler
from metaphrase.training.trainer import AlignmentTrainer

SIZES = {"de": 21, "fr": 9, "sw": 3}


def pairs(sizes=SIZES):
    return Dataset.from_list(
        [
            {"source": f"{code} {i}", "target": f"en {code} {i}", "source_lang": code, "target_lang": "en"}
            for code, size in sizes.items()
            for i in range(size)
        ]
    )


def shuffled(dataset, *, batch_size, drop_last, generator, seed):
    rows = RandomSampler(dataset, generator=generator)
    return DefaultBatchSampler(rows, batch_size, drop_last, generator=generator, seed=seed)


def without_duplicates(dataset, **settings):
    return NoDuplicatesBatchSampler(dataset.select_columns(["source", "target"]), **settings)


@pytest.fixture(params=[shuffled, without_duplicates])
def sampler_of(request):
    def make(dataset, *, drop_last=False, epoch=0):
        generator = torch.Generator()
        sampler = LanguageBatchSampler(
            dataset, batch_size=4, drop_last=drop_last, generator=generator, seed=5, make=request.param
        )
        sampler.set_epoch(epoch)
        return sampler

    return make


def languages_of(dataset, batch):
    return {dataset[row]["source_lang"] for row in batch}


def test_every_pair_is_in_one_batch(sampler_of):
    data = pairs()
    batches = list(sampler_of(data))
    assert sorted(row for batch in batches for row in batch) == list(range(33))
    assert len(batches) == len(sampler_of(data)) == 9
    assert [len(batch) for batch in batches] == [4] * 8 + [1]
    pure = [languages_of(data, batch) for batch in batches[:7]]
    assert Counter(code for codes in pure for code in codes) == {"de": 5, "fr": 2}
    assert all(len(codes) == 1 for codes in pure)
    assert pure != sorted(pure, key=str)  # the languages take turns


def test_a_last_small_batch_can_be_dropped(sampler_of):
    batches = list(sampler_of(pairs(), drop_last=True))
    assert [len(batch) for batch in batches] == [4] * 8
    assert len(sampler_of(pairs(), drop_last=True)) == 8


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pair_is_in_one_batch_at_most_if_many_share_a_side(sampler_of, drop_last):
    rows = [{**row, "target": f"en {min(at % 9, 4)}"} for at, row in enumerate(pairs())]
    batches = list(sampler_of(Dataset.from_list(rows), drop_last=drop_last))
    counts = Counter(row for batch in batches for row in batch)
    assert set(counts.values()) == {1}
    assert drop_last or len(counts) == len(rows)


def test_an_epoch_depends_on_seed_and_number_only(sampler_of):
    data = pairs()
    one, again, other = (list(sampler_of(data, epoch=epoch)) for epoch in (3, 3, 4))
    assert one == again
    assert one != other
    sampler = sampler_of(data, epoch=0)
    list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == one


def test_a_language_has_other_batches_in_each_epoch(sampler_of):
    """Not the same batches in another order."""
    first, second = ({frozenset(batch) for batch in sampler_of(pairs({"de": 32}), epoch=epoch)} for epoch in (0, 1))
    assert len(first) == 8
    assert first != second


def test_both_languages_count(sampler_of):
    rows = [{**row, "target_lang": "en" if i % 2 else "sw"} for i, row in enumerate(pairs({"de": 16}))]
    data = Dataset.from_list(rows)
    for batch in sampler_of(data):
        assert len({data[row]["target_lang"] for row in batch}) == 1


@pytest.fixture
def train(tiny_encoder_dir, full_bitext, tmp_path):
    from metaphrase.encoders.loading import load_encoder

    rows = [{**row, "source_lang": "fr" if i % 3 == 0 else "de"} for i, row in enumerate(full_bitext)]

    def run(
        folder,
        resume=None,
        *,
        data=None,
        batches="language",
        sampler="no_duplicates",
        stop=9,
        save_steps=1,
        eval_dataset=None,
        recipe=None,
    ):
        torch.manual_seed(7)
        model = load_encoder(str(tiny_encoder_dir), device="cpu")
        loss = AlignmentLoss(model, recipe or Recipe.load("tr"), max_length=24)
        args = AlignmentTrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=4,
            batches=batches,
            batch_sampler=sampler,
            max_steps=stop,
            save_steps=save_steps,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = data or Dataset.from_list(rows)
        trainer = AlignmentTrainer(model=model, args=args, train_dataset=data, eval_dataset=eval_dataset, loss=loss)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return trainer.state.log_history, {name: value.clone() for name, value in model.state_dict().items()}

    return run


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
def test_a_resumed_run_sees_the_same_batches(train, sampler):
    """In the first epoch of six steps, and in the second."""
    log, whole = train("whole", sampler=sampler)
    for step in (2, 7):
        again, resumed = train(f"resumed-{step}", f"whole/checkpoint-{step}", sampler=sampler, save_steps=9)
        assert [one["loss"] for one in log if "loss" in one] == [one["loss"] for one in again if "loss" in one]
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name


def test_a_run_with_other_batches_is_not_resumed(train, tmp_path):
    train("whole", stop=2)
    with pytest.raises(CheckpointError, match="batches"):
        train("resumed", "whole/checkpoint-1", batches="mixed", stop=2)
    assert Path(tmp_path / "whole/checkpoint-2").is_dir()


@pytest.mark.parametrize("data", ["stream", "without languages"])
def test_data_whose_languages_are_unknown_are_refused(train, data):
    with pytest.raises(UsageError, match="'batches: language' requires data that are not a stream"):
        train(
            "refused",
            data=pairs().to_iterable_dataset() if data == "stream" else pairs().remove_columns("target_lang"),
        )


def test_an_evaluation_set_without_languages_is_refused_before_training(train):
    with pytest.raises(UsageError, match="`eval_dataset` lacks these"):
        train("refused", eval_dataset={"sw": pairs().remove_columns("source_lang")})


@pytest.fixture
def shared():
    """Pairs of which some share their target: five languages of ten targets, fifty of one, and sixty targets of one pair."""
    targets = [f"shared {i}" for i in range(10)] * 5 + ["often"] * 50 + [f"single {i}" for i in range(60)]
    return Dataset.from_list([{"source": f"source {i}", "target": target} for i, target in enumerate(targets)])


def with_shared_targets(dataset, *, epoch=0, drop_last=False, batch_size=16):
    sampler = SharedTargetBatchSampler(
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        generator=torch.Generator(),
        seed=5,
        valid_label_columns=None,
    )
    sampler.set_epoch(epoch)
    return sampler


def test_pairs_with_the_same_target_come_together(shared):
    batches = list(with_shared_targets(shared))
    assert sorted(row for batch in batches for row in batch) == list(range(160))
    assert [len(batch) for batch in batches] == [16] * 10
    assert len(with_shared_targets(shared)) == 10
    counts = [Counter(shared[row]["target"] for row in batch) for batch in batches]
    together = sum(any(count[f"shared {i}"] >= 4 for count in counts) for i in range(10))
    assert (
        together >= 4
    )  # the end of a batch divides some of them; at random, four of five are in one batch very rarely
    assert max(len([one for one in count if one.startswith("shared")]) for count in counts) > 1
    assert all(len(count) > 1 for count in counts)  # "often" does not fill batches


def test_batches_of_shared_targets_depend_on_seed_and_epoch(shared):
    one, again, other = (list(with_shared_targets(shared, epoch=epoch)) for epoch in (3, 3, 4))
    assert one == again
    assert one != other
    assert [len(batch) for batch in with_shared_targets(shared, batch_size=24, drop_last=True)] == [24] * 6
    assert [len(batch) for batch in with_shared_targets(shared, batch_size=24)] == [24] * 6 + [16]


@pytest.mark.long
def test_a_resumed_run_sees_the_same_shared_targets(train):
    terms = [{"objective": "tr", "args": {"direction": "symmetric", "positives": "shared_target"}}]
    settings = {"batches": "shared_target", "sampler": "batch_sampler"}
    settings["recipe"] = Recipe.from_dict({"name": "shared", "terms": terms})
    log, whole = train("whole", **settings)
    again, resumed = train("resumed", "whole/checkpoint-7", save_steps=9, **settings)
    assert [one["loss"] for one in log if "loss" in one] == [one["loss"] for one in again if "loss" in one]
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_settings_that_keep_shared_targets_apart_are_refused(train):
    with pytest.raises(UsageError, match="requires batch_sampler 'batch_sampler', but it is 'no_duplicates'"):
        train("refused", batches="shared_target")
    with pytest.raises(UsageError, match="tr would rank a translation against copies of it"):
        train("refused", batches="shared_target", sampler="batch_sampler")
    terms = [{"objective": "tr", "args": {"direction": "symmetric", "positives": "shared_target"}}]
    recipe = Recipe.from_dict({"name": "shared", "terms": terms})
    settings = {"batches": "shared_target", "sampler": "batch_sampler", "recipe": recipe}
    with pytest.raises(
        UsageError, match="'batches: shared_target' requires data that are not a stream, but `train_dataset`"
    ):
        train("refused", data=pairs().to_iterable_dataset(), **settings)
    objectives = recipe.objectives()
    args = AlignmentTrainingArguments(output_dir="unused", batch_sampler="no_duplicates", use_cpu=True)
    with pytest.raises(UsageError, match="The positives of tr are pairs with the same target"):
        check_arguments(args, objectives)


def test_pairs_with_one_target_are_at_most_a_quarter_of_a_batch():
    """A target with 16 pairs beside 48 others: in groups of 4, which hardly ever fill one batch of 16."""
    dataset = Dataset.from_dict({"target": ["same"] * 16 + [f"t{at}" for at in range(48)]})
    runs = []
    for seed in range(20):
        sampler = SharedTargetBatchSampler(
            dataset, batch_size=16, drop_last=False, generator=torch.Generator(), seed=seed
        )
        rows = [row < 16 for batch in sampler for row in batch]
        runs.append(sum(a and not b for a, b in zip(rows, [*rows[1:], False], strict=True)))
    assert max(runs) == 4  # the four groups are apart in at least one order
