"""What the ranks of one spawn do: each function runs on every rank with the same seed, and returns numbers."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Mean, Objective, PerRow, Sum, Update, supervised
from anybatch.batches import take_rows
from tests.reference import whole_batch_gradient

LABELS = 3


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


def ddp_uneven_rows() -> dict[str, float]:
    model, batch = network(), labelled(40)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5).backward(own(batch, near_equal(40)))
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1])
    return {
        "error": error(wrapped, reference),
        "loss": abs(float(result.loss - loss)),
        "units": result.units,
        "micro_batches": result.micro_batches,
    }


def ddp_uneven_tokens() -> dict[str, float]:
    model, batch = network(torch.float64), ragged(24)
    batch = (batch[0].double(), batch[1])
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    rows = own(batch, near_equal(24))
    result = Accumulator(wrapped, TOKENS, micro_batch=1 + dist.get_rank()).backward(rows)
    exact = error(wrapped, reference)
    # the common mistake: each rank's own mean, averaged over ranks
    twin = DistributedDataParallel(copy.deepcopy(model))
    tokens(twin, rows).backward()
    return {
        "error": exact,
        "mean_of_means": error(twin, reference),
        "loss": abs(float(result.loss - tokens(model, batch))),
        "units": result.units - float(num_targets(batch)),
    }


def ddp_toggled_between_forward_and_backward() -> dict[str, float]:
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


def ddp_rank_without_rows(batch_of_none: bool = True) -> dict[str, float]:
    model, batch = network(), labelled(7)
    size = dist.get_world_size()
    counts = [7 - (size - 2), *[1] * (size - 2), 0]
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    rows = own(batch, counts)
    if batch_of_none and not len(rows[0]):
        rows = None
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(rows)
    return {"error": error(wrapped, reference), "units": result.units}


def ddp_empty_tensors() -> dict[str, float]:
    return ddp_rank_without_rows(batch_of_none=False)


def ddp_rank_without_targets() -> dict[str, float]:
    """A rank whose rows have no target that counts: its mean is nan."""
    model, batch = network(), ragged(12)
    counts = near_equal(12)
    batch[1][: counts[0]] = -100
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, counts))
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - tokens(model, batch)))}


def ddp_no_targets_at_all() -> dict[str, float]:
    model, batch = network(), ragged(12)
    batch[1][:] = -100
    wrapped = DistributedDataParallel(model)
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, near_equal(12)))
    return {"norm": float(whole(wrapped).norm()), "loss": float(result.loss), "units": result.units}


def ddp_class_weights() -> dict[str, float]:
    model, batch = network(), labelled(23)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 20.0]))
    reference = whole_batch_gradient(
        model,
        lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], weight=torch.tensor([0.2, 1.0, 20.0]).double()),
        batch,
    )
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    Accumulator(wrapped, supervised(criterion), micro_batch=4).backward(own(batch, near_equal(23)))
    return {"error": error(wrapped, reference)}


def ddp_sum_loss() -> dict[str, float]:
    model, batch = network(), labelled(7)
    counts = [7, *[0] * (dist.get_world_size() - 1)] if dist.get_world_size() == 2 else near_equal(7)
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], reduction="sum"), batch
    )
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss(reduction="sum")), micro_batch=3).backward(
        own(batch, counts)
    )
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - loss))}


def ddp_adds_to_gradients(**options: Any) -> dict[str, float]:
    model, batch = network(), labelled(22)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=4)
    accumulator.backward(own(batch, near_equal(22)))
    accumulator.backward(own(batch, near_equal(22)))
    return {"error": error(wrapped, 2 * reference)}


def ddp_bucket_views() -> dict[str, float]:
    return ddp_adds_to_gradients(gradient_as_bucket_view=True)


def ddp_bf16() -> dict[str, float]:
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


def ddp_unused_parameters() -> dict[str, float]:
    model, batch = branched()
    reference = whole_batch_gradient(model, by_pairs, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return {"error": error(wrapped, reference), "never": float(wrapped.module.never.weight.grad is not None)}


def ddp_unused_parameters_unannounced() -> float:
    model, batch = branched()
    wrapped = DistributedDataParallel(model)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return 0.0


def ddp_static_graph() -> float:
    wrapped = DistributedDataParallel(network(), static_graph=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2)
    return 0.0


def ddp_not_called() -> float:
    wrapped = DistributedDataParallel(network())
    objective = Objective(lambda model, rows: F.cross_entropy(model.module(rows[0]), rows[1]))
    Accumulator(wrapped, objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


def ddp_error_in_units() -> float:
    def units(batch: Any) -> float:
        return -1 if dist.get_rank() == 1 else len(batch[0])

    objective = Objective(lambda model, rows: F.cross_entropy(model(rows[0]), rows[1]), units)
    Accumulator(DistributedDataParallel(network()), objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


def _halved(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state[0] += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def ddp_comm_hook() -> dict[str, float]:
    model, batch = network(), labelled(30)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    calls = [0]
    wrapped.register_comm_hook(calls, _halved)
    objective = supervised(nn.CrossEntropyLoss())
    Accumulator(wrapped, objective, micro_batch=2).backward(own(batch, near_equal(30)))
    return {"error": error(wrapped, reference), "calls": calls[0]}


def ddp_comm_hook_refused() -> float:
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


def ddp_inside_a_model() -> dict[str, float]:
    """Two wrapped submodules, and a parameter that nobody wrapped."""
    torch.manual_seed(1)
    model, batch = TwoTowers(), labelled(17)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    model.first, model.second = DistributedDataParallel(model.first), DistributedDataParallel(model.second)
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


def ddp_metrics() -> dict[str, float]:
    model, batch = network(), labelled(11)
    counts = [5, 6] if dist.get_world_size() == 2 else [6, 5, *[0] * (dist.get_world_size() - 2)]
    rows = own(batch, counts)
    wrapped = DistributedDataParallel(model)
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


def ddp_updates_with_clipping() -> dict[str, float]:
    """Four updates, clipped: weights and reported numbers as in one process."""
    alone = network(torch.float64)
    wanted = trained(alone, token_batches(torch.float64), clip_norm=0.1)
    wrapped = DistributedDataParallel(network(torch.float64))
    batches = [own(batch, near_equal(len(batch[0]))) for batch in token_batches(torch.float64)]
    got = trained(wrapped, batches, clip_norm=0.1)
    weights = torch.cat([parameter.detach().flatten() for parameter in wrapped.parameters()])
    whole_weights = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    return {
        "weights": float((weights - whole_weights).norm() / whole_weights.norm()),
        "norms": max(abs(float(a.grad_norm - b.grad_norm)) for a, b in zip(wanted, got, strict=True)),
        "losses": max(abs(float(a.loss - b.loss)) for a, b in zip(wanted, got, strict=True)),
        "clipped": float(min(result.grad_norm for result in got)) > 0.1,
    }


DDP = {name: function for name, function in list(globals().items()) if name.startswith("ddp_")}
