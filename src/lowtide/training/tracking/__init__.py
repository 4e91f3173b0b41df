"""Trackers: the subscribers that come with lowtide, and how a config becomes a bus of them.

    kinds      their configs, torch-free            scalars   any number -> a plain value
    console    progress for a person                jsonl     records for programs
    tensorboard, wandb                              other people's viewers; imported only when used

A tracker of one's own is a class ``package.module:Class`` with ``handle(event)`` and ``close()``, named in
the config: ``{kind: custom, target: package.module:Class, config: {...}}``. It is called as ``Class(config,
run_folder=folder)``, or without the config where it has no nested pydantic ``Config``.
"""

from __future__ import annotations

from lowtide.training.tracking.build import build_bus

__all__ = ["build_bus"]
