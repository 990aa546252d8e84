"""Tokens and text: encode prompts, give back the bytes of each token, name the tokenizer by its digest."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Any

from kvtool.errors import KvtoolError


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE (GPT-2) spells the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenization:
    """What kvtool needs of a tokenizer.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` as the model expects a prompt (begin-of-text where it uses one)."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise KvtoolError("prompt", "the prompt holds half a surrogate pair, which is no text") from None
        return [int(token) for token in self._tokenizer(text, verbose=False)["input_ids"]]

    def encode_chat(self, text: str) -> list[int]:
        """Tokens of the model's chat template around one user message, up to where the answer begins.

        Raises:
            KvtoolError: code `usage` for a model without a template.
        """
        if not self._tokenizer.chat_template:
            raise KvtoolError("usage", "this model has no chat template", "drop --chat")
        message = [{"role": "user", "content": text}]
        spelled = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # The template writes the begin-of-text token itself.
        return [int(t) for t in self._tokenizer(spelled, add_special_tokens=False, verbose=False)["input_ids"]]

    def encode_bare(self, text: str) -> list[int]:
        """Tokens of `text` and nothing else, as it would stand inside a longer text."""
        return [int(t) for t in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokenizer's end-of-text token, if it has one."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([int(end)])

    def pieces(self, tokens: list[int]) -> list[bytes]:
        """The bytes that each token stands for; joined they are the text."""
        return [self._piece(spelling) for spelling in self._tokenizer.convert_ids_to_tokens(tokens)]

    def _piece(self, spelling: str | None) -> bytes:
        if spelling is None or spelling in self._added:
            return (spelling or "").encode()
        if self._byte_level:
            alphabet = self._alphabet
            if all(character in alphabet for character in spelling):
                return bytes(alphabet[character] for character in spelling)
            return spelling.encode()
        found = re.fullmatch(r"<0x([0-9A-F]{2})>", spelling)
        return bytes([int(found[1], 16)]) if found else spelling.replace("\u2581", " ").encode()

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return _byte_alphabet()

    @cached_property
    def _added(self) -> set[str]:
        return set(self._tokenizer.get_added_vocab())

    @cached_property
    def _byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str()).get("decoder"))

    def manifest(self) -> dict[str, Any]:
        """Class, vocabulary size, SHA-256 of tokenizer and of chat template (null where there is none)."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        spelled = backend.to_str() if backend is not None else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        template = self._tokenizer.chat_template
        template = json.dumps(template, sort_keys=True) if isinstance(template, dict | list) else template
        return {
            "class": type(self._tokenizer).__name__,
            "vocabulary": len(self._tokenizer),
            "digest": hashlib.sha256(spelled.encode()).hexdigest(),
            "chat_template_digest": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        }
