"""``lowtide config check | show | schema``: a config without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lowtide.cli._answer import AllowCode, Answer, Json, Overrides

__all__ = ["app"]

app = App(name="config", help="Check or show a config, or print what one may hold.")

Config = Annotated[Path, Parameter(help="The YAML file.")]


@app.command
def check(config: Config, /, *, set_: Overrides = (), allow_code: AllowCode = False, json: Json = False) -> Answer:
    """Check a config without running it; every fault is named in one message."""
    from lowtide.training.config import load_config

    loaded = load_config(config, set_, allow_code=allow_code)
    unchecked = [] if allow_code else list(_custom(loaded.resolved, ""))
    lines = [f"{config}: legal", *(f"not checked without --allow-code: {what}" for what in unchecked)]
    return Answer({"config": str(config), "legal": True, "unchecked": unchecked}, text="\n".join(lines), json=json)


@app.command
def show(config: Config, /, *, set_: Overrides = (), allow_code: AllowCode = False, json: Json = False) -> Answer:
    """Print a config with every field; what the environment gave stands there by name."""
    from lowtide.training.config import load_config, to_yaml

    loaded = load_config(config, set_, allow_code=allow_code)
    return Answer(loaded.resolved, text=to_yaml(loaded.resolved).rstrip(), json=json)


@app.command
def schema(
    *,
    markdown: Annotated[bool, Parameter(negative=(), help="Print the reference page instead.")] = False,
    json: Json = False,
) -> Answer:
    """Print the JSON schema of a config, which editors can use, or the reference page."""
    from lowtide.cli._answer import strict_json
    from lowtide.training.config import TrainConfig, reference_page

    document = TrainConfig.model_json_schema()
    return Answer(document, text=reference_page().rstrip() if markdown else strict_json(document), json=json)


def _custom(value: Any, path: str) -> list[str]:
    found: list[str] = []
    if isinstance(value, dict):
        if value.get("kind") == "custom":
            found.append(f"{path} ({value.get('target')})")
        entries = list(value.items())
    else:
        entries = list(enumerate(value)) if isinstance(value, list) else []
    for key, below in entries:
        found += _custom(below, f"{path}.{key}" if path else str(key))
    return found
