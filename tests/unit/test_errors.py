"""The tree of errors: exit codes, what is found in a chain, nearest names."""

from __future__ import annotations

import pytest

from lowtide import errors
from lowtide.errors import (
    ConfigError,
    DoesNotFitError,
    InputError,
    LowtideError,
    NothingMatchedError,
    PolicyError,
    RankError,
    RecomputeError,
    RefusedError,
    RunOutOfMemoryError,
    StoppedError,
    UserError,
    find_error,
    listing,
    nearest,
)

EXIT_CODES = {
    UserError: 2,
    ConfigError: 2,
    InputError: 2,
    PolicyError: 2,
    NothingMatchedError: 2,
    RefusedError: 2,
    DoesNotFitError: 3,
    StoppedError: 75,
    RecomputeError: 1,
    RunOutOfMemoryError: 1,
    RankError: 1,
    LowtideError: 1,
}


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_exit_codes(kind):
    assert kind("x").exit_code == EXIT_CODES[kind]


def test_every_error_is_in_the_tree_and_drawn_in_the_docstring():
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    for kind in kinds:
        assert issubclass(kind, LowtideError)
        assert kind.__name__ in (errors.__doc__ or "")
    assert issubclass(UserError, ValueError)
    assert issubclass(RecomputeError, RuntimeError)


def _wrapped(inner: BaseException, *, explicit: bool) -> BaseException:
    try:
        try:
            raise inner
        except type(inner) as error:
            raise RuntimeError("outer") from (error if explicit else None)
    except RuntimeError as error:
        return error


def test_an_error_is_found_behind_causes_and_contexts():
    inner = RunOutOfMemoryError("x")
    assert find_error(inner) is inner
    assert find_error(_wrapped(inner, explicit=True)) is inner
    assert find_error(_wrapped(inner, explicit=False)) is inner
    assert find_error(_wrapped(inner, explicit=True), PolicyError) is None
    assert find_error(_wrapped(ValueError("x"), explicit=True)) is None


def test_a_chain_that_bites_its_tail_ends():
    a, b = RuntimeError("a"), RuntimeError("b")
    a.__cause__, b.__cause__ = b, a
    assert find_error(a) is None


def test_nearest_puts_the_best_first_and_finds_by_the_last_segment():
    assert nearest("gradient_checkpoint", ["model", "gradient_checkpointing"]) == ["gradient_checkpointing"]
    assert nearest("layrs", ["layers", "heads"]) == ["layers"]
    assert nearest("x.mm", ["aten.addmm", "aten.mm", "aten.relu"], count=2)[0].endswith("mm")
    assert nearest("qqq", ["layers"]) == []


def test_listing_says_how_many_more():
    assert listing(["a", "b"]) == "a, b"
    assert listing([str(i) for i in range(5)], limit=2) == "0, 1 and 3 more"
