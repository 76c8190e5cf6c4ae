"""What a plan cannot know, said in sentences."""

from anybatch.memory.predicting.envelope import PassShape
from anybatch.memory.predicting.trials import Trials
from anybatch.memory.tracing import TrialSetup
from anybatch.sizes import show_bytes
from anybatch.torch_inside import BatchNormLayer


def notes_for(trials: Trials, setup: TrialSetup, shape: PassShape, *, bucket_bytes: int = 0) -> tuple[str, ...]:
    """Where this plan may be off, and by what."""
    notes = []
    if bucket_bytes:
        notes.append(
            f"DistributedDataParallel keeps {show_bytes(bucket_bytes)} of buckets beside the gradients: they are taken off the "
            "memory, and not counted in peaks."
        )
    if setup.device.type != "cpu" and trials.method == "fake tensors":
        notes += _notes_of_gpu(trials, setup, shape)
    has_norms = any(isinstance(module, BatchNormLayer) for module in setup.parts[0].modules())
    if has_norms and setup.running.batch_norm == "exact" and setup.running.offload is not None:
        notes.append("What batch_norm='exact' moves to the host or to disk is counted as if it stayed: an upper bound.")
    if setup.running.prefetch and setup.is_elsewhere:
        notes.append("prefetch=True has the inputs of two micro-batches on the device at a time; one is counted.")
    if setup.check is not None:
        copied = f" and {show_bytes(setup.check.copied)} of weights, raised to fp32" if setup.check.copied else ""
        notes.append(
            f"check='full' is counted: before the first batch it takes as much as micro-batches of {setup.check.fewest} rows "
            f"at least{copied}."
        )
    if trials.is_together:
        notes.append("Micro-batches do not stand alone in this update, so each size was tried with the whole batch.")
    return tuple(notes)


def _notes_of_gpu(trials: Trials, setup: TrialSetup, shape: PassShape) -> list[str]:
    notes = [
        f"On {setup.device} not counted: the context (0.3 to 1 GiB outside of torch's allocator), workspaces of cuBLAS and "
        "cuDNN, and what the caching allocator rounds up and leaves in pieces"
        + (
            f": by its rules {trials.reserved[shape] - 1:.1%} here."
            if shape in trials.reserved
            else " (often 2 to 10 %)."
        )
    ]
    ops = trials.fake.recorder.ops if trials.fake is not None else ()
    if any("scaled_dot_product" in op for op in ops):
        notes.append(
            "Attention was followed through the CPU's kernel, which keeps no matrix of rows x heads x length x length; a GPU "
            "that has to fall back from its flash and memory-efficient kernels keeps one."
        )
    if setup.running.autocast is not None:
        notes.append("Autocast was followed with the CPU's list of ops, which differs from a GPU's in a few.")
    optimizer = setup.parts[1]
    if optimizer is not None and any(group.get("foreach", False) is None for group in optimizer.param_groups):
        notes.append("The optimizer was stepped over all parameters at once (foreach), as torch does on a GPU.")
    return notes
