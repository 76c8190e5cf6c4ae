"""A plan of a model that is only a config file: built on the meta device, so that no weights are made."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybatch.errors import PlanError
from anybatch.faces import one_of
from anybatch.memory.planning import plan
from anybatch.memory.predicting import Plan
from anybatch.objectives import huggingface

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {
    kind.__name__.lower(): kind
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor)
}


def plan_config(
    path: Path,
    *,
    tokens: int,
    rows: int,
    dtype: str,
    optimizer: str,
    memory: int | None,
    device: str,
    checkpoints: bool,
) -> Plan:
    """The plan of a language model of this transformers config: `rows` rows of `tokens` tokens, weights and state in `dtype`.

    Gradients are summed in fp32 unless that does not fit (`sums="auto"`). With `checkpoints` its blocks run again in backward.
    """
    if dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype}: {one_of(dtype, list(DTYPES))}")
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"--optimizer {optimizer}: {one_of(optimizer, list(OPTIMIZERS))}")
    model = _on_meta(path, DTYPES[dtype])
    if checkpoints:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    drawn = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    learner = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
    batch = {"input_ids": drawn, "labels": drawn}
    return plan(
        model, learner, huggingface(), batch, memory=memory, device=device, sums="auto", checkpointing=not checkpoints
    )


def _on_meta(path: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    try:
        described: dict[str, Any] = json.loads(path.read_text())
        config = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"--model {path}: no config of transformers could be read ({type(error).__name__}: {error}). Give the config.json "
            "of a model, which has a model_type."
        ) from None
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train()
