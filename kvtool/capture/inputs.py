"""The four input modes, as token sequences ready to run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvtool.capture.request import Request
from kvtool.capture.tokenization import Tokenization
from kvtool.errors import KvtoolError


@dataclass(frozen=True)
class Input:
    """One sequence to run.

    Attributes:
        name: the id of the prompt, the name of the text where there are several, or None.
        prompt: its tokens.
        forced: the evaluated tokens of teacher forcing; empty for generation.
        new_tokens: most tokens to generate; 0 for teacher forcing.
    """

    name: str | None
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    new_tokens: int

    @property
    def most_tokens(self) -> int:
        """Rows of the sequence at most."""
        return len(self.prompt) + len(self.forced) + self.new_tokens


def read_texts(request: Request) -> list[tuple[str | None, str]]:
    """(id, text) of everything the request names; read before a model is, since that may take a minute.

    Raises:
        KvtoolError: codes `prompt` (empty, not UTF-8, bad JSON lines) and `file-missing`.
    """
    several = len(request.text_files) > 1
    texts: list[tuple[str | None, str]] = [(p.stem if several else None, _read(p)) for p in request.text_files]
    texts = texts or _prompts(request)
    for index, (name, text) in enumerate(texts):
        if not text:
            where = f"prompt {name or index}" if len(texts) > 1 else "the prompt"
            raise KvtoolError("prompt", f"{where} holds no token", "give it some text")
    return texts


def tokenize(
    request: Request, texts: list[tuple[str | None, str]], tokenization: Tokenization, position_limit: int | None
) -> list[Input]:
    """The texts as token sequences.

    Args:
        position_limit: most positions of the model, or None.

    Raises:
        KvtoolError: code `prompt` (empty, too short, too long, with token counts).
    """
    if request.text_files:
        pairs = zip(request.text_files, texts, strict=True)
        found = [_forced(request, path, name, text, tokenization) for path, (name, text) in pairs]
    else:
        encode = tokenization.encode_chat if request.chat else tokenization.encode
        found = [Input(name, tuple(encode(text)), (), request.new_tokens) for name, text in texts]
    for index, item in enumerate(found):
        where = f"prompt {item.name or index}" if len(found) > 1 else "the prompt"
        if not item.prompt:
            raise KvtoolError("prompt", f"{where} holds no token", "give it some text")
        if position_limit is not None and item.most_tokens > position_limit:
            after = item.new_tokens or len(item.forced)
            raise KvtoolError(
                "prompt",
                f"{where} has {len(item.prompt)} tokens and {after} follow, the model has {position_limit} positions",
                "shorten the prompt or ask for fewer tokens",
            )
    return found


def _read(path: Path) -> str:
    try:
        # newline="" keeps line ends as they are: they are tokens too.
        with Path(path).open(encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        raise KvtoolError("prompt", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise KvtoolError("file-missing", f"{path} cannot be read: {error.strerror}") from None


def _forced(request: Request, path: Path, name: str | None, text: str, tokenization: Tokenization) -> Input:
    assert request.prompt_tokens is not None
    assert request.eval_tokens is not None
    tokens = tokenization.encode(text)
    wanted = request.prompt_tokens + request.eval_tokens
    if len(tokens) < wanted:
        raise KvtoolError(
            "prompt",
            f"{path} has {len(tokens)} tokens, but {request.prompt_tokens} + {request.eval_tokens} are asked for",
            "give a longer text, or fewer --prompt-tokens or --eval-tokens",
        )
    return Input(name, tuple(tokens[: request.prompt_tokens]), tuple(tokens[request.prompt_tokens : wanted]), 0)


def _prompts(request: Request) -> list[tuple[str | None, str]]:
    """(id, text) of every prompt."""
    if request.prompt is not None:
        return [(None, request.prompt)]
    if request.prompt_file is not None:
        return [(None, _read(request.prompt_file))]
    assert request.prompts is not None
    found: list[tuple[str | None, str]] = []
    for number, line in enumerate(_read(request.prompts).removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise KvtoolError("prompt", f"line {number} of {request.prompts} is not JSON") from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise KvtoolError(
                "prompt",
                f'line {number} of {request.prompts} has no "prompt" text',
                'a line reads {"prompt": "...", "id": "..."}',
            )
        unknown = sorted(set(value) - {"prompt", "id"})
        if unknown:
            raise KvtoolError("prompt", f"line {number} of {request.prompts} has the unknown key {unknown[0]!r}")
        found.append((None if value.get("id") is None else str(value["id"]), value["prompt"]))
    if not found:
        raise KvtoolError("prompt", f"{request.prompts} holds no prompt")
    names = [name for name, _ in found if name is not None]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise KvtoolError("prompt", f"{request.prompts} uses the id {double} twice")
    return found
