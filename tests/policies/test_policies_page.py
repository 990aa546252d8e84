"""docs/policies.md against the code: names, parameters, defaults, and the example in it."""

import dataclasses
import re
from pathlib import Path

import pytest

from kvtool.policies import BUILT_IN, policy_from_text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()
SECTIONS = dict(re.findall(r"^## `([a-z0-9-]+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_policy_has_a_section_and_a_line_in_the_overview():
    assert list(SECTIONS) == [
        re.match(r"\| \[`([^`]+)`", row)[1] for row in re.findall(r"^\| \[`.*", PAGE, re.MULTILINE)
    ]
    assert set(SECTIONS) == set(BUILT_IN)


POINTS = ("capkv", "capkv-paper", "jacap")


@pytest.mark.parametrize("name", BUILT_IN)
def test_parameters_and_defaults_are_those_of_the_code(name):
    documented = dict(re.findall(r"^\| `([a-z_]+)` \| `([^`]+)` \|", SECTIONS[name], re.MULTILINE))
    _, policy = policy_from_text(name)
    defaults = {f.name: str(getattr(policy, f.name)) for f in dataclasses.fields(policy)}
    if name in POINTS:  # of one family: they say only where they differ from it
        family = policy_from_text("capacity")[1]
        defaults = {key: value for key, value in defaults.items() if value != str(getattr(family, key))}
    assert documented == defaults


def test_points_of_the_family_are_the_same_code():
    family = type(policy_from_text("capacity")[1])
    for name in POINTS:
        found = type(policy_from_text(name)[1])
        assert issubclass(found, family)
        assert not [member for member, value in vars(found).items() if callable(value) and member[0] != "_"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_oracles_and_protection_are_said_in_the_overview(name):
    row = re.search(rf"^\| \[`{name}`\].*", PAGE, re.MULTILINE)[0]
    _, policy = policy_from_text(name)
    assert ("**the future**" in row) == policy.oracle
    shield = policy.protection(100)
    protects = row.split("|")[5].strip()
    expected = {
        "full": "everything",
        "h2o": "newest half of the budget",
        "tova": "newest 1",
        "snapkv": "newest 64",
        "r-kv": "newest 8",
        "scissorhands": "newest 10",
    }.get(name, f"first {shield.sinks}" if shield.sinks else "nothing")
    assert protects == expected
    windows = {"h2o": 50, "tova": 1, "snapkv": 64, "r-kv": 8, "scissorhands": 10}
    assert shield.window == windows.get(name, 0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_docstring_has_idea_paper_deviations_and_cost(name):
    words = type(policy_from_text(name)[1]).__doc__
    assert all(word in words for word in ("Deviations:", "Cost:")), name
    assert "Paper:" in words or name in ("jacap", "capacity")


def test_the_specs_on_the_page_are_accepted():
    specs = re.findall(r"`((?:snapkv|capkv|jacap|h2o|tova)[:][^`]+)`", PAGE)
    assert len(specs) >= 2
    assert [policy_from_text(spec)[0] for spec in specs] == [spec.partition(":")[0] for spec in specs]


def test_the_example_policy_works():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "example"}
    exec(compile(code, "docs/policies.md", "exec"), namespace)  # it ends in check_policy(LoudValues)
    assert namespace["LoudValues"]().power == 1.0
