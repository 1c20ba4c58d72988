import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import CNN, Dense, Pooling, WeightedLayerPooling
from tokenizers import models
from transformers import BertConfig, BertModel

from metaphrase.corpus.parallel import load_parallel_folder
from metaphrase.encoders.loading import freeze_word_embeddings, load_encoder
from metaphrase.encoders.reduction import prune_layers
from metaphrase.evaluation.retrieval import evaluate_retrieval
from metaphrase.exceptions import CheckpointError, MissingFileError, ModelError, RecipeError, UsageError
from metaphrase.io.files import DEMO
from metaphrase.modeling.collator import ParallelCollator
from metaphrase.modeling.encoding import encode_views
from metaphrase.modeling.frozen import FrozenEncoder
from metaphrase.objectives import OBJECTIVES, Objective
from metaphrase.objectives.anchor import anchor, interpolated_anchor
from metaphrase.training.arguments import AlignmentTrainingArguments
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from metaphrase.training.trainer import AlignmentTrainer
from tests.conftest import as_sentence_transformer, shape, wordpiece
from tests.oracles import assert_equal_gradients


def moved(loss):
    """The encoder after a step in some direction."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in loss.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return loss


def encoded_alone(model, text):
    """Encode one sentence, without padding."""
    features = dict(model.preprocess([text]))
    output = model({key: value[:, :24] if torch.is_tensor(value) else value for key, value in features.items()})
    return output["sentence_embedding"][0], output["token_embeddings"][0]


def trainer_of(model, loss, rows, folder, **settings):
    settings = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 8, **settings}
    args = AlignmentTrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **settings
    )
    return AlignmentTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss)


def distance(now, then):
    return (now / now.norm() - then / then.norm()).pow(2).sum()


def anchor_loop(model, original, rows, sides, level):
    """Sentence by sentence, and token by token."""
    total = 0
    for row in rows:
        now = {side: encoded_alone(model, row[side]) for side in ("source", "target")}
        with torch.no_grad():
            then = {side: encoded_alone(original, row[side]) for side in ("source", "target")}
        if sides == "interpolated":
            means = [sum(one[side][0] / one[side][0].norm() for side in one) / 2 for one in (now, then)]
            total = total + distance(*means)
            continue
        chosen = ("source", "target") if sides == "both" else (sides,)
        for side in chosen:
            if level == "sentence":
                total = total + distance(now[side][0], then[side][0]) / len(chosen)
                continue
            tokens = list(zip(now[side][1], then[side][1], strict=True))
            total = total + sum(distance(*token) for token in tokens) / len(tokens) / len(chosen)
    return total / len(rows)


@pytest.mark.parametrize(
    ("sides", "level", "pooling"),
    [
        ("target", "sentence", "cls"),
        ("both", "sentence", "mean"),
        ("source", "sentence", "max"),
        ("interpolated", "sentence", "mean"),
        ("target", "tokens", "mean"),
        ("both", "tokens", "cls"),
    ],
)
def test_matches_loop(make_loss, batch_of, bitext, tiny_encoder, sides, level, pooling):
    tiny_encoder[1].pooling_mode = pooling
    original = copy.deepcopy(tiny_encoder).double().eval()
    loss = moved(make_loss("anchor", sides=sides, level=level))
    rows = bitext[:5]
    views = {name: view for name, view in batch_of(loss, rows).items() if isinstance(view, dict)}
    assert views.keys() == {"source", "target"} if sides in ("both", "interpolated") else {sides}
    slow = anchor_loop(loss.model, original, rows, sides, level)
    fast = loss.objectives["anchor"](encode_views(loss.model, views))
    assert_equal_gradients(fast, slow, loss.model)


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory):
    """An encoder whose pieces are characters with other ids, with one layer and mean pooling."""
    torch.manual_seed(3)
    folder, tokenizer = tmp_path_factory.mktemp("teacher"), wordpiece()
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    characters = [piece for piece in reversed(pieces) if len(piece.removeprefix("##")) == 1]
    kept = [piece for piece in pieces if piece in tokenizer.all_special_tokens] + characters
    assert [tokenizer.convert_tokens_to_ids(token) for token in kept[:5]] == [0, 1, 2, 3, 4]
    vocabulary = {piece: at for at, piece in enumerate(kept)}
    tokenizer.backend_tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    BertModel(
        BertConfig(**shape(tokenizer, num_hidden_layers=1, max_position_embeddings=64)), add_pooling_layer=False
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    as_sentence_transformer(folder, "mean").save_pretrained(str(folder))
    return folder


def distance_loop(model, original, rows, args):
    """Equation 1 of Reimers & Gurevych 2020 sentence by sentence, averaged over the sides, with its options."""
    total = 0
    for row in rows:
        for side in ("source", "target") if args["sides"] == "both" else (args["sides"],):
            now = encoded_alone(model, row[side])[0]
            compared = row["target" if args["toward"] == "target" else side]
            then = original.encode([compared], convert_to_tensor=True, show_progress_bar=False)[0].clone()
            if args.get("normalize", True):
                now, then = now / now.norm(), then / then.norm()
            total = total + sum((a - b) ** 2 for a, b in zip(now, then, strict=True)) / (1 + (args["sides"] == "both"))
    return total / len(rows)


@pytest.mark.parametrize("taught", [True, False], ids=["teacher", "original"])
@pytest.mark.parametrize(
    "args",
    [
        {"sides": "both", "toward": "target", "normalize": False},
        {"sides": "source", "toward": "target"},
        {"sides": "both", "toward": "itself"},
    ],
    ids=str,
)
def test_distillation_matches_loop(make_loss, batch_of, bitext, tiny_encoder, teacher_dir, args, taught):
    original = load_encoder(teacher_dir, max_length=40) if taught else copy.deepcopy(tiny_encoder)
    loss = moved(make_loss("anchor", max_length=40, **args, **({"teacher": str(teacher_dir)} if taught else {})))
    views = {name: view for name, view in batch_of(loss, bitext[:5]).items() if isinstance(view, dict)}
    slow = distance_loop(loss.model, original.double().eval(), bitext[:5], args)
    fast = loss.objectives["anchor"](encode_views(loss.model, views))
    assert_equal_gradients(fast, slow, loss.model)


def test_the_recipe_is_the_mse_loss_of_sentence_transformers_times_the_size(tiny_encoder, teacher_dir, bitext):
    rows, (term,) = bitext[:6], Recipe.load("distill").terms
    content = {"name": "one", "terms": [{"objective": "anchor", "args": {**term.args, "teacher": str(teacher_dir)}}]}
    loss = AlignmentLoss(tiny_encoder, Recipe.from_dict(content), max_length=32).eval()
    ours = loss(ParallelCollator(tiny_encoder.tokenizer, loss.views)(rows))["anchor"]
    features = [tiny_encoder.preprocess([row[side] for row in rows]) for side in ("source", "target")]
    labels = load_encoder(teacher_dir).encode([row["target"] for row in rows], convert_to_tensor=True).cpu()
    theirs = MSELoss(tiny_encoder)(features, labels.clone())
    torch.testing.assert_close(ours, theirs * tiny_encoder.get_embedding_dimension())


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(tiny_encoder, teacher_dir, bitext, tmp_path):
    """Its source sentences come nearer to the teacher's embeddings of their translations."""
    terms = [{"objective": "anchor", "args": {**Recipe.load("distill").terms[0].args, "teacher": str(teacher_dir)}}]
    loss = AlignmentLoss(tiny_encoder, Recipe.from_dict({"name": "taught", "terms": terms}), max_length=24)
    assert not any("original" in key for key in loss.state_dict())
    wanted = load_encoder(teacher_dir).encode([row["target"] for row in bitext], convert_to_tensor=True).cpu()
    distances = []
    for trains in (False, True):
        if trains:
            trainer_of(tiny_encoder, loss, bitext, tmp_path, max_steps=30, learning_rate=3e-3).train()
        now = tiny_encoder.encode([row["source"] for row in bitext], convert_to_tensor=True).cpu()
        distances.append(anchor(now, wanted, normalize=False).item())
    assert distances[1] < 0.3 * distances[0]


@pytest.mark.slow
def test_a_student_of_three_layers_learns_from_the_starter(tmp_path):
    student = prune_layers(load_encoder("starter", device="cpu"), [0, 1, 11])
    freeze_word_embeddings(student)
    rows, held_out = (load_parallel_folder(DEMO, ["sw"], split=split)["sw"] for split in ("train", "dev"))
    pairs = [{"source": a, "target": b} for a, b in zip(rows.sources[:320], rows.targets, strict=False)]
    before = evaluate_retrieval(student, {"sw": held_out}, resamples=50).average.score
    loss = AlignmentLoss(student, Recipe.load("distill"), max_length=32)
    settings = {"per_device_train_batch_size": 16, "learning_rate": 1e-4, "save_strategy": "no"}
    trainer_of(student, loss, pairs, tmp_path, max_steps=20, **settings).train()
    assert evaluate_retrieval(student, {"sw": held_out}, resamples=50).average.score > before + 5


def test_a_teacher_that_does_not_fit_is_refused(make_loss, tiny_encoder, teacher_dir, tmp_path):
    tiny_encoder.append(Dense(tiny_encoder.get_embedding_dimension(), 7))
    with pytest.raises(ModelError, match=r"have 32 components, .* have 7\. Choose .*docs/keeping\.md"):
        make_loss("anchor", model=tiny_encoder, teacher=str(teacher_dir))
    with pytest.raises(MissingFileError, match=r"'teacher' of 'anchor' cannot be loaded\. There is no folder"):
        make_loss("anchor", teacher=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"'teacher' of 'anchor' cannot be loaded\. A maximum length of 70 tokens"):
        make_loss("anchor", teacher=str(teacher_dir), max_length=70)
    for args in ({"teacher": "starter"}, {"toward": "target"}, {"normalize": False}):
        with pytest.raises(UsageError, match="apply to the embeddings of single sentences"):
            make_loss("anchor", level="tokens", **args)


@pytest.mark.parametrize("args", [{"sides": "both"}, {"sides": "interpolated"}, {"level": "tokens"}], ids=str)
def test_it_is_zero_at_the_start_of_training(make_loss, batch_of, bitext, args):
    loss = make_loss("anchor", **args)
    assert loss(batch_of(loss, bitext[:4]))["anchor"].item() == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("size", [7, 32])
def test_states_of_tokens_are_compared_behind_the_same_modules(make_loss, batch_of, bitext, tiny_encoder, size):
    dense = Dense(32, size, module_input_name="token_embeddings", module_output_name="token_embeddings")
    model = SentenceTransformer(modules=[tiny_encoder[0], dense, Pooling(size, "mean")], device="cpu")
    loss = make_loss("anchor", model=model, level="tokens")
    assert loss(batch_of(loss, bitext[:4]))["anchor"].item() == pytest.approx(0, abs=1e-20)


def test_length_does_not_count_and_opposites_are_four():
    embedding = torch.randn(3, 5)
    assert anchor(embedding, 7 * embedding).item() == pytest.approx(0, abs=1e-12)
    assert anchor(embedding, -embedding).item() == pytest.approx(4)


def test_it_is_computed_in_float32():
    assert anchor(torch.ones(1, 3).bfloat16(), torch.ones(1, 3).bfloat16()).dtype == torch.float32


def test_frozen_word_embeddings_are_shared_and_trained_ones_copied(tiny_encoder, bitext):
    recipe = Recipe.from_dict({"name": "one", "terms": [{"objective": "anchor"}]})
    for freeze in (False, True):
        if freeze:
            freeze_word_embeddings(tiny_encoder)
        loss = AlignmentLoss(tiny_encoder, recipe)
        original = loss.objectives["anchor"].original.encoder
        table = tiny_encoder[0].auto_model.get_input_embeddings()
        assert (original.get_input_embeddings() is table) == freeze
        assert not any(parameter.requires_grad for parameter in original.parameters())


def test_shared_word_embeddings_that_are_unfrozen_later_are_refused(make_loss, batch_of, bitext, tiny_encoder):
    freeze_word_embeddings(tiny_encoder)
    loss = make_loss("anchor", model=tiny_encoder)
    batch = batch_of(loss, bitext[:3])
    loss(batch)
    loss.model.requires_grad_(True)
    with pytest.raises(UsageError, match="frozen when the loss was built, so the original model shares them"):
        loss(batch)


@pytest.mark.parametrize("kind", ["CNN", "WeightedLayerPooling"])
def test_modules_that_read_padding_or_other_layers_are_refused(make_loss, tiny_encoder, kind):
    module = CNN(32, 32, [3]) if kind == "CNN" else WeightedLayerPooling(32, 2, layer_start=1)
    model = SentenceTransformer(modules=[tiny_encoder[0], module, Pooling(32, "mean")], device="cpu")
    with pytest.raises(ModelError, match=f"but its module {kind} reads more"):
        make_loss("anchor", model=model)
    make_loss("tr", model=model)


def test_a_loss_is_saved_without_the_encodings_of_its_original(make_loss, batch_of, bitext, tmp_path):
    loss = moved(make_loss("anchor"))
    batch = batch_of(loss, bitext[:3])
    value = loss(batch)["anchor"]
    torch.save(loss, tmp_path / "loss.pt")
    again = torch.load(tmp_path / "loss.pt", weights_only=False)(batch)["anchor"]
    torch.testing.assert_close(again, value)


def test_the_interpolated_pair_stays_while_its_sides_meet():
    source, target = torch.eye(2)
    middle = source + target
    assert interpolated_anchor(middle[None], middle[None], (source[None], target[None])).item() == pytest.approx(0)
    assert anchor(middle[None], source[None]).item() > 0.5


def test_a_projection_of_the_model_belongs_to_the_original(tiny_encoder, make_loss, batch_of, bitext):
    size = tiny_encoder.get_embedding_dimension()
    tiny_encoder.append(Dense(size, 7, bias=False))
    loss = make_loss("anchor", model=tiny_encoder, sides="both")
    assert loss(batch_of(loss, bitext[:4]))["anchor"].item() == pytest.approx(0, abs=1e-20)


def test_unknown_sides_and_interpolated_tokens_are_refused(make_loss):
    with pytest.raises(RecipeError, match="is 'neither'"):
        make_loss("anchor", sides="neither")
    with pytest.raises(UsageError, match="'level: tokens' does not have"):
        make_loss("anchor", sides="interpolated", level="tokens")


def test_objectives_share_one_original_which_encodes_a_view_once(tiny_encoder, batch_of, bitext):
    terms = [{"objective": "anchor", "args": {"sides": "both"}}, {"objective": "similarity-preservation"}]
    loss = AlignmentLoss(tiny_encoder, Recipe.from_dict({"name": "two", "terms": terms}), max_length=24)
    first, second = (objective.original for objective in loss.objectives.values())
    assert first is second
    calls = []
    first.encoder.register_forward_hook(lambda *args: calls.append(1))
    for step in (1, 2):
        batch = batch_of(loss, bitext[:4])
        loss(batch)
        assert len(calls) == 2 * step
    del batch
    assert not len(first._encoded)


@pytest.mark.long
def test_it_keeps_the_model_in_place_and_is_neither_saved_nor_trained(tiny_encoder, bitext, tmp_path):
    recipe = {"name": "held", "terms": [{"objective": "tr"}, {"objective": "anchor", "weight": 100.0}]}
    texts = [row["target"] for row in bitext]
    start = tiny_encoder.encode(texts, convert_to_tensor=True)
    distances = {}
    for name, terms in (("free", recipe["terms"][:1]), ("held", recipe["terms"])):
        model = copy.deepcopy(tiny_encoder)
        loss = AlignmentLoss(model, Recipe.from_dict({"name": name, "terms": terms}), max_length=24)
        assert not any("original" in key for key in loss.state_dict())
        trainer_of(model, loss, bitext, tmp_path / name, learning_rate=3e-3, lr_scheduler_type="constant").train()
        distances[name] = anchor(model.encode(texts, convert_to_tensor=True), start).item()
    assert distances["held"] < 0.5 * distances["free"]


@pytest.mark.long
@pytest.mark.parametrize("taught", [False, True], ids=["original", "teacher"])
def test_a_resumed_run_is_anchored_to_the_original_start(tiny_encoder, teacher_dir, bitext, tmp_path, taught):
    ends, args = [], {"teacher": str(teacher_dir), "toward": "target"} if taught else {}
    for stop in (None, 4):
        model = copy.deepcopy(tiny_encoder)
        torch.manual_seed(0)

        def train(resume, model=model, stop=stop):
            terms = [{"objective": "tr"}, {"objective": "anchor", "args": args}]
            loss = AlignmentLoss(model, Recipe.from_dict({"name": "held", "terms": terms}), max_length=24)
            trainer_of(model, loss, bitext, tmp_path / str(stop), learning_rate=1e-3).train(
                resume_from_checkpoint=resume
            )

        train(None if stop is None else str(tmp_path / "None" / "checkpoint-4"))
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


def _other_weights(folder):
    state = load_file(folder / "model.safetensors")
    state["encoder.layer.0.output.dense.bias"] += 1e-3
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _other_pooling(folder):
    Pooling(32, pooling_mode="cls").save(str(folder / "1_Pooling"))


def _other_normaliser(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": None}))


@pytest.mark.parametrize("change", [_other_weights, _other_pooling, _other_normaliser])
def test_a_run_is_not_resumed_with_another_teacher(tiny_encoder, teacher_dir, bitext, tmp_path, fault, change):
    folder = Path(shutil.copytree(teacher_dir, tmp_path / "my-teacher"))
    terms = [{"objective": "anchor", "args": {"teacher": str(folder), "toward": "target"}}]
    recipe = Recipe.from_dict({"name": "taught", "terms": terms})

    def make_trainer(**options):
        loss = AlignmentLoss(copy.deepcopy(tiny_encoder), recipe, max_length=24)
        return trainer_of(loss.model, loss, bitext, tmp_path / "run", max_steps=1, save_steps=1, **options)

    make_trainer().train()
    make_trainer().verify_checkpoint(True)
    change(folder)
    differs = rf'belongs to another run, which differs in: anchor\.teacher {folder} \("\w+" → "\w+"\)\. Restore'
    with pytest.raises(CheckpointError, match=differs):
        make_trainer().verify_checkpoint(True)
    make_trainer(allow_changes=True).verify_checkpoint(True)
    fault("A5", "resumed with another teacher", tried=1, survived=1)


def test_a_run_is_not_resumed_from_another_original_encoder(tiny_encoder, bitext, tmp_path, fault):
    def trainer_from(encoder):
        loss = AlignmentLoss(copy.deepcopy(encoder), Recipe.load("metaphrase"), max_length=24)
        return trainer_of(loss.model, loss, bitext, tmp_path, max_steps=1, save_steps=1)

    trainer = trainer_from(tiny_encoder)
    trainer.train()
    trainer_from(tiny_encoder).verify_checkpoint(True)
    with pytest.raises(CheckpointError, match=r'differs in: anchor\.original_encoder \("\w+" → "\w+"\)\. Restore'):
        trainer_from(trainer.model).verify_checkpoint(True)
    fault("A5", "resumed from other weights of the original encoder", tried=1, survived=1)


def test_the_digests_of_objectives_are_kept_apart(tiny_encoder, bitext, tmp_path, monkeypatch):
    class Reading(Objective):
        name, granularity, version = "reading", "sentence", "of the first of January"

        def digests(self):
            return {"original_encoder": self.version, "seed": "x"}

        def forward(self, encodings):
            return encodings["source"].sentence_bh.square().mean()

    def trainer():
        recipe = Recipe.from_dict({"name": "own", "terms": [{"objective": "anchor"}, {"objective": "reading"}]})
        loss = AlignmentLoss(copy.deepcopy(tiny_encoder), recipe, max_length=24)
        return trainer_of(loss.model, loss, bitext, tmp_path, max_steps=1, save_steps=1)

    monkeypatch.setitem(OBJECTIVES, "reading", Reading)
    trainer().train()
    run = json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text(encoding="utf-8"))["run"]
    assert {"seed", "anchor.original_encoder", "reading.original_encoder", "reading.seed"} < run.keys()
    monkeypatch.setattr(Reading, "version", "of the first of January, later")
    with pytest.raises(CheckpointError, match=r'differs in: reading\.original_encoder \("\w+" → "\w+"\)\. Restore'):
        trainer().verify_checkpoint(True)


def test_the_original_encoder_has_no_dropout(tiny_encoder):
    tiny_encoder.train()
    modules = tuple(tiny_encoder.children())
    original = FrozenEncoder.copy_of(modules[0].auto_model, modules[1:])
    assert not any(module.training for part in (original.encoder, original.modules) for module in part.modules())
