"""docs/settings.md has every setting of a pipeline, with its default as it is."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
from source_tree import ROOT

from nestpipe_kernels import config as module
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.pipeline.facts import common_facts
from nestpipe_kernels.testing.scenario import Scenario

ROW = re.compile(r"^\| `(\w+)`( \*)? \| (.*?) \| `(.*?)` \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)
PAGE = {found[0]: found[1:] for found in ROW.findall((ROOT / "docs" / "settings.md").read_text(encoding="utf-8"))}
FIELDS = {field.name: field for field in dataclasses.fields(PipelineConfig)}


def test_every_setting_has_a_row_and_nothing_else_has() -> None:
    assert sorted(PAGE) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_row_is_filled_and_its_default_is_the_actual_one(name: str) -> None:
    _, kind, default, *words, result = PAGE[name]
    assert ast.literal_eval(default) == FIELDS[name].default
    assert type(ast.literal_eval(default)) is type(FIELDS[name].default)
    assert kind and all(len(text) > 10 for text in words)
    assert result.startswith(("same bits", "rounding", "another result"))


@pytest.mark.parametrize(
    ("name", "choices"), [("schedule", module.SCHEDULE_NAMES), ("row_wire", module.WIRE_FORMATS),
                          ("gradient_wire", module.WIRE_FORMATS)],
)  # fmt: skip
def test_choices_are_the_actual_ones(name: str, choices: tuple[str, ...]) -> None:
    assert tuple(re.findall('"(.*?)"', PAGE[name][1])) == choices


def test_stars_mark_what_ranks_are_asked_to_have_in_common() -> None:
    compared = common_facts(Scenario(world_size=1).ranks()[0], PipelineConfig())
    assert {name for name, row in PAGE.items() if row[0]} == set(compared) & set(FIELDS)
