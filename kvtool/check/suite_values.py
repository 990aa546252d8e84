"""Suite values: how the keys of a job are read, and how what is wrong with one is told in the suite's own words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from kvtool.budget import MOST_TOKENS, Budget
from kvtool.errors import HINTS, KvtoolError
from kvtool.registry import did_you_mean
from kvtool.schedule import parse_schedule
from kvtool.words import parse_ids

# What the command line calls a key of a suite.
KEYS = {
    "--ratio": "ratios",
    "--budget": "budgets",
    "-r": "ratios",
    "-b": "budgets",
    "--sinks": "sinks",
    "--window": "window",
    "--prefix": "prefix",
    "--layers": "layers",
    "--sequences": "sequences",
    "--evaluate": "evaluate",
    "--precision": "precision",
    "--kl-window": "kl_windows",
    "--metric": "metrics",
    "--policy": "policies",
    # in the words of a schedule
    "--every": "every",
    "--from": "from",
    "--high-water": "high-water",
    "--prefill-block": "prefill",
    "--delay": "delay",
    "--granularity": "schedules",
    "--evict-at": "at",
    "--evict-order": "after",
}


def in_suite_words(error: KvtoolError) -> KvtoolError:
    """The error of a suite for one that speaks of options of the command line: its keys stand for them."""

    def told(sentence: str) -> str:
        return re.sub(r"(?<![\w-])--?[a-z][a-z-]*", lambda match: KEYS.get(match[0], match[0]), sentence)

    hint = None if error.hint == HINTS["usage"] else error.hint
    return KvtoolError("suite", told(error.message), hint and told(hint))


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("is a text in quotes")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return value


def count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("is a whole number")
    return value


def _at_least(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not least <= count(value) <= MOST_TOKENS:
            raise ValueError(f"is a whole number from {least} on, at most {MOST_TOKENS}, not {value}")
        return int(value)

    return read


def _one_of(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if text(value) not in words:
            raise KvtoolError("usage", f"{value!r} is unknown", did_you_mean(str(value), list(words)))
        return str(value)

    return read


def _ratio(value: Any) -> str:
    """A share as its decimal: the shortest spelling of a TOML float is what was typed."""
    if isinstance(value, float) and math.isfinite(value):
        word = repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        word = str(value)
    else:
        word = text(value)
    Budget.from_ratio(word)
    return word


def _budget(value: Any) -> int:
    Budget.from_tokens(count(value))
    return int(value)


def _schedule(value: Any) -> str:
    parse_schedule(text(value))
    return str(value)


def _many(one: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError("is a list with something in it")
        try:
            return tuple(one(member) for member in value)
        except ValueError as error:
            raise ValueError(f"is a list, and each of its entries {error}") from None

    return read


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, str):
        return parse_ids(value, "ids")
    return sorted(set(_many(count)(value)))


# Options of kvtool.replay that decide results.
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "ratios": _many(_ratio),
    "budgets": _many(_budget),
    "schedules": _many(_schedule),
    "sinks": _at_least(0),
    "window": _at_least(0),
    "prefix": _at_least(0),
    "layers": _ids,
    "sequences": _ids,
    "evaluate": _one_of("live", "pool"),
    "precision": _one_of("float32", "float64"),
    "kl_windows": _many(_at_least(1)),
}
OWN: dict[str, Callable[[Any], Any]] = {
    "name": text,
    "trace": text,
    "policies": _many(text),
    "metrics": _many(text),
    "decisions": flag,
}
