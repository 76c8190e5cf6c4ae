"""`anybatch plan --ranks`: what many ranks would make of a task, on paper."""

import json
from typing import TYPE_CHECKING

from anybatch.cli.folders import check_installed
from anybatch.cli.rates import parse_bandwidth, parse_flops, parse_latency
from anybatch.cli.screen import say
from anybatch.errors import SettingsError
from anybatch.training import Settings, check_task_exists, find_task

if TYPE_CHECKING:
    from anybatch.cli.plans.ranks_tables import RanksPlan


def ranks_plan_command(
    task: str, settings: Settings, *, ranks: int, bandwidth: str, latency: str, flops: str | None, is_json: bool
) -> int:
    """Print what ranks would make of a task."""
    if ranks < 1:
        raise SettingsError(f"--ranks {ranks}: expected 1 or more.")
    network = {"bandwidth": parse_bandwidth(bandwidth), "latency": parse_latency(latency)}
    rate = None if flops is None else parse_flops(flops)
    found = plan_ranks(task, settings, ranks=ranks, **network, flops=rate)
    from anybatch.cli.plans.ranks_tables import ranks_plan_lines, ranks_plan_record

    say(json.dumps(ranks_plan_record(found), indent=1) if is_json else "\n".join(ranks_plan_lines(found)))
    return 0


def plan_ranks(
    task: str, settings: Settings, *, ranks: int, bandwidth: float, latency: float, flops: float | None
) -> "RanksPlan":
    """Time one micro-batch of a task, for batches of up to 32 of them on each rank."""
    check_task_exists(task)
    check_installed("torchdata")
    build = find_task(task)  # torch is loaded from here on
    from anybatch.batches import move
    from anybatch.cli.plans.ranks_tables import RanksPlan
    from anybatch.projection import Network, time_pass
    from anybatch.training import assemble, first_batch

    experiment = assemble(build, settings)
    built = experiment.task
    rows = settings.micro_batch if isinstance(settings.micro_batch, int) else built.micro_batch
    batch = move(first_batch(built, batch=rows, seed=0), experiment.device)
    autocast = experiment.update.running.autocast
    asked = max(1, experiment.plan.batch // (rows * ranks))
    return RanksPlan(
        one_pass=time_pass(built.model, built.whole_objective, batch, autocast=autocast, flops=flops),
        network=Network(ranks=ranks, bandwidth=bandwidth, latency=latency),
        micro_batches=tuple(sorted({1, 2, 4, 8, 16, 32, asked})),
    )
