"""What the server of forks has loaded when it forks.

It may have one thread only: a fork has none of the others, and waits for ever for what they hold. So nothing is computed here,
and the libraries under NumPy and torch are told to keep to one thread.
"""

import gc
import os

import pydantic  # noqa: F401 - typer asks for it
import torch
import torch._dynamo  # every optimizer asks for it
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler

import anybatch
import anybatch.app.cli.app
import anybatch.app.cli.train
import anybatch.app.report.page
import anybatch.app.training.loop

for name in dir(anybatch):
    getattr(anybatch, name)
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # as in tests/conftest.py
threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
if threads > 1:
    raise RuntimeError(
        f"the server of forks has {threads} threads and must have one; what it loads has started the others"
    )
gc.collect()
gc.freeze()  # what is loaded stays: no collection in a fork looks at it again
