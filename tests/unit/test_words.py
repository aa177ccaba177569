"""The counts of scripts/words.py, which may only fall."""

import json
from pathlib import Path

import pytest

from scripts import words

CODE = '''"""What is under way, one step a line."""


def told(self):
    """None: it is told."""


def load(self):
    """Load the weights, which the trainer wrote, from a folder."""
'''


def test_names_and_phrases_are_counted_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(CODE)
    found = [(each.rule, each.line, each.text) for each in words.find(file)]
    assert sorted(found) == [
        ("idiom", 1, "under way"),
        ("idiom", 5, "told"),
        ("none", 5, "None: "),
        ("participle", 4, "told"),
        ("question", 1, "What is under way, one step a line."),
        ("rate", 1, "one step a line"),
    ]


def test_a_count_that_rises_fails_and_one_that_falls_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "repl_rl").mkdir()
    (tmp_path / "repl_rl" / "a.py").write_text(CODE)
    stored = tmp_path / "words.json"
    counts = dict.fromkeys(words.RULES, 2)
    stored.write_text(json.dumps({**counts, "idiom": 1}))
    assert words.main(["--store"], tmp_path, stored) == 1
    assert "risen: idiom" in capsys.readouterr().err
    assert json.loads(stored.read_text())["idiom"] == 1
    stored.write_text(json.dumps(counts))
    assert words.main(["--store"], tmp_path, stored) == 0
    assert json.loads(stored.read_text()) == {
        "participle": 1, "question": 1, "idiom": 2, "rate": 1, "none": 1, "long": 0
    }  # fmt: skip
