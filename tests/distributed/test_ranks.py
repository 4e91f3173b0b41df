"""What rank 0 decides reaches every rank, errors too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide.errors import ConfigError, InputError, RankError
from lowtide.training.ids import agree_on_id, new_experiment_id
from lowtide.training.mesh import process_group
from lowtide.training.ranks import barrier, on_main, raised_elsewhere, share_string

STRINGS = ["", "x", "ä 😀 \n\t\0", "\ud800 alone", "long " * 50_000]


def _share(strings: list[str]) -> list[str]:
    import torch.distributed as dist

    mine = strings if dist.get_rank() == 0 else [None] * len(strings)
    return [share_string(each) for each in mine]


def _share_what_differs() -> str:
    import torch.distributed as dist

    return share_string(f"rank {dist.get_rank()}")


def _errors_of(error: BaseException | None) -> list[tuple[str, str, int | None]]:
    import torch.distributed as dist

    def act() -> None:
        if error is not None:
            raise error

    found = []
    for _ in range(2):  # a second time: the group is still of use
        try:
            on_main(act)
        except BaseException as seen:
            found.append((type(seen).__name__, str(seen), raised_elsewhere(seen)))
    barrier()
    assert dist.is_initialized()
    return found


def _not_json() -> str:
    try:
        on_main(lambda: object())
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _no_string() -> str:
    with pytest.raises(RankError, match="it gave None"):
        share_string(None)
    return "told"


def _record(folder: str) -> object:
    return on_main(lambda: {"pid": os.getpid(), "made": Path(folder, "made").mkdir() is None})


def _agree(given: str | None) -> str:
    return agree_on_id({"a": 1}, experiment_id=given)


def _own_group() -> tuple[int, int, str]:
    with process_group(60, device="cpu") as world:
        return world.rank, world.world_size, share_string(f"from {world.rank}")


def _fail_alone_in_own_group() -> str:
    import torch
    import torch.distributed as dist

    try:
        with process_group(60, device="cpu") as world:
            if world.rank == 1:
                raise LookupError("rank 1 only")
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        assert not dist.is_initialized()
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_any_string_reaches_every_rank(run_on, n):
    assert run_on(n, _share, STRINGS) == [STRINGS] * n


def test_the_string_is_rank_0s_whatever_the_others_have(run_on):
    assert run_on(3, _share_what_differs) == ["rank 0"] * 3


def test_our_errors_arrive_as_themselves_and_say_where_they_began(run_on):
    here, there = run_on(2, _errors_of, ConfigError("data.batch_size is wrong"))
    assert here == [("ConfigError", "data.batch_size is wrong", None)] * 2
    assert there == [("ConfigError", "data.batch_size is wrong", 0)] * 2


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), KeyboardInterrupt("stop"), SystemExit("bye")])
def test_other_errors_arrive_as_one_that_names_them(run_on, error):
    here, there = run_on(2, _errors_of, error)
    kind = type(error).__name__
    assert here == [(kind, str(error), None)] * 2
    assert there == [("RankError", f"rank 0 failed: {kind}: {error}", 0)] * 2


def test_no_error_is_no_error(run_on):
    assert run_on(2, _errors_of, None) == [[], []]


def test_a_result_that_cannot_be_shared_is_an_error_everywhere(run_on):
    assert run_on(2, _not_json) == ["TypeError", "RankError"]


def test_sharing_what_is_no_string_is_an_error_everywhere(run_on):
    assert run_on(2, _no_string) == ["told", "told"]


def test_only_rank_0_acts_and_all_have_its_result(run_on, tmp_path):
    first, *others = run_on(3, _record, str(tmp_path))
    assert others == [first] * 2
    assert (tmp_path / "made").is_dir()


def test_ranks_agree_on_an_id(run_on):
    one, two = run_on(2, _agree, None)
    assert one == two
    assert one[16:24] == new_experiment_id({"a": 1})[16:24]
    assert run_on(2, _agree, "mine") == ["mine", "mine"]


def test_an_id_that_is_not_legal_is_refused_on_every_rank(run_on):
    with pytest.raises(ConfigError, match="not legal"):
        run_on(2, _agree, "../mine")


def test_the_environment_of_torchrun_makes_the_group(run_on):
    assert run_on(2, _own_group, group=False) == [(0, 2, "from 0"), (1, 2, "from 0")]


def test_a_rank_that_fails_alone_leaves_nobody_waiting_and_no_group(run_on):
    assert run_on(2, _fail_alone_in_own_group, group=False) == ["RuntimeError", "LookupError"]


def test_a_folder_that_cannot_be_made_is_the_users_error(run_on, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        run_on(2, _errors_of_folder, str(tmp_path / "file"))


def _errors_of_folder(path: str) -> None:
    from lowtide.training.run_folder import RunFolder

    RunFolder.create(Path(path), experiment_id="x", name="x", given="", resolved={})
