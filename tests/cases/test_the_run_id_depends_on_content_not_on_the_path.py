"""Field case 36 (the config's part): the hash in a run's id is the same wherever the config lies.

That one rank decides the id and all others receive it is tested with the ids.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from lowtide.training.config import config_hash, load_config
from lowtide.training.ids import new_experiment_id
from tests.helpers.configs import MINIMAL, write


def test_the_same_content_elsewhere_has_the_same_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("LOWTIDE_TEST_NAME", "first")
    text = MINIMAL + "run: {name: '${env:LOWTIDE_TEST_NAME}'}\n"
    one = load_config(write(tmp_path, text, "a.yaml"))
    monkeypatch.chdir(there)
    monkeypatch.setenv("LOWTIDE_TEST_NAME", "second")
    other = load_config(write(there, "# moved\n" + text, "b.yaml"))
    assert (one.config.run.name, other.config.run.name) == ("first", "second")
    # What the environment gave stands there by name: it does not leak into the hash either.
    assert config_hash(one.resolved) == config_hash(other.resolved)
    now = datetime(2026, 12, 1, 4, 15, 0, tzinfo=UTC)
    ids = [new_experiment_id(loaded.resolved, now=now) for loaded in (one, other)]
    assert ids[0].split("-")[:3] == ids[1].split("-")[:3]
    assert ids[0] != ids[1]
