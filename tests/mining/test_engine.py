"""Mining as tasks of datatrove."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
from datatrove.pipeline.base import PipelineStep

from metaphrase.cli import main
from metaphrase.exceptions import DataMismatchError, StorageError
from metaphrase.mining import encoding, filtering, workflow
from metaphrase.mining.engine import Embed, LocalExecutor, Work
from metaphrase.mining.options import EngineOptions, FilterOptions, SearchOptions
from tests.cli.test_mine import KILLED, texts  # noqa: F401
from tests.conftest import mostly_slow
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
LOCAL = ["--executor", "local", "--workers", "1"]


@pytest.fixture
def words(texts, tiny_encoder_dir, monkeypatch):  # noqa: F811
    """A command with shards of 7 of 25 sentences a side."""
    monkeypatch.setattr(workflow, "draw_histogram", lambda *args: [])
    return ["mine", *texts, "--model", str(tiny_encoder_dir), "--shard_size", "7", "--k", "2", "--batch_size", "4"]


@pytest.fixture
def mine(words, tmp_path):
    """Mines with further options, and returns the bytes of the pairs."""

    def run(*options):
        assert main([*words, "-o", str(tmp_path / "mined.tsv"), *map(str, options)]) == 0
        return (tmp_path / "mined.tsv").read_bytes()

    return run


def shards(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.np[yz]") if path.name != "ends.npy"
    }


@pytest.mark.parametrize("options", [[], pytest.param(["--index", "ivf", "--half", "--bf16"], marks=pytest.mark.long)])
def test_results_do_not_depend_on_the_tasks(mine, tmp_path, options):
    one = mine(*LOCAL, *options, "--storage", tmp_path / "1")
    assert len(shards(tmp_path / "1")) == 16
    for tasks in (4, 20):
        assert mine(*LOCAL, *options, "--tasks", tasks, "--storage", tmp_path / str(tasks)) == one
        assert shards(tmp_path / str(tasks)) == shards(tmp_path / "1")
        marks = list((tmp_path / str(tasks)).rglob("completions/*"))
        assert len(marks) == tasks * (3 if options else 2)
    plain = mine("--keep_work", *options)  # as many threads as there are
    for path, content in shards(tmp_path / "mined.tsv.partial").items():
        assert len(content) == len(shards(tmp_path / "1")[path])
    settings = json.loads((tmp_path / "mined.tsv.json").read_text())["settings"]
    assert bool(options) == ("source_recall" in settings)
    if os.environ["OMP_NUM_THREADS"] == "1":
        assert plain == one
        assert shards(tmp_path / "mined.tsv.partial") == shards(tmp_path / "1")


@pytest.mark.parametrize("able", [False, True])
def test_bfloat16_is_ignored_on_a_machine_where_it_is_slow(mine, tmp_path, monkeypatch, caplog, able):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": able})
    exact = mine()
    for options in ([], LOCAL):
        assert (mine("--bf16", *options) == exact) is not able
        assert ("bf16 is disabled" in caplog.text) is not able
        assert json.loads((tmp_path / "mined.tsv.json").read_text())["settings"]["bf16"] is able


def test_the_default_storage_is_deleted_at_the_end(mine, tmp_path):
    assert mine(*LOCAL, "--tasks", 2)
    assert not (tmp_path / "mined.tsv.partial").exists()


def test_a_kept_storage_serves_other_margins(mine, tmp_path, words, capsys):
    storage = [*LOCAL, "--storage", tmp_path / "storage"]
    mine(*storage)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")}
    assert mine(*storage, "--margin", "distance") == mine("--margin", "distance")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "storage").rglob("*")} == before
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "x.tsv"), *map(str, storage), "--max_length", "5"]) == 2
    assert "storage holds the work of another command" in " ".join(capsys.readouterr().err.split())


def test_a_storage_in_memory(mine, tmp_path):
    memory = fsspec.filesystem("memory")
    expected = mine(*LOCAL, "--storage", tmp_path / "1", "--index", "ivf")
    assert mine(*LOCAL, "--tasks", 3, "--storage", "memory://mining", "--index", "ivf") == expected
    stored = {Path(path).relative_to("/mining"): memory.cat(path) for path in memory.find("/mining")}
    assert {path: stored[path] for path in shards(tmp_path / "1")} == shards(tmp_path / "1")
    assert len([path for path in stored if "completions" in path.parts]) == 9
    memory.rm("/mining", recursive=True)


@pytest.mark.long
def test_what_a_storage_in_memory_has_is_not_made_again(mine, words, tmp_path, capsys):
    memory = fsspec.filesystem("memory")
    options = ["--storage", "memory://reused", "--tasks"]
    expected = mine(*LOCAL, *options, 3)
    damaged, embeddings = "/reused/target/neighbours/000001.npz", "/reused/target/embeddings/000001.npy"
    made = {path: (memory.cat(path), memory.created(path)) for path in memory.glob("/reused/*/*/*.np[yz]")}
    memory.pipe(damaged, made[damaged][0][:90])
    assert mine(*LOCAL, *options, 2) == expected
    assert [path for path, (_, time_) in made.items() if memory.created(path) != time_] == [damaged]
    memory.pipe(embeddings, made[embeddings][0][:90])
    memory.rm("/reused/source/neighbours/000000.npz")
    assert main([*words, "-o", str(tmp_path / "x.tsv"), *LOCAL, *options, "2"]) == 2
    assert "Run the command again to recompute it." in " ".join(capsys.readouterr().err.split())
    assert mine(*LOCAL, *options, 2) == expected
    assert {path: memory.cat(path) for path in made} == {path: content for path, (content, _) in made.items()}
    memory.rm("/reused", recursive=True)


@pytest.mark.long
def test_lost_and_damaged_files_are_made_again(mine, words, tmp_path, capsys, fault):
    storage = tmp_path / "storage"
    options = [*LOCAL, "--tasks", 3, "--storage", storage]
    expected = mine(*options)
    made = shards(storage)
    embeddings, neighbours = (Path("target", name) for name in ("embeddings/000001.npy", "neighbours/000002.npz"))
    for lost in ([embeddings], [neighbours], made):
        for path in lost:
            (storage / path).unlink()
        assert mine(*options) == expected
        assert shards(storage) == made
    approximate = [*options[:-1], tmp_path / "ivf", "--index", "ivf"]
    expected_of_index = mine(*approximate)
    (tmp_path / "ivf" / "target" / "recall.json").unlink()
    assert mine(*approximate) == expected_of_index
    assert (tmp_path / "ivf" / "target" / "recall.json").exists()
    for damaged in (embeddings, neighbours):
        (storage / damaged).write_bytes(made[damaged][:90])
        (storage / neighbours.with_stem("000000")).unlink()
        assert main([*words, "-o", str(tmp_path / "mined.tsv"), *map(str, options)]) == 2
        assert "Run the command again to recompute it." in " ".join(capsys.readouterr().err.split())
        assert mine(*options) == expected
        assert shards(storage) == made
    fault("I3", "lost and damaged files of mining on datatrove", tried=5, survived=5)


def test_marks_of_another_number_of_tasks_are_not_trusted(mine, tmp_path):
    options = [*LOCAL, "--storage", tmp_path / "storage", "--tasks"]
    expected = mine(*options, 1)
    shutil.rmtree(tmp_path / "storage" / "source")  # its texts, too
    assert mine(*options, 5) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "4"], "--tasks requires --executor local, slurm or ray."),
        (["--executor", "local", "--workers", "4"], "--workers 4 needs as many tasks, but --tasks is 1"),
        (["--storage", "s3://x"], "--storage requires --executor"),
        ([*LOCAL, "--tasks", "0"], "--tasks must be a whole number from 1 to 2,147,483,647, but is 0"),
        (["--executor", "locl"], "invalid choice: 'locl' (did you mean 'local'?)"),
        (["--executor", "slurm"], "--executor slurm requires --storage"),
        (["--executor", "slurm", "--storage", "{d}/my work", "--executor_args", "partition=cpu", "time=1"], "do not quote it, and it contains ' '."),
        (["--executor", "slurm", "--storage", "{d}/s", "--executor_args", "time"], "must be KEY=VALUE, such as partition=cpu, but is 'time'"),
        (["--executor", "slurm", "--storage", "{d}/s", "--executor_args", "time=1:00:00"], "missing 1 required positional argument: 'partition'"),
        ([*LOCAL, "--executor_args", "tasks=3"], "got multiple values for keyword argument 'tasks'"),
        ([*LOCAL, "--executor_args", "partition=cpu"], "unexpected keyword argument 'partition'"),
        ([*LOCAL, "--executor_args", "local_tasks=3"], "--executor_args do not fit datatrove's LocalExecutor: Local tasks go beyond"),
        ([*LOCAL, "--storage", "{d}/news.de"], "Cannot write to --storage"),
        ([*LOCAL, "--storage", "s4://bucket/mine"], "is neither a folder nor the URL of a storage: Protocol not known: s4"),
        ([*LOCAL, "--storage", ""], "--storage is empty. Name a folder or a URL, or omit the option"),
        (["--storage", ""], "--storage requires --executor local, slurm or ray"),
        (["--executor", "slurm", "--storage", "{d}/new/deep", "--executor_args", "partition=cpu", "time=1"], "submits jobs with sbatch, which was not found"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line_before_the_encoder_is_loaded(
    words, tmp_path, capsys, monkeypatch, options, message
):
    monkeypatch.delattr(workflow, "load_encoder")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "-o", str(tmp_path / "x.tsv"), *(option.format(d=tmp_path) for option in options)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} <= {"news.de", "news.en.gz"}


def test_the_package_of_a_storage_is_named(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert main([*words, "-o", str(tmp_path / "x.tsv"), *LOCAL, "--storage", "gs://bucket/mine"]) == 2
    assert "requires another package: Please install gcsfs" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (filtering, lambda text, out, engine: filtering.filter_corpus(FilterOptions([text], out), engine=engine)),
        (encoding, lambda text, out, engine: encoding.encode_file(text, out, engine=engine)),
    ],
)
def test_other_commands_check_the_storage_before_the_encoder_is_loaded(words, tmp_path, monkeypatch, module, start):
    monkeypatch.delattr(module, "load_encoder")
    (tmp_path / "pairs.tsv").write_text("Guten Morgen.\tGood morning.\n", encoding="utf-8")
    engine = EngineOptions(executor="local", storage=words[1])
    with pytest.raises(StorageError, match="Cannot write to --storage"):
        start(str(tmp_path / "pairs.tsv"), str(tmp_path / "out.tsv"), engine)


def test_the_extra_is_named(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datatrove", None)
    assert main([*words, "-o", str(tmp_path / "x.tsv"), *LOCAL]) == 2
    assert "[scale]'" in "".join(capsys.readouterr().err.split())


def test_an_encoder_of_a_node_with_other_weights_is_refused(mine, tiny_encoder_dir, tmp_path):
    mine(*LOCAL, "--storage", tmp_path)
    step = Embed(Work(str(tmp_path), SearchOptions(str(tiny_encoder_dir)), "0", {"source": 25, "target": 25}, {}))
    with pytest.raises(DataMismatchError, match="has other weights or settings on this machine"):
        step.run(None)


@pytest.mark.long
@pytest.mark.parametrize(("which", "left"), [("target/embeddings", 2), ("source/neighbours", 3)])
def test_a_killed_run_goes_on(mine, words, tmp_path, fault, which, left):
    storage = tmp_path / "storage"
    options = [*LOCAL, "--tasks", 4, "--storage", storage]
    killed = run_python("-c", KILLED, left, which, *words, "-o", tmp_path / "mined.tsv", *options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = {path: path.stat().st_mtime_ns for path in storage.rglob("*.np[yz]")}
    assert len(done) > 2
    resumed = mine(*options)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert mine(*LOCAL, "--storage", tmp_path / "whole") == resumed
    assert shards(storage) == shards(tmp_path / "whole")
    fault("I1", "kill -9 of mining on datatrove", tried=1, survived=1)


class Mortal(PipelineStep):
    """Notes its rank, and kills its process when rank 1 is tried for the first times."""

    name, type = "mortal", "Test"

    def __init__(self, folder, deaths):
        super().__init__()
        self.folder, self.deaths = folder, deaths

    def run(self, data=None, rank=0, world_size=1):
        tried = len(list(self.folder.glob(f"{rank}-*")))
        (self.folder / f"{rank}-{tried}").touch()
        if rank == 1 and tried < self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize(("deaths", "left"), mostly_slow([(2, []), (3, [1])], [(2, [])]))
def test_the_task_of_a_killed_worker_is_repeated(tmp_path, monkeypatch, fault, deaths, left):
    monkeypatch.syspath_prepend(ROOT)  # for workers
    executor = LocalExecutor([Mortal(tmp_path, deaths)], tasks=4, workers=2, logging_dir=str(tmp_path / "logs"))
    executor.run()
    assert executor.get_incomplete_ranks() == left
    assert len(list(tmp_path.glob("1-*"))) == 3
    fault("I1", "kill -9 of a worker of mining on datatrove", tried=1, survived=1)


class Sleeping(Mortal):
    """Notes its process, and sleeps."""

    def run(self, data=None, rank=0, world_size=1):
        (self.folder / str(os.getpid())).touch()
        time.sleep(600)


SCRIPT = """
import sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from tests.mining.test_engine import LocalExecutor, Mortal, Sleeping
executor, step, folder = globals()[sys.argv[1]], globals()[sys.argv[2]], Path(sys.argv[3])
executor([step(folder, 1)], tasks=2, workers=2, logging_dir=str(folder / "logs")).run()
"""


@pytest.mark.slow
def test_the_pool_of_datatrove_waits_for_a_killed_worker(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", SCRIPT, "LocalPipelineExecutor", "Mortal", tmp_path], cwd=ROOT)
    while not (tmp_path / "logs" / "completions" / "00000").exists():
        time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):  # if this fails, LocalExecutor is superfluous
        command.wait(20)
    command.kill()
    command.wait()


@pytest.mark.slow
def test_workers_end_with_a_killed_command(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", SCRIPT, "LocalExecutor", "Sleeping", tmp_path], cwd=ROOT)
    while len(workers := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 2:
        assert command.poll() is None
        time.sleep(0.1)
    command.kill()
    command.wait()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


@pytest.mark.long
@pytest.mark.parametrize("to_workers", [True, False])
def test_an_interrupt_ends_the_tasks(tmp_path, to_workers):
    script = SCRIPT.replace("tasks=2", "tasks=4")
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + script
    )  # also in a background job
    command = subprocess.Popen(
        [sys.executable, "-c", script, "LocalExecutor", "Sleeping", tmp_path],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(workers := [path.name for path in tmp_path.iterdir() if path.name.isdecimal()]) < 2:
            assert command.poll() is None
            time.sleep(0.1)
        (os.killpg if to_workers else os.kill)(command.pid, signal.SIGINT)  # a terminal sends it to all processes
        assert command.wait(60) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdecimal()] == workers  # no other task was started


@pytest.mark.long
def test_several_workers(mine, words, tmp_path):
    assert mine(*LOCAL[:2], "--tasks", 5, "--workers", 2) == mine(*LOCAL)


# --- Slurm ---

SBATCH = """#!/bin/bash
number=$(printf %02d $(ls "$SUBMITTED" | wc -l))
{ echo "#args ${@:1:$#-1}"; cat "${@: -1}"; } > "$SUBMITTED/$number"
echo "Submitted batch job 10$number"
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/bash\necho node1\n"


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """The scripts given to a program `sbatch`, which keeps them."""
    programs, scripts = tmp_path / "bin", tmp_path / "submitted"
    for folder in (programs, scripts):
        folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("SUBMITTED", str(scripts))
    return lambda: [path.read_text() for path in sorted(scripts.iterdir())]


@pytest.fixture
def slurm(words, tmp_path):
    """Submits mining in four tasks."""
    options = ["--executor", "slurm", "--tasks", "4", "--workers", "2", "--storage", str(tmp_path / "storage")]
    arguments = [
        "--executor_args",
        "partition=cpu",
        "time=04:00:00",
        "cpus_per_task=1",
        'sbatch_args={"account": "me"}',
    ]
    return lambda *more: main([*words, "-o", str(tmp_path / "mined.tsv"), *options, *arguments, *more])


def test_scripts_of_slurm(slurm, submitted, tmp_path, capsys):
    assert slurm() == 0
    assert f"the last job writes {tmp_path}/mined.tsv" in " ".join(capsys.readouterr().err.split()).replace(
        " /", "/", 1
    )
    embed, _, search, _, finish, _ = submitted()  # each with a job that adds up statistics
    directives = [line.removeprefix("#SBATCH --") for line in embed.splitlines() if line.startswith("#SBATCH")]
    assert {
        "array=0-3%2",
        "partition=cpu",
        "time=04:00:00",
        "cpus-per-task=1",
        "account=me",
        "job-name=metaphrase-embed-4",
    } <= {*directives}
    logs = tmp_path / "storage" / "logs"
    assert f"launch_pickled_pipeline {logs}/embed-4/executor.pik" in embed
    assert f"launch_pickled_pipeline {logs}/search-4/executor.pik" in search
    assert "--array=0-0" in finish
    assert "dependency" not in embed.splitlines()[0]
    assert "--dependency=afterok:1000" in search.splitlines()[0]
    assert "--dependency=afterok:1002" in finish.splitlines()[0]
    assert not (tmp_path / "mined.tsv").exists()


def test_a_job_that_slurm_does_not_accept(slurm, submitted, tmp_path, capsys):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    assert slurm() == 2
    assert "Slurm did not accept the job" in " ".join(capsys.readouterr().err.split())


def run_job(script, tasks):
    """Run some tasks of a job's array as Slurm would."""
    for task in tasks:
        variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "node[1]", "SLURM_JOB_ID": "1"}
        done = subprocess.run(["bash", "-c", script], env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_jobs_of_slurm_write_the_pairs(slurm, mine, submitted, tmp_path, fault):
    expected = mine(*LOCAL)
    (tmp_path / "mined.tsv").unlink()
    assert slurm("--tasks", "2") == 0
    run_job(submitted()[0], [0])  # the other task is lost
    assert slurm("--tasks", "2") == 0
    embed, _, search, _, finish, _ = submitted()[6:]
    assert "--array=0-0%2" in embed
    for script, tasks in ((embed, 1), (search, 2), (finish, 1)):
        run_job(script, range(tasks))
    assert (tmp_path / "mined.tsv").read_bytes() == expected
    fault("I1", "a Slurm task of mining is lost", tried=1, survived=1)


def test_a_search_waits_for_embeddings_that_are_made_again(slurm, mine, submitted, tmp_path):
    storage = tmp_path / "storage"
    mine(*LOCAL, "--tasks", 4, "--storage", storage, "--index", "ivf")
    (storage / "target/embeddings/000001.npy").unlink()
    (storage / "source/neighbours/000000.npz").unlink()
    assert slurm("--index", "ivf") == 0
    embed, *others = submitted()
    search = next(script for script in others if "metaphrase-search-4" in script)
    assert "metaphrase-embed-4" in embed
    assert "--dependency=afterok:1000" in search.splitlines()[0]
