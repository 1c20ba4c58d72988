"""The code of README and docs/ works: Python runs, commands parse and run, quoted messages and files exist.

Python snippets run in the fast lane. Commands are parsed there by their own parsers, and run in the slow lane with a tiny
encoder as the starter, a local Hub, and small files with the names that the pages use. Walk-throughs run as a whole: files,
Python, and every line of the shell, in a clone of this repository.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer

import metaphrase.encoders.starter
from metaphrase.cli import COMMANDS, main
from metaphrase.io.files import PACKAGED_DATA
from metaphrase.objectives import OBJECTIVES, Objective
from metaphrase.publishing.release import release
from metaphrase.training.loss import AlignmentLoss
from metaphrase.training.recipe import Recipe
from tests.hub_server import Hub, reach, serve_hub

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "RELEASING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA = PACKAGED_DATA

# huggingface_hub hands httpx2 a stream as `data` where `content` is wanted by now.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

#: Lines that are neither run nor parsed by metaphrase, with the reason.
ELSEWHERE = {
    r"(git|cd|cp|rm|export|source|\.venv/bin/python -m twine) ": "is part of a walk-through, which runs as a whole",
    r"python -m venv ": "creates an environment",
    r"pip install ": "installs; its extras are checked",
    r"docker ": "needs Docker; `docs/install.md` and the Dockerfile name the same commands",
    r"make ": "its target is checked; the programs it runs have their own tests",
    r"torchrun ": "needs several GPUs; its options are parsed, and tests/training runs two processes",
}

#: Commands that are parsed but not run, with the reason.
PARSED_ONLY = {
    r"--suite all": "fine-tunes for minutes; tests/evaluation and tests/cli/test_evaluate.py run its parts",
    r"metaphrase compare": "reads finished runs; tests/publishing/test_run_comparison.py runs it",
    r"--executor": "other processes load the real starter; tests/mining/test_engine.py and test_ray.py run it",
    r"--model out/aligner": "scripts/train_aligner.py trains the encoder; tests/cli/test_align.py aligns by embeddings",
    r"scripts/release\.py": "trains for minutes; tests/scripts/test_release.py runs it",
    r"scripts/ablations\.py": "trains for days; tests/scripts/test_ablations.py runs it",
    r"scripts/evidence\.py": "trains for days; tests/scripts/test_evidence.py runs it",
}

#: Options that a fine-tuning program requires in addition to a settings file.
NEEDED_BY_FINETUNING = ["--model", "my-encoder", "--output_dir", "out/finetuned"]

#: Pages that a user follows from the first line to the last: practitioner, researcher, maintainer.
WALK_THROUGHS = [ROOT / "docs" / "my-language.md", ROOT / "docs" / "adding-an-objective.md", ROOT / "RELEASING.md"]

#: Languages of code fences that are not run: output, drawings and references. YAML is loaded as a recipe.
SHOWN = {"", "text", "yaml", "bibtex", "toml", "diff"}

#: Appended to the options of a page, and taking precedence over them.
SMALL_TRAINING = [
    "--max_steps",
    "2",
    "--per_device_train_batch_size",
    "8",
    "--max_length",
    "24",
    "--logging_steps",
    "1",
]
SMALL = {
    "adapt": ["--minutes", "0.02"],
    "demo": [*SMALL_TRAINING, "--languages", "sw", "fi", "--report_to", "none", "--use_cpu"],
    "train": [*SMALL_TRAINING, "--report_to", "none", "--use_cpu"],
    "mine": ["--threshold", "0"],
    "evaluate": ["--resamples", "50"],
    "report": ["--resamples", "50"],
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in re.finditer(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^ *```$', text, re.DOTALL | re.MULTILINE):
            yield Block(
                page, text.count("\n", 0, fence.start()) + 2, fence[2], textwrap.dedent(fence[4]), fence[3] or ""
            )


BLOCKS = list(blocks())


@dataclass(frozen=True)
class Command:
    """A line of a bash block: its words, its input and its output."""

    block: Block
    line: str

    def __str__(self) -> str:
        return f"{self.block.page.stem}: {self.line}"[:110]

    @property
    def words(self) -> list[str]:
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars="<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        return [word for word in lexer if not re.fullmatch(r"[A-Z_]+=.*|…", word)]

    def redirected(self, sign: str) -> str | None:
        words = self.words
        return words[words.index(sign) + 1] if sign in words else None

    @property
    def bare(self) -> list[str]:
        words = self.words
        for sign in "<>":
            if sign in words:
                at = words.index(sign)
                del words[at : at + 2]
        return words

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of ``metaphrase``."""
        words = self.bare
        if words[0] == "metaphrase":
            return words[1:]
        return ["train", *words[words.index("trainers/train.py") + 1 :]]

    @property
    def is_ours(self) -> bool:
        return self.bare[:1] == ["metaphrase"] or "trainers/train.py" in self.bare

    @property
    def is_script(self) -> bool:
        return re.match(r"python (scripts|trainers)/", " ".join(self.bare)) is not None and not self.is_ours


def commands() -> Iterator[Command]:
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                for part in line.split(" && "):
                    if part.strip() and not part.strip().startswith("#"):
                        yield Command(block, " ".join(part.split()))


LINES = list(commands())
OURS = [line for line in LINES if line.is_ours]
PLAIN = ("--help", "--version")


def listed(line: Command, table: dict[str, str], match=re.search) -> bool:
    return any(match(pattern, line.line) for pattern in table)


# ----------------------------------------------------------------------------------------------------------- the fixture


def lines_of(language: str, count: int, split: str = "train") -> list[str]:
    content = gzip.decompress((DATA / "demo" / f"{language}-en.{split}.tsv.gz").read_bytes()).decode()
    return ["\t".join(line.split("\t")[:2]) for line in content.split("\n")[1 : count + 1]]


def write(path: Path, lines: list[str], header: str = "source\ttarget") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = ("\n".join([*([header] if header else []), *lines]) + "\n").encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory, tiny_encoder_dir) -> Path:
    """Write small versions of all files that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    pairs = lines_of("sw", 400)
    for name in ("sw-en.tsv.gz", "my.tsv", "good.tsv.gz"):
        write(folder / name, pairs)
    write(folder / "web.tsv.gz", pairs[:60])
    columns = [f"{pair}\tsw\ten" for pair in pairs[:60]]
    write(folder / "corpus.tsv.gz", columns, "source\ttarget\tsource_lang\ttarget_lang")
    write(folder / "pairs.tsv", pairs[:40])
    for name, side in (("sw.txt", 0), ("en.txt", 1), ("news.sw.gz", 0), ("news.en.gz", 1)):
        write(folder / name, [pair.split("\t")[side] for pair in pairs], "")
    write(folder / "test.eng", ["<s snum=1> the dog sleeps </s>"], "")
    write(folder / "test.hin", ["<s snum=1> der Hund schläft </s>"], "")
    write(folder / "test.eng.hin.wa", ["1 1 1 S", "1 2 2 S", "1 3 3 P"], "")
    write(
        folder / "run.yaml",
        ["recipe: tr", "corpus: my.tsv", "languages: [sw]", "max_steps: 2", "output_dir: out/y"],
        "",
    )
    shutil.copy(ROOT / "src" / "metaphrase" / "recipes" / "dap.yaml", folder / "mine.yaml")
    for block in filter(lambda block: block.title.endswith(".yaml"), BLOCKS):
        (folder / block.title).write_text(block.text, encoding="utf-8")
    for name in ("configs", "scripts", "trainers", "model_cards", "src"):
        (folder / name).symlink_to(ROOT / name)
    encoder = SentenceTransformer(str(tiny_encoder_dir), device="cpu", model_kwargs={"add_pooling_layer": False})
    shutil.copytree(tiny_encoder_dir, folder / "my-encoder")
    shutil.copytree(tiny_encoder_dir, folder / "my-copy")
    shutil.copytree(tiny_encoder_dir, folder / "metaphrase-e5-small")
    recipe = Recipe.load("dap")
    for name in ("runs/demo", "runs/adapt-sw", "runs/miner", "out/sw", "out/dap", "out/short"):
        with torch.no_grad():  # as if it had been trained
            encoder[0].auto_model.encoder.layer[0].output.dense.bias.add_(0.01)
        release(encoder, folder / name, recipe=recipe.to_dict())
        facts = {
            "command": "metaphrase train",
            "model": "starter",
            "base": "starter",
            "settings": {},
            "recipe": recipe.to_dict(),
            "seed": 42,
            "seconds": 1.0,
        }
        facts |= {"files": [{"file": "sw-en.tsv.gz", "languages": ["en", "sw"]}], "corpus": {"languages": {"sw": 400}}}
        (folder / name / "run.json").write_text(json.dumps(facts | {"log_history": []}), encoding="utf-8")
    for name in ("my-test-sets", "my-dev-sets", "my-benchmarks/udhr", "runs/adapt-sw/data/held-out"):
        split = ".test" if "held-out" in name else ""
        write(folder / name / f"sw-en{split}.tsv.gz", lines_of("sw", 30, "test"))
    write(folder / "stsb" / "stsb-sw-dev.csv", [f"{a},{b},{a}.5" for a, b in enumerate("abcdefgh")], "")
    loss = AlignmentLoss(encoder, recipe, max_length=24)
    loss.heads.save_pretrained(folder / "out" / "dap" / "heads")

    packaged = folder / "packaged"
    for language in ("sw", "fi"):
        for split, count in (("train", 200), ("test", 30), ("dev", 30)):
            write(packaged / "demo" / f"{language}-en.{split}.tsv.gz", lines_of(language, count, split))
    (packaged / "udhr").mkdir()
    for language in ("sw", "fi", "de", "fr"):
        shutil.copy(DATA / "udhr" / f"{language}-en.tsv.gz", packaged / "udhr")
    shutil.copy(DATA / "demo.yaml", packaged)
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as server:
        server.tokens["hf_me"] = {"name": "me", "role": "write", "orgs": []}
        yield server


@pytest.fixture
def starter(monkeypatch, tiny_encoder_dir):
    """Use the tiny encoder as the starter."""
    monkeypatch.setattr(metaphrase.encoders.starter, "starter_path", lambda source="auto": tiny_encoder_dir)


@pytest.fixture
def there(template, starter, monkeypatch) -> Path:
    """Change to the folder with the files, for tests that only read it."""
    monkeypatch.chdir(template)
    return template


@pytest.fixture
def world(template, starter, hub, tmp_path, monkeypatch) -> Path:
    """Change to a copy of the files, with a Hub that has a model for every id that the pages name."""
    folder = Path(shutil.copytree(template, tmp_path / "documented", symlinks=True))
    monkeypatch.chdir(folder)
    reach(hub, monkeypatch.setattr, tmp_path / "client")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    monkeypatch.setattr("metaphrase.training.baseline.UDHR", folder / "packaged" / "udhr")
    hub.repositories.clear()
    released = {
        str(path.relative_to("out/sw")): path.read_bytes() for path in Path("out/sw").rglob("*") if path.is_file()
    }
    for name in ("BAAI/bge-m3", "me/e5-small-swahili"):
        hub.put(name, released)
        hub.repositories["model", name].user = "me"
    for path in (ROOT / "src" / "metaphrase").rglob("*.py"):
        if re.search(r"\bPACKAGED_DATA\b", path.read_text(encoding="utf-8")):
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            monkeypatch.setattr(f"{module}.PACKAGED_DATA", folder / "packaged")
    return folder


# ------------------------------------------------------------------------------------------------------------ every block


def test_there_is_something_to_test():
    assert len([block for block in BLOCKS if block.language == "python"]) >= 10
    assert len(OURS) >= 40


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_of_a_kind_that_is_tested(block):
    assert block.language in {"python", "bash", *SHOWN}


@pytest.mark.parametrize("line", [line for line in LINES if not line.is_ours], ids=str)
def test_every_other_line_is_known(line):
    assert line.is_script or listed(line, ELSEWHERE, re.match), "add a reason to ELSEWHERE"
    if line.bare[0] == "make":
        assert re.search(rf"^{line.bare[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if line.is_script:
        source = (ROOT / line.bare[1]).read_text(encoding="utf-8")
        source += "".join(path.read_text() for path in (ROOT / "src/metaphrase/evaluation/transfer").glob("*.py"))
        flags = [word[2:] for word in line.bare if word.startswith("--") and word not in ("--help", "--config")]
        assert [flag for flag in flags if not re.search(rf"--{flag}\b|^ +{flag}:", source, re.MULTILINE)] == []
    for word in line.bare:
        if extras := re.fullmatch(r"\.\[(.+)\]", word):
            known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(extras[1].split(",")) <= known["optional-dependencies"].keys()


def test_no_reason_is_left_over():
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, line.line) for line in LINES), pattern
    for pattern in PARSED_ONLY:
        assert any(re.search(pattern, line.line) for line in LINES), pattern


def program(*words: str, folder: Path) -> str:
    """Return the output of a program of this repository, run in a new process."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line.is_script], ids=str)
def test_every_other_program_knows_its_options(line, template):
    """Options occur in the printed help, and the settings of a ``--config`` file in the printed configuration."""
    words = [word for word in line.bare[1:] if word != "--help"]
    described = program(words[0], "--help", folder=template)
    flags = {word for word in words if word.startswith("--") and word != "--config"}
    assert [flag for flag in flags if not re.search(rf"{flag}\b", described)] == []
    if "--config" in words and "--print-config" in described:
        given = yaml.safe_load(program(*words, *NEEDED_BY_FINETUNING, "--print-config", folder=template))
        file = yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text(encoding="utf-8"))
        printed = file.keys() & given.keys()  # settings that equal the default are not printed
        assert len(printed) > len(file) / 2
        assert {key: given[key] for key in printed} == {key: file[key] for key in printed}


@pytest.mark.parametrize("line", OURS, ids=str)
def test_every_command_is_understood(line, there, capsys):
    words = line.arguments
    if set(words) & set(PLAIN):
        with contextlib.suppress(SystemExit):
            assert main(words) == 0
        return
    assert words[0] in COMMANDS
    needed = ["--corpus", "my.tsv", "--output_dir", "out/x"] if "torchrun" in line.line else []
    with pytest.raises(SystemExit) as done:
        raise SystemExit(main([*words, *needed, "--print-config"]))
    assert done.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", OURS, ids=str)
def test_what_commands_read_is_there(line, there):
    """Files named in the pages are those of the fixture, so that the slow lane runs the pages as written."""
    page = [other for other in OURS if other.block.page == line.block.page]
    outputs = ("-o", "--output", "--output_dir")
    pairs = [(a, b) for other in page for a, b in itertools.pairwise(other.bare) if a in outputs]
    written = {name for _, name in pairs} | {other.redirected(">") for other in page}
    written |= {block.title for block in BLOCKS if block.page == line.block.page}
    named = {word for word in line.words if re.search(r"\.(tsv|txt|yaml|jsonl|json|parquet)$|\.gz$|/$", word)}
    assert [name for name in sorted(named - written) if not (there / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted({line.block.page for line in OURS} - {*WALK_THROUGHS}), ids=lambda page: page.stem
)
def test_every_command_runs(page, world, monkeypatch, capsys):
    """Run the commands of a page in order, as each may read the output of earlier ones."""
    shutil.rmtree("my-copy")  # a page writes it
    for line in OURS:
        if line.block.page == page and not listed(line, PARSED_ONLY) and "torchrun" not in line.line:
            assert failure(line, monkeypatch, capsys) == ""


def failure(line: Command, monkeypatch, capsys) -> str:
    """Run a command of metaphrase in this process, with small settings; what it says if it fails."""
    words = [
        path for word in line.arguments for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]
    if set(words) & {*PLAIN, "--help-all", "--print-config"}:
        return ""
    if source := line.redirected("<"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(source).read_bytes()), encoding="utf-8"))
    status = main([*words, *SMALL.get(words[0], [])])
    written = capsys.readouterr()
    if target := line.redirected(">"):
        Path(target).write_text(written.out, encoding="utf-8")
    passed = status in ((0, 1) if words[0] in ("debias", "diagnose", "merge") else (0,))
    return "" if passed else f"{line.line}\n{written.err}"


@pytest.fixture
def index() -> Iterator[str]:
    """Address of a server that accepts all uploads, as that of PyPI."""

    class Accept(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Accept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/legacy/"
        server.shutdown()


@pytest.fixture
def shell(world, index, monkeypatch, tmp_path):
    """Return a function that runs a line of another program and returns what it says if it fails.

    A clone comes from this repository.

    The environment of the tests takes the place of the one that ``make install`` creates.
    """
    mirror, venv = tmp_path / "mirror.git", tmp_path / "venv"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), str(mirror)], check=True)
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith("."):
            (venv / path.name).symlink_to(path)
    for name in (".installed", ".dev", ".all"):
        (venv / name).touch()
        os.utime(venv / name, (2**32, 2**32))
    settings = {"url." + mirror.as_uri() + ".insteadOf": "https://github.com/metaphrase/metaphrase"}
    settings |= {"user.name": "me", "user.email": "me@localhost"}
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HF_TOKEN"))}
    environment = {f"GIT_CONFIG_KEY_{at}": key for at, key in enumerate(settings)}
    environment |= {f"GIT_CONFIG_VALUE_{at}": value for at, value in enumerate(settings.values())}
    environment |= {"GIT_CONFIG_COUNT": str(len(settings)), "HOME": str(world), "PYTHONPATH": "src"}
    environment |= {
        "VENV": str(venv),
        "OFFLINE": "1",
        "TESTS": "tests/objectives/test_anchor_margin.py tests/objectives/test_external.py",
    }
    environment |= {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "TWINE_REPOSITORY_URL": index,
        "TWINE_USERNAME": "__token__",
        "TWINE_PASSWORD": "pypi-x",
    }

    def failure_of(line: Command) -> str:
        words = line.bare
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            Path("my-test-sets").symlink_to(world / "my-test-sets")
        elif words[0] == "export":
            monkeypatch.syspath_prepend(Path.cwd())
        elif words[0] == "source":
            assert words[1] == ".venv/bin/activate"
            assert (venv / "bin" / "activate").is_file()
        else:
            command = ["bash", "-euc", line.line.replace(".venv/", f"{venv}/")]
            done = subprocess.run(
                command, env=outer | environment, capture_output=True, text=True, check=False, timeout=900
            )
            return "" if done.returncode == 0 else f"{line.line}\n{done.stdout}\n{done.stderr}"
        return ""

    return failure_of


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", WALK_THROUGHS, ids=lambda page: page.stem)
def test_a_walk_through_runs_from_the_first_line_to_the_last(page, world, shell, hub, monkeypatch, capsys):
    hub.repositories.pop(("model", "me/e5-small-swahili"))  # the push creates it
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))
    names: dict[str, object] = {"__name__": "documented"}
    for block in (block for block in BLOCKS if block.page == page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python" and not block.title.startswith("tests/"):
            assert exception(block, names) == ""
        for line in LINES:
            if line.block is block:
                assert (failure(line, monkeypatch, capsys) if line.is_ours else shell(line)) == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "page", sorted({block.page for block in BLOCKS if block.language == "python"}), ids=lambda page: page.stem
)
def test_python_runs(page, world, tiny_encoder, monkeypatch, capsys):
    """Run the Python of a page, block by block, with the variables that its text assumes."""
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))  # a page registers one
    similarity_qk, row_qk = np.array([[0.9, 0.2], [0.8, 0.1]], np.float32), np.array([[0, 1], [1, 0]], np.int32)
    names = {"model": tiny_encoder, "__name__": "documented"}
    names |= {"similarity_qk": similarity_qk, "row_qk": row_qk, "similarity_pk": similarity_qk, "row_pk": row_qk}
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            assert exception(block, names) == ""


def exception(block: Block, names: dict[str, object]) -> str:
    """Run Python of a page, with small settings; its traceback if it raises an exception."""
    few = "max_steps=2, use_cpu=True, report_to='none'"
    code = re.sub(r'"max_steps": \d+', '"max_steps": 2, "use_cpu": True, "report_to": "none"', block.text)
    code = re.sub(r"(TrainingArguments\(.*)max_steps=\d+", rf"\1{few}", code)
    code = re.sub(r"max_steps=\d{2,}", f"{few}, max_length=24", code)
    try:
        exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec", dont_inherit=True), names)
    except Exception:
        return traceback.format_exc()
    return ""


def test_patches_apply(tmp_path):
    patches = [block.text for block in BLOCKS if block.title.endswith(".diff")]
    assert patches
    for patch in patches:
        (tmp_path / "patch").write_text(patch, encoding="utf-8")
        subprocess.run(["git", "apply", "--check", str(tmp_path / "patch")], cwd=ROOT, check=True)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_recipe(block, tmp_path, monkeypatch):
    """Recipes may name the objective that CONTRIBUTING.md adds, which tests/test_contributing.py trains."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    added = set(re.findall(r'\bname: ClassVar\[str\] = "(\w+)"', guide))
    named = set(re.findall(r'objective: "?([\w.:-]+)', block.text))
    unknown = {name for name in named if name not in OBJECTIVES}  # a reference may be to any package
    assert unknown <= added
    for name in unknown:
        members = {"name": name, "granularity": "sentence", "forward": lambda self, encodings: None}
        monkeypatch.setitem(OBJECTIVES, name, type("Added", (Objective,), members))
    (tmp_path / "mine.yaml").write_text(block.text, encoding="utf-8")
    recipe = Recipe.load(tmp_path / "mine.yaml")
    assert {term.objective for term in recipe.terms} == named


# ----------------------------------------------------------------------------------------------- what the pages refer to


def test_errors_that_are_explained_are_ours():
    """The texts between the … in the first column occur in the source."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "metaphrase").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 25
    parts = [part.strip() for text in quoted for part in text.split("…")]
    assert [part for part in parts if part not in source] == []


def test_tests_that_security_names_exist():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or not re.search(rf"\bdef {name}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_page_is_in_the_navigation():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"(?:- |: )([\w/-]+\.md)$", site, re.MULTILINE))


def test_the_site_loads_nothing_from_elsewhere():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  font: false$", site, re.MULTILINE)
    assert not re.search(r"^extra_(css|javascript)|https://(?!github\.com/metaphrase/)", site, re.MULTILINE)


def test_links_out_of_the_pages_lead_to_the_repository():
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    config = SimpleNamespace(repo_url="https://host/us")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/a.md"))
    given = "[a](../../src/b.py#L1) [b](../scaling.md#mining) [c](https://x) [d](e.md)"
    wanted = "[a](https://host/us/blob/main/src/b.py#L1) [b](../scaling.md#mining) [c](https://x) [d](e.md)"
    assert hooks["on_page_markdown"](given, page=page, config=config, files=None) == wanted
    assert hooks["on_page_content"]("a :class:<code>~Recipe</code>") == "a <code>Recipe</code>"
