"""Object detector: digits on a canvas, with a loss that divides by the number of objects.

Detectors such as RetinaNet, FCOS and CenterNet sum their losses over all positions and divide by the number of objects. The
usual loop divides each micro-batch by its own objects, so an object in a crowded micro-batch counts less. Here every row
carries the number of objects of its batch, and `reduction="sum"` adds up the micro-batches. `units=` would not do: a
micro-batch without objects would have 0 units, and its background would be left out.
"""

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss

from anybatch import Objective, Update

Batch = dict[str, Tensor]
digits = torch.tensor(load_digits().images).float() / 16


def make_batch(rows: int) -> Batch:
    """Put 0 to 4 digits on each canvas of 24 x 24, one per cell of a 3 x 3 grid; the size of a digit is its box."""
    canvas, is_object, sizes = torch.zeros(rows, 1, 24, 24), torch.zeros(rows, 3, 3), torch.zeros(rows, 3, 3)
    for row in range(rows):
        for cell in torch.randperm(9)[: torch.randint(0, 5, ())]:
            y, x, size = cell // 3, cell % 3, torch.randint(4, 9, ())
            digit = digits[torch.randint(len(digits), ())][None, None]
            canvas[row, :, 8 * y : 8 * y + size, 8 * x : 8 * x + size] = nn.functional.interpolate(digit, int(size))[0]
            is_object[row, y, x], sizes[row, y, x] = 1, size / 8
    num_objects = is_object.sum().clamp(min=1).expand(rows)  # counted before the batch is split
    return {"image": canvas, "is_object": is_object, "size": sizes, "num_objects": num_objects}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 2, 2), nn.ReLU(), nn.Conv2d(32, 2, 1))


def detection_loss(model: nn.Module, batch: Batch, num_objects: Tensor) -> Tensor:
    scores, sizes = model(batch["image"]).unbind(1)
    classification = binary_cross_entropy_with_logits(scores, batch["is_object"], reduction="sum")
    regression = l1_loss(sizes * batch["is_object"], batch["size"], reduction="sum")
    return (classification + regression) / num_objects


def train_usual(model: nn.Module, batches: list[Batch], micro_batch: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        parts = list(zip(*(column.split(micro_batch) for column in batch.values()), strict=True))
        for columns in parts:
            part = dict(zip(batch, columns, strict=True))
            num_objects = part["is_object"].sum().clamp(min=1)  # of this micro-batch: here it goes wrong
            (detection_loss(model, part, num_objects) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objective = Objective(
        lambda model, part: detection_loss(model, part, part["num_objects"][0]),  # of the whole batch
        reduction="sum",
    )
    update = Update(model, optimizer, objective, micro_batch=4)
    for batch in batches:
        update(batch)


def gradient(train: Callable[[nn.Module, list[Batch]], None], batch: Batch) -> Tensor:
    model = make_model()
    train(model, [batch])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


if __name__ == "__main__":
    torch.manual_seed(0)
    *batches, new = [make_batch(32) for _ in range(21)]
    whole_batch = partial(train_usual, micro_batch=32)
    reference = gradient(whole_batch, batches[0])
    for name, train in {"whole batch": whole_batch, "usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (gradient(train, batches[0]) - reference).norm() / reference.norm()
        model = make_model()
        train(model, batches)
        loss = detection_loss(model, new, new["num_objects"][0])
        print(f"{name:11}  gradient off by {error:.0e}  loss on new images {loss:.3f}")
