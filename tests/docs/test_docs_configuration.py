"""What the documentation says of the configuration is so."""

import re
from pathlib import Path

import pytest
from pages import IDS, PAGES, ROOT, blocks, config_reference, known_keys, spans
from qarl_formats.registry import scheme_class, scheme_names

from qarl.config import Config
from qarl.config.load import make_config
from qarl.config.yaml_io import parse_yaml

SECTIONS = "|".join(Config.model_fields)
KEY = re.compile(rf"((?:{SECTIONS})\.[a-z_][a-z_0-9.]*?)(?:[:=] ?.*)?")
NO_KEYS = ("data.task", "rollout.vllm.args", "reward.functions.0.weight")  # what is below these is free, or an index
BASE = """
model: {path: a/b}
data: {source: "task:arithmetic"}
reward: {functions: [{name: exact}]}
objective: {name: grpo}
train: {steps: 1}
"""


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_yaml_is_a_configuration_or_a_part_of_one(page: Path):
    for text in blocks(page, "yaml"):
        given = parse_yaml(text, page.name)
        make_config(given if "model" in given else parse_yaml(BASE, "base") | given, page.name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_key_that_is_named_exists(page: Path):
    if page.name == "CHANGELOG.md":
        return  # it names keys that are no more
    for span in spans(page):
        if (found := KEY.fullmatch(span)) and not span.endswith((".py", ".md", ".json", ".yaml")):
            key = found[1]
            assert key in known_keys() or key.startswith(NO_KEYS), span


def test_the_table_of_schemes_is_the_registry():
    text = (ROOT / "docs/configuration.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|`]+) \|$", text, re.MULTILINE))
    schemes = scheme_names(lambda kind: kind.__module__.startswith("qarl_formats."))  # and no other test's
    assert table == {name: scheme_class(name).description for name in schemes}


def test_the_reference_of_keys_is_what_the_schema_says():
    reference = config_reference()
    told = (ROOT / "docs/configuration_keys.md").read_text()
    assert told == reference.page(Config.model_json_schema()), "run python tools/config_reference.py"
