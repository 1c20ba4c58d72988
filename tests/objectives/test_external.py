"""Objectives of other packages: as `package.module:Class`, by an entry point, and set in a notebook."""

import importlib
import json
import linecache
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from metaphrase.cli import main
from metaphrase.corpus.loading import Corpus
from metaphrase.corpus.report import CorpusReport
from metaphrase.exceptions import ModelError, RecipeError, UsageError
from metaphrase.io.arguments import OwnTemperature
from metaphrase.objectives import OBJECTIVES
from metaphrase.objectives.base import Objective, check_unused, code_digest
from metaphrase.objectives.masked_language_modeling import MaskedLanguageModeling
from metaphrase.objectives.registry import Objectives
from metaphrase.training.heads import AlignmentHeads
from metaphrase.training.loss import build_loss
from metaphrase.training.recipe import Recipe

MODULE = '''
from dataclasses import dataclass
import torch
from torch import nn
from metaphrase.modeling.views import View, source_view, target_view
from metaphrase.objectives.base import Objective


@dataclass(frozen=True)
class Lengths(View):
    """The numbers of pieces of both sides; nothing to encode."""

    max_length: int

    def build(self, batch, rngs):
        lengths = [[len(ids) for ids in batch.pieces(side, self.max_length)] for side in ("source", "target")]
        return {"lengths": torch.tensor(lengths, dtype=torch.float32).T}


class Distance(Objective):
    """Mean squared distance after a projection, weighted by lengths."""

    name = "projected-distance"
    granularity = "sentence"

    def __init__(self, *, max_length: int = 32, power: int = 2, scale: float | None = None):
        super().__init__(max_length=max_length)
        self.power, self.scale = power, scale or 1.0

    def views(self):
        return source_view(self.max_length), target_view(self.max_length), Lengths("lengths", self.max_length)

    def make_head(self, config, **settings):
        return nn.Linear(config.hidden_size, settings["size"])

    def head_settings(self, sources):
        return {"size": 8}

    def forward(self, encodings):
        source_bh, target_bh = (self.head(encodings[side].sentence_bh) for side in ("source", "target"))
        lengths_b2 = encodings["lengths"].features["lengths"]
        weights_b = lengths_b2.amin(dim=1) / lengths_b2.amax(dim=1)
        return self.scale * ((source_bh - target_bh).abs() ** self.power).mean(dim=1) @ weights_b / len(weights_b)


class Abstract(Objective):
    name, granularity = "abstract", "sentence"


class Coarse(Distance):
    granularity = "page"


class Dotted(Distance):
    name = "my.distance"


class Logged(Distance):
    name = "eval_distance"


@dataclass
class Comparable(Objective):
    name, granularity = "comparable", "sentence"

    def forward(self, encodings):
        return encodings["source"].sentence_bh.mean()


class Unlimited(Distance):
    def __init__(self, *, power: int = 2):
        super().__init__(power=power)


class Unreduced(Distance):
    def forward(self, encodings):
        return encodings["source"].sentence_bh.sum(dim=1)


class Nothing(Distance):
    def forward(self, encodings):
        pass


class Detached(Distance):
    def forward(self, encodings):
        return encodings["source"].sentence_bh.detach().mean()


class Cut(Distance):
    def forward(self, encodings):
        return encodings["source"].sentence_bh.detach().mean().requires_grad_()


class Complex(Distance):
    def forward(self, encodings):
        return encodings["source"].sentence_bh.mean() * 1j


class Viewless(Distance):
    def views(self):
        return source_view(self.max_length)


class Uncounted(Distance):
    def digests(self):
        return {"words": 3}


class Reserved(Distance):
    name = "double"


class Uninitialised(Distance):
    def __init__(self, *, max_length: int = 32):
        self.power = 2


class Stateful(Distance):
    def __init__(self, *, max_length: int = 32):
        super().__init__(max_length=max_length)
        self.projection = nn.Linear(4, 4)
'''


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A folder on the path of Python with a package of its own."""
    folder = tmp_path / "site"
    (folder / "outside").mkdir(parents=True)
    (folder / "outside" / "__init__.py").touch()
    (folder / "outside" / "losses.py").write_text(MODULE)
    (folder / "outside" / "broken.py").write_text("class (")
    (folder / "outside" / "needy.py").write_text("import nowhere")
    (folder / "outside" / "script.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "outside"]:
        del sys.modules[name]


def write_recipe(path: Path, objective: str, **args) -> Path:
    terms = [{"objective": "tr"}, {"objective": objective, "weight": 0.5, "args": args}]
    path.write_text(json.dumps({"name": "external", "terms": terms}))
    return path


@pytest.mark.long
def test_a_recipe_trains_and_resumes_a_class_of_another_package(package, tiny_encoder_dir, bitext_path, tmp_path):
    recipe, output = write_recipe(tmp_path / "mine.yaml", "outside.losses:Distance", power=1), tmp_path / "out"
    command = ["train", "--model", str(tiny_encoder_dir), "--corpus", str(bitext_path), "--languages", "de"]
    command += ["--recipe", str(recipe), "--output_dir", str(output), "--use_cpu", "--report_to", "none"]
    command += ["--per_device_train_batch_size", "8", "--retention", "none", "--logging_steps", "1"]
    assert main([*command, "--max_steps", "2"]) == 0
    logs = json.loads((output / "run.json").read_text())["log_history"]
    assert any(log.get("projected-distance", 0) > 0 for log in logs)
    assert main([*command, "--max_steps", "3", "--allow_changes", "true", "--resume_from_checkpoint", "true"]) == 0
    heads = AlignmentHeads.from_pretrained(output / "checkpoint-3" / "heads")
    assert heads.heads["projected-distance"].weight.shape == (8, 32)
    saved = heads.config.objectives["projected-distance"]
    assert saved["objective"] == "outside.losses:Distance"
    assert saved["args"]["power"] == 1
    assert "outside.losses:Distance" in (output / "README.md").read_text(encoding="utf-8")


def test_a_run_does_not_resume_with_other_code_of_an_objective(
    package, tiny_encoder_dir, bitext_path, tmp_path, capsys
):
    losses, output = package / "outside" / "losses.py", tmp_path / "out"
    recipe = write_recipe(tmp_path / "mine.yaml", "outside.losses:Distance")
    command = ["train", "--model", str(tiny_encoder_dir), "--corpus", str(bitext_path), "--languages", "de"]
    command += ["--recipe", str(recipe), "--output_dir", str(output), "--use_cpu", "--report_to", "none"]
    command += ["--per_device_train_batch_size", "8", "--retention", "none", "--resume_from_checkpoint", "true"]
    assert main([*command, "--max_steps", "1"]) == 0
    code = json.loads((output / "run.json").read_text())["objective_code"]
    assert list(code) == ["projected-distance"]
    losses.write_text(MODULE.replace("lengths_b2.amax(dim=1)", "lengths_b2.sum(dim=1)"))
    linecache.clearcache()
    importlib.reload(sys.modules["outside.losses"])
    capsys.readouterr()
    assert main([*command, "--max_steps", "2"]) == 2
    assert "differs in: projected-distance.code (" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--max_steps", "2", "--allow_changes"]) == 0
    assert json.loads((output / "run.json").read_text())["objective_code"] != code


HELPED = """
def helped(loss):
    return loss * 1  # of a sum

class Helped(Distance):
    def forward(self, encodings):
        return helped(super().forward(encodings))
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return helped(", "return 2 * helped(", True),
        ("return self.scale", "return 2 * self.scale", True),  # of the base class
        ("len(ids)", "len(ids) - 2", True),  # of a view
        ("loss * 1", "loss * 2", True),  # of a function
        ("of a sum", "of a mean", False),
    ],
)
def test_the_code_of_an_objective_is_its_module_without_comments(package, old, new, changed):
    def digest(text):
        (package / "outside" / "losses.py").write_text(text)
        linecache.clearcache()
        return code_digest(importlib.reload(importlib.import_module("outside.losses")).Helped)

    text = MODULE + HELPED
    assert text.replace(old, new) != text
    assert (digest(text) != digest(text.replace(old, new))) == changed


def test_code_without_a_source_has_no_digest(package):
    from outside.losses import Distance

    scope = {"Distance": Distance, "__name__": "__main__"}
    exec("class Typed(Distance):\n    pass\n", scope)
    assert code_digest(scope["Typed"]) is None
    assert code_digest(OBJECTIVES["tr"]) is None
    assert code_digest(Distance) is not None


@pytest.mark.slow
def test_an_installed_package_adds_an_objective(package, tmp_path):
    information = package / "outside-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[metaphrase.objectives]\nprojected-distance = outside.losses:Distance\nwrong = outside.losses:Distance\n"
    )
    code = f"""
    import sys
    from metaphrase import OBJECTIVES, Recipe
    assert "projected-distance" in OBJECTIVES and "projected-distance" in list(OBJECTIVES)
    assert "torch" not in sys.modules and "outside" not in sys.modules
    recipe = Recipe.load({str(write_recipe(tmp_path / "named.yaml", "projected-distance", power=3))!r})
    assert recipe.objectives()["projected-distance"].power == 3
    try:
        OBJECTIVES["wrong"]
    except ValueError as error:
        assert "whose name is 'projected-distance'" in str(error)
    """
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("objective", "args", "message"),
    [
        (
            "outside.losses:Distance",
            {"pwoer": 1},
            "'pwoer' in the args of 'outside.losses:Distance'.*did you mean 'power'",
        ),
        ("outside.losses:Distance", {"power": "two"}, r"1:\d+: 'power' in .* must be a whole number, but is 'two'"),
        ("outside.losses:Distance", {"scale": "x"}, "must be a number, but is 'x'"),
        ("outside.losses:Distanse", {}, r"outside\.losses has no 'Distanse' \(did you mean 'Distance'\?\)\."),
        ("json:dumps", {}, "is not an objective: it must be a subclass of metaphrase.Objective"),
        ("nowhere.losses:Distance", {}, "cannot be imported: No module named 'nowhere'. Install its package"),
        ("outside.lost:Distance", {}, "cannot be imported: No module named 'outside.lost'. Install its package"),
        ("outside.broken:Distance", {}, r"outside\.broken raises SyntaxError: invalid syntax .*\. Correct it"),
        (
            "outside.needy:Distance",
            {},
            r"outside\.needy raises ModuleNotFoundError: No module named 'nowhere'\. Correct it",
        ),
        ("outside.script:Distance", {}, r"outside\.script raises SystemExit: 1\. Correct it"),
        ("outside.losses:Abstract", {}, "lacks the method forward"),
        ("outside.losses:Coarse", {}, "'granularity' of .* must be one of 'sentence', .* but is 'page'"),
        ("outside.losses:Dotted", {}, "has the name 'my.distance'. Use a name without dots"),
        ("outside.losses:Unlimited", {}, "has no argument 'max_length'"),
        ("outside.losses:Reserved", {}, "has the name 'double', which torch reserves"),
        ("outside.losses:Logged", {}, "has the name 'eval_distance', which is a key of the trainer's log"),
        ("outside.losses:Comparable", {}, r"cannot be hashed, .* Decorate it with @dataclass\(eq=False, repr=False"),
    ],
)
def test_wrong_references_and_arguments_are_reported(package, tmp_path, objective, args, message):
    recipe = Recipe.load(write_recipe(tmp_path / "mine.yaml", objective, **args))
    with pytest.raises(RecipeError, match=message):
        recipe.check()


@pytest.mark.parametrize(
    ("name", "found"),
    [("Unreduced", r"a tensor of shape \(3,\)"), ("Nothing", "None"), ("Complex", r".* torch\.complex128")],
)
def test_a_loss_is_a_scalar(package, make_loss, batch_of, bitext, name, found):
    loss = make_loss(f"outside.losses:{name}")
    with pytest.raises(RecipeError, match=f"'projected-distance' must be a real-valued scalar tensor, but is {found}"):
        loss(batch_of(loss, bitext[:3]))


@pytest.mark.parametrize("name", ["Detached", "Cut"])
def test_a_loss_has_a_gradient(package, make_loss, batch_of, bitext, name):
    loss = make_loss(f"outside.losses:{name}")
    batch = batch_of(loss, bitext[:3])
    with pytest.raises(RecipeError, match="'projected-distance' has no gradient, so the objective has no effect"):
        loss(batch)
    with torch.no_grad():
        loss(batch)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Uninitialised", r"does not initialise its base class. Call super\(\).__init__\(max_length=max_length\)"),
        ("Stateful", r"outside of its head \(projection.weight, projection.bias\).* Create them in make_head"),
        (
            "Viewless",
            r"views\(\) of the objective 'projected-distance' must return a list or tuple of views, but returns",
        ),
        (
            "Uncounted",
            r"digests\(\) of the objective 'projected-distance' must return a dict.*, but returns {'words': 3}",
        ),
    ],
)
def test_classes_that_cannot_be_trained_are_refused(package, make_loss, name, message):
    with pytest.raises(RecipeError, match=message):
        assert make_loss(f"outside.losses:{name}").digests


def test_a_wrong_argument_is_reported_before_the_encoder_is_loaded(tmp_path, bitext_path, capsys):
    recipe = write_recipe(tmp_path / "mine.yaml", "rtl", layers="two")
    command = ["train", "--model", str(tmp_path / "nowhere"), "--corpus", str(bitext_path), "--recipe", str(recipe)]
    assert main([*command, "--languages", "de", "--output_dir", str(tmp_path / "out"), "--report_to", "none"]) == 2
    assert "'layers' in the args of 'rtl' in recipe 'external' must be a whole number" in capsys.readouterr().err


def test_a_class_is_named_as_its_key(package):
    from outside.losses import Distance

    objectives = Objectives({})
    with pytest.raises(ValueError, match="has the name 'projected-distance'"):
        objectives["distance"] = Distance
    with pytest.raises(RecipeError, match="int is not an objective"):
        objectives["distance"] = int
    objectives["projected-distance"] = Distance
    assert objectives["projected-distance"] is objectives["outside.losses:Distance"] is Distance
    assert list(objectives) == ["projected-distance"]
    assert objectives.granularity("projected-distance") == "sentence"
    with pytest.raises(KeyError):
        objectives["nothing"]


def test_a_class_that_is_reloaded_replaces_the_old_one(package):
    recipe = Recipe.from_dict({"name": "own", "terms": [{"objective": "outside.losses:Distance"}]})
    old = recipe.objectives()["projected-distance"]
    (package / "outside" / "losses.py").write_text(MODULE.replace("power: int = 2", "power: int = 11"))
    importlib.reload(sys.modules["outside.losses"])
    assert (old.power, recipe.objectives()["projected-distance"].power) == (2, 11)


def test_one_class_under_two_keys_is_refused(package, monkeypatch):
    from outside.losses import Distance

    monkeypatch.setitem(OBJECTIVES, "projected-distance", Distance)
    terms = [{"objective": "projected-distance"}, {"objective": "outside.losses:Distance"}]
    with pytest.raises(RecipeError, match="names projected-distance twice"):
        Recipe.from_dict({"name": "twice", "terms": terms}).check()


def test_heads_of_an_unknown_objective_are_explained(package, tiny_encoder, tmp_path, monkeypatch):
    from outside.losses import Distance

    from metaphrase.training.loss import AlignmentLoss

    with monkeypatch.context() as notebook:
        notebook.setitem(OBJECTIVES, "projected-distance", Distance)
        terms = [{"objective": "projected-distance"}]
        loss = AlignmentLoss(tiny_encoder, Recipe.from_dict({"name": "notebook", "terms": terms}))
        loss.heads.save_pretrained(tmp_path / "heads")
        assert "objective" not in loss.heads.config.objectives["projected-distance"]
    with pytest.raises(ModelError, match="unknown objective 'projected-distance'"):
        AlignmentHeads.from_pretrained(tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    config["objectives"]["projected-distance"]["objective"] = "no_such_package.losses:Distance"
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="unknown objective 'projected-distance'"):
        AlignmentHeads.from_pretrained(tmp_path / "heads")


def test_an_objective_with_a_head_reads_files_of_the_home_folder(make_loss, tmp_path, monkeypatch):
    """The configuration of the heads does not reveal the folder, but the objective reads its argument as it is given."""
    monkeypatch.setenv("HOME", str(tmp_path))

    class Reading(Objective):
        name, granularity = "reading", "sentence"

        def __init__(self, *, max_length: int = 32, path: str = "", temperature: OwnTemperature = 0.25):
            super().__init__(max_length=max_length)
            self.text, self.temperature = Path(path).read_text(encoding="utf-8"), temperature

        def make_head(self, config, **settings):
            return torch.nn.Linear(config.hidden_size, len(self.text))

        def forward(self, encodings):
            return self.head(encodings["source"].sentence_bh).square().mean()

    monkeypatch.setitem(OBJECTIVES, "reading", Reading)
    (tmp_path / "words.txt").write_text("abc", encoding="utf-8")
    loss = make_loss("reading", path=str(tmp_path / "words.txt"), temperature="auto")
    assert loss.objectives["reading"].temperature == 0.25  # the default: that of the encoder is unknown
    loss.heads.save_pretrained(tmp_path / "heads")
    assert str(tmp_path) not in (tmp_path / "heads" / "config.json").read_text(encoding="utf-8")
    assert AlignmentHeads.from_pretrained(tmp_path / "heads").heads["reading"].out_features == 3


def test_the_temperature_of_an_unknown_encoder_needs_a_default(make_loss, monkeypatch):
    class Tempered(Objective):
        name, granularity = "tempered", "sentence"

        def __init__(self, *, max_length: int = 32, temperature: OwnTemperature = "auto"):
            super().__init__(max_length=max_length)
            self.temperature = temperature

        def forward(self, encodings):
            return encodings["source"].sentence_bh.sum() / self.temperature

    class Untempered(Tempered):
        def __init__(self, *, max_length: int = 32):
            super().__init__(max_length=max_length)

    for cls in (Tempered, Untempered):
        monkeypatch.setitem(OBJECTIVES, "tempered", cls)
        with pytest.raises(UsageError, match=r"'temperature' of 'tempered' is 'auto', .* Set it to a number"):
            make_loss("tempered")
    monkeypatch.setitem(OBJECTIVES, "tempered", Tempered)
    assert make_loss("tempered", temperature=0.5).objectives["tempered"].temperature == 0.5
    monkeypatch.setattr("metaphrase.objectives.base.own_temperature", lambda *known: 0.02)
    assert make_loss("tempered").objectives["tempered"].temperature == 0.02
    check_unused(Tempered(), ("temperature",), "kind: soft")
    with pytest.raises(
        UsageError, match=r"'temperature' of 'tempered' is 0\.5, but has an effect only with 'kind: soft'"
    ):
        check_unused(Tempered(temperature=0.5), ("temperature",), "kind: soft")


def test_the_english_vocabulary_of_an_own_objective_is_that_of_the_corpus(tiny_encoder, bitext, monkeypatch):
    """Also if it is the default, and with settings of the head that have the name of another head's part."""

    class Predicting(MaskedLanguageModeling):
        name = "predicting"

        def __init__(self, *, max_length: int = 32, vocabulary: str = "english"):
            super().__init__(max_length=max_length)
            self.vocabulary = vocabulary

    class Counting(Objective):
        name, granularity = "counting", "sentence"

        def head_settings(self, sources):
            return {"vocabulary": ["a", "b"]}

        def make_head(self, config, **settings):
            return torch.nn.Linear(config.hidden_size, len(settings["vocabulary"]))

        def forward(self, encodings):
            return self.head(encodings["source"].sentence_bh).square().mean()

    for cls in (Predicting, Counting):
        monkeypatch.setitem(OBJECTIVES, cls.name, cls)
    recipe = Recipe.from_dict(
        {"name": "own", "terms": [{"objective": one.name, "args": {}} for one in (Predicting, Counting)]}
    )
    corpus = Corpus(Dataset.from_list([dict(row) for row in bitext]), CorpusReport(), [])
    loss = build_loss(tiny_encoder, recipe, corpus)
    assert loss.transforms() == {"predicting": "fresh"}
    known = {id for row in bitext for id in tiny_encoder.tokenizer(row["target"])["input_ids"]}
    assert known <= set(loss.objectives["predicting"].head.ids_v.tolist())
