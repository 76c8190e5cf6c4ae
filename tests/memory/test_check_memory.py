"""What is looked at before the first batch, against every malloc of a process and in plans."""

import json

import pytest
import torch
from torch import nn

from anybatch import Coupled, Fit, MemoryLimitError, Objective, Tokens, Update, UpdateError, info_nce, plan, supervised
from benchmarks.every_malloc import in_own_process

CLASSES = supervised(nn.CrossEntropyLoss())


@pytest.fixture(scope="module")
def counted():
    ran = in_own_process("tests.memory.every_check")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_check_takes_no_more_than_the_update(counted):
    assert counted["linear"]["check"][1] <= 1.03  # of 8 rows
    assert counted["attention"]["check"][1] <= 0.85
    assert counted["attention"]["check"][2] <= 0.85  # of a batch that is not cut


def test_the_default_look_takes_less_than_the_update(counted):
    assert all(look < 0.7 for kind in ("linear", "attention", "bf16") for look in counted[kind]["look"])


@pytest.mark.parametrize("kind", ["linear", "attention", "bf16"])
def test_what_the_check_takes_beyond_the_update_is_planned(counted, kind):
    assert all(0.97 <= planned <= 1.1 for planned in counted[kind]["planned"]), counted[kind]
    assert any(check > 1.03 for check in counted[kind]["check"]), "nothing that a plan could have missed"


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_a_checked_first_batch_never_goes_beyond_the_limit(counted, dtype):
    found = counted["limits"][dtype]
    assert found["finding"] == "passed"
    assert found["used"] <= 0.975  # half of the margin is for what kernels keep
    assert found["size"] > 2000, "what kernels keep for a shape, most of all in bf16, leaves half of the limit to rows"


def wide(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of large activations on the meta device."""
    layers = [nn.Unflatten(1, (1, 64)), nn.Linear(64, 64), nn.Flatten(), nn.Linear(64, 512), nn.Linear(512, 10)]
    model = nn.Sequential(*layers).to("meta", dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(count, 64, device="meta", dtype=dtype), torch.empty(count, device="meta", dtype=torch.long)


def planned(check: object, dtype: torch.dtype = torch.float32, memory: str | int = "1GiB", **options: object):
    batch = rows(600, dtype)
    return plan(*wide(dtype), CLASSES, batch, memory=memory, device="cuda", ranking=False, check=check, **options)


def test_a_plan_with_the_check_is_never_below_one_without():
    plain, checked = planned(False), planned(True)
    assert [checked.peak(size) for size in (3, 50, 300)] == [plain.peak(size) for size in (3, 50, 300)]
    assert checked.peak(1) == checked.peak(2) == plain.peak(3) > plain.peak(2)
    assert checked.whole_bytes == plain.whole_bytes
    assert "check='full' is counted" in checked.describe()
    assert "check=" not in plain.describe() + planned("first").describe()


def test_weights_that_the_check_raises_are_counted():
    plain, checked = planned(False, torch.bfloat16), planned("full", torch.bfloat16)
    raised = sum(4 * parameter.numel() for parameter in wide()[0].parameters())
    assert checked.peak(1) == plain.peak(6) + raised
    assert checked.peak(400) == max(plain.peak(400), plain.peak(300) + raised)
    limit = plain.peak(8)
    assert planned(False, torch.bfloat16, limit, margin=0.0).micro_batch >= 8
    assert planned(True, torch.bfloat16, limit, margin=0.0).micro_batch == 0


def test_a_coupled_loss_and_sums_of_their_own_are_planned_with_the_check():
    model = nn.Linear(64, 32)
    pairs = torch.randn(12, 64), torch.randn(12, 64)
    coupled = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.5))
    plans = [plan(model, None, coupled, pairs, memory="1GiB", ranking=False, check=check) for check in (False, True)]
    assert plans[1].whole_bytes >= plans[0].whole_bytes
    assert plans[1].peak(1) >= max(plans[0].peak(1), plans[0].peak(3))
    checked = planned(True, torch.bfloat16, sums="auto")
    assert checked.peak(1) > planned(False, torch.bfloat16, sums="auto").peak(1)


def test_tokens_count_rows_of_full_length():
    mask = torch.ones(16, 32, dtype=torch.long).tril(8)
    batch = {"input_ids": mask, "attention_mask": mask}
    model = nn.Sequential(nn.Embedding(2, 64), nn.Linear(64, 64), nn.Linear(64, 2))

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["input_ids"]).square().mean()

    options = {"memory": "1GiB", "split": Tokens(64), "ranking": False}
    plain, checked = (plan(model, None, Objective(loss), batch, check=check, **options) for check in (False, True))
    longest = int(mask.sum(1).max())
    assert checked.peak(longest) == plain.peak(3 * longest) > plain.peak(longest)


def test_fit_counts_the_check_until_it_is_done_and_says_how_to_do_with_less():
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    batch = torch.randn(40, 16), torch.randint(0, 4, (40,))
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, micro_batch=Fit("1GiB"), check=True)
    assert update.accumulator.workload.check == "full"
    update(batch)
    assert update.guard.finding == "passed"
    assert update.accumulator.workload.check == "off"
    tight = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, micro_batch=Fit(20_000), check=True)
    with pytest.raises(MemoryLimitError, match=r"Allow more, use check='first', shorter rows"):
        tight(batch)


def test_a_check_that_there_is_not_is_refused():
    with pytest.raises(UpdateError, match=r"check='fully'.*'full'"):
        planned("fully")
