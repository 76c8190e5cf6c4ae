"""What the ranks of one spawn do: each function runs on every rank with the same seed, and returns numbers."""

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Coupled, Fit, Mean, Objective, PerRow, Sum, Update, info_nce, plan, supervised
from anybatch.batches.counting import take_rows
from tests.reference import whole_batch_gradient

LABELS = 3
Wrap = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_views(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module) -> nn.Module:
    """Every linear layer a unit of its own, and the rest."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp_units(model: nn.Module) -> nn.Module:
    """Every child with parameters a unit of its own; one may hold BatchNorms inside, or be one."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(model)


def ddp_sync_norm(model: nn.Module) -> nn.Module:
    """Converted when it is wrapped: on the CPU DDP takes no SyncBatchNorm."""
    wrapped = DistributedDataParallel(model)
    wrapped.module = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped.module)
    return wrapped


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def near_equal(count: int) -> list[int]:
    """40 rows over 3 ranks are 14, 13, 13."""
    size = dist.get_world_size()
    return [count // size + (rank < count % size) for rank in range(size)]


def own(batch: Any, counts: list[int]) -> Any:
    """This rank's rows of the whole batch."""
    start = sum(counts[: dist.get_rank()])
    return take_rows(batch, list(range(start, start + counts[dist.get_rank()])))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, LABELS)).to(dtype)


def labelled(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(count, 6), torch.randint(0, LABELS, (count,))


def ragged(count: int, length: int = 7) -> tuple[Tensor, Tensor]:
    """Rows of 7 positions of which the early rows count many and the late ones few."""
    torch.manual_seed(3)
    targets = torch.randint(0, LABELS, (count, length))
    for row in range(count):
        targets[row, max(1, length - row * length // count) :] = -100
    return torch.randn(count, length, 6), targets


def tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def num_targets(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


TOKENS = Objective(tokens, num_targets)


def error(model: nn.Module, reference: Tensor) -> float:
    return float((whole(model) - reference).norm() / reference.norm())


def whole(model: nn.Module) -> Tensor:
    """All gradients in one vector, sharded ones gathered."""
    grads = []
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None and hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        grads.append(torch.zeros(parameter.shape) if grad is None else grad)
    return torch.cat([grad.detach().to_dense().double().flatten() for grad in grads])


def gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(model: nn.Module, alone: nn.Module) -> float:
    """Of the weights, relative."""
    got = torch.cat([gathered(parameter).flatten() for parameter in model.parameters()])
    wanted = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    return float((got - wanted).norm() / wanted.norm())


def uneven_rows(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(40)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5).backward(own(batch, near_equal(40)))
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1])
    return {
        "error": error(wrapped, reference),
        "loss": abs(float(result.loss - loss)),
        "units": result.units,
        "micro_batches": result.micro_batches,
    }


def uneven_tokens(wrap: Wrap) -> dict[str, float]:
    model, batch = network(torch.float64), ragged(24)
    batch = (batch[0].double(), batch[1])
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = wrap(copy.deepcopy(model))
    rows = own(batch, near_equal(24))
    result = Accumulator(wrapped, TOKENS, micro_batch=1 + dist.get_rank()).backward(rows)
    exact = error(wrapped, reference)
    # the common mistake: each rank's own mean, averaged over ranks
    twin = wrap(copy.deepcopy(model))
    tokens(twin, rows).backward()
    return {
        "error": exact,
        "mean_of_means": error(twin, reference),
        "loss": abs(float(result.loss - tokens(model, batch).detach())),
        "units": result.units - float(num_targets(batch)),
    }


def toggled_between_forward_and_backward() -> dict[str, float]:
    model, batch = network(), labelled(24)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    rows = own(batch, near_equal(24))
    parts = [take_rows(rows, list(range(len(rows[0])))[start::3]) for start in range(3)]
    for index, part in enumerate(parts):
        if index == 0:
            loss = F.cross_entropy(wrapped(part[0]), part[1]) / 3
            with wrapped.no_sync():
                loss.backward()
        elif index == 1:
            with wrapped.no_sync():
                (F.cross_entropy(wrapped(part[0]), part[1]) / 3).backward()
        else:
            with wrapped.no_sync():
                loss = F.cross_entropy(wrapped(part[0]), part[1]) / 3
            loss.backward()
    return {"error": error(wrapped, reference)}


def rank_without_rows(wrap: Wrap, *, gives_none: bool = True) -> dict[str, float]:
    model, batch = network(), labelled(7)
    size = dist.get_world_size()
    counts = [7 - (size - 2), *[1] * (size - 2), 0]
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    rows = own(batch, counts)
    if gives_none and not len(rows[0]):
        rows = None
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(rows)
    return {"error": error(wrapped, reference), "units": result.units}


def empty_tensors(wrap: Wrap) -> dict[str, float]:
    return rank_without_rows(wrap, gives_none=False)


def rank_without_targets(wrap: Wrap) -> dict[str, float]:
    """A rank whose rows have no target that counts: its mean is nan."""
    model, batch = network(), ragged(12)
    counts = near_equal(12)
    batch[1][: counts[0]] = -100
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, counts))
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - tokens(model, batch).detach()))}


def no_targets_at_all(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), ragged(12)
    batch[1][:] = -100
    wrapped = wrap(model)
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, near_equal(12)))
    return {"norm": float(whole(wrapped).norm()), "loss": float(result.loss), "units": result.units}


def class_weights(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(23)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 20.0]))
    reference = whole_batch_gradient(
        model,
        lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], weight=torch.tensor([0.2, 1.0, 20.0]).double()),
        batch,
    )
    wrapped = wrap(copy.deepcopy(model))
    Accumulator(wrapped, supervised(criterion), micro_batch=4).backward(own(batch, near_equal(23)))
    return {"error": error(wrapped, reference)}


def sum_loss(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(7)
    counts = [7, *[0] * (dist.get_world_size() - 1)] if dist.get_world_size() == 2 else near_equal(7)
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], reduction="sum"), batch
    )
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss(reduction="sum")), micro_batch=3).backward(
        own(batch, counts)
    )
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - loss))}


def adds_to_gradients(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(22)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=4)
    accumulator.backward(own(batch, near_equal(22)))
    accumulator.backward(own(batch, near_equal(22)))
    return {"error": error(wrapped, 2 * reference)}


def bf16() -> dict[str, float]:
    """Summed in fp32 over micro-batches and ranks: as good as one process, far better than bf16 sums."""
    torch.manual_seed(5)
    model = nn.Linear(16, 4).bfloat16()
    inputs, targets = torch.randn(512, 16).bfloat16(), torch.randint(0, 4, (512,))
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), (inputs, targets)
    )
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=1, keep_fp32=True)
    accumulator.backward(own((inputs, targets), near_equal(512)))
    found = {"error": error(wrapped, reference), "is_fp32": float(wrapped.module.weight.grad.dtype is torch.float32)}
    plain = DistributedDataParallel(copy.deepcopy(model))
    rows = own((inputs, targets), near_equal(512))
    for index in range(len(rows[0])):
        with plain.no_sync() if index + 1 < len(rows[0]) else torch.enable_grad():
            loss = F.cross_entropy(plain(rows[0][index : index + 1]).float(), rows[1][index : index + 1])
            (loss / len(rows[0])).backward()
    return {**found, "plain": error(plain, reference)}


class Branched(nn.Module):
    """The second branch is taken by the micro-batches whose first number says so."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, LABELS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs)
        if inputs[0, 0] > 0:
            hidden = hidden + self.branch(hidden)
        output: Tensor = self.head(hidden.tanh())
        return output


def branched() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs, targets = labelled(16)
    inputs[:, 0] = -1.0
    inputs[0:2, 0] = 1.0  # the first micro-batch of rank 0, never the last of any rank
    return Branched(), (inputs, targets)


def by_pairs(model: nn.Module, batch: Any) -> Tensor:
    parts = [F.cross_entropy(model(batch[0][i : i + 2]), batch[1][i : i + 2]) for i in range(0, len(batch[0]), 2)]
    return torch.stack(parts).mean()


def counts_of_pairs() -> list[int]:
    size = dist.get_world_size()
    return [6, 10] if size == 2 else [6, 4, 6] if size == 3 else [4] * 4


def unused_parameters() -> dict[str, float]:
    model, batch = branched()
    reference = whole_batch_gradient(model, by_pairs, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return {"error": error(wrapped, reference), "never": float(wrapped.module.never.weight.grad is not None)}


def unused_parameters_unannounced() -> float:
    model, batch = branched()
    wrapped = DistributedDataParallel(model)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return 0.0


def static_graph() -> float:
    wrapped = DistributedDataParallel(network(), static_graph=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2)
    return 0.0


def not_called() -> float:
    wrapped = DistributedDataParallel(network())
    objective = Objective(lambda model, rows: F.cross_entropy(model.module(rows[0]), rows[1]))
    Accumulator(wrapped, objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


def error_in_units(wrap: Wrap) -> float:
    def units(batch: Any) -> float:
        return -1 if dist.get_rank() == 1 else len(batch[0])

    objective = Objective(lambda model, rows: F.cross_entropy(model(rows[0]), rows[1]), units)
    Accumulator(wrap(network()), objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


def _halved(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state[0] += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def comm_hook() -> dict[str, float]:
    model, batch = network(), labelled(30)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    calls = [0]
    wrapped.register_comm_hook(calls, _halved)
    objective = supervised(nn.CrossEntropyLoss())
    Accumulator(wrapped, objective, micro_batch=2).backward(own(batch, near_equal(30)))
    return {"error": error(wrapped, reference), "calls": calls[0]}


def comm_hook_refused() -> float:
    wrapped = DistributedDataParallel(network())
    wrapped.register_comm_hook([0], _halved)
    objective = supervised(nn.CrossEntropyLoss())
    Accumulator(wrapped, objective, micro_batch=2, drop_nonfinite=True).backward(own(labelled(8), near_equal(8)))
    return 0.0


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, LABELS)
        self.outside = nn.Parameter(torch.randn(5))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second((self.first(inputs) * self.outside).tanh())
        return output


def inside_a_model(wrap: Wrap) -> dict[str, float]:
    """Two wrapped submodules, and a parameter that nobody wrapped."""
    torch.manual_seed(1)
    model, batch = TwoTowers(), labelled(17)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    model.first, model.second = wrap(model.first), wrap(model.second)
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(own(batch, near_equal(17)))
    return {"error": error(model, reference)}


def with_metrics(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch[0])
    rows = F.cross_entropy(outputs, batch[1], reduction="none")
    hits = (outputs.argmax(1) == batch[1]).sum()
    return rows.mean(), {
        "error": 1 - hits / len(rows),
        "hits": Sum(hits),
        "first": Mean(batch[0][:, 0].mean(), len(rows)),
        "rows": PerRow(rows),
    }


def metrics(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(11)
    counts = [5, 6] if dist.get_world_size() == 2 else [6, 5, *[0] * (dist.get_world_size() - 2)]
    rows = own(batch, counts)
    wrapped = wrap(model)
    result = Accumulator(wrapped, Objective(with_metrics), micro_batch=2).backward(rows if len(rows[0]) else None)
    wanted = with_metrics(model, batch)[1]
    return {
        "error": abs(float(result.metrics["error"] - wanted["error"])),
        "hits": float(result.metrics["hits"]) - float(wanted["hits"].value),
        "first": abs(float(result.metrics["first"] - wanted["first"].value)),
        "rows": float((result.metrics["rows"] - wanted["rows"].values).abs().max()),
    }


def trained(model: nn.Module, batches: list[Any], *, micro_batch: int = 3, **options: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update = Update(model, optimizer, TOKENS, micro_batch=micro_batch, **options)
    return [update(batch) for batch in batches]


def token_batches(dtype: torch.dtype) -> list[Any]:
    batches = []
    for number in range(4):
        torch.manual_seed(10 + number)
        count = [13, 9, 16, 5][number]
        inputs, targets = ragged(count)
        batches.append(((inputs + number).to(dtype), targets))
    return batches


def updates_with_clipping(wrap: Wrap) -> dict[str, float]:
    """Four updates, clipped: weights and reported numbers as in one process."""
    alone = network(torch.float64)
    wanted = trained(alone, token_batches(torch.float64), clip_norm=0.1)
    wrapped = wrap(network(torch.float64))
    batches = [own(batch, near_equal(len(batch[0]))) for batch in token_batches(torch.float64)]
    got = trained(wrapped, batches, clip_norm=0.1)
    return {
        "weights": difference(wrapped, alone),
        "norms": max(abs(float(a.grad_norm - b.grad_norm)) for a, b in zip(wanted, got, strict=True)),
        "losses": max(abs(float(a.loss - b.loss)) for a, b in zip(wanted, got, strict=True)),
        "clipped": float(min(result.grad_norm for result in got)) > 0.1,
    }


def value_clipping_and_scaling(wrap: Wrap) -> dict[str, float]:
    """A scaler, and clipping by value: as one process has it."""
    found = {}
    for name, options in {"clip_value": {"clip_value": 1e-3}, "scaler": {"clip_norm": 0.1}}.items():
        models = network(torch.float64), wrap(network(torch.float64))
        for model in models:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if name == "scaler" else None
            batches = token_batches(torch.float64)
            if model is models[1]:
                batches = [own(batch, near_equal(len(batch[0]))) for batch in batches]
            trained(model, batches, scaler=scaler, **options)
        found[name] = difference(models[1], models[0])
    return found


def spoilt() -> tuple[Tensor, Tensor]:
    """16 rows; the third of the last rank's own is inf."""
    inputs, targets = labelled(16)
    counts = near_equal(16)
    inputs[sum(counts[:-1]) + 2] = torch.inf
    return inputs, targets


def nonfinite(wrap: Wrap, decision: str) -> dict[str, Any]:
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=2, on_nonfinite=decision)
    result = update(own(spoilt(), near_equal(16)))
    again = update(own(labelled(16), near_equal(16)))
    return {
        "applied": result.applied,
        "weights": difference(model, network()),
        "units": result.units,
        "dropped": result.dropped,
        "again": again.applied,
    }


def drop(wrap: Wrap) -> dict[str, float]:
    """The micro-batch that is left out is one of the last rank's, and the rest is renormalised over all ranks."""
    model, counts = network(), near_equal(16)
    left_out = sum(counts[:-1]) + 2
    kept = [row for row in range(16) if row not in (left_out, left_out + 1)]
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), take_rows(labelled(16), kept)
    )
    wrapped = wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    result = Accumulator(wrapped, objective, micro_batch=2, drop_nonfinite=True).backward(own(spoilt(), counts))
    numbers = [-(-count // 2) for count in counts]
    return {
        "error": error(wrapped, reference),
        "units": result.units - 14,
        "dropped": float(result.dropped != (sum(numbers[:-1]) + 1,)),
    }


def overflow(wrap: Wrap) -> dict[str, Any]:
    """One rank's rows overflow: no rank steps, and every rank's scale is halved."""
    model = wrap(network())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=3, scaler=scaler)
    result = update(own(spoilt(), near_equal(16)))
    return {"applied": result.applied, "scale": scaler.get_scale(), "weights": difference(model, network())}


def overflow_of_a_shard() -> dict[str, Any]:
    """The gradient of the first output alone overflows: rank 0 holds it."""
    model = fully_shard(nn.Linear(6, 4 * dist.get_world_size()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    objective = Objective(lambda twin, rows: twin(rows[0]).mean() + (twin(rows[0])[:, 0] * 1e37).mean())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=3, scaler=scaler)
    result = update(own(labelled(16), near_equal(16)))
    return {"applied": result.applied, "scale": scaler.get_scale()}


def error_in_a_forward(wrap: Wrap) -> dict[str, float]:
    """All ranks fail in their second micro-batch; what was there stays, and the next batch is exact."""
    model, batch = network(), labelled(24)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    calls = [0]

    def failing(twin: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("second micro-batch")
        return F.cross_entropy(twin(rows[0]), rows[1])

    accumulator = Accumulator(wrapped, Objective(failing), micro_batch=3)
    rows = own(batch, near_equal(24))
    with contextlib.suppress(ValueError):
        accumulator.backward(rows)
    left = sum(parameter.grad is not None for parameter in wrapped.parameters())
    accumulator.backward(rows)
    return {"left": left, "error": error(wrapped, reference)}


def keeps_parameters(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(40)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5, reshard=False)
    accumulator.backward(own(batch, near_equal(40)))
    return {"error": error(wrapped, reference)}


def low_precision(reduce_dtype: torch.dtype | None) -> dict[str, float]:
    """Computed in bf16, summed in fp32."""
    model, batch = network(), labelled(64)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    wrapped = fully_shard(copy.deepcopy(model), mp_policy=policy)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, near_equal(64)))
    return {"error": error(wrapped, reference)}


def replicated_and_sharded() -> dict[str, float]:
    def wrap(model: nn.Module) -> nn.Module:
        shape = (2, dist.get_world_size() // 2)
        return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))

    return uneven_rows(wrap) if dist.get_world_size() % 2 == 0 else uneven_rows(hsdp)


def sharded_and_tensor_parallel() -> float:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    Accumulator(fully_shard(model, mesh=mesh["data"]), supervised(nn.CrossEntropyLoss()), micro_batch=2)
    return 0.0


class Towers(nn.Module):
    """Queries, keys and a learned scale; the number of forwards of a micro-batch is two."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.0), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.tensor([6.0]))  # fully_shard takes no 0-dim parameter

    def forward(self, pair: Any) -> Any:
        return self.encoder(pair[0]), self.encoder(pair[1]), self.scale[0]


class ScaledInfoNCE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, representations: Any) -> Any:
        queries, keys, scale = representations
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T * scale
        own = torch.arange(len(logits))
        rows = F.cross_entropy(logits + self.bias * torch.eye(len(logits)), own, reduction="none")
        return rows.mean(), {"rows": PerRow(rows), "seen": Sum(len(rows))}


def pairs(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    first = torch.randn(count, 6, dtype=torch.float64)
    return first, first + 0.3 * torch.randn(count, 6, dtype=torch.float64)


def coupled(wrap: Wrap, counts: str = "uneven") -> dict[str, float]:
    """A contrastive loss over all ranks' rows; the scale is the model's, the bias the loss's own."""
    torch.manual_seed(1)
    model, own_loss, batch = Towers().double(), ScaledInfoNCE(), pairs(23)
    twin, twin_loss = copy.deepcopy(model), copy.deepcopy(own_loss)
    wanted, metrics = twin_loss(twin(batch))
    wanted.backward()
    reference = torch.cat([whole(twin), whole(twin_loss)])
    given = near_equal(23) if counts == "uneven" else [23, *[0] * (dist.get_world_size() - 1)]
    rows = own(batch, given)
    wrapped = wrap(model)
    accumulator = Accumulator(
        wrapped,
        Coupled(lambda model, pair: model(pair), own_loss),
        micro_batch=2 + dist.get_rank(),
    )
    result = accumulator.backward(rows if len(rows[0]) else None)
    got = torch.cat([whole(wrapped), whole(own_loss)])
    # the common mistake: each rank's loss over its own rows, averaged
    alone = range(0, 23, 12)
    mistaken = copy.deepcopy(twin)
    mistaken.zero_grad()
    sum(twin_loss(mistaken((batch[0][i : i + 12], batch[1][i : i + 12])))[0] for i in alone).div(len(alone)).backward()
    return {
        "error": float((got - reference).norm() / reference.norm()),
        "own_rows_only": float((whole(mistaken) - whole(twin)).norm() / whole(twin).norm()),
        "loss": abs(float(result.loss) - float(wanted.detach())),
        "units": result.units - 23,
        "rows": float((result.metrics["rows"] - metrics["rows"].values.detach()).abs().max()),
        "seen": float(result.metrics["seen"]) - 23,
    }


def convolutional(*, bias: bool = True) -> nn.Module:
    """A bias before a BatchNorm has the gradient 0, of which AdamW would make steps of rounding errors."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, bias=bias),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        Residual(4, bias=bias),
        nn.Flatten(),
        nn.Linear(16, LABELS),
    ).double()


class Residual(nn.Module):
    """Two branches, each with a BatchNorm: their order in backward is the engine's choice."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv1d(width, width, 1, bias=bias), nn.BatchNorm1d(width))
        self.side = nn.Sequential(nn.Conv1d(width, width, 1, bias=bias), nn.BatchNorm1d(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.main(inputs) + self.side(inputs)).tanh()


def signals(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randn(count, 2, 6, dtype=torch.float64)
    rows[count // 2 :] += 2.0
    return rows, torch.randint(0, LABELS, (count,))


def norms_of(model: nn.Module) -> Tensor:
    buffers = [buffer for name, buffer in model.named_buffers() if "running" in name]
    return torch.cat([buffer.flatten() for buffer in buffers])


def exact_norm(wrap: Wrap, counts: list[int] | None = None) -> dict[str, float]:
    """BatchNorm pooled over all ranks' rows, two residual branches, uneven numbers of micro-batches."""
    model, batch = convolutional(), signals(14)
    twin = copy.deepcopy(model)
    wanted = F.cross_entropy(twin(batch[0]), batch[1])
    wanted.backward()
    given = counts or near_equal(14)
    given = [*given, *[0] * (dist.get_world_size() - len(given))]
    rows = own(batch, given)
    wrapped = wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    result = Accumulator(wrapped, objective, micro_batch=2 + 2 * dist.get_rank(), batch_norm="exact").backward(
        rows if len(rows[0]) else None
    )
    is_held = DistributedDataParallel._active_ddp_module is not None
    plain = DistributedDataParallel(copy.deepcopy(model))
    own_part = own(batch, near_equal(14))
    F.cross_entropy(plain(own_part[0]), own_part[1]).backward()
    return {
        "error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()),
        "per_rank": float((whole(plain) - whole(twin)).norm() / whole(twin).norm()),
        "running": float((norms_of(wrapped) - norms_of(twin)).abs().max()),
        "tracked": float(max(b for n, b in wrapped.named_buffers() if "tracked" in n)) - 1,
        "loss": abs(float(result.loss) - float(wanted.detach())),
        "is_held": is_held,
    }


def exact_norm_updates(wrap: Wrap) -> dict[str, float]:
    """AdamW over batches of which one leaves the last rank without rows; then the model in eval, as it is used."""
    model, batch = convolutional(bias=False), signals(14)
    twin, wrapped = copy.deepcopy(model), wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    update = Update(
        wrapped,
        torch.optim.AdamW(wrapped.parameters(), lr=0.01),
        objective,
        micro_batch=2 + dist.get_rank(),
        batch_norm="exact",
        clip_norm=0.5,
    )
    alone = torch.optim.AdamW(twin.parameters(), lr=0.01)
    size = dist.get_world_size()
    for given in (near_equal(14), [14 - (size - 2), *[1] * (size - 2), 0], near_equal(14)[::-1], near_equal(14)):
        rows = own(batch, given)
        update(rows if len(rows[0]) else None)
        alone.zero_grad()
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        alone.step()
    running = float((norms_of(wrapped) - norms_of(twin)).abs().max())
    wrapped.eval()
    twin.eval()
    with torch.no_grad():
        outputs = float((wrapped(batch[0]) - twin(batch[0])).abs().max())
    return {"error": difference(wrapped, twin), "running": running, "outputs": outputs}


def exact_norm_low_precision() -> dict[str, float]:
    """A gradient of 256 + 1 + 1 + 1 on each rank: 259 in fp32, and not a number of bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), mp_policy=policy)
    weights = torch.tensor([256.0, 1.0, 1.0, 1.0])
    objective = Objective(lambda model, rows: (model(rows[0])[:, 0].float() * rows[1]).sum(), reduction="sum")
    Accumulator(model, objective, micro_batch=1, batch_norm="exact").backward((torch.randn(4, 3), weights))
    return {"error": float(gathered(model[2].bias.grad)[0]) - 259 * dist.get_world_size()}


def exact_norm_error_in_a_forward() -> dict[str, float]:
    """Every rank fails in its second micro-batch, when the first has run and the others have begun; the next batch is right."""
    model, batch = convolutional(), signals(14)
    twin, wrapped = copy.deepcopy(model), fsdp_units(copy.deepcopy(model))
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    calls = [0]

    def loss(model: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        number = calls[0]
        outputs = model(rows[0])
        if number == 2:
            raise ValueError("once")
        return F.cross_entropy(outputs, rows[1])

    accumulator = Accumulator(wrapped, Objective(loss), micro_batch=2, batch_norm="exact")
    with contextlib.suppress(ValueError):
        accumulator.backward(own(batch, near_equal(14)))
    left = sum(parameter.grad is not None for parameter in wrapped.parameters())
    accumulator.backward(own(batch, near_equal(14)))
    return {"error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()), "left": left}


def micro_norm(wrap: Wrap) -> dict[str, float]:
    """Each micro-batch its own statistics; running statistics merged over micro-batches and ranks, and equal on them."""
    wrapped, batch = wrap(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, LABELS)).double()), labelled(14)
    batch = (batch[0].double(), batch[1])
    twin = nn.BatchNorm1d(6).double()
    twin(batch[0])
    given = [6, 8] if dist.get_world_size() == 2 else [6, 8, *[0] * (dist.get_world_size() - 2)]
    rows = own(batch, given)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=3, batch_norm="micro").backward(
        rows if len(rows[0]) else None
    )
    return {"running": float((norms_of(wrapped) - norms_of(twin)).abs().max())}


def measured_norm() -> dict[str, Any]:
    """Where nobody chose, the warning carries the error against the gradient of the whole batch of all ranks."""
    model, batch = convolutional(), signals(14)
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    wrapped = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(own(batch, near_equal(14)))
    told = next(str(warning.message) for warning in caught if "BatchNorm" in str(warning.message))
    return {
        "told": float(told.split("gradient is ")[1].split(" ")[0]),
        "error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()),
    }


def coupled_exact_norm(wrap: Wrap) -> dict[str, float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = pairs(11)
    loss = info_nce(learned=True).double()
    objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), loss)
    twin, twin_loss = copy.deepcopy(model), copy.deepcopy(loss)
    twin_loss((twin(batch[0]), twin(batch[1]))).backward()
    wrapped = wrap(model)
    Accumulator(wrapped, objective, micro_batch=2, batch_norm="exact").backward(own(batch, near_equal(11)))
    got, wanted = torch.cat([whole(wrapped), whole(loss)]), torch.cat([whole(twin), whole(twin_loss)])
    return {"error": float((got - wanted).norm() / wanted.norm())}


def out_of_memory(objective: str, failing: Callable[[int, int], bool]) -> dict[str, Any]:
    """The last rank runs out of memory in micro-batches of more than 2 rows; all ranks start again, in smaller ones."""
    torch.manual_seed(1)
    model = (Towers() if objective == "coupled" else network()).double()
    batch = (
        pairs(20) if objective == "coupled" else tuple(t.double() if t.is_floating_point() else t for t in labelled(20))
    )
    own_loss = ScaledInfoNCE()
    twin = copy.deepcopy(model)
    if objective == "coupled":
        copy.deepcopy(own_loss)(twin(batch))[0].backward()
    else:
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
    calls = [0]

    def check(rows: Any) -> None:
        calls[0] += 1
        if dist.get_rank() == dist.get_world_size() - 1 and failing(calls[0], len(rows[0])):
            raise torch.OutOfMemoryError("provoked")

    def loss(model: nn.Module, rows: Any) -> Tensor:
        check(rows)
        return F.cross_entropy(model(rows[0]), rows[1])

    def encode(model: nn.Module, rows: Any) -> Any:
        check(rows)
        return model(rows)

    wrapped = DistributedDataParallel(model)
    goal = Coupled(encode, own_loss) if objective == "coupled" else Objective(loss)
    accumulator = Accumulator(wrapped, goal, micro_batch=5)
    result = accumulator.backward(own(batch, near_equal(20)))
    return {
        "error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()),
        "retries": result.retries,
        "split": accumulator.split.size,
    }


def more_than_two(call: int, rows: int) -> bool:
    return rows > 2


def always(call: int, rows: int) -> bool:
    return True


def second_pass(call: int, rows: int) -> bool:
    return rows > 2 and call > 2


def fitted(wrap: Wrap) -> dict[str, Any]:
    """Each rank chooses for its own rows: the last has half the memory; the gradient is the whole batch's."""
    torch.manual_seed(1)
    model = network(torch.float64)
    twin = copy.deepcopy(model)
    batch = tuple(t.double() if t.is_floating_point() else t for t in labelled(64))
    goal, rows = supervised(nn.CrossEntropyLoss()), own(batch, near_equal(64))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    alone = plan(twin, optimizer, goal, rows, memory="1GiB", checkpointing=False)
    memory = alone.peak(16 if dist.get_rank() == 0 else 8)
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    wrapped = wrap(model)
    buckets = sum(p.nbytes for p in model.parameters()) if wrap is ddp else 0
    fit = Fit(memory + buckets, margin=0.0)
    Update(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), goal, micro_batch=fit)(rows)
    assert fit.choice is not None
    return {"size": fit.choice.size, "reason": fit.choice.reason, "error": error(wrapped, whole(twin))}


def error_of_one_rank() -> float:
    """One rank alone fails in its second forward."""
    calls = [0]

    def loss(model: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 2:
            raise ValueError("only here")
        return F.cross_entropy(model(rows[0]), rows[1])

    Accumulator(DistributedDataParallel(network()), Objective(loss), micro_batch=2).backward(
        own(labelled(20), near_equal(20))
    )
    return 0.0


def collectives(wrap: Wrap, micro_batch: int, reshard: bool = True) -> dict[str, int]:
    """What the third update sends, by name; the first two set up buckets."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(
        model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, clip_norm=1.0, reshard=reshard
    )
    rows = own(labelled(24), near_equal(24))
    update(rows)
    update(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(rows)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def exact_norm_collectives(micro_batch: int) -> dict[str, int]:
    """What a batch in lockstep sends, by name."""
    accumulator = Accumulator(
        fsdp_units(convolutional()), supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, batch_norm="exact"
    )
    rows = own(signals(14), near_equal(14))
    accumulator.backward(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accumulator.backward(rows)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def synchronising_every_micro_batch() -> dict[str, int]:
    """The twin of counting: without no_sync there is one reduction per micro-batch."""
    model = DistributedDataParallel(network())
    rows = own(labelled(24), near_equal(24))
    F.cross_entropy(model(rows[0]), rows[1]).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for start in range(0, len(rows[0]), 2):
            F.cross_entropy(model(rows[0][start : start + 2]), rows[1][start : start + 2]).backward()
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


EVERYWHERE = (
    uneven_rows,
    uneven_tokens,
    rank_without_rows,
    empty_tensors,
    rank_without_targets,
    no_targets_at_all,
    class_weights,
    sum_loss,
    adds_to_gradients,
    metrics,
    updates_with_clipping,
    value_clipping_and_scaling,
    overflow,
    error_in_a_forward,
    error_in_units,
)
DDP = {
    **{f"ddp_{scenario.__name__}": partial(scenario, ddp) for scenario in EVERYWHERE},
    "ddp_bucket_views": partial(adds_to_gradients, ddp_views),
    "ddp_inside_a_model": partial(inside_a_model, ddp),
    "ddp_toggled_between_forward_and_backward": toggled_between_forward_and_backward,
    **{f"ddp_{decision}": partial(nonfinite, ddp, decision) for decision in ("raise", "skip")},
    "ddp_drop": partial(drop, ddp),
    "ddp_bf16": bf16,
    "ddp_unused_parameters": unused_parameters,
    "ddp_unused_parameters_unannounced": unused_parameters_unannounced,
    "ddp_static_graph": static_graph,
    "ddp_not_called": not_called,
    "ddp_comm_hook": comm_hook,
    "ddp_comm_hook_refused": comm_hook_refused,
}
FSDP = {
    **{f"fsdp_{scenario.__name__}": partial(scenario, fsdp) for scenario in EVERYWHERE},
    "fsdp_inside_a_model": partial(inside_a_model, fully_shard),
    "fsdp_hsdp": replicated_and_sharded,
    **{f"fsdp_{decision}": partial(nonfinite, fsdp, decision) for decision in ("raise", "skip", "drop")},
    "fsdp_keeps_parameters": partial(keeps_parameters, fsdp),
    "fsdp_low_precision": partial(low_precision, torch.float32),
    "fsdp_low_precision_sums": partial(low_precision, None),
    "fsdp_overflow_of_a_shard": overflow_of_a_shard,
    "fsdp_tensor_parallel": sharded_and_tensor_parallel,
}
COUPLED = {
    "ddp_coupled": partial(coupled, ddp),
    "ddp_coupled_rank_without_rows": partial(coupled, ddp, "none"),
    "fsdp_coupled": partial(coupled, fsdp),
    "fsdp_coupled_rank_without_rows": partial(coupled, fsdp, "none"),
    "ddp_coupled_exact_norm": partial(coupled_exact_norm, ddp),
    "fsdp_coupled_exact_norm": partial(coupled_exact_norm, fsdp_units),
}
NORMS = {
    "ddp_exact_norm": partial(exact_norm, ddp),
    "ddp_exact_norm_rank_without_rows": partial(exact_norm, ddp, [14]),
    "ddp_sync_norm": partial(exact_norm, ddp_sync_norm),
    "fsdp_exact_norm": partial(exact_norm, fsdp_units),
    "fsdp_exact_norm_one_unit": partial(exact_norm, hsdp),
    "fsdp_exact_norm_rank_without_rows": partial(exact_norm, fsdp_units, [14]),
    "ddp_exact_norm_updates": partial(exact_norm_updates, ddp),
    "fsdp_exact_norm_updates": partial(exact_norm_updates, fsdp_units),
    "fsdp_exact_norm_low_precision": exact_norm_low_precision,
    "fsdp_exact_norm_error_in_a_forward": exact_norm_error_in_a_forward,
    "ddp_micro_norm": partial(micro_norm, ddp),
    "fsdp_micro_norm": partial(micro_norm, fsdp),
    "ddp_measured_norm": measured_norm,
}
MEMORY = {
    "ddp_out_of_memory": partial(out_of_memory, "rows", more_than_two),
    "ddp_out_of_memory_coupled": partial(out_of_memory, "coupled", more_than_two),
    "ddp_out_of_memory_second_pass": partial(out_of_memory, "coupled", second_pass),
    "ddp_out_of_memory_always": partial(out_of_memory, "rows", always),
    "ddp_fit": partial(fitted, ddp),
    "fsdp_fit": partial(fitted, fsdp),
    "ddp_error_of_one_rank": error_of_one_rank,
}
COUNTS = {
    **{f"ddp_collectives_{size}": partial(collectives, ddp, size) for size in (12, 4, 1)},
    **{f"fsdp_collectives_{size}": partial(collectives, fsdp, size) for size in (12, 4, 1)},
    "fsdp_collectives_kept": partial(collectives, fsdp, 1, reshard=False),
    **{f"fsdp_exact_norm_collectives_{size}": partial(exact_norm_collectives, size) for size in (7, 1)},
    "ddp_synchronising_every_micro_batch": synchronising_every_micro_batch,
}
ALL = {**DDP, **FSDP, **COUPLED, **NORMS, **MEMORY, **COUNTS}
ON_THREE = (
    "ddp_uneven_rows",
    "fsdp_uneven_rows",
    "ddp_uneven_tokens",
    "fsdp_uneven_tokens",
    "ddp_rank_without_rows",
    "fsdp_rank_without_rows",
    "ddp_metrics",
    "ddp_drop",
    "ddp_coupled",
    "ddp_exact_norm_rank_without_rows",
    "fsdp_exact_norm",
    "fsdp_exact_norm_rank_without_rows",
    "fsdp_exact_norm_updates",
    "fsdp_coupled_exact_norm",
    "ddp_micro_norm",
)
