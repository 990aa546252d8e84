"""What a package that plugs into kvtool should test of itself."""

from importlib.metadata import entry_points

import pytest
from kvtool_example.novel_keys import NovelKeys
from kvtool_example.tail_error import TailError

from kvtool.errors import KvtoolError
from kvtool.metrics import metric_from_text
from kvtool.policies import policy_from_text
from kvtool.testing import check_metric, check_policy


@pytest.mark.parametrize("memory", [1, 4, 100])
def test_the_policy_keeps_the_rules(memory: int) -> None:
    check_policy(NovelKeys(memory))


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_the_metric_keeps_the_rules(share: float) -> None:
    check_metric(TailError(share), full={"tail_error": 0.0, "mean_tail_error": 0.0})


def test_the_names_lead_here() -> None:
    assert policy_from_text("novel-keys:memory=2") == ("novel-keys", NovelKeys(2))
    assert metric_from_text("tail_error:share=0.1") == ("tail_error:share=0.1", TailError(0.1))
    assert "novel-keys" in entry_points(group="kvtool.policies").names


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(KvtoolError, match="positive"):
        policy_from_text("novel-keys:memory=0")
