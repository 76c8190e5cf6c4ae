"""The fix of each kind as code: the smallest change of the user's own lines, and the anybatch lines that make it impossible."""

ANYBATCH = """
or, with anybatch, where the loader yields the whole batch of {batch} rows:
    update = anybatch.Update(model, optimizer, anybatch.supervised(criterion), micro_batch={rows})
    for batch in loader:
        update(batch)"""

_FLUSH = """    in_this_update = min({n}, len(loader) - i // {n} * {n})
    (loss / in_this_update).backward()
    if (i + 1) % {n} == 0 or i + 1 == len(loader):"""

OWN = {
    "cleared-before-use": "clear only after the step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "stepped-every-micro-batch": (
        "step and clear together, once per {n} micro-batches:\n    if (i + 1) % {n} == 0:\n        optimizer.step()\n"
        "        optimizer.zero_grad()"
    ),
    "not-divided": "divide the loss:\n    (loss / {n}).backward()",
    "divided-twice": "divide once; where a framework divides already, leave the loss as it is:\n    (loss / {n}).backward()",
    "other-divisor": "divide by the number of micro-batches that this update really has:\n    (loss / {n}).backward()",
    "tail-dropped": f"step on the last micro-batch of the epoch too, and divide by how many there are:\n{_FLUSH}",
    "tail-leaks": f"step on the last micro-batch of the epoch too, so that nothing is carried into the next:\n{_FLUSH}",
    "left-at-end": f"step once more after the last micro-batch:\n{_FLUSH}",
    "uneven-micro-batches": (
        "weight each micro-batch by what its mean divides by, over the whole update:\n"
        "    loss = criterion(outputs, targets)  # with reduction='sum'\n    (loss / units_of_all_micro_batches).backward()"
    ),
    "clip-early": "clip once, after the last backward of the update and before the step.",
    "clip-scaled": "unscale first:\n    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(...)",
    "clip-after-step": "clip before the step:\n    torch.nn.utils.clip_grad_norm_(...)\n    optimizer.step()",
    "schedule-per-micro-batch": "step the scheduler with the optimizer:\n    optimizer.step()\n    scheduler.step()",
    "schedule-before-step": "first the optimizer, then the scheduler:\n    optimizer.step()\n    scheduler.step()",
    "schedule-horizon": "make the schedule for updates:\n    num_training_steps = epochs * math.ceil(len(loader) / {n})",
    "scaler-misuse": (
        "scale every loss of the update with one scale; then, once per update:\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
    "ddp-every-pass": (
        "synchronise in the last micro-batch only, forward and backward inside the block:\n"
        "    with nullcontext() if is_last else model.no_sync():"
    ),
    "ddp-backward-only": (
        "put the forward inside no_sync as well: DDP decides at forward.\n    with model.no_sync():\n"
        "        loss = criterion(model(inputs), targets)\n        loss.backward()"
    ),
    "ddp-never": "run the last micro-batch of every update, forward and backward, outside no_sync.",
    "batch-norm": "use GroupNorm or LayerNorm, or frozen statistics (model.eval() on these layers), or a larger micro-batch.",
    "never-cleared": "clear after every step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "kept-graph": "keep the number, not the graph:\n    total += loss.item()      # or losses.append(loss.detach())",
    "unowned-parameters": "give them to the optimizer, or freeze them:\n    parameter.requires_grad_(False)",
    "low-precision-sum": "sum in fp32, before the first backward:\n    for p in model.parameters(): p.grad_dtype "
    "= torch.float32",
    "off-by-one": "count from one:\n    if (i + 1) % {n} == 0:",
    "negatives-missing": (
        "accumulating does not bring the negatives of other micro-batches back; cache the representations:\n"
        "    anybatch.Update(model, optimizer, anybatch.Coupled(encode, loss), micro_batch={rows})"
    ),
    "rows-repeated": "deal the rows out:\n    sampler = DistributedSampler(dataset, shuffle=True)",
    "windows-differ": "step all optimizers after the same micro-batches.",
    "loss-logged-divided": "log the loss as it was before the division:\n    print(loss.item() * {n})",
    "eval-left-on": "switch back after validation:\n    model.train()",
    "learning-rate": "raise it by the rule, and warm up:\n    anybatch.scale_lr(optimizer, batch={batch}, base_batch={rows})",
}
WITHOUT_LINES = (
    "negatives-missing",
    "learning-rate",
    "kept-graph",
    "unowned-parameters",
    "eval-left-on",
    "loss-logged-divided",
)


def fix_for(kind: str, *, n: int = 0, rows: int = 0) -> str:
    """The fix as text; what is not known stays a name."""
    own = OWN.get(kind, "")
    if not own:
        return ""
    size = str(rows) if rows else "16"
    batch = str(rows * n) if rows and n else "64"
    whole = own if kind in WITHOUT_LINES else own + ANYBATCH
    return whole.replace("{n}", str(n) if n > 1 else "n").replace("{rows}", size).replace("{batch}", batch)
