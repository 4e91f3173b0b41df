"""``lowtide config check | show | schema``: a config without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lowtide.cli._answer import AllowCode, Answer, Json, Overrides
from lowtide.errors import LowtideError, UserError

if TYPE_CHECKING:
    from lowtide.training.config import LoadedConfig

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
    """Print a config with every field; what the environment gave stands there by name.

    Below it, as a comment, its policy written as rules, on the blocks of its model.
    """
    from lowtide.training.config import load_config, to_yaml

    loaded = load_config(config, set_, allow_code=allow_code)
    text = to_yaml(loaded.resolved).rstrip()
    # The document loads again as a config, so it has no place for what only explains it.
    return Answer(loaded.resolved, text=text if json else text + _as_rules(loaded, allow_code=allow_code), json=json)


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


def _as_rules(loaded: LoadedConfig[Any], *, allow_code: bool) -> str:
    """Return the policy as ``rules``, in comments; empty where it is written so, or says nothing of layers."""
    from lowtide.training.config import to_yaml

    policy = loaded.config.policy
    if policy.kind in ("none", "rules", "memory_budget"):
        return ""
    try:
        if not allow_code and (custom := _custom(loaded.resolved.get("model"), "model")):
            raise UserError(f"the model is not built without --allow-code: {', '.join(custom)}")
        from lowtide.training.inspect import expand_config

        rules = expand_config(loaded.config)
    except Exception as error:
        # Beside the config, never instead of it: a custom model may know no fake tensors.
        kind = "" if isinstance(error, LowtideError) else f"{type(error).__name__}: "
        return f"\n# policy {policy.kind} as rules: not known, since the model's blocks are not: {kind}{error}"
    written = to_yaml({"policy": rules.model_dump(mode="json", exclude_defaults=True) | {"kind": "rules"}})
    lines = written.rstrip().splitlines()
    return "\n".join(["", f"# policy {policy.kind} as rules:", *(f"# {line}" for line in lines)])


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
