"""Write the tables of the documentation that come from code: ``python docs/make_tables.py`` rewrites them in place.

A table stands between ``<!-- NAME: ... -->`` and ``<!-- end -->``. Why made and not typed: numbers and lists that a
person copies are wrong after the next change. ``tests/unit/test_docs.py`` holds the pages equal to what this makes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
SAVED_CONFIG = DOCS.parent / "examples" / "quickstart.yaml"
SAVED_POLICIES = (
    "kind: none",
    "kind: full",
    "kind: every_nth_layer\nn: 2",
    "kind: some_layers\ncheckpoint: 2/3",
    "kind: selective_op\nsave: [sdpa]",
    "kind: selective_op\nsave: [sdpa, {op: matmul, keep: 1/2}]",
    "kind: selective_op\nsave: [sdpa, matmul]",
    "kind: rules\ndefault: save\nrules: [{modules: mlp, action: recompute}]",
    "kind: rules\ndefault: save\nrules: [{modules: mlp, op: aten.silu, action: recompute}]",
)


def saved_table() -> str:
    """Saved bytes of one forward of the quickstart's model on one rank, under a policy of each kind."""
    import torch
    import yaml

    from lowtide import saved_bytes
    from lowtide.training import load_config
    from lowtide.training.build import build_bare
    from lowtide.training.loop import next_token_loss
    from lowtide.training.model.forward import forward_logits
    from lowtide.units import format_bytes

    config = load_config(SAVED_CONFIG).config
    shape = (config.data.batch_size, config.data.sequence_length)
    policies = [yaml.safe_load(text) for text in SAVED_POLICIES]
    found = saved_bytes(
        lambda: build_bare(config),
        lambda: (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)),
        # `none` stands first in any case.
        policies=policies[1:],
        forward=lambda model, batch: next_token_loss(forward_logits(model, batch[0]), batch[1]),
    )
    rows = ["| policy | checkpointed | all blocks keep | share of `none` |", "|---|--:|--:|--:|"]
    whole = sum(found.columns[0].block_bytes)
    for text, column in zip(SAVED_POLICIES, found.columns, strict=True):
        kept, blocks = sum(column.block_bytes), len(column.block_bytes)
        said = text.replace("\n", ", ")
        rows.append(
            f"| `{said}` | {column.checkpointed} of {blocks} | {format_bytes(kept)} | {100 * kept / whole:.0f}% |"
        )
    rest = format_bytes(found.columns[0].rest_bytes)
    version = torch.__version__.split("+")[0]
    rows += ["", f"Outside of the blocks (embedding, head, loss) {rest} more in every row; torch {version}."]
    return "\n".join(rows)


def alias_table() -> str:
    """The operators that each alias stands for."""
    from lowtide.policy import ALIASES

    rows = ["| alias | operators, every overload of each |", "|---|---|"]
    rows += [f"| `{name}` | {', '.join(f'`{op}`' for op in ops)} |" for name, ops in ALIASES.items()]
    return "\n".join(rows)


def routing_list() -> str:
    """The operators whose integer results every kind saves."""
    from lowtide.policy import ROUTING_OPS

    return ", ".join(f"`{op}`" for op in ROUTING_OPS)


def event_table() -> str:
    """The events and their fields."""
    from lowtide.training import events

    rows = ["| event | when | fields |", "|---|---|---|"]
    for name in events.__all__:
        kind = getattr(events, name)
        if not (isinstance(kind, type) and issubclass(kind, events.Event)) or kind is events.Event:
            continue
        when = " ".join((kind.__doc__ or "").split()).replace("``", "`")
        fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        rows.append(f"| `{name}` | {when} | {fields} |")
    return "\n".join(rows)


def sweep_table() -> str:
    """The fields of a sweep file."""
    from pydantic_core import to_json

    from lowtide.sweeps import SweepConfig

    rows = ["| field | default | what it does |", "|---|---|---|"]
    for name, info in SweepConfig.model_fields.items():
        default = (
            "required" if info.is_required() else f"`{to_json(info.get_default(call_default_factory=True)).decode()}`"
        )
        prose = " ".join((info.description or "").split()).replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {prose} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "saved bytes": saved_table,
    "aliases": alias_table,
    "routing": routing_list,
    "events": event_table,
    "sweep": sweep_table,
}
_BLOCK = re.compile(r"(<!-- (?P<name>[a-z ]+): [^>]*-->\n)(?P<body>(?:(?!<!--).)*?)\n?(<!-- end -->)", re.DOTALL)


def tables_in(text: str) -> dict[str, str]:
    """Return the tables that stand in a page, by name."""
    return {found["name"]: found["body"] for found in _BLOCK.finditer(text)}


def rewrite(text: str) -> str:
    """Return a page with its tables made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}\n{found[4]}", text)


def main() -> int:
    """Rewrite every page that holds a table."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if tables_in(text):
            page.write_text(rewrite(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
