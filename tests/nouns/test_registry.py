"""Specs: how a word on the command line becomes a typed policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvtool.errors import KvtoolError
from kvtool.policies import policy_from_text
from kvtool.registry import Spec, configure, spell, split_spec


@dataclass(frozen=True)
class Example:
    count: int = 3
    share: float = 0.5
    on: bool = True
    mode: Literal["a", "b"] = "a"
    ridge: float | Literal["relative"] = 1.0
    limit: int | None = None
    path: str = "x"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is at least 0")


def test_split_keeps_colons_in_values() -> None:
    assert split_spec("p:path=a:b,count=2") == Spec("p", {"path": "a:b", "count": "2"})
    assert split_spec("dir/f.py:Cls:path=a:b") == Spec("dir/f.py:Cls", {"path": "a:b"})
    assert split_spec("p") == Spec("p", {})


def test_values_take_the_field_types() -> None:
    spec = split_spec("e:count=4,share=1e-2,on=false,mode=b,ridge=relative,limit=none,path=7")
    assert configure(Example, spec) == Example(4, 0.01, False, "b", "relative", None, "7")
    assert configure(Example, split_spec("e:ridge=2,limit=5")) == Example(ridge=2.0, limit=5)


def test_spell_is_the_inverse_and_leaves_defaults_out() -> None:
    value = Example(count=9, on=False, ridge="relative")
    text = spell("e", value)
    assert text == "e:count=9,on=false,ridge=relative"
    assert configure(Example, split_spec(text)) == value
    assert spell("e", Example()) == "e"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e:cuont=1", "did you mean count"),
        ("e:count=1.5", "whole number"),
        ("e:mode=c", "one of a, b"),
        ("e:on=maybe", "true or false"),
        ("e:count=-1", "at least 0"),
        ("e:count", "key=value"),
        ("e:count=1,count=2", "twice"),
        ("e:limit=x", "whole number"),
    ],
)
def test_wrong_parameters_say_what_is_right(text: str, said: str) -> None:
    with pytest.raises(KvtoolError) as caught:
        configure(Example, split_spec(text))
    assert caught.value.code == "policy-parameter"
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(KvtoolError) as caught:
        policy_from_text("snapkw")
    assert caught.value.code == "policy-unknown"
    assert "did you mean snapkv?" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["quest", "Quest:page=16"])
def test_methods_that_reselect_are_refused_by_name(name: str) -> None:
    with pytest.raises(KvtoolError, match="evicts nothing") as caught:
        policy_from_text(name)
    assert caught.value.code == "not-eviction"


def test_policies_from_files(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "docs" / "example_policy.py"
    name, policy = policy_from_text(f"{example}:NewestAndLoudest:half_life=64")
    assert name.endswith("example_policy.py:NewestAndLoudest")
    assert policy.half_life == 64.0  # type: ignore[attr-defined]
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    for text, said in [
        (f"{broken}:X", "failed to load"),
        (f"{example}:Missing", "holds no policy dataclass"),
        (f"{example}", "needs a class"),
        (f"{tmp_path}/none.py:X", "does not exist"),
    ]:
        with pytest.raises(KvtoolError, match=said):
            policy_from_text(text)
