import json

from metaphrase.corpus import load_corpus
from tests.corpus.samples import many, tsv


def test_the_report_adds_up(tmp_path):
    pairs = [*many(5), *many(2), ("", "x"), ("!", "!")]
    tsv(tmp_path / "sw-en.tsv", pairs)
    tsv(tmp_path / "te-en.tsv", many(4))
    report = load_corpus(tmp_path).report
    assert report.table() == [
        {"file": str(tmp_path / "sw-en.tsv"), "language": "sw", "read": 9, "kept": 5,
         "dropped": "duplicate 2, empty side 1, no words 1"},
        {"file": str(tmp_path / "te-en.tsv"), "language": "te", "read": 4, "kept": 4, "dropped": ""},
    ]  # fmt: skip
    facts = json.loads(json.dumps(report.to_dict()))
    assert (facts["read"], facts["kept"], facts["languages"]) == (13, 9, {"sw": 5, "te": 4})
    assert facts["files"][0]["examples"]["empty side"] == [f"{tmp_path / 'sw-en.tsv'}:9"]
    assert repr(report) == "CorpusReport(read=13, kept=9)"
    assert str(report).splitlines() == [
        "file       language  read  kept  dropped",
        "sw-en.tsv  sw           9     5  duplicate 2, empty side 1, no words 1",
        "te-en.tsv  te           4     4",
        "total                  13     9  duplicate 2, empty side 1, no words 1",
    ]
