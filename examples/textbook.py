"""The textbook task: 1,000 x 10, y = sum > 0, a linear model, batches of 64 in micro-batches of 16, trained through Update.

Each update's gradient is compared with that of the whole batch at once in float64.
"""

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Update, supervised

EPOCHS = 10


def gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def whole_batch_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """One backward pass over the whole batch, in float64, on a copy."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    nn.functional.cross_entropy(twin(inputs.double()), targets).backward()
    return gradient(twin)


def main() -> None:
    torch.manual_seed(0)
    inputs, new_inputs = torch.randn(1000, 10), torch.randn(1000, 10)
    targets, new_targets = (inputs.sum(1) > 0).long(), (new_inputs.sum(1) > 0).long()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)

    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=16)

    print("epoch  updates  samples  mean loss  accuracy on new data  gradient off by")
    for epoch in range(1, EPOCHS + 1):
        samples, total, worst = 0, 0.0, 0.0
        for batch in loader:
            reference = whole_batch_gradient(model, *batch)
            result = update(batch)
            samples += int(result.units)
            total += float(result.loss) * result.units
            worst = max(worst, float((gradient(model) - reference).norm() / reference.norm()))
        with torch.no_grad():
            accuracy = (model(new_inputs).argmax(1) == new_targets).float().mean()
        print(f"{epoch:5}  {len(loader):7}  {samples:7}  {total / samples:9.4f}  {accuracy:20.1%}  {worst:15.1e}")


if __name__ == "__main__":
    main()
