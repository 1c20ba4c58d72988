import copy
import csv
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from metaphrase.corpus import Cleaning
from metaphrase.encoders.loading import load_encoder
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.functional import translation_ranking
from metaphrase.modeling.packing import packed
from metaphrase.modeling.views import Batch, concatenated, source_view, target_view
from metaphrase.objectives.momentum_contrast import MomentumHead, QueryAndKey, enqueue, momentum_contrast
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer
from tests.oracles import momentum_contrast_loop
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
VIEW = "query-and-key"


def without_dropout(loss):
    for module in loss.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return loss.train()


def unit(*shape):
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("denominator", ["positive_and_queue", "queue"])
@pytest.mark.parametrize(("batch", "queue", "hidden"), [(1, 1, 4), (2, 5, 4), (7, 3, 13)])
def test_matches_loop(batch, queue, hidden, denominator):
    tensors = [torch.randn(n, hidden, dtype=torch.float64, requires_grad=True) for n in (batch, batch, queue)]
    fast = momentum_contrast(*tensors, temperature=0.3, denominator=denominator)
    slow = momentum_contrast_loop(*tensors, temperature=0.3, literal=denominator == "queue")
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9)
    got, wanted = (torch.autograd.grad(value, tensors) for value in (fast, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def with_cosines(*cosines):
    """A query, and unit vectors that have these cosines with it."""
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    return query, torch.tensor([[c, math.sqrt(1 - c * c)] for c in cosines], dtype=torch.float64)


def test_numbers_by_hand():
    query, others = with_cosines(0.9, 0.1, 0.2, -0.3)
    assert momentum_contrast(query, others[:1], others[1:]).item() == pytest.approx(9.441011e-07, rel=1e-6)
    query, same = with_cosines(*[0.4] * 32_001)
    assert momentum_contrast(query, same[:1], same[1:]).item() == pytest.approx(10.373522, abs=1e-6)
    assert momentum_contrast(query, same[:1], same[1:], denominator="queue").item() == pytest.approx(math.log(32_000))


def test_equation_3_as_printed_can_be_negative():
    query, others = with_cosines(0.9, 0.1, 0.2)
    assert momentum_contrast(query, others[:1], others[1:], denominator="queue") < 0


def test_half_precision_is_computed_wide():
    query, key, queue = unit(4, 8).half(), unit(4, 8).half(), unit(9, 8).half()
    got = momentum_contrast(query, key, queue, temperature=0.01)
    assert got.dtype == torch.float32
    wanted = momentum_contrast(query.double(), key.double(), queue.double(), temperature=0.01)
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 11])
def test_the_queue_holds_the_last_keys(batch):
    queue, pointer = torch.zeros(7, 1), torch.tensor(0)
    seen = []
    for step in range(9):
        keys = torch.arange(step * batch, (step + 1) * batch, dtype=torch.float32)[:, None] + 1
        before = queue.clone()
        new, pointer = enqueue(queue, pointer, keys)
        assert torch.equal(queue, before)  # the loss of this step still needs it
        queue, seen = new, seen + keys.flatten().tolist()
        assert pointer == len(seen) % 7
        if len(seen) >= 7:
            assert torch.roll(queue, -int(pointer), 0).flatten().tolist() == seen[-7:]  # oldest first


def test_a_run_is_mocos_algorithm(make_loss, batch_of, bitext):
    """Losses, queue and momentum encoder of five steps, and a second encoder that is averaged by hand."""
    loss = without_dropout(make_loss("moco", queue_size=7, momentum=0.9, projection_size=6))
    head, rows = loss.heads.heads["moco"], bitext
    follower, projection = copy.deepcopy(loss.model), copy.deepcopy(head.projection)
    queue = list(head.queue_qh)
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=0.1)

    def embedding(model, layers, ids, mask):
        states = model({"input_ids": ids, "attention_mask": mask})["token_embeddings"]
        return F.normalize(layers(F.normalize(states[:, 0], dim=-1)), dim=-1)

    for step in range(5):
        batch = batch_of(loss, rows[4 * step : 4 * step + 4])
        features = batch[VIEW]
        with torch.no_grad():
            keys = embedding(follower, projection, features["key_ids"], features["key_mask"])
            queries = embedding(loss.model, head.projection, features["input_ids"], features["attention_mask"])
        optimizer.zero_grad()
        value = loss(batch)["moco"]
        wanted = momentum_contrast_loop(queries, keys, queue)
        assert value.item() == pytest.approx(wanted.item(), rel=1e-9)
        value.backward()
        optimizer.step()
        loss.after_step()
        queue = [*queue, *keys][-7:]
        pairs = [*zip(follower.parameters(), loss.model.parameters(), strict=True)]
        for key, query in [*pairs, *zip(projection.parameters(), head.projection.parameters(), strict=True)]:
            key.data = 0.9 * key.data + (1 - 0.9) * query.data
        held = torch.roll(head.queue_qh, -int(head.pointer), 0)
        torch.testing.assert_close(held, torch.stack(queue), rtol=1e-9, atol=1e-12)
    mine = dict(head.momentum_encoder.named_parameters())
    for name, value in follower[0].auto_model.named_parameters():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-12)
    moved = [not torch.equal(mine[name], value) for name, value in loss.model[0].auto_model.named_parameters()]
    assert any(moved)


def test_only_the_query_has_a_gradient(make_loss, batch_of, bitext):
    loss = without_dropout(make_loss("moco", queue_size=16))
    loss(batch_of(loss, bitext[:6]))["moco"].backward()
    head = loss.heads.heads["moco"]
    assert all(p.grad is None and not p.requires_grad for p in head.momentum_encoder.parameters())
    assert all(p.grad is None and not p.requires_grad for p in head.momentum_projection.parameters())
    assert all(p.grad.abs().max() > 0 for p in head.projection.parameters())
    assert loss.model[0].auto_model.encoder.layer[0].attention.self.query.weight.grad.abs().max() > 0


def test_evaluation_does_not_change_the_queue(make_loss, batch_of, bitext):
    loss = make_loss("moco", queue_size=16)
    head = loss.heads.heads["moco"]
    before = head.queue_qh.clone()
    batch = batch_of(loss, bitext[:6])
    first, second = loss(batch)["moco"], loss(batch)["moco"]
    assert first == second
    assert torch.equal(head.queue_qh, before)
    assert head.pointer == 0
    loss.train()(batch)
    assert head.pointer == 6
    assert (head.queue_qh != before).any(dim=1).tolist() == [True] * 6 + [False] * 10


def test_keys_are_encoded_with_dropout_in_training(make_loss, batch_of, bitext):
    loss = make_loss("moco", queue_size=16)
    head, features = loss.heads.heads["moco"], batch_of(loss, bitext[:6])[VIEW]

    def keys():
        return head.key(features["key_ids"], features["key_mask"].bool())

    assert torch.equal(keys(), keys())
    loss.train()
    assert not torch.equal(keys(), keys())


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_the_momentum_encoder_after_some_steps_has_its_closed_form(make_loss, momentum):
    loss = make_loss("moco", momentum=momentum, queue_size=4)
    head, encoder = loss.heads.heads["moco"], loss.model[0].auto_model
    followers = {"encoder": head.momentum_encoder, "projection": head.momentum_projection}
    leaders = {"encoder": encoder, "projection": head.projection}
    starts = {kind: [p.clone() for p in leader.parameters()] for kind, leader in leaders.items()}
    history = {kind: [] for kind in leaders}
    for _ in range(3):
        for kind, leader in leaders.items():
            for parameter in leader.parameters():
                parameter.data += torch.randn_like(parameter)
            history[kind].append([p.clone() for p in leader.parameters()])
        loss.after_step()
    for kind, follower in followers.items():
        for at, (key, start) in enumerate(zip(follower.parameters(), starts[kind], strict=True)):
            values = [step[at] for step in history[kind]]
            wanted = momentum**3 * start + (1 - momentum) * sum(
                momentum ** (2 - n) * value for n, value in enumerate(values)
            )
            exact = {0.0: values[-1], 1.0: start}.get(momentum)
            assert exact is None or torch.equal(key, exact)
            torch.testing.assert_close(key, wanted, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_are_not_averaged(make_loss):
    loss = make_loss("moco", momentum=0.5, queue_size=4)
    encoder, head = loss.model[0].auto_model, loss.heads.heads["moco"]
    table = encoder.get_input_embeddings().weight.requires_grad_(False)
    before = head.momentum_encoder.get_input_embeddings().weight.clone()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(1.0)
    loss.after_step()
    assert torch.equal(head.momentum_encoder.get_input_embeddings().weight, before)
    position = head.momentum_encoder.embeddings.position_embeddings.weight
    torch.testing.assert_close(position, encoder.embeddings.position_embeddings.weight - 0.5)
    assert table is encoder.get_input_embeddings().weight


@pytest.mark.parametrize("encoder", ["tiny_encoder", "tiny_xlmr"])
def test_the_momentum_encoder_starts_as_the_encoder(request, make_loss, batch_of, bitext, encoder):
    loss = make_loss("moco", model=request.getfixturevalue(encoder), projection_size=None, normalize="h")
    features = batch_of(loss, bitext[:9])[VIEW]
    keys = loss.heads.heads["moco"].key(features["key_ids"], features["key_mask"].bool())
    inputs = {"input_ids": features["key_ids"], "attention_mask": features["key_mask"]}
    sentences = loss.model(inputs)["sentence_embedding"]  # CLS pooling of one model, mean pooling of the other
    torch.testing.assert_close(keys, F.normalize(sentences, dim=-1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("encoder", ["tiny_encoder", "tiny_xlmr"])
def test_keys_without_padding_are_the_padded_ones(request, make_loss, batch_of, bitext, monkeypatch, encoder):
    loss = make_loss("moco", model=request.getfixturevalue(encoder), queue_size=4)
    head, features = loss.heads.heads["moco"], batch_of(loss, bitext[:9])[VIEW]
    ids, mask = features["key_ids"], features["key_mask"].bool()
    assert not mask.all()
    lengths = []
    head.momentum_encoder.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    flat = head.key(ids, mask)
    monkeypatch.setattr(type(head.momentum_encoder), "_supports_attention_backend", False)
    head.momentum_encoder.set_attn_implementation("eager")
    torch.testing.assert_close(head.key(ids, mask), flat, rtol=1e-10, atol=1e-10)
    assert lengths == [(1, int(mask.sum())), ids.shape]


@pytest.mark.parametrize("packing", [False, True])
def test_ppa_encodes_twice_and_the_momentum_encoder_once(tiny_encoder, tokenizer, bitext, packing):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("ppa"), max_length=24)
    calls = []
    encoders = {"encoder": tiny_encoder[0].auto_model, "follower": loss.heads.heads["moco"].momentum_encoder}
    for name, encoder in encoders.items():
        encoder.encoder.register_forward_hook(
            lambda module, args, output, name=name: calls.append((name, output.last_hidden_state.requires_grad))
        )
    with packed(tiny_encoder, enabled=packing):
        loss(ParallelCollator(tokenizer, loss.views)(bitext[:5]))
    assert calls == [("encoder", True), ("encoder", True), ("follower", False)]


def real(ids, mask):
    return [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1), strict=True)]


def test_tlm_sees_the_sentences_in_the_contrasts_order(bitext, tokenizer):
    loss_views = (
        QueryAndKey(VIEW, 24, shuffle=True),
        concatenated(24, 0.0, positions="continuous", layout="pair", segments=True, order="shuffled"),
    )
    turned = []
    for epoch in range(2):
        collator = ParallelCollator(tokenizer, loss_views)
        collator.set_epoch(epoch)
        contrast, pair = collator(bitext).values()
        queries, keys = (
            real(contrast[ids], contrast[mask])
            for ids, mask in (("input_ids", "attention_mask"), ("key_ids", "key_mask"))
        )
        joint = real(pair["input_ids"], pair["attention_mask"])
        assert joint == [query + key[1:] for query, key in zip(queries, keys, strict=True)]  # one [CLS]
        for row, positions, types in zip(joint, pair["position_ids"], pair["token_type_ids"], strict=True):
            assert positions[: len(row)].tolist() == [*range(len(row))]
            first = row.index(tokenizer.sep_token_id) + 1
            assert types[: len(row)].tolist() == [0] * first + [1] * (len(row) - first)
        sources = [tokenizer(row["source"])["input_ids"] for row in bitext]
        turned.append([query != source for query, source in zip(queries, sources, strict=True)])
    assert 0 < sum(turned[0]) < len(bitext)
    assert turned[0] != turned[1]


def test_half_of_the_pairs_are_swapped(tokenizer):
    rows = [{"source": "der hund", "target": f"the dog {'sleeps ' * n}"} for n in range(1, 2)] * 4000
    rngs = [np.random.default_rng((42, 0, n)) for n in range(4000)]
    features = QueryAndKey(VIEW, 24, shuffle=True).build(Batch(rows, tokenizer), rngs)
    source = tokenizer("der hund")["input_ids"]
    queries = real(features["input_ids"], features["attention_mask"])
    assert np.mean([query == source for query in queries]) == pytest.approx(0.5, abs=0.03)


def test_without_shuffling_sources_are_queries(bitext, tokenizer):
    features = QueryAndKey(VIEW, 6, shuffle=False).build(
        Batch(bitext, tokenizer), [np.random.default_rng(0)] * len(bitext)
    )
    for side, ids, mask in (("source", "input_ids", "attention_mask"), ("target", "key_ids", "key_mask")):
        wanted = tokenizer([row[side] for row in bitext], truncation=True, max_length=6)["input_ids"]
        assert real(features[ids], features[mask]) == wanted


def test_padding_and_order_of_the_batch_change_nothing(make_loss, batch_of, bitext):
    loss = make_loss("moco", queue_size=16)
    batch = batch_of(loss, bitext[:5])
    wanted = loss(batch)["moco"]
    padded = {VIEW: {name: F.pad(value, (0, 3)) for name, value in batch[VIEW].items()}}
    torch.testing.assert_close(loss(padded)["moco"], wanted, rtol=1e-10, atol=1e-12)
    turned = {VIEW: {name: value.flip(0) for name, value in batch[VIEW].items()}}
    torch.testing.assert_close(loss(turned)["moco"], wanted, rtol=1e-10, atol=1e-12)


def test_padding_is_excluded_from_the_mean(make_loss, encodings_of, bitext, tiny_xlmr):
    loss = make_loss("moco", model=tiny_xlmr, queue_size=16)
    encodings = encodings_of(loss, bitext[:5])
    pair = encodings[VIEW]
    assert not pair.mask_bl.all()
    wanted = loss.objectives["moco"](encodings)
    wanted.backward()
    grad = pair.tokens_blh.grad
    assert torch.equal(grad[~pair.mask_bl], torch.zeros_like(grad[~pair.mask_bl]))
    assert (grad[pair.mask_bl].abs().sum(-1) > 0).all()
    other = torch.where(pair.mask_bl[..., None], pair.tokens_blh, 5.0)
    torch.testing.assert_close(loss.objectives["moco"]({VIEW: replace(pair, tokens_blh=other)}), wanted)


@pytest.mark.parametrize(("normalize", "h", "z"), [("both", True, True), ("h", True, False), ("z", False, True)])
@pytest.mark.parametrize("projection_size", [None, 5])
def test_what_is_normalised(make_loss, encodings_of, bitext, normalize, h, z, projection_size):
    loss = make_loss("moco", normalize=normalize, projection_size=projection_size, queue_size=4)
    pair, head = encodings_of(loss, bitext[:3])[VIEW], loss.heads.heads["moco"]
    wanted = pair.tokens_blh[:, 0]
    wanted = wanted / wanted.norm(dim=1, keepdim=True) if h else wanted
    wanted = head.projection(wanted)
    wanted = wanted / wanted.norm(dim=1, keepdim=True) if z else wanted
    torch.testing.assert_close(head.query(pair.tokens_blh, pair.mask_bl), wanted)
    assert head.queue_qh.shape == (4, projection_size or 32)
    torch.testing.assert_close(head.queue_qh.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_a_projection_without_biases_stays_so(make_loss, batch_of, bitext):
    loss = make_loss("moco", bias=False, queue_size=4).train()
    head = loss.heads.heads["moco"]
    optimizer = torch.optim.AdamW([p for p in loss.parameters() if p.requires_grad], lr=0.1)
    loss(batch_of(loss, bitext[:3]))["moco"].backward()
    before = head.projection[0].weight.clone()
    optimizer.step()
    loss.after_step()
    assert not torch.equal(head.projection[0].weight, before)
    assert not head.projection[0].bias.any()
    assert not head.projection[2].bias.any()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"momentum": 1.1}, "from 0 to 1, but is 1.1"),
        ({"normalize": "x"}, "'both', 'h', 'z', but is 'x'"),
        ({"denominator": "all"}, "'positive_and_queue', 'queue', but is 'all'"),
    ],
)
def test_impossible_settings_are_refused(make_loss, args, message):
    with pytest.raises(ValueError, match=message):
        make_loss("moco", **args)


def test_another_pooling_is_refused(make_loss, tiny_encoder):
    tiny_encoder[1].pooling_mode = "max"
    with pytest.raises(ValueError, match="uses 'max'"):
        make_loss("moco", model=tiny_encoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_encoder_in_half_precision_with_mean_pooling(batch_of, bitext, tiny_xlmr, dtype):
    recipe = Recipe.from_dict({"name": "half", "terms": [{"objective": "moco", "args": {"queue_size": 20}}]})
    loss = AlignmentLoss(tiny_xlmr.to(dtype), recipe, max_length=24)
    assert loss(batch_of(loss, bitext[:3]))["moco"].isfinite()


def test_an_input_language_embedding_is_refused(make_loss, batch_of, bitext, tiny_encoder):
    recipe = Recipe.from_dict({"name": "l", "terms": [{"objective": "moco"}], "language_embedding": True})
    loss = AlignmentLoss(tiny_encoder, recipe, max_length=24, languages=["de", "en"])
    with pytest.raises(ValueError, match="view 'query-and-key' does not provide it"):
        loss(batch_of(loss, bitext[:3]))


def test_a_new_head_allocates_no_second_encoder(tiny_encoder):
    config = tiny_encoder[0].auto_model.config
    head = MomentumHead(config, pooling="cls", projection_size=4, bias=True, queue_size=3, normalize="both")
    assert all(parameter.is_meta for parameter in head.momentum_encoder.parameters())
    assert getattr(head.momentum_encoder, "pooler", None) is None


@pytest.mark.parametrize("projection_size", [None, 6])
@pytest.mark.parametrize("encoder", ["tiny_encoder", "tiny_xlmr"])
def test_the_head_is_restored_exactly(request, tokenizer, tmp_path, bitext, encoder, projection_size):
    args = {"queue_size": 9, "projection_size": projection_size, "momentum": 0.5}
    recipe = Recipe.from_dict({"name": "m", "terms": [{"objective": "moco", "args": args}]})
    loss = without_dropout(AlignmentLoss(request.getfixturevalue(encoder), recipe, max_length=24))
    with torch.no_grad():
        for parameter in loss.heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    batch = ParallelCollator(tokenizer, loss.views)(bitext[:4])
    loss(batch)
    head = loss.heads.heads["moco"]
    assert head.pointer == 4
    loss.heads.save_pretrained(tmp_path)
    loaded = AlignmentHeads.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert state.keys() == loss.heads.state_dict().keys()
    assert {"heads.moco.queue_qh", "heads.moco.pointer"} <= state.keys()
    for key, value in loss.heads.state_dict().items():
        assert torch.equal(state[key], value), key
    ids, mask = batch[VIEW]["key_ids"], batch[VIEW]["key_mask"].bool()
    assert torch.equal(loaded.eval().heads["moco"].key(ids, mask), head.eval().key(ids, mask))


def test_the_momentum_encoder_is_saved_with_the_heads(tiny_encoder):
    loss = AlignmentLoss(tiny_encoder, Recipe.load("ppa"), max_length=24)
    head = loss.heads.heads["moco"]
    for mode in (True, False):
        loss.train(mode)
        assert head.momentum_encoder.training is mode
    loss.heads.to(torch.bfloat16)
    assert head.queue_qh.dtype == head.momentum_encoder.dtype == torch.bfloat16
    assert head.pointer.dtype == torch.int64


@pytest.fixture
def make_trainer(tiny_encoder, tmp_path, bitext):
    rows = [{column: row[column] for column in ("source", "target", "source_lang", "target_lang")} for row in bitext]

    def make(folder="run", *, queue_size=20, terms=None, **options):
        torch.manual_seed(7)
        moco = {"objective": "moco", "args": {"queue_size": queue_size, "momentum": 0.9}}
        tlm = {"positions": "continuous", "layout": "pair", "segments": True, "order": "shuffled"}
        recipe = Recipe.from_dict({"name": "p", "terms": terms or [moco, {"objective": "tlm", "args": tlm}]})
        loss = AlignmentLoss(copy.deepcopy(tiny_encoder), recipe, max_length=24)
        settings = {
            "output_dir": str(tmp_path / folder),
            "per_device_train_batch_size": 8,
            "max_steps": 6,
            "save_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "head_learning_rate": 2e-3,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        arguments = AlignmentTrainingArguments(**settings)
        return AlignmentTrainer(model=loss.model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss)

    return make


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer):
    whole = make_trainer(max_steps=8, save_steps=5)  # three steps an epoch; the queue of 20 wraps within a batch
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-5"
    resumed = make_trainer("resumed", max_steps=8, save_steps=5)
    kept = []
    resumed.add_callback(_AtStart(lambda: kept.append(copy.deepcopy(resumed.loss.heads.state_dict()))))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    saved = AlignmentHeads.from_pretrained(checkpoint / "heads").state_dict()
    assert saved["heads.moco.pointer"] == 40 % 20
    for name, value in saved.items():
        assert torch.equal(kept[0][name], value), name
    logs = [[log for log in t.state.log_history if "moco" in log] for t in (whole, resumed)]
    assert len(logs[0]) == 8
    assert [(log["moco"], log["tlm"]) for log in logs[0]] == [(log["moco"], log["tlm"]) for log in logs[1]]
    state = resumed.loss.state_dict()
    for name, value in whole.loss.state_dict().items():
        assert torch.equal(state[name], value), name
    moved = whole.loss.heads.heads["moco"].momentum_encoder.encoder.layer[0].output.dense.weight
    assert not torch.equal(moved, saved["heads.moco.momentum_encoder.encoder.layer.0.output.dense.weight"])


class _AtStart(TrainerCallback):
    def __init__(self, look):
        self.look = look

    def on_train_begin(self, args, state, control, **kwargs):
        self.look()


def test_one_average_a_step_and_one_enqueue_a_micro_batch(make_trainer):
    trainer = make_trainer(
        queue_size=100, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=2, save_strategy="no"
    )
    followed = []
    head = trainer.loss.heads.heads["moco"]
    follow = head.follow
    head.follow = lambda *args: (followed.append(int(head.pointer)), follow(*args))
    trainer.train()
    assert followed == [12, 24]


def test_the_optimiser_excludes_the_momentum_encoder(make_trainer):
    trainer = make_trainer(max_steps=2, save_strategy="no", weight_decay=0.1)
    head = trainer.loss.heads.heads["moco"]
    trainer.train()
    mine = {*head.momentum_encoder.parameters(), *head.momentum_projection.parameters()}
    assert not mine & set(trainer.head_parameters())
    assert not mine & set(trainer.optimizer.state)
    assert set(head.projection.parameters()) <= set(trainer.optimizer.state)


@pytest.mark.slow
def test_it_learns(tiny_bert_dir, tokenizer, bitext):
    model = load_encoder(tiny_bert_dir, default_pooling="mean", device="cpu")
    moco = {"objective": "moco", "args": {"queue_size": 12, "momentum": 0.9}}
    loss = AlignmentLoss(model, Recipe.from_dict({"name": "m", "terms": [moco]}), max_length=24)
    collator = ParallelCollator(tokenizer, loss.views)

    def ranking():
        views = ParallelCollator(tokenizer, (source_view(24), target_view(24)))(bitext)
        with torch.no_grad():
            encodings = encode_views(model.eval(), views)
        return translation_ranking(encodings["source"].sentence_bh, encodings["target"].sentence_bh).item()

    before = ranking()
    optimizer = torch.optim.AdamW([p for p in loss.parameters() if p.requires_grad], lr=5e-4)
    for epoch in range(30):
        collator.set_epoch(epoch)
        order = torch.randperm(len(bitext)).tolist()
        for start in (0, 8, 16):
            optimizer.zero_grad()
            loss.train()(collator([bitext[n] for n in order[start : start + 8]]))["moco"].backward()
            optimizer.step()
            loss.after_step()
    assert ranking() < before / 2


@pytest.mark.slow
def test_two_ranks_hold_the_same_queue(tiny_encoder_dir, bitext_path, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29631"),
            *("-m", "tests.objectives.two_ranks_momentum"),
            *(str(tiny_encoder_dir), str(bitext_path), str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(ranks[0]["enqueued"], ranks[0]["keys"], rtol=1e-6, atol=1e-6)  # rank 0's, then rank 1's
    for name, value in ranks[0]["after"].items():
        assert torch.equal(value, ranks[1]["after"][name]), name
    before, after = ranks[0]["before"], ranks[0]["after"]
    assert after["heads.heads.moco.pointer"] == 5 * 8 % 28  # an epoch's three micro-batches are steps of two and one
    for part in ("queue_qh", "momentum_projection.0.weight", "momentum_encoder.encoder.layer.0.output.dense.weight"):
        assert not torch.equal(after[f"heads.heads.moco.{part}"], before[f"heads.heads.moco.{part}"]), part


@pytest.mark.slow
def test_the_tutorial_runs(tiny_encoder_dir, bitext, tmp_path):
    path = tmp_path / "de-en.tsv"
    with path.open("w", encoding="utf-8", newline="\n") as out:
        writer = csv.writer(out, delimiter="\t", lineterminator="\n")
        writer.writerow(["source", "target"])
        for start in range(len(bitext)):  # PPA skips sentences with fewer than ten pieces
            rows = [bitext[(start + n) % len(bitext)] for n in range(4)]
            writer.writerow([" ".join(row[side] for row in rows) for side in ("source", "target")])
    done = run_python(ROOT / "trainers" / "ppa.py", path, tmp_path / "out", tiny_encoder_dir, 3)
    assert done.returncode == 0, done.stderr
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").encode("ja").shape == (32,)


def test_the_recipe_is_the_papers_sum():
    recipe = Recipe.load("ppa")
    assert [(term.objective, term.weight) for term in recipe.terms] == [("moco", 1.0), ("tlm", 1.0)]
    assert recipe.max_length == 128


def test_the_papers_cleaning_can_be_asked_for():
    from metaphrase.training.configuration import CLEANINGS

    assert CLEANINGS["ppa"] == Cleaning.ppa()
