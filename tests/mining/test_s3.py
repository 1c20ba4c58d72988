"""Mining with a storage on an S3 server of this machine, by workers in processes of their own."""

import pytest

from tests.mining.test_engine import LOCAL, mine, shards, texts, words  # noqa: F401

pytest.importorskip("moto.server", reason="the extra test-all is not installed")
s3fs = pytest.importorskip("s3fs", reason="the extra test-all is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def bucket(monkeypatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    storage = s3fs.S3FileSystem()
    storage.mkdir("bucket")
    yield storage
    server.stop()


def test_a_storage_on_s3(mine, bucket, tmp_path, capsys):  # noqa: F811
    expected = mine(*LOCAL, "--index", "ivf", "--storage", tmp_path / "1")
    options = ["--executor", "local", "--tasks", 3, "--index", "ivf", "--storage", "s3://bucket/mine"]
    assert mine(*options, "--workers", 2) == expected
    for path, content in shards(tmp_path / "1").items():
        assert bucket.cat(f"bucket/mine/{path.as_posix()}") == content
    capsys.readouterr()
    assert mine(*options, "--workers", 1) == expected
    assert "embed" not in capsys.readouterr().err
    bucket.rm("bucket/mine/target/embeddings/000001.npy")
    assert mine(*options, "--workers", 1) == expected
    assert "embed: 1 of 3 tasks" in capsys.readouterr().err
