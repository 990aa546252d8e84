"""Where operations run: cards found and refused, arrays moved once, fallbacks counted with their reason."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.kernels import device
from kvtool.kernels.device import Card, DeviceError, Running, Unsupported, door, find_card, merged, summary, using
from kvtool.kernels.device.running import home

HERE = Card("cuda", "a card", "cpu")  # stands in for one: nothing has to be moved
AWAY = Card("cuda", "a card", "meta")


@dataclass(frozen=True, eq=False)
class Pair:
    one: Tensor
    other: Tensor | None


def doubled(x: Tensor, times: int = 2) -> Tensor:
    return x * times


def version(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Give the operation `made_up` a Triton module with these functions."""
    module = ModuleType("kvtool.kernels.made_up.triton")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "kvtool.kernels.made_up", ModuleType("kvtool.kernels.made_up"))
    monkeypatch.setitem(sys.modules, "kvtool.kernels.made_up.triton", module)


def test_the_cpu_runs_the_reference_itself() -> None:
    assert float(door("made_up", doubled)(torch.tensor(3.0))) == 6
    with using(None) as running:
        assert running is None
        assert float(door("made_up", doubled)(torch.tensor(3.0), times=3)) == 9


def test_a_card_runs_the_triton_version_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, doubled=lambda x, times=2: x * times + 100)
    with using(HERE) as running:
        assert float(door("made_up", doubled)(torch.tensor(3.0), times=3)) == 109
        assert device.active() is running
    assert device.active() is None
    assert running is not None
    assert running.log.counts == {"made_up": {"triton": 1, "cpu": 0, "reasons": {}}}


def unsupported(*_: Any) -> None:
    raise Unsupported("too wide")


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


class OutOfResources(Exception):
    """As Triton names it."""


def out_of_resources(*_: Any) -> None:
    raise OutOfResources


@pytest.mark.parametrize(
    ("functions", "wide", "reason"),
    [
        ({}, False, "doubled has no Triton version"),
        ({"doubled": unsupported}, False, "too wide"),
        ({"doubled": out_of_memory}, False, "the card's memory is too small"),
        ({"doubled": out_of_resources}, False, "the card's shared memory is too small"),
        ({"doubled": doubled}, True, "float64 was asked for, and the kernel is float32"),
    ],
)
def test_what_the_card_cannot_do_the_cpu_does_for_a_reason(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any], wide: bool, reason: str
) -> None:
    version(monkeypatch, **functions)
    with using(HERE, wide=wide) as running:
        assert float(door("made_up", doubled)(torch.tensor(3.0))) == 6
    assert running is not None
    assert running.log.counts == {"made_up": {"triton": 0, "cpu": 1, "reasons": {reason: 1}}}


def test_float64_stays_on_a_card_whose_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, doubled=doubled, FLOAT64=("doubled",))
    with using(HERE, wide=True) as running:
        door("made_up", doubled)(torch.tensor(3.0))
    assert running is not None
    assert running.log.counts["made_up"]["triton"] == 1


def test_a_fault_of_a_kernel_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, doubled=lambda x: x.no_such_thing)
    with using(HERE), pytest.raises(AttributeError):
        door("made_up", doubled)(torch.tensor(3.0))


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvtool.kernels.leverage.triton", raising=False)
    with using(HERE) as running:
        door("leverage", doubled)(torch.tensor(3.0))
    assert running is not None
    assert "triton" in next(iter(running.log.counts["leverage"]["reasons"]))


def test_the_same_array_is_moved_once_and_let_go_with_its_owner() -> None:
    running, array = Running(AWAY), torch.ones(4)
    there = running.moved(array)
    assert there.device.type == "meta"
    assert running.moved(array) is there
    assert running.moved("words") == "words"
    array.add_(1)  # written to: what lies there is out of date
    again = running.moved(array)
    assert again is not there
    assert running.moved(array) is again
    del array
    gc.collect()
    assert not running._moved


def test_arrays_are_dropped_at_the_end() -> None:
    array = torch.ones(4)
    with using(AWAY) as running:
        assert running is not None
        running.moved(array)
        assert running._moved
    assert not running._moved


def test_results_come_home_whatever_they_are_made_of() -> None:
    came = home((Pair(torch.ones(2), None), [torch.zeros(1)], 7))
    assert torch.equal(came[0].one, torch.ones(2))
    assert came[0].other is None
    assert came[1:] == ([torch.zeros(1)], 7)


def test_counts_of_units_add_up() -> None:
    one = {"b": {"triton": 1, "cpu": 2, "reasons": {"z": 2}}}
    other = {"a": {"triton": 3, "cpu": 0, "reasons": {}}, "b": {"triton": 0, "cpu": 1, "reasons": {"y": 1}}}
    total = merged([one, other])
    assert list(total) == ["a", "b"]
    assert total["b"] == {"triton": 1, "cpu": 3, "reasons": {"y": 1, "z": 2}}
    assert summary(total) == "a 3 in Triton, 0 on the CPU; b 1 in Triton, 3 on the CPU: y (1); z (2)"
    assert one["b"]["cpu"] == 2
    assert summary({}) == "no operation was called"


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Imagined 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_auto_takes_a_card_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    assert find_card("auto") == find_card("cuda") == Card("cuda", "Imagined 9000", "cuda")
    assert find_card("cpu") is None


def test_an_old_card_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5))
    assert find_card("auto") is None
    with pytest.raises(DeviceError, match=r"Imagined 9000 is of compute capability 7\.5"):
        find_card("cuda")


def test_a_card_without_triton_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_card("auto") is None
    with pytest.raises(DeviceError, match="triton is not installed"):
        find_card("cuda")


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_card("auto") is None
    with pytest.raises(DeviceError, match="--device cuda: ") as caught:
        find_card("cuda")
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize("word", ["gpu", "interpreter", ""])
def test_other_words_are_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(DeviceError, match="unknown"):
        find_card(word)
