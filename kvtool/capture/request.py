"""Request: what a capture was asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.capture.gradient_plan import GradientPlan, parse_at, parse_probe, parse_targets
from kvtool.errors import KvtoolError
from kvtool.layer import MOST_DRAWS
from kvtool.words import parse_ids

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
DEFAULT_NEW_TOKENS = 64
_GRADIENTS = ("gradients", "gradient_block")


@dataclass(frozen=True)
class QuerySelection:
    """Which steps' queries are stored: `all`, `decode` (steps after the prompt) or the `last` N."""

    kind: str = "all"
    count: int = 0

    def first_step(self, prompt_length: int, tokens: int) -> int:
        """The first step whose query is stored, of a sequence of `tokens` rows."""
        if self.kind == "all":
            return 0
        return prompt_length if self.kind == "decode" else max(tokens - self.count, 0)

    def __str__(self) -> str:
        return f"last:{self.count}" if self.kind == "last" else self.kind


def parse_queries(text: str) -> QuerySelection:
    """`all`, `decode` or `last:N`."""
    if text in ("all", "decode"):
        return QuerySelection(text)
    found = re.fullmatch(r"last:(\d+)", text)
    if found and int(found[1]) > 0:
        return QuerySelection("last", int(found[1]))
    raise KvtoolError("usage", f"--queries {text} is not all, decode or last:N", "last:256 stores the last 256 queries")


def parse_dtype(text: str | None, option: str) -> str | None:
    """The canonical name: float32, bfloat16 or float16."""
    if text is None:
        return None
    if text not in DTYPES:
        raise KvtoolError("usage", f"{option} {text} is not a dtype", "one of float32, bfloat16, float16")
    return DTYPES[text]


def parse_memory(text: str | int | None) -> int | None:
    """Bytes of `12GB`, `800MiB`, `4e9`."""
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise KvtoolError("usage", f"--max-memory {text} is not a size", "write 12GB or 800MiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " kmgt".index(found[2] or " "))


@dataclass(frozen=True)
class Request:
    """The options of `kvtool capture`, each as on the command line; see docs/capture.md."""

    model: str
    output: Path | None = None
    prompt: str | None = None
    prompt_file: Path | None = None
    prompts: Path | None = None
    text_file: Path | tuple[Path, ...] | None = None
    prompt_tokens: int | None = None
    eval_tokens: int | None = None
    chat: bool = False
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    chunk: int | None = None
    model_dtype: str | None = None
    threads: int | None = None
    layers: str | None = None
    queries: str = "all"
    dtype: str | None = None
    output_projection: bool = True
    gradients: int | None = None
    gradients_at: str | None = None
    gradient_targets: str | None = None
    gradient_block: int | None = None
    gradient_probe: str | None = None
    max_memory: str | int | None = None
    online: bool = False
    force: bool = False

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn; greedy otherwise."""
        return bool(self.temperature)

    @property
    def query_selection(self) -> QuerySelection:
        return parse_queries(self.queries)

    @property
    def gradient_plan(self) -> GradientPlan | None:
        """What gradients are drawn, None without --gradients."""
        if self.gradients is None:
            return None
        targets = None if self.gradient_targets is None else parse_targets(self.gradient_targets)
        at, probe = parse_at(self.gradients_at), parse_probe(self.gradient_probe)
        return GradientPlan(self.gradients, at, targets, self.gradient_block, self.seed, probe)

    @property
    def text_files(self) -> tuple[Path, ...]:
        """The texts of teacher forcing, one sequence each."""
        if self.text_file is None:
            return ()
        return self.text_file if isinstance(self.text_file, tuple) else (self.text_file,)

    @property
    def new_tokens(self) -> int:
        return self.max_new_tokens or DEFAULT_NEW_TOKENS

    def check(self, *, output_needed: bool = True) -> None:
        """Refuse contradictions, bad words and missing files.

        Raises:
            KvtoolError: codes `usage`, `file-missing`, `output-exists`.
        """
        modes = {
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--prompts": self.prompts,
            "--text-file": self.text_file or None,
        }
        given = [name for name, value in modes.items() if value is not None]
        if len(given) != 1:
            raise KvtoolError(
                "usage",
                "there is nothing to run the model on" if not given else f"{' and '.join(given)} exclude each other",
                f"give one of {', '.join(modes)}",
            )
        self._check_mode(given[0])
        self._check_values()
        for path in (self.prompt_file, self.prompts, *self.text_files):
            if path is not None and not Path(path).is_file():
                raise KvtoolError("file-missing", f"{path} is not a file")
        if self.output is None:
            if output_needed:
                raise KvtoolError("usage", "the trace needs a name", "add -o run.zarr, or --dry-run for an estimate")
        elif Path(self.output).exists() and not self.force:
            raise KvtoolError("output-exists", f"{self.output} is already there", "--force replaces it")

    def _check_mode(self, mode: str) -> None:
        if mode == "--text-file":
            if not self.prompt_tokens or not self.eval_tokens:
                raise KvtoolError(
                    "usage",
                    "--text-file needs to know where the prompt ends and how much is evaluated",
                    "add --prompt-tokens N --eval-tokens M",
                )
            generation = {
                "--chat": self.chat,
                "--max-new-tokens": self.max_new_tokens,
                "--temperature": self.temperature,
                "--top-k": self.top_k,
                "--top-p": self.top_p,
            }
            odd = [name for name, value in generation.items() if value]
            if odd:
                raise KvtoolError("usage", f"{odd[0]} generates, but --text-file feeds a given text", f"drop {odd[0]}")
        elif self.prompt_tokens or self.eval_tokens:
            raise KvtoolError(
                "usage", "--prompt-tokens and --eval-tokens cut a --text-file", "use --max-new-tokens with a prompt"
            )

    def _check_values(self) -> None:
        parse_ids(self.layers, "--layers")
        parse_queries(self.queries)
        parse_dtype(self.model_dtype, "--model-dtype")
        parse_dtype(self.dtype, "--dtype")
        parse_memory(self.max_memory)
        if not self.sampled and (self.top_k or self.top_p is not None):
            raise KvtoolError("usage", "--top-k and --top-p sample, but decoding is greedy", "add --temperature 1.0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise KvtoolError("usage", f"--top-p {self.top_p} is not above 0 and at most 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise KvtoolError("usage", f"--temperature {self.temperature} is not a number from 0 up")
        for name in ("prompt_tokens", "eval_tokens", "max_new_tokens", "chunk", "threads", "top_k", *_GRADIENTS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KvtoolError("usage", f"--{name.replace('_', '-')} {value} is not at least 1")
        self._check_gradients()
        if self.seed < 0:
            raise KvtoolError("usage", f"--seed {self.seed} is negative")

    def _check_gradients(self) -> None:
        plan = self.gradient_plan
        if plan is not None and plan.draws > MOST_DRAWS:
            raise KvtoolError(
                "usage", f"--gradients {plan.draws} is more than {MOST_DRAWS} draws", "--gradients 4 is a good start"
            )
        for name in ("gradients_at", "gradient_targets", "gradient_block", "gradient_probe"):
            if plan is None and getattr(self, name) is not None:
                raise KvtoolError(
                    "usage",
                    f"--{name.replace('_', '-')} says how gradients are drawn, but none are",
                    "add --gradients 4",
                )
        if plan is not None and self.text_file is not None:
            assert self.prompt_tokens is not None
            assert self.eval_tokens is not None
            plan.drawn(self.prompt_tokens, self.prompt_tokens + self.eval_tokens)
