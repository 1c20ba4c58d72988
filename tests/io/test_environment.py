"""The command that installs an extra, from where the package was installed."""

import json

import pytest

from metaphrase.io.environment import install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'metaphrase[align]'"),
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[align]'"),
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "pip install '{folder}[align]'"),
        ({"url": "file://{folder}/It%27s", "dir_info": {}}, """pip install '{folder}/It'"'"'s[align]'"""),
        ({"url": "file:///gone/metaphrase", "dir_info": {}}, "pip install 'metaphrase[align]'"),
        (
            {"url": "https://example.org/m.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'metaphrase[align] @ git+https://example.org/m.git'",
        ),
    ],
    ids=["index", "clone", "editable", "a quote", "a clone that is gone", "repository"],
)
def test_an_extra_is_installed_from_where_the_package_is_from(tmp_path, monkeypatch, origin, command):
    clone = tmp_path / "my clone"
    (clone / "It's").mkdir(parents=True)
    place = tmp_path / "site" / "metaphrase-9.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: metaphrase\nVersion: 9\n")
    if origin is not None:
        url = origin["url"].replace("{folder}", str(clone).replace(" ", "%20"))
        (place / "direct_url.json").write_text(json.dumps(origin | {"url": url}))
    monkeypatch.syspath_prepend(str(place.parent))
    assert install_command("align") == command.replace("{folder}", str(clone))
