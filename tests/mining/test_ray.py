"""Mining on a Ray cluster of two nodes, one of which is killed."""

import threading
import time

import pytest

from tests.mining.test_engine import LOCAL, mine, shards, texts, words  # noqa: F401

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=settings | {"include_dashboard": False})
    second = cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False)
    yield lambda: cluster.remove_node(second, allow_graceful=False)
    ray.shutdown()
    cluster.shutdown()


def test_the_tasks_of_a_killed_node_are_repeated(mine, cluster, tmp_path, fault):  # noqa: F811
    storage = tmp_path / "storage"

    def kill():
        while not list(storage.rglob("*.npy")):
            time.sleep(0.05)
        cluster()

    killer = threading.Thread(target=kill)
    killer.start()
    options = ["--executor", "ray", "--tasks", 6, "--executor_args", "mem_per_cpu_gb=0.5", "--storage", storage]
    pairs = mine(*options)
    killer.join()
    assert len(ray.nodes()) == 2
    assert sum(node["Alive"] for node in ray.nodes()) == 1
    assert pairs == mine(*LOCAL, "--storage", tmp_path / "whole")
    assert shards(storage) == shards(tmp_path / "whole")
    fault("I1", "kill -9 of a node of a Ray cluster", tried=1, survived=1)
