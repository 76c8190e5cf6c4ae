"""Plan models without their weights: from a config file, or too large for this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anybatch.core import Sums
from anybatch.display import did_you_mean, one_of
from anybatch.errors import PlanError, first_line
from anybatch.memory.planning import Plan, plan
from anybatch.objectives import huggingface

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {
    kind.__name__.lower(): kind
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Adagrad)
}


def plan_config(
    path: Path,
    *,
    tokens: int,
    rows: int = 8,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    memory: str | int | None = None,
    device: str = "cuda",
    sums: Sums = "fp32",
    checkpointing: bool = False,
) -> Plan:
    """Plan a language model of a transformers config: `rows` rows of `tokens` tokens, weights and state in `dtype`.

    `checkpointing` turns on the model's `gradient_checkpointing_enable`.
    """
    for name, value in (("tokens", tokens), ("rows", rows)):
        if value < 1:
            raise PlanError(f"--{name} {value}: expected 1 or more.")
    if dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype}: {one_of(dtype, list(DTYPES))}")
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"--optimizer {optimizer}: {one_of(optimizer, list(OPTIMIZERS))}")
    model = model_on_meta(path, DTYPES[dtype])
    if checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise PlanError(f"--checkpointing: {type(model).__name__} does not offer it. Leave the option out.")
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    return plan(
        model,
        OPTIMIZERS[optimizer](model.parameters(), lr=1e-4),
        huggingface(),
        {"input_ids": ids, "labels": ids},
        memory=memory,
        device=device,
        sums=sums,
        checkpointing=not checkpointing,
    )


def model_on_meta(path: Path, dtype: torch.dtype) -> nn.Module:
    """Build the language model of a config file on the meta device, in training mode."""
    import transformers

    described = _read(path)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kind = described.pop("model_type", None)
    if kind not in known:
        said = "has no model_type" if kind is None else f"has model_type {kind!r}"
        raise PlanError(
            f"--model {path} {said}, and transformers {transformers.__version__} knows no such model"
            f"{did_you_mean(kind, known) or '. Give the config.json of a model of transformers.'}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **described)
        config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = _head(transformers, config)
    except PlanError:
        raise
    except Exception as error:  # values of the config that do not match
        raise PlanError(
            f"--model {path}: transformers made no model of it ({type(error).__name__}: {first_line(error)}). Look at the "
            "values of the config."
        ) from None
    return model.to(dtype).train()


def _read(path: Path) -> dict[str, Any]:
    what = "Give the config.json of a model of transformers."
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--model {path} cannot be read ({error.strerror}). {what}") from None
    except ValueError as error:
        raise PlanError(f"--model {path} is no JSON ({first_line(error)}). {what}") from None
    if not isinstance(described, dict):
        raise PlanError(f"--model {path} holds a {type(described).__name__}; expected an object. {what}")
    return described


def _head(transformers: Any, config: Any) -> nn.Module:
    """Build the model with the first head that has a loss over tokens: causal, sequence-to-sequence, or masked."""
    for auto, known in (
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
    ):
        if type(config) in known:
            model: nn.Module = auto.from_config(config)
            return model
    raise PlanError(
        f"--model: {config.model_type} has no language model in transformers. Write a task file that builds the model, and "
        "give that instead: anybatch plan TASK."
    )


@contextmanager
def parameters_on_meta(beyond: int) -> Iterator[None]:
    """Put parameters on the meta device inside the block, once those before them exceed `beyond` bytes.

    >>> with parameters_on_meta(beyond=100):
    ...     small, large = nn.Linear(2, 2), nn.Linear(100, 100)
    >>> small.weight.device.type, large.weight.device.type
    ('cpu', 'meta')
    """
    taken = 0

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal taken
        taken += 0 if parameter is None else parameter.nbytes
        if parameter is None or taken <= beyond:
            return None  # unchanged
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
