"""The embedded text: what it holds, what is held out, and an order that only the seed decides."""

from __future__ import annotations

import itertools
import re
import sys
import types

import pytest
import torch
from pydantic import ValidationError

from lowtide.errors import InputError
from lowtide.training.data import corpus
from lowtide.training.data.corpus import load_corpus, split_documents
from lowtide.training.data.kinds import EmbeddedTextConfig


def _source(*, rank=0, world_size=1, seed=0, **fields):
    config = EmbeddedTextConfig(**{"sequence_length": 64, "batch_size": 4, **fields})
    return config.build(rank=rank, world_size=world_size, seed=seed)


def _take(source, count, start=0):
    return list(itertools.islice(source.batches(start), count))


def test_the_text_is_real_and_english():
    text = load_corpus(docstrings=False, held_out=0.05).training.tobytes().decode()
    assert len(text) > 300_000
    assert "assert" in text
    assert text.count(" the ") > 2000


def test_batches_are_text_and_targets_are_the_next_byte():
    source = _source()
    inputs, targets = next(source.batches())
    assert inputs.shape == targets.shape == (4, 64)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < source.vocab_size == 256
    text = load_corpus(docstrings=False, held_out=0.05).training.tobytes()
    for row_in, row_out in zip(inputs, targets, strict=True):
        assert bytes([*row_in.tolist(), int(row_out[-1])]) in text


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    assert all(torch.equal(a[0], b[0]) for a, b in zip(_take(_source(), 5), _take(_source(), 5), strict=True))
    assert not torch.equal(_take(_source(), 1)[0][0], _take(_source(seed=1), 1)[0][0])


@pytest.mark.parametrize("start", [1, 7, 1000, 10**9])
def test_a_later_step_is_reached_without_those_before_it(start):
    source = _source()
    if start < 100:
        expected = _take(source, start + 2)[start:]
    else:
        expected = _take(_source(), 2, start)
    found = _take(source, 2, start)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 4), (4, 2), (8, 1)])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(world_size, batch_size):
    whole = _take(_source(batch_size=8), 3)
    parts = [_take(_source(rank=r, world_size=world_size, batch_size=batch_size), 3) for r in range(world_size)]
    for step, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([p[step][0] for p in parts]), inputs)
        assert torch.equal(torch.cat([p[step][1] for p in parts]), targets)


def test_a_run_goes_on_with_the_next_sample_on_another_number_of_ranks():
    order = torch.cat([x for x, _ in _take(_source(batch_size=1), 40)])
    two = [_source(rank=r, world_size=2, batch_size=4) for r in range(2)]
    resumed = torch.cat([next(s.batches_from(24))[0] for s in two])
    assert torch.equal(resumed, order[24:32])


def test_an_epoch_sees_every_window_once_and_the_next_one_cuts_elsewhere():
    source = _source(sequence_length=512, batch_size=1)
    epochs = [torch.cat([x for x, _ in _take(source, source.windows, e * source.windows)]) for e in range(2)]
    rows = [{bytes(row.tolist()) for row in epoch} for epoch in epochs]
    assert len(rows[0]) == source.windows
    assert len(rows[0] & rows[1]) < source.windows // 100 + 1
    text = load_corpus(docstrings=False, held_out=0.05).training.tobytes()
    # The text repeats itself, so a window may stand at several places; all share one grid.
    grids = [{found.start() % 512 for found in re.finditer(re.escape(row), text)} for row in rows[0]]
    assert len(set.intersection(*grids)) == 1


def test_held_out_text_is_unseen_in_training():
    kept = load_corpus(docstrings=False, held_out=0.05)
    training = kept.training.tobytes()
    paragraphs = [p.strip() for p in kept.held_out.tobytes().split(b"\n\n") if len(p.strip()) >= 60]
    assert len(paragraphs) > 20
    assert [p for p in paragraphs if b"\n\n" + p + b"\n\n" in training] == []
    share = len(kept.held_out) / (len(kept.held_out) + len(training))
    assert 0.02 < share < 0.12


def test_evaluation_goes_through_the_held_out_text_in_order_on_all_ranks():
    whole = list(_source(batch_size=8).evaluation_batches())
    parts = [list(_source(rank=r, world_size=2, batch_size=4).evaluation_batches()) for r in range(2)]
    assert len(whole) == len(parts[0]) == len(parts[1]) > 10
    for step, (inputs, _) in enumerate(whole):
        assert torch.equal(torch.cat([p[step][0] for p in parts]), inputs)
    text = load_corpus(docstrings=False, held_out=0.05).held_out.tobytes()
    assert text.startswith(bytes(torch.cat([x for x, _ in whole]).flatten().tolist()))


def test_every_rank_evaluates_even_when_the_text_is_short():
    sources = [_source(rank=r, world_size=3, batch_size=100, sequence_length=512) for r in range(3)]
    assert [len(list(s.evaluation_batches())) for s in sources] == [1, 1, 1]
    assert next(sources[2].evaluation_batches())[0].shape == (100, 512)


def test_a_sequence_longer_than_the_text_is_refused_with_what_is_possible():
    with pytest.raises(InputError, match=r"sequence_length: 1000000 is too long.*use (\d+) or less") as caught:
        _source(sequence_length=1_000_000)
    longest = int(str(caught.value).split("use ")[1].split(" ")[0])
    next(_source(sequence_length=longest, batch_size=1).batches())


def test_another_layout_of_the_reference_is_read_too(monkeypatch):
    """Python moves these texts around; a mapping of strings in any module of the package is taken."""
    package = types.ModuleType("pydoc_data")
    package.__path__ = []
    module = types.ModuleType("pydoc_data.elsewhere")
    module.sections = {"b": "second " * 10, "a": "first " * 10, "n": 3}
    module._private = {"x": "no"}
    monkeypatch.setitem(sys.modules, "pydoc_data", package)
    monkeypatch.setitem(sys.modules, "pydoc_data.elsewhere", module)
    found = types.SimpleNamespace(name="elsewhere")
    monkeypatch.setattr(corpus.pkgutil, "iter_modules", lambda path: [found])
    assert dict(corpus._reference()) == {
        "elsewhere/a": ("first " * 10).strip(),
        "elsewhere/b": ("second " * 10).strip(),
    }


def test_a_python_without_the_reference_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    load_corpus.cache_clear()
    try:
        with pytest.raises(InputError, match="carries no pydoc_data"):
            load_corpus(docstrings=False, held_out=0.05)
    finally:
        load_corpus.cache_clear()


def test_the_split_needs_no_order_and_loses_only_what_was_held_out():
    documents = {f"d{i}": "\n\n".join([f"paragraph {i} {j} " + "x" * 50 for j in range(3)]) for i in range(40)}
    documents["d7"] += "\n\n" + documents["d30"]
    training, held_out = split_documents(documents, share=0.1)
    turned = dict(reversed(documents.items()))
    assert split_documents(turned, share=0.1) == (training, held_out)
    assert 3 <= len(held_out) <= 8
    everything = {p for text in documents.values() for p in text.split("\n\n")}
    seen = {p for text in training for p in text.split("\n\n")}
    unseen = {p for text in held_out for p in text.split("\n\n")}
    assert seen | unseen == everything
    assert seen & unseen == set()


def test_docstrings_add_text(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text('"""About it."""\ndef f():\n    """Does it."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text('"""Not this."""\n')
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert dict(corpus._docstrings()) == {"docstrings/good.py": "About it.\n\nDoes it."}


@pytest.mark.parametrize("fields", [{"sequence_length": 0}, {"batch_size": 0}, {"held_out": 0.6}, {"batch": 3}])
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(ValidationError):
        EmbeddedTextConfig(**fields)
