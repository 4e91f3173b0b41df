"""How checkpoints lie on the disk, and which of them are whole. No torch.

    checkpoints/
      step-00000120/        complete: it has a manifest, and every file that the manifest lists
        data/               torch.distributed.checkpoint's files
        rng/rank-0.json     random state of each rank that saved
        manifest.json       written last, on rank 0: progress, and size and hash of every file
      .tmp-step-00000180/   being written, or left behind by a kill; the next save removes it
      abandoned-step-.../   later than the step that was saved last: the run was resumed from before it

A checkpoint appears by renaming its folder after everything in it has reached the disk, so a kill at any moment
leaves the older ones as they were. Hashes show damage, not authorship: torch's own files contain pickles, so load
only checkpoints that you trust.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.errors import InputError, listing
from lowtide.system.files import read_json, sync_folder, write_json
from lowtide.training.ranks import on_main

__all__ = [
    "CheckpointInfo",
    "FileRecord",
    "Progress",
    "checkpoint_name",
    "discard_leftovers",
    "finish",
    "hash_file",
    "latest_complete",
    "list_files",
    "prepare",
    "read_complete",
]

_LOG = logging.getLogger(__name__)
_SCHEMA_VERSION = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,15})")
_BEING_WRITTEN, _REPLACED, _SET_ASIDE = ".tmp-", ".old-", "abandoned-"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Progress:
    """How far a run is: what the loop goes on from."""

    step: int
    """Optimizer steps done."""

    tokens: int
    """Tokens trained on, over all ranks."""

    samples: int
    """Samples that all ranks together have taken from the training data: the position in its order."""


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint, as its manifest tells it."""

    path: Path
    progress: Progress
    world_size: int
    size_bytes: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the saver wrote down besides: JSON values, such as the policy."""


def checkpoint_name(step: int) -> str:
    """Name the folder of a step; names sort as numbers do."""
    return f"step-{step:08d}"


def prepare(folder: Path, step: int) -> Path:
    """Make the empty folder that a checkpoint is written into, beside its place. For one rank."""
    beside = folder / f"{_BEING_WRITTEN}{checkpoint_name(step)}"
    folder.mkdir(parents=True, exist_ok=True)
    discard_leftovers(folder)
    (beside / "rng").mkdir(parents=True)
    return beside


def discard_leftovers(folder: Path) -> None:
    """Remove what killed saves left behind. There is one writer per folder, so nothing of it is in use."""
    for path in folder.iterdir():
        if path.name.startswith((_BEING_WRITTEN, _REPLACED)):
            shutil.rmtree(path)


def list_files(beside: Path) -> list[str]:
    """List the files of a checkpoint by relative name, without the manifest."""
    found = (p.relative_to(beside).as_posix() for p in beside.rglob("*") if p.is_file())
    return sorted(name for name in found if name != _MANIFEST)


def hash_file(path: Path) -> FileRecord:
    """Read a file once for its size and hash, and see that it is on the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def finish(
    beside: Path,
    *,
    progress: Progress,
    world_size: int,
    files: Mapping[str, FileRecord],
    notes: Mapping[str, Any],
    keep_last: int | None,
) -> Path:
    """Write the manifest, rename the folder to its place, and remove the oldest. For one rank."""
    write_json(
        beside / _MANIFEST,
        {
            "schema_version": _SCHEMA_VERSION,
            "step": progress.step,
            "tokens": progress.tokens,
            "samples": progress.samples,
            "world_size": world_size,
            "files": {name: [r.size_bytes, r.sha256] for name, r in sorted(files.items())},
            "notes": dict(notes),
        },
    )
    for inner in (p for p in beside.rglob("*") if p.is_dir()):
        sync_folder(inner)
    place = beside.parent / checkpoint_name(progress.step)
    replaced = beside.parent / f"{_REPLACED}{place.name}"
    if place.exists():
        place.rename(replaced)
    beside.rename(place)
    sync_folder(place.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    _set_aside_later(place.parent, progress.step)
    if keep_last is not None:
        _remove_oldest(place.parent, keep_last)
    return place


def latest_complete(
    folder: Path, *, tell: Callable[[str], None] = _LOG.warning, check_contents: bool = True
) -> CheckpointInfo | None:
    """Find the newest whole checkpoint; None where there is none. Collective: rank 0 looks, all ranks learn.

    Broken and half ones are passed over; ``tell`` hears of each on rank 0, with the reason. Hashing reads every
    file once; ``check_contents=False`` looks at names and sizes only.
    """

    def look() -> str | None:
        for path in sorted(_by_step(folder), key=_step_of, reverse=True):
            reason = _why_broken(path, check_contents=check_contents)
            if reason is None:
                return str(path)
            tell(f"checkpoint {path} is passed over: {reason}")
        return None

    found = on_main(look)
    return None if found is None else _read_manifest(Path(found))


def read_complete(path: Path, *, check_contents: bool = True) -> CheckpointInfo:
    """Read the checkpoint that the user named. Collective, as ``latest_complete``.

    Raises:
        InputError: there is none, or it is broken; on every rank.
    """

    def look() -> None:
        reason = _why_broken(path, check_contents=check_contents)
        if reason is not None:
            near = [p.name for p in _by_step(path.parent)] if path.parent.is_dir() else []
            there = f"; in {path.parent} there are: {listing(sorted(near))}" if near else ""
            raise InputError(f"{path} is no complete checkpoint: {reason}{there}")

    on_main(look)
    return _read_manifest(path)


def _by_step(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())


def _step_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _why_broken(path: Path, *, check_contents: bool) -> str | None:
    if not (path / _MANIFEST).is_file():
        return "it has no manifest.json, which is written last" if path.is_dir() else "there is no such folder"
    try:
        document = read_json(path / _MANIFEST)
        expected = {str(name): FileRecord(*record) for name, record in document["files"].items()}
        _read_manifest(path)
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        return f"its manifest.json cannot be understood ({type(error).__name__}: {error})"
    missing = sorted(set(expected) - set(list_files(path)))
    if missing:
        return f"missing: {listing(missing)}"
    for name, record in sorted(expected.items()):
        size_bytes = (path / name).stat().st_size
        if size_bytes != record.size_bytes:
            return f"{name} has {size_bytes} bytes instead of {record.size_bytes}"
    if check_contents:
        changed = [name for name, record in sorted(expected.items()) if hash_file(path / name) != record]
        if changed:
            return f"changed since it was written: {listing(changed)}"
    return None


def _read_manifest(path: Path) -> CheckpointInfo:
    document = read_json(path / _MANIFEST)
    if document["schema_version"] != _SCHEMA_VERSION:
        raise ValueError(f"schema_version {document['schema_version']!r}, this lowtide reads {_SCHEMA_VERSION}")
    progress = Progress(int(document["step"]), int(document["tokens"]), int(document["samples"]))
    size_bytes = sum(int(size) for size, _ in document["files"].values())
    return CheckpointInfo(path, progress, int(document["world_size"]), size_bytes, dict(document["notes"]))


def _set_aside_later(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps, left by a run that was resumed from before them.

    Were they to stay, the newest would not be this run's, and this run's own would be removed as the oldest.
    """
    for path in [p for p in _by_step(folder) if _step_of(p) > step]:
        aside = path.with_name(f"{_SET_ASIDE}{path.name}")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        _LOG.warning("%s is of a run that step %d left behind; it is kept as %s", path, step, aside.name)


def _remove_oldest(folder: Path, keep_last: int) -> None:
    """Keep the newest ``keep_last`` that have a manifest; what has none does not count and stays."""
    assert keep_last >= 1, f"keep_last is 1 or more, got {keep_last}"
    complete = sorted((p for p in _by_step(folder) if (p / _MANIFEST).is_file()), key=_step_of)
    for path in complete[:-keep_last]:
        # Without its manifest it is known as half, should the removal be interrupted.
        (path / _MANIFEST).unlink()
        shutil.rmtree(path)
