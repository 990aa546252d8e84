"""Words and options of schedules on the command line: bad ones are one sentence, exit 2, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.schedule import parse_schedule

TINY = str(Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr")

# what is typed behind `kvtool replay TRACE -p knorm -o out` -> what the sentence or its hint must say
BAD = {
    "-b 8 --every 0": "--every 0 is too small",
    "-b 8 --every -3": "--every -3 is too small",
    "-b 8 --every x": "valid integer",
    "-b 8 --every 99999999999": "more than 9 digits",
    "-b 8 --every 4 --from -1": "--from -1 is too small",
    "-b 8 --from 3": "neither was given",
    "-r 0.5 --high-water 20": "needs a budget in tokens below it",
    "--high-water 20": "needs a budget in tokens below it",
    "-b 20 --high-water 20": "-b 10",
    "-b 8 --high-water 1": "--high-water 1 is too small",
    "-b 8 --high-water -1": "--high-water -1 is too small",
    "-b 8 --prefill-block 0": "--prefill-block 0 is too small",
    "-b 8 --prefill-block -4": "--prefill-block -4 is too small",
    "-b 8 --delay -1": "--delay -1 is too small",
    "-b 8 --granularity block": "known: token, block:N",
    "-b 8 --granularity block:0": "--granularity block 0 is too small",
    "-b 8 --granularity block:-2": "--granularity block -2 is too small",
    "-b 8 --granularity block:x": "block takes a whole number, not 'x'",
    "-b 8 --granularity page:3": "known: token, block:N",
    "-b 8 --granularity token:3": "known: token, block:N",
    "-b 8 --evict-order during": "known: before, after",
    "-b 8 --evict-at 0": "no token to evict",
    "-b 8 --evict-at -4": "no token to evict",
    "-b 8 -s evry:4": "did you mean every?",
    "-b 8 -s high-watr:9": "did you mean high-water?",
    "-b 8 -s prompt_end": "did you mean prompt-end?",
    "-b 8 -s every:4/aftr": "did you mean after?",
    "-b 8 -s every:4/dely:2": "did you mean delay?",
    "-b 8 -s every:4,form:3": "did you mean from?",
    "-b 8 -s at:4,from:3": "not understood",
    "-b 8 -s every": "every takes a whole number, not ''",
    "-b 8 -s every:": "every takes a whole number, not ''",
    "-b 8 -s every:4.5": "every takes a whole number, not '4.5'",
    "-b 8 -s every:-4": "--every -4 is too small",
    "-b 8 -s every:4+": "not understood",
    "-b 8 -s /after": "not understood",
    "-b 8 -s prompt-end:3": "prompt-end takes no number",
    "-b 8 -s every:4/delay": "delay takes a whole number, not ''",
    "-b 8 -s every:4/after:1": "not understood",
    "-b 8 -s every:4/delay:1/delay:2": "says delay twice",
    "-b 8 -s every:4,from:1,from:2": "not understood",
    "-b 8 -s at:0": "no token to evict",
    "-b 8 -s at:999": "has no query after it",
    "-b 8 -s every:4 --every 4": "leave the other schedule options out",
    "-b 8 -s every:4 --delay 1": "leave the other schedule options out",
    "-b 8 -s every:4 --evict-order after": "leave the other schedule options out",
    "-b 8 --every 4 --evaluate pool": "--evaluate pool speaks of one event",
    "-b 8 --every 4 --decompose": "--decompose speaks of one event",
    "-b 8 --high-water 20 --decompose": "--decompose speaks of one event",
    "-b 8 -s every:4 -s prompt-end --decompose": "--decompose speaks of one event",
    "-b 8 -s at:140 -s prompt-end --evaluate pool": "--evaluate pool speaks of one event",
    "-b 8 --prefix -1": "--prefix -1 cannot be negative",
    "-b 8 --prefix 99999999999999": "--prefix 99999999999999: above",
    "-b 8 --deadline-ms 0": "--deadline-ms 0 is no time",
    "-b 8 --deadline-ms -4": "--deadline-ms -4 is no time",
    "-b 8 --deadline-ms nan": "--deadline-ms nan is no time",
    "-b 8 --deadline-ms inf": "--deadline-ms inf is no time",
}


@pytest.mark.parametrize("typed", BAD)
def test_bad_words(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["replay", TINY, "-p", "knorm", "-o", "out", *typed.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.rstrip("\n").split("\n")
    assert len(lines) <= 2, err
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert "internal" not in err
    assert BAD[typed] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("--every 64", "every:64"),
        ("--every 64 --from 0 --evict-order after", "every:64,from:0/after"),
        ("--prefill-block 32 --every 8 --delay 3 --granularity block:4", "prefill:32+every:8/delay:3/block:4"),
        ("--evict-at 140", "at:140"),
        ("--prompt-end --high-water 100", "prompt-end+high-water:100"),
        ("-s every:64/block:4/delay:2", "every:64/delay:2/block:4"),
    ],
)
def test_good_words(typed: str, spelled: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["replay", TINY, "-p", "knorm", "-b", "48", "--layers", "3", "--sequences", "0", "--json", *typed.split()]
    assert run(command) == 0
    assert f'"schedule": "{spelled}"' in capfd.readouterr().out


def test_spaces_around_words_mean_nothing() -> None:
    assert parse_schedule(" every:4 , from:2 + at:9 / after / delay:3 ") == parse_schedule(
        "every:4,from:2+at:9/after/delay:3"
    )


@pytest.mark.parametrize("typed", ["every:４", "every:1_0", "every:+4", "every:--4", "every: ", "at:²"])
def test_numbers_are_plain_digits(typed: str) -> None:
    with pytest.raises(KvtoolError, match="takes a whole number"):
        parse_schedule(typed)
