"""Load a model and its tokenizer: safely, completely, and with the attention kvtool expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.capture.quiet import no_stderr
from kvtool.capture.source import Source
from kvtool.errors import KvtoolError

# The run's dtypes: CPU kernels exist for them, and traces hold them bit by bit.
_RUN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to run.

    Attributes:
        model: in evaluation mode, on the CPU.
        tokenizer: or None where the folder has none.
        source: where it came from.
        dtype: the run's.
    """

    model: Any
    tokenizer: Any
    source: Source
    dtype: torch.dtype


def load_config(source: Source) -> Any:
    """The configuration, with every attention or expert implementation that it names forgotten.

    Raises:
        KvtoolError: code `model-load`.
    """
    from transformers import AutoConfig

    try:
        with no_stderr():
            config = AutoConfig.from_pretrained(**source.arguments)
    except Exception as error:
        raise _failure(source, error) from error
    _forget_implementations(config)
    return config


def _forget_implementations(config: Any) -> None:
    for name in [name for name in vars(config) if name.endswith(("_implementation", "_implementation_internal"))]:
        setattr(config, name, None)
    for key in getattr(config, "sub_configs", {}):
        if getattr(config, key, None) is not None:
            _forget_implementations(getattr(config, key))


def run_dtype(source: Source, config: Any, asked: str | None) -> torch.dtype:
    """`--model-dtype`, else the checkpoint's own, float32 for GGUF."""
    if asked is not None:
        return _RUN[asked]
    if source.gguf:
        return torch.float32
    text = config.get_text_config()
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None) or _stored_dtype(source)
    own = _RUN.get(str(named).removeprefix("torch."))
    if own is None:
        raise KvtoolError(
            "model-load",
            f"{source.name} is stored as {named}, which kvtool does not run in",
            "choose --model-dtype float32 or bfloat16",
        )
    return own


def _stored_dtype(source: Source) -> torch.dtype:
    """The dtype of the first floating-point weight, where the configuration says none."""
    from safetensors import safe_open

    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    for path in source.weight_files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                dtype = names.get(file.get_slice(key).get_dtype())
                if dtype is not None:
                    return dtype
    return torch.float32


def skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights, on the meta device: shapes and sizes only."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except ValueError as error:
        raise KvtoolError(
            "model-unsupported", f"{type(config).__name__} has no causal language model: {_reason(error)}"
        ) from error


def load_model(
    source: Source, config: Any, dtype: torch.dtype, notes: Callable[[str], None] = lambda text: None
) -> Any:
    """The model with all of its weights, in evaluation mode.

    Raises:
        KvtoolError: code `model-load` when weights are missing, misshapen or unreadable: transformers
            itself would fill them with random numbers and only warn.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    if source.gguf:
        from transformers import GgufConfig

        # Packed weights would bring kernels of their own along, and with them another attention.
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    try:
        with no_stderr():
            model, info = AutoModelForCausalLM.from_pretrained(**source.arguments, **options)
    except Exception as error:
        raise _failure(source, error) from error
    for key in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(key):
            first = sorted(str(item) for item in info[key])[0]
            raise KvtoolError(
                "model-load",
                f"{source.name} is incomplete: {len(info[key])} weights are missing or misshapen, such as {first}",
                "download or convert the model again",
            )
    idle = sorted(str(key) for key in info.get("unexpected_keys") or ())
    if idle:
        notes(f"{source.name} holds {len(idle)} weights that the model of its config.json does not use: {idle[0]}, …")
    return model.eval().requires_grad_(False)


def load_tokenizer(source: Source) -> Any:
    """The tokenizer.

    Raises:
        KvtoolError: code `model-load`.
    """
    from transformers import AutoTokenizer

    try:
        with no_stderr():
            return AutoTokenizer.from_pretrained(**source.arguments)
    except Exception as error:
        raise KvtoolError(
            "model-load",
            f"{source.name} has no tokenizer that can be loaded: {_reason(error)}",
            "the tokenizer's files belong beside the weights",
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _failure(source: Source, error: Exception) -> KvtoolError:
    return KvtoolError(
        "model-load",
        f"{source.name} cannot be loaded: {_reason(error)}",
        "see whether the installed transformers knows this architecture" if isinstance(error, ValueError) else None,
    )
