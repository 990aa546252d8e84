"""Plan: the checked answer to "replay what, how", made before any array is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch

from kvtool.budget import MOST_TOKENS, Budget
from kvtool.decomposition.settings import Decompose
from kvtool.errors import KvtoolError
from kvtool.kernels.device import Card
from kvtool.layer import Layer
from kvtool.manifest import parameters, source_digest, versions
from kvtool.metrics import Asked, Metric, PredictedKL, asked_metrics, built_in_metrics, trial
from kvtool.metrics.predicted_kl import WINDOW
from kvtool.policies import ALL, Policy, Protection, policy_from_text
from kvtool.policies.table import SHELF as POLICIES
from kvtool.registry import did_you_mean, spell, split_spec
from kvtool.replay.calibration import Calibration
from kvtool.replay.cards import card_of
from kvtool.replay.misfits import refuse_misfits
from kvtool.replay.rules import Rules
from kvtool.schedule import Schedule, parse_schedule
from kvtool.trace import Trace
from kvtool.triggers import PromptEnd

Evaluate = Literal["live", "pool"]
CONTROLS = ("full", "random")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Cell:
    """One (policy with parameters, schedule, budget): a line of the answer.

    Attributes:
        label: the policy as the user may type it again, defaults left out.
    """

    label: str
    policy: Policy
    budget: Budget
    schedule: Schedule

    def key(self, plan: Plan) -> dict[str, Any]:
        """The key columns that every entry of this cell carries."""
        return {
            "policy": self.label,
            "ratio": self.budget.ratio_number,
            "budget": self.budget.tokens,
            "schedule": str(self.schedule),
            "evaluate": plan.evaluate,
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """What one replay does.

    Attributes:
        policies: (label, policy), each once, controls included.
        budgets, schedules: each once, in the order asked.
        protection: the run's own sinks and window, the same for every policy; the sinks cover the prefix.
        prefix: first rows that were asked for as a prefix, such as a system prompt.
        deadline_ms: an event that takes longer keeps the sliding window instead, None for no deadline.
        telemetry: whether times and bytes of every event are measured.
        bin_steps: evaluated steps per bin of the table `timeline`; None is the least that needs at most 32 bins.
        kl_windows: steps in further windows of `predicted_kl`.
        token_shares: whether the predicted KL is told apart by evicted token.
        decompose: how the errors are told apart, None where they are not.
        calibrations: traces of other texts that policies read, by the path that they name.
        asked: metrics besides the built-in ones.
        card: where the operations run, None for the CPU.
    """

    policies: list[tuple[str, Policy]]
    budgets: list[Budget]
    schedules: tuple[Schedule, ...] = (Schedule(),)
    protection: Protection = field(default_factory=lambda: Protection(4, 32))
    evaluate: Evaluate = "live"
    precision: str = "float32"
    kl_windows: tuple[int, ...] = ()
    token_shares: bool = False
    decompose: Decompose | None = None
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    prefix: int = 0
    deadline_ms: float | None = None
    telemetry: bool = False
    bin_steps: int | None = None
    asked: tuple[Asked, ...] = ()
    card: Card | None = None

    @property
    def metrics(self) -> dict[str, Metric]:
        """Everything that is measured, by name: the built-in metrics, then those that were asked for."""
        further: dict[str, Metric] = {metric.name: metric for metric in self.asked}
        return {**built_in_metrics(), PredictedKL.name: PredictedKL(self.kl_windows), **further}

    @property
    def versions(self) -> dict[str, int]:
        """Name -> version of every metric."""
        return {name: metric.version for name, metric in self.metrics.items()}

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of the metrics that were asked for: float64, whatever they are called."""
        return tuple(column.name for metric in self.asked for column in metric.columns)

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(label, policy, budget, schedule)
            for label, policy in self.policies
            for schedule in self.schedules
            for budget in self.budgets
        ]

    @property
    def repeats(self) -> bool:
        """Whether any cell may have several events."""
        return any(schedule.repeats for schedule in self.schedules)

    def rules(self, schedule: Schedule, control: bool = False) -> Rules:
        """What all policies under this schedule have in common; a control has no deadline."""
        return Rules(schedule, self.protection, None if control else self.deadline_ms, self.telemetry)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def calibrated(self, layer: Layer) -> Layer:
        """`layer` with what the calibration traces say of it."""
        for calibration in self.calibrations.values():
            layer = calibration.joined(layer)
        return layer

    def only(self, policies: list[tuple[str, Policy]]) -> Plan:
        """The same plan with these of its policies."""
        return replace(self, policies=policies)

    def _calibration_digest(self, policy: Policy) -> str | None:
        name = policy.calibration_trace
        return None if name is None else self.calibrations[name].trace.digest

    def identity(self, trace: Trace) -> dict[str, Any]:
        """All that decides what a finished part of this plan on `trace` holds, its sequence and layer apart."""
        card = None if self.card is None else [self.card.kind, self.card.name]  # each rounds in an order of its own
        known = {"trace": trace.digest, "plan": self.describe(), "metrics": self.versions}
        return {**known, "card": card, **versions("torch")}

    def describe(self) -> dict[str, Any]:
        """Everything that decides the numbers, defaults included, for manifest and keys."""
        return {
            "policies": [
                {
                    "label": label,
                    "class": type(policy).__qualname__,
                    "source": source_digest(type(policy)),
                    "package": POLICIES.package(split_spec(label).name),
                    "oracle": policy.oracle,
                    "parameters": parameters(policy),
                    "calibration": self._calibration_digest(policy),
                }
                for label, policy in self.policies
            ],
            "budgets": [
                {"ratio": str(b.ratio) if b.ratio is not None else None, "tokens": b.tokens} for b in self.budgets
            ],
            "schedules": [str(schedule) for schedule in self.schedules],
            "sinks": self.protection.sinks,
            "window": self.protection.window,
            "prefix": self.prefix,
            "deadline_ms": self.deadline_ms,
            "telemetry": self.telemetry,
            "bin_steps": self.bin_steps,
            "reproducible": self.deadline_ms is None,
            "evaluate": self.evaluate,
            "precision": self.precision,
            "kl_windows": [1, WINDOW, *self.kl_windows],
            "metrics": [metric.describe() for metric in self.asked],
            "decompose": None if self.decompose is None else self.decompose.describe(),
            "loop": "open: queries come from the full-cache run; errors do not reach later layers or steps",
        }


def make_plan(
    policies: str | Many[str],
    *,
    ratios: str | float | Fraction | Many[str | float | Fraction] = (),
    budgets: int | Many[int] = (),
    schedules: str | Many[str] = (),
    evict_at: int | None = None,
    sinks: int = 4,
    window: int = 32,
    prefix: int = 0,
    deadline_ms: float | None = None,
    telemetry: bool = False,
    bin_steps: int | None = None,
    evaluate: str = "live",
    precision: str = "float32",
    kl_windows: int | Iterable[int] = (),
    token_shares: bool = False,
    decompose: Decompose | None = None,
    controls: bool = True,
    metrics: str | Many[str] = (),
    device: str = "cpu",
) -> Plan:
    """Check every choice and add the controls `full` and `random`.

    Raises:
        KvtoolError: `usage`, what kvtool.policies.table.policy_from_text and kvtool.metrics.asked_metrics raise, and
            `metric-broken` for a metric that fails on made-up layers.
    """
    policies = [policies] if isinstance(policies, str) else policies
    ratios = [ratios] if isinstance(ratios, str | float | int | Fraction) else ratios
    budgets = [budgets] if isinstance(budgets, int) else budgets
    asked = _schedules([schedules] if isinstance(schedules, str) else schedules, evict_at)
    kl_windows = [kl_windows] if isinstance(kl_windows, int) else kl_windows
    if ratios and budgets:
        raise KvtoolError("usage", "--ratio and --budget were both given", "give one: a share evicted, or tokens kept")
    if sinks < 0 or window < 0:
        raise KvtoolError("usage", f"--sinks {sinks} --window {window}: protection cannot be negative")
    if prefix < 0:
        raise KvtoolError("usage", f"--prefix {prefix} cannot be negative", "it is a number of first tokens")
    if deadline_ms is not None and not 0 < deadline_ms < math.inf:
        raise KvtoolError(
            "usage", f"--deadline-ms {deadline_ms:g} is no time", "milliseconds above 0; leave it out for none"
        )
    if max(sinks, window, prefix) > MOST_TOKENS:
        raise KvtoolError("usage", f"--sinks {sinks} --window {window} --prefix {prefix}: above {MOST_TOKENS} tokens")
    if evaluate not in ("live", "pool"):
        raise KvtoolError("usage", f"--evaluate {evaluate} is unknown", did_you_mean(evaluate, ["live", "pool"]))
    if precision not in DTYPES:
        raise KvtoolError("usage", f"--precision {precision} is unknown", did_you_mean(precision, list(DTYPES)))
    further = tuple(dict.fromkeys(width for width in kl_windows if width not in (1, WINDOW)))
    if any(width < 1 for width in further):
        raise KvtoolError("usage", f"--kl-window {min(further)} holds no step", "give a number of steps, such as 8")
    sizes = [Budget.from_ratio(r) for r in ratios] or [Budget.from_tokens(b) for b in budgets]
    if bin_steps is not None and (bin_steps < 1 or not any(schedule.repeats for schedule in asked)):
        raise KvtoolError(
            "usage",
            f"--bin {bin_steps}: errors over time are told of repeating schedules, in bins of at least one step",
            "add --every 64, or leave --bin out",
        )
    refuse_misfits(asked, sizes, evaluate, decompose is not None)
    sizes = sizes or [Budget.from_ratio(r) for r in ("0.5", "0.75", "0.9")]
    chosen: dict[str, Policy] = {}
    for words, own in [*(_meant(word) for word in policies), (CONTROLS if controls else (), True)]:
        for word in words:
            name, policy = policy_from_text(word, own=own)
            chosen.setdefault(spell(name, policy), policy)
    asked_for = asked_metrics([metrics] if isinstance(metrics, str) else metrics)
    for metric in asked_for:
        trial(metric)
    moved = next((label for label, policy in chosen.items() if policy.positions == "cache"), None)
    if moved is not None and (evaluate == "pool" or token_shares):
        option = "--evaluate pool" if evaluate == "pool" else "--token-shares"
        raise KvtoolError("usage", f"{option} holds for true positions only, and {moved} counts them inside its cache")
    names = dict.fromkeys(policy.calibration_trace for policy in chosen.values())
    return Plan(
        policies=list(chosen.items()),
        calibrations={name: Calibration.open(name) for name in names if name is not None},
        budgets=list(dict.fromkeys(sizes)),
        schedules=asked,
        protection=Protection(max(sinks, prefix), window),
        prefix=prefix,
        deadline_ms=deadline_ms,
        telemetry=telemetry,
        bin_steps=bin_steps,
        evaluate=evaluate,  # type: ignore[arg-type]
        precision=precision,
        kl_windows=further,
        token_shares=token_shares,
        decompose=decompose,
        asked=asked_for,
        card=card_of(device),
    )


def _meant(word: str) -> tuple[tuple[str, ...], bool]:
    """The policies that `word` stands for, and whether kvtool's own are meant: `all` is those, whoever else gives
    one of their names."""
    return (ALL, True) if word == "all" else ((word,), False)


def _schedules(texts: Many[str], evict_at: int | None) -> tuple[Schedule, ...]:
    """Each once, in the order asked; the end of the prompt where none was."""
    if evict_at is not None:
        if texts:
            raise KvtoolError("usage", "--evict-at and a schedule were both given", "at:N is a schedule too")
        return (Schedule((PromptEnd(evict_at),)),)
    return tuple(dict.fromkeys(parse_schedule(text) for text in texts)) or (Schedule(),)
