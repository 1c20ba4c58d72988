"""Embedding and searching as tasks of datatrove: on this machine, as Slurm jobs or on a Ray cluster.

The command reads the texts, drops repeated sentences, and puts the rest into a storage: a folder or an fsspec URL, with a
folder for each *side*, such as ``source`` of mining, or ``sw-en/source`` of filtering. Then each stage divides its files
among tasks:

1. `Embed`: embeddings, a shard of sentences per file.
2. `Index`: the approximate index that a side's sentences are searched in, unless the search is exact.
3. `Search`: neighbours, a shard of queries per file, among all embeddings of the other side.

Finally, the command reads the files that it needs, and writes its result.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep
from joblib import cpu_count
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.exceptions import DataError, DataMismatchError, StorageError, UsageError, WorkerError
from metaphrase.io.digests import encoder_digest
from metaphrase.io.environment import flush_denormals
from metaphrase.io.work_folders import MANIFEST
from metaphrase.mining.options import EngineOptions, SearchOptions
from metaphrase.mining.search import Rows, faiss
from metaphrase.mining.sentences import Sentences
from metaphrase.mining.shards import INDEX, RECALL, build_index, embed_texts, load_rows, search_shards

TEXTS = ("sentences.txt", "ends.npy", "sentences.json")
EMBEDDINGS, NEIGHBOURS = "embeddings/*.npy", "neighbours/*.npz"
#: Number of times that the tasks of killed workers are run.
_ATTEMPTS = 3
#: Characters of a path that may have another meaning for a shell, or for a directive of Slurm.
_UNQUOTED = re.compile(r"[^\w@+=:,./-]")


@dataclass(frozen=True)
class Work:
    """What every task needs: the storage, the search, the digest of the encoder, and the number of sentences of each side.

    ``pools`` has, for each side whose neighbours are searched, the side that they are searched in.
    """

    storage: str
    search: SearchOptions
    encoder: str
    sentences: Mapping[str, int]
    pools: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        """Whether neighbours are searched without an index."""
        return self.search.index == "exact"


# ---------------------------------------------------------------------------------------------------- stages


class Step(PipelineStep):
    """A stage. Each of its tasks computes every ``world_size``-th file, counted over all sides.

    A file does not depend on its task: its texts are encoded in the same batches, or its queries are compared
    with the same blocks, on a number of threads that the executor fixes.
    """

    type = "Mining"

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    @abstractmethod
    def files(self, side: str) -> list[str]:
        """The files of a side, computed by all tasks."""

    @abstractmethod
    def inputs(self, side: str) -> list[str]:
        """Patterns of the files that the files of a side are computed from."""

    @abstractmethod
    def make(self, folder: Path, side: str, part: slice) -> None:
        """Compute some of the files of a side."""

    def parts(self, rank: int, tasks: int) -> dict[str, slice]:
        """The files of each side that a task computes."""
        parts, before = {}, 0
        for side in self.work.sentences:
            count, first = len(self.files(side)), (rank - before) % tasks
            before += count
            if first < count:
                parts[side] = slice(first, None, tasks)
        return parts

    def outputs(self, rank: int, tasks: int) -> list[str]:
        """The paths that a task computes."""
        parts = self.parts(rank, tasks)
        return [f"{side}/{name}" for side, part in parts.items() for name in self.files(side)[part]]

    def shards(self, side: str, name: str) -> list[str]:
        """The names of all shards of a side."""
        return [name.format(at) for at in range(-(-self.work.sentences[side] // self.work.search.shard_size))]

    def rows(self, folder: Path, side: str) -> Rows:
        """The embeddings of a side."""
        return load_rows(folder / side / "embeddings", self.work.sentences[side], self.work.search.shard_size)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Run a task."""
        if parts := self.parts(rank, world_size):
            storage, outputs = get_datafolder(self.work.storage), self.outputs(rank, world_size)
            inputs = [path for side in parts for path in self.inputs(side)]
            with self.track_time("task"), _threads(), staged(storage, inputs, outputs) as folder:
                for side, part in parts.items():
                    self.make(folder, side, part)


class Embed(Step):
    """Embed sentences."""

    name = "embed"

    def files(self, side: str) -> list[str]:
        """One shard of rows each."""
        return self.shards(side, "embeddings/{:06d}.npy")

    def inputs(self, side: str) -> list[str]:
        """The texts."""
        return [f"{side}/{name}" for name in TEXTS]

    def make(self, folder: Path, side: str, part: slice) -> None:
        """Embed some shards."""
        search = self.work.search
        model = _encoder(search.model, search.max_length, search.prompt_or_none, self.work.encoder)
        embed_texts(model, Sentences(folder / side), folder / side / "embeddings", search, part=part)


class Index(Step):
    """Build approximate indexes."""

    name = "index"

    def files(self, side: str) -> list[str]:
        """The index that this side's sentences are searched in."""
        return [INDEX] if side in self.work.pools and not self.work.is_exact else []

    def inputs(self, side: str) -> list[str]:
        """The embeddings of the other side."""
        return [f"{self.work.pools[side]}/{EMBEDDINGS}"]

    def make(self, folder: Path, side: str, part: slice) -> None:
        """Build the index of the other side."""
        build_index(self.rows(folder, self.work.pools[side]), folder / side, self.work.search)


class Search(Step):
    """Search neighbours."""

    name = "search"

    def files(self, side: str) -> list[str]:
        """The neighbours of one shard of queries each."""
        return self.shards(side, "neighbours/{:06d}.npz") if side in self.work.pools else []

    def inputs(self, side: str) -> list[str]:
        """The embeddings of both sides, and the index."""
        embeddings = [f"{one}/{EMBEDDINGS}" for one in (side, self.work.pools[side])]
        return embeddings if self.work.is_exact else [*embeddings, f"{side}/{INDEX}"]

    def outputs(self, rank: int, tasks: int) -> list[str]:
        """The paths that a task computes; the task of the first shard of a side also measures the recall of its index."""
        parts = self.parts(rank, tasks)
        measured = [f"{side}/{RECALL}" for side, part in parts.items() if not (part.start or self.work.is_exact)]
        return super().outputs(rank, tasks) + measured

    def make(self, folder: Path, side: str, part: slice) -> None:
        """Search the neighbours of some shards."""
        queries, pool = (self.rows(folder, one) for one in (side, self.work.pools[side]))
        search_shards(queries, pool, folder / side, self.work.search, part=part)


# ---------------------------------------------------------------------------------------------------- running


def check_settings(engine: EngineOptions) -> None:
    """Check the storage, which is written to, and the arguments of an executor.

    Raises:
        UsageError: A package of the storage or the program of Slurm is missing, or the storage or the arguments do not fit
            the executor.
        StorageError: The storage cannot be written to.
    """
    _executor(engine, None, "memory://logs", engine.tasks, None)
    if engine.storage is not None:
        storage = _open_storage(engine.storage)
        path = storage.resolve_paths("")
        if engine.executor == "slurm" and (unsafe := sorted(set(_UNQUOTED.findall(path)))):
            raise UsageError(
                f"--storage {path} cannot be used with --executor slurm: the job scripts of datatrove do not quote it, and "
                f"it contains {' '.join(map(repr, unsafe))}. Choose a folder without these characters."
            )
        _try_writing(storage, engine.storage)
    if engine.executor == "slurm" and shutil.which("sbatch") is None:
        raise UsageError(
            "--executor slurm submits jobs with sbatch, which was not found. Run the command on a machine that can submit "
            "jobs."
        )


def _open_storage(path: str) -> DataFolder:
    try:
        return get_datafolder(path)
    except ImportError as error:
        raise UsageError(f"--storage {path} requires another package: {error}.") from error
    except ValueError as error:
        raise UsageError(f"--storage {path} is neither a folder nor the URL of a storage: {error}.") from error


def _try_writing(storage: DataFolder, path: str) -> None:
    """Write a file to a storage, and delete it with the local folders that are created for it."""
    name, folder = f".{uuid4().hex}", Path(storage.resolve_paths(""))
    new = [one for one in (folder, *folder.parents) if not one.exists()] if storage.is_local() else []
    try:
        storage.makedirs("", exist_ok=True)
        storage.pipe_file(name, b"")
        storage.rm_file(name)
    except Exception as error:  # each kind of storage has errors of its own
        raise StorageError(f"Cannot write to --storage {path}: {error}.") from error
    with suppress(OSError):  # not empty: another command uses the storage by now
        for one in new:
            one.rmdir()


def run_stages(
    engine: EngineOptions,
    work: Work,
    texts: Path,
    *,
    with_rows: bool,
    finish: Callable[[], Any],
    note: Callable[[str], Any],
) -> AbstractContextManager[Path] | None:
    """Run the stages that have files; what is already in the storage is reused.

    ``texts`` is the folder with the sentences and their manifest; see `make_shards` for the other arguments.

    Returns a context with a folder of the neighbours, the recall of an approximate search and, ``with_rows``, the
    embeddings; None if the stages were submitted to Slurm.
    """
    storage = _open_storage(work.storage)
    work = replace(work, storage=storage.resolve_paths(""))  # a relative path may be another one elsewhere
    try:
        _copy_texts(texts, storage, work.sentences)
    except OSError as error:
        raise StorageError(f"Cannot write to --storage {engine.storage}: {error}.") from error
    before: PipelineExecutor | None = None
    steps: list[Step] = [Embed(work), Index(work), Search(work)]
    for step in (step for step in steps if any(map(step.files, work.sentences))):
        # datatrove marks finished tasks by their number, which stands for other shards if the number of tasks changes
        logs = storage.resolve_paths(f"logs/{step.name}-{engine.tasks}")
        stage = _executor(engine, step, logs, engine.tasks, before)
        _remove_stale_marks(stage, step, storage)
        if left := stage.get_incomplete_ranks():
            note(f"{step.name}: {len(left)} of {engine.tasks} tasks ({engine.executor}; logs: {logs})")
        _run(stage)
        storage.fs.invalidate_cache()  # listings are cached, but other processes have written
        if engine.executor != "slurm" and (left := stage.get_incomplete_ranks(skip_completed=True)):
            raise WorkerError(
                f"{len(left)} of {engine.tasks} tasks of the stage {step.name!r} failed: {left[:10]}. Read their logs in "
                f"{logs}; the same command runs only these tasks again."
            )
        if getattr(stage, "job_id", None) != -1:  # else Slurm has no job to wait for: nothing was left to submit
            before = stage
    if engine.executor == "slurm":
        logs = storage.resolve_paths("logs/finish")
        _run(_executor(engine, partial(_finish, finish), logs, 1, before, skip_completed=False))
        return None
    results = [f"{side}/{name}" for side in work.pools for name in (NEIGHBOURS, *([] if work.is_exact else [RECALL]))]
    rows = [f"{side}/{EMBEDDINGS}" for side in work.sentences] if with_rows else []
    return staged(storage, [*results, *rows])


def _finish(finish: Callable[[], Any], data: Any, rank: int, world_size: int) -> None:
    finish()


def _executor(
    engine: EngineOptions, step: Any, logs: str, tasks: int, before: PipelineExecutor | None, **more: Any
) -> PipelineExecutor:
    """Create an executor of datatrove for one stage."""
    settings = {"pipeline": [step], "tasks": tasks, "workers": engine.workers or -1, "logging_dir": logs, **more}
    cls = {"local": LocalExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}[str(engine.executor)]
    if cls is LocalExecutor:
        settings["workers"] = engine.workers or default_workers()
    elif cls is SlurmPipelineExecutor:
        settings |= {"job_name": f"metaphrase-{Path(logs).name}", "depends": before}
    try:
        return cls(**settings, **engine.arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--executor_args do not fit datatrove's {cls.__name__}: {error}.") from error


def _run(stage: PipelineExecutor) -> None:
    """Run a stage, or submit it to Slurm."""
    try:
        stage.run()
    except (CalledProcessError, FileNotFoundError) as error:
        if not isinstance(stage, SlurmPipelineExecutor):
            raise
        raise UsageError(
            f"Slurm did not accept the job ({error}). See the message of sbatch above, check --executor_args, and run the "
            "command on a machine that can submit jobs."
        ) from error


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor, whose tasks survive a killed worker: datatrove's own pool would wait for it forever.

    An interrupt ends the workers; their tasks are repeated by the next run.
    """

    def run(self) -> None:
        """Run the tasks that are not done."""
        task = partial(self._run_for_rank, local_rank=1)  # prints errors only
        for _ in range(_ATTEMPTS):
            ranks = self.get_incomplete_ranks()
            if self.workers == 1 or not ranks:
                list(map(task, ranks))
                return
            workers = min(self.workers, len(ranks))
            context = multiprocessing.get_context(self.start_method)
            context.set_forkserver_preload([__name__])
            given = (context.Value("i", 0), _gpus())
            with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, context, _prepare_worker, given) as pool:
                try:
                    list(pool.map(task, ranks))
                except KeyboardInterrupt:  # the pool would wait for tasks
                    for worker in multiprocessing.active_children():
                        worker.kill()
                    raise
                return


def default_workers() -> int:
    """A worker for each GPU, or for each CPU that the affinity of this process and the quota of its container allow."""
    return len(_gpus()) or cpu_count()


def _gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return (names.split(",") if names else list(map(str, range(count))))[:count]


def _prepare_worker(started: Any, devices: Sequence[str]) -> None:
    """Give a worker its GPU, and end it when the command is killed or, instead of its task only, interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with started.get_lock():
        number = started.value
        started.value += 1
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def staged(storage: DataFolder, inputs: Sequence[str], outputs: Sequence[str] = ()) -> Iterator[Path]:
    """Copy files of a storage to a temporary folder, and repeat its changes at the end. A local storage is used itself.

    ``inputs`` are patterns, whose files must exist; files of ``outputs`` are copied if they exist.

    Raises:
        DataError: There are no such files.
    """
    copied = set(filter(storage.isfile, outputs))
    for pattern in inputs:  # not `glob`, to which the brackets of a folder's name are a pattern
        paths = storage.find(str(Path(pattern).parent))
        if not (matching := [path for path in paths if fnmatchcase(path, pattern)]):
            raise DataError(
                f"{storage.resolve_paths(pattern)} does not exist. Every worker must be able to read and write the storage."
            )
        copied.update(matching)
    if storage.is_local():
        yield Path(storage.resolve_paths(""))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path in copied:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            storage.get_file(path, str(folder / path))
        before = _file_states(folder)
        try:
            yield folder
        finally:
            after = _file_states(folder)
            for path in sorted(before.keys() - after.keys()):  # they were damaged
                storage.rm_file(path)
            for path in sorted(path for path in after if after[path] != before.get(path)):
                storage.put_file(str(folder / path), path)


def _file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file was changed, and its inode."""
    stats = {file.relative_to(folder).as_posix(): file.stat() for file in folder.rglob("*") if file.is_file()}
    return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def _copy_texts(texts: Path, storage: DataFolder, sides: Iterable[str]) -> None:
    """Copy the sentences to a storage elsewhere, unless they are already there."""
    if storage.is_local() and Path(storage.resolve_paths("")) == texts.resolve():
        return
    is_kept = storage.isfile(MANIFEST)
    if is_kept and storage.cat_file(MANIFEST) != (texts / MANIFEST).read_bytes():
        raise DataMismatchError(
            f"{storage.resolve_paths('')} holds the work of another command: other texts, another encoder or other "
            "options of the search. Use another --storage, or delete it."
        )
    for path in (*(f"{side}/{name}" for side in sides for name in TEXTS), MANIFEST):  # last: it marks them complete
        if is_kept and storage.isfile(path) and storage.size(path) == (texts / path).stat().st_size:
            continue
        storage.makedirs(str(Path(path).parent), exist_ok=True)
        storage.put_file(str(texts / path), path)


def _remove_stale_marks(stage: PipelineExecutor, step: Step, storage: DataFolder) -> None:
    """Remove datatrove's marks of tasks whose files no longer exist."""
    storage.fs.invalidate_cache()
    kept = set(storage.list_files())
    for rank in range(stage.world_size):
        if not kept.issuperset(step.outputs(rank, stage.world_size)) and stage.is_rank_completed(rank):
            stage.logging_dir.rm_file(f"completions/{rank:05d}")


@lru_cache(maxsize=1)
def _encoder(name: str, max_length: int | None, prompt: str | None, digest: str) -> SentenceTransformer:
    """Load the encoder, once for all tasks of a worker."""
    model = load_encoder(name, max_length=max_length)
    if encoder_digest(model, resolve_prompt(model, prompt)) != digest:
        raise DataMismatchError(
            f"The encoder {name!r} has other weights or settings on this machine than where the command was started."
        )
    return model


@contextmanager
def _threads() -> Iterator[None]:
    """Use the threads that the executor gives a task, one with ``local``: their number changes the last bits of a sum."""
    count = max(1, int(os.environ.get("DATATROVE_CPUS_PER_TASK", 1)))
    kinds = [(torch.get_num_threads, torch.set_num_threads)]
    kinds += [(faiss.omp_get_max_threads, faiss.omp_set_num_threads)] if faiss is not None else []
    before = [get() for get, _ in kinds]
    flush_denormals()
    try:
        for _, put in kinds:
            put(count)
        yield
    finally:
        for (_, put), threads in zip(kinds, before, strict=True):
            put(threads)
