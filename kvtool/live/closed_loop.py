"""Closed loop: every sequence and cell of a live run in turn, then the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvtool.capture.hook import implementation
from kvtool.capture.loading import Loaded
from kvtool.capture.manifest import model_manifest
from kvtool.capture.sequences import stop_tokens
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.live.answer import Answer, find_answer
from kvtool.live.beside import replay_beside
from kvtool.live.loop import Loop, Outcome
from kvtool.live.model import LiveModel, check_sequence, find, load
from kvtool.live.recording import Recording
from kvtool.live.tables import Entries, Ran, add_outcome, blank_tables, means, undefined
from kvtool.live.timeline import mean_timeline
from kvtool.manifest import environment
from kvtool.replay.notes import note_unit, sentences, without_effect
from kvtool.replay.plan import Plan
from kvtool.replay.unit import decide_cells
from kvtool.result import LIVE, Result, table_of
from kvtool.trace import Sequence, Trace
from kvtool.words import spans

# Mean KL in nats that rounding alone may cause where nothing is evicted: the mask takes another path through
# the attention kernel than the model's own. On SmolLM2 behind 1,024 tokens, step by step, 5e-12 in float32 and 1.2e-3
# in bfloat16; in one block exactly 0.
BOUNDS = {torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 2e-2}

LOOPS = {
    "trace": "closed: evicted in the model's own cache, errors reach every layer; decisions from the trace",
    "run": "closed: evicted in the model's own cache, errors reach every layer and later decisions; decisions from "
    "what the run itself computed",
}


@dataclass(frozen=True)
class Options:
    """What a live run does besides evicting; see kvtool.live.run.live."""

    calibrate: bool = False
    layer_errors: bool = False
    generate: int = 0
    answer: tuple[str, ...] = ()
    other_weights: bool = False
    model_dtype: str | None = None
    online: bool = False
    chunk: int | None = None
    decide: str = "trace"


class ClosedLoop:
    """One live run."""

    def __init__(
        self,
        model: str,
        trace: Trace,
        plan: Plan,
        work: list[tuple[Sequence, int, int]],
        options: Options,
        progress: Callable[[int, int, str], None] | None,
        notes: Callable[[str], None] | None,
    ) -> None:
        self._model, self._trace, self._plan, self._work = model, trace, plan, work
        self._options = options
        self._progress = progress or (lambda done, total, what: None)
        self._say = notes or (lambda text: None)
        # One sequence at a time: {index: (sequence, event, its layers)}.
        self._sequences: dict[int, tuple[Sequence, int, list[int]]] = {}
        for sequence, layer, step in work:
            self._sequences.setdefault(sequence.index, (sequence, step, []))[2].append(layer)
        if len(options.answer) not in (0, 1, len(self._sequences)):
            raise KvtoolError(
                "usage",
                f"{len(options.answer)} answers do not fit the number of sequences, {len(self._sequences)}",
                "give one --answer, or one for each sequence in order",
            )
        self._done, self._total = 0, len(self._sequences) * len(plan.cells)
        self._noted: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {"key_error": 0.0, "full_kl": 0.0, "answers": []}

    def run(self, warnings: list[str]) -> Result:
        """Everything.

        Raises:
            KvtoolError: see kvtool.live.run.live.
        """
        source = find(
            self._model,
            self._trace,
            online=self._options.online,
            other_weights=self._options.other_weights,
            notes=self._say,
        )
        self._progress(0, self._total, "loading")
        ready = load(source, self._trace, self._options.model_dtype)
        tables = blank_tables()
        for place, (sequence, event, layers) in enumerate(self._sequences.values()):
            check_sequence(ready, sequence)
            self._run_sequence(ready, sequence, event, layers, self._answer(place), tables)
        tables["cells"] += means(tables["cells"])
        tables["spans"] += mean_timeline(tables["spans"], len(self._sequences))
        if self._options.calibrate:
            self._progress(self._total, self._total, "replaying")
            replay_beside(self._trace, self._plan, self._work, tables, same=self._options.decide == "trace")
        evicting = sum(not policy.keeps_all for _, policy in self._plan.policies)
        said = [
            *warnings,
            *self._warnings(ready),
            *undefined(tables),
            *sentences(self._noted, evicting, len(self._work)),
        ]
        arrow = {name: table_of(name, entries, self._plan.numbers) for name, entries in tables.items()}
        return Result(self._manifest(ready), arrow, said, LIVE)

    def _answer(self, place: int) -> str | None:
        answers = self._options.answer
        return None if not answers else answers[0] if len(answers) == 1 else answers[place]

    def _run_sequence(
        self, ready: LiveModel, sequence: Sequence, event: int, layers: list[int], text: str | None, tables: Entries
    ) -> None:
        answer: Answer | None = None
        if text is not None:
            answer = find_answer(text, sequence, event, ready.tokenization.encode_bare)
            self._facts["answers"].append({"sequence": sequence.index, "rows": [answer.low, answer.high]})
            self._tell_of(answer, ready, sequence)
        decided = {}
        for layer in layers:
            self._progress(self._done, self._total, f"sequence {sequence.index}: deciding layer {layer}")
            decided[layer] = decide_cells(sequence, sequence.layer(layer, dtype=self._plan.dtype), self._plan, event)
        self._progress(self._done, self._total, f"sequence {sequence.index}: prompt")
        donors = {layer: self._donor(ready, layer) for layer in layers}
        sources = {layer: donor.layer for layer, donor in donors.items()}
        own = self._options.decide == "run"
        loop = Loop(
            ready,
            sequence,
            event,
            answer.appended if answer else (),
            self._options.layer_errors,
            self._options.chunk,
            Recording(sequence, sorted(set(sources.values())), self._plan) if own else None,
        )
        self._facts["key_error"] = max(self._facts["key_error"], loop.key_error)
        # `full` first: if it moves the model's predictions, nothing else is worth the time.
        order = sorted(enumerate(self._plan.cells), key=lambda pair: not pair[1].policy.keeps_all)
        outcomes: dict[int, Ran] = {}
        for number, cell in order:
            self._progress(self._done, self._total, f"sequence {sequence.index}: {cell.label} {cell.budget}")
            foreseen = {layer: sets[number] for layer, sets in decided.items()}
            # An oracle's future is the trace's, and `full` decides nothing.
            if own and not cell.policy.oracle and not cell.policy.keeps_all:
                outcome, retained = loop.decide(cell, self._plan, sources)
            else:
                outcome, retained = loop.evict(foreseen), foreseen
            if cell.policy.keeps_all:
                self._check_full(ready, outcome)
            if self._options.generate:
                stop = stop_tokens(ready.model) | ready.tokenization.stop_tokens
                outcome = replace(outcome, generated=loop.generate(retained, self._options.generate, stop))
            outcomes[number] = Ran(cell, outcome, retained, donors, foreseen if own else None)
            self._done += 1
        kept_all = next(ran.outcome for ran in outcomes.values() if ran.cell.policy.keeps_all)
        for _, ran in sorted(outcomes.items()):
            add_outcome(tables, self._plan, ran, sequence, event, answer)
            tables["cells"][-1] |= self._text(ready, ran.outcome, kept_all)
            for layer, kept in ran.retained.items():
                missing = without_effect(ran.cell, kept, ran.geometries[layer])
                self._noted += note_unit(ran.cell, kept, missing, sequence.index, layer)

    def _tell_of(self, answer: Answer, ready: LiveModel, sequence: Sequence) -> None:
        """Notes on an answer whose place the user may not expect."""
        if answer.appended:
            stop = stop_tokens(ready.model) | ready.tokenization.stop_tokens
            ended = int(sequence.tokens[-1]) in stop
            after = ", which is an end-of-text token: its likelihood there means little" if ended else ""
            self._say(f"sequence {sequence.index} does not hold the answer: it is fed behind the last row{after}")
        elif answer.places > 1:
            self._say(
                f"sequence {sequence.index} holds the answer {answer.places} times after the event; the first is "
                f"taken, rows {answer.low}:{answer.high}"
            )

    @staticmethod
    def _donor(ready: LiveModel, layer: int) -> Geometry:
        """Geometry of the layer whose cache `layer` reads."""
        geometry = ready.probed[layer].geometry
        return geometry if geometry.kv_source is None else ready.probed[geometry.kv_source].geometry

    def _text(self, ready: LiveModel, outcome: Outcome, full: Outcome) -> dict[str, Any]:
        """The model's own continuation, and how many of its first tokens are those of the full cache."""
        if not self._options.generate:
            return {"generated": None, "generated_same": None}
        pairs = zip(outcome.generated, full.generated, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(outcome.generated), len(full.generated)))
        text = b"".join(ready.tokenization.pieces(outcome.generated)).decode(errors="replace")
        return {"generated": text, "generated_same": same}

    def _check_full(self, ready: LiveModel, outcome: Outcome) -> None:
        found, bound = float(outcome.predictions.kl.mean()), BOUNDS[ready.dtype]
        self._facts["full_kl"] = max(self._facts["full_kl"], found)
        if not found <= bound:
            raise KvtoolError(
                "not-reproduced",
                f"with nothing evicted the predictions of {type(ready.model).__name__} move by {found:.2g} nats of KL "
                f"(bound {bound:g})",
                "--model-dtype float32 leaves the least to rounding",
            )

    def _warnings(self, ready: LiveModel) -> list[str]:
        said = []
        whole = sorted(set(ready.probed) - {layer for _, layer, _ in self._work})
        if whole:
            said.append(f"layers {spans(whole)} keep their whole cache: the trace, or --layers, does not hold them")
        oracles = [label for label, policy in self._plan.policies if policy.oracle]
        if oracles and self._options.decide == "run":
            said.append(f"{', '.join(oracles)}: oracles know the trace's future, so the trace decides for them")
        return said

    def _manifest(self, ready: LiveModel) -> dict[str, Any]:
        trace, plan, options = self._trace, self._plan, self._options
        loaded = Loaded(ready.model, None, ready.source, ready.dtype)
        described = {**plan.describe(), "loop": LOOPS[options.decide]}
        chosen = [sequence for sequence, _, _ in self._sequences.values()]
        layer_ids = sorted({layer for _, layer, _ in self._work})
        return {
            "trace": {"path": trace.shown, "digest": trace.digest},
            "model": trace.manifest["model"].get("name", "unnamed model"),
            "capture": trace.manifest.get("capture"),
            "sequences": {
                "count": len(chosen),
                "indices": [s.index for s in chosen],
                "prompt_lengths": [s.prompt_length for s in chosen],
                "lengths": [s.length for s in chosen],
            },
            "layers": {"ids": layer_ids, "text": spans(layer_ids)},
            "replay": described,
            "live": {
                "model": model_manifest(loaded),
                "run_dtype": str(ready.dtype).removeprefix("torch."),
                "attention": implementation(ready.model),
                "decide": options.decide,
                "generate": options.generate,
                "answer": list(options.answer),
                "other_weights": options.other_weights,
                "chunk": options.chunk,
                **self._facts,
            },
            "metrics": {"measured_kl": 1, **{metric.name: metric.version for metric in plan.asked}},
            "device": "cpu",
            "environment": environment("pyarrow", "zarr", "transformers"),
        }
