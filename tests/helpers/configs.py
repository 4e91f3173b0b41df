"""Configs for tests: files written from text, kinds that count what they build, and a class to hold them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from lowtide.errors import ConfigError
from lowtide.training.config import LoadedConfig, TrainConfig, load, load_config
from lowtide.training.registry import Component, Family, register
from lowtide.training.section import Section

MINIMAL = """\
model: {kind: decoder}
data: {kind: random}
"""

built: Counter[str] = Counter()
"""How many objects the kinds below have built, by kind."""


def write(folder: Path, text: str, name: str = "train.yaml") -> Path:
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path


def read(folder: Path, text: str, *overrides: str, allow_code: bool = True) -> LoadedConfig[TrainConfig]:
    return load_config(write(folder, text), overrides, allow_code=allow_code)


def complaint(folder: Path, text: str, *overrides: str, allow_code: bool = True) -> str:
    """Return the message of the error, with the file's folder left out."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *overrides, allow_code=allow_code)
    return str(caught.value).replace(f"{folder}/", "")


def parts(folder: Path, text: str, *overrides: str, **environment: str) -> LoadedConfig[Assembly]:
    """Read a config of counted parts; only the given variables are in the environment."""
    return load(Assembly, write(folder, text), overrides, environment=environment)


def parts_complaint(folder: Path, text: str, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parts(folder, text, *overrides, **environment)
    return str(caught.value).replace(f"{folder}/", "")


class Part:
    """What the kinds of family ``test_part`` build."""

    def __init__(self, size: int, children: tuple[Any, ...] = ()) -> None:
        self.size, self.children = size, children


@register("test_part", "leaf")
class Leaf(Component):
    kind: Literal["leaf"] = "leaf"
    size: int = Field(default=1, ge=1)
    label: str = "plain"

    def build(self, **arguments: Any) -> Part:
        built["leaf"] += 1
        return Part(self.size)


@register("test_part", "tree")
class Tree(Component):
    kind: Literal["tree"] = "tree"
    left: Annotated[Component, Family("test_part")]
    right: Annotated[Component, Family("test_part")]

    def build(self, *, builder: Any, **arguments: Any) -> Part:
        built["tree"] += 1
        return Part(0, (builder.build(self.left, **arguments), builder.build(self.right, **arguments)))


class Numbers(Section):
    count: int = Field(default=3, ge=1)
    rate: float = Field(default=0.5, gt=0, lt=10)
    name: str = "plain"
    on: bool = False
    sizes: tuple[int, ...] = (1, 2)


class Assembly(Section):
    first: Annotated[Component, Family("test_part")] = Leaf()
    second: Annotated[Component, Family("test_part")] = Leaf()
    many: tuple[Annotated[Component, Family("test_part")], ...] = ()
    numbers: Numbers = Numbers()
    free: Any = None


class Wrapped:
    """A class outside lowtide, for ``kind: custom``."""

    class Config(BaseModel):
        width: int = Field(default=2, ge=1)
        inner: Annotated[Component, Family("test_part")] | None = None

    def __init__(self, config: Config, *, builder: Any = None, **arguments: Any) -> None:
        built["wrapped"] += 1
        self.config, self.arguments = config, arguments
        self.inner = None if config.inner is None else builder.build(config.inner)


class Bare:
    """A class outside lowtide that takes no config."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@register("test_part", "torch_linear")
class TorchLinear(Component):
    kind: Literal["torch_linear"] = "torch_linear"

    def build(self, **arguments: Any) -> Any:
        import torch

        return torch.nn.Linear(2, 2)


@register("test_part", "torch_wrapper")
class TorchWrapper(Component):
    kind: Literal["torch_wrapper"] = "torch_wrapper"
    model: Annotated[Component, Family("test_part")]

    def build(self, *, builder: Any, **arguments: Any) -> Any:
        import torch

        class Wrapper(torch.nn.Module):
            def __init__(self, model: torch.nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.model(x)

        return Wrapper(builder.build(self.model))
