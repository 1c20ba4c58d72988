"""Mining on a Ray cluster of two nodes, one of which is killed."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.mining.test_engine import LOCAL, mine, shards, texts, words  # noqa: F401

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def cluster(monkeypatch):
    """A cluster, and its second node."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=settings | {"include_dashboard": False})
    second = cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def kill_within_a_task(cluster, node, marks):
    """Kill a node with all its processes while it works on a task; returns the task's mark, which is missing, and the time."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    until = time.monotonic() + 180
    while time.monotonic() < until:
        for process in (processes := raylet.children(recursive=True)):
            with suppress(psutil.Error):
                logs = " ".join(file.path for file in process.open_files())
                if task := re.search(r"ray_logs/logs/task_(\d+)\.log", logs):
                    process.suspend()  # so that it does not end in the meantime
                    if not (marks / task[1]).exists():
                        cluster.remove_node(node, allow_graceful=False)
                        for one in processes:
                            with suppress(psutil.NoSuchProcess):
                                one.kill()
                        return marks / task[1], time.time()
                    process.resume()
        time.sleep(0.01)
    raise TimeoutError("The second node had no task.")


def test_the_task_of_a_killed_node_is_made_again(mine, cluster, tmp_path, fault):  # noqa: F811
    storage = tmp_path / "storage"
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill_within_a_task, *cluster, storage / "logs" / "embed-3" / "completions")
        options = ["--executor", "ray", "--tasks", 3, "--executor_args", "mem_per_cpu_gb=0.5", "--storage", storage]
        pairs = mine(*options)
        mark, died = killed.result()
    assert mark.stat().st_mtime > died  # the task was lost, and made again by the other node
    assert pairs == mine(*LOCAL, "--storage", tmp_path / "whole")
    assert shards(storage) == shards(tmp_path / "whole")
    fault("I1", "kill -9 of a node of a Ray cluster within a task", tried=1, survived=1)
