"""What one synchronisation per update saves on many ranks, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anybatch.cli.rates import show_megabytes
from anybatch.cli.tables import table
from anybatch.projection import Network, PassSeconds, Projection, Sharding
from anybatch.sizes import show_seconds

EFFICIENCIES = (0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlan:
    """A task's pass on a network, with the numbers of micro-batches to look at."""

    one_pass: PassSeconds
    network: Network
    micro_batches: tuple[int, ...]


def ranks_plan_lines(ranks_plan: RanksPlan) -> list[str]:
    """What is known of a pass on many ranks, in words and tables."""
    one_pass, network = ranks_plan.one_pass, ranks_plan.network
    projection = Projection(network=network, one_pass=one_pass, micro_batches=1)
    hidden = max(1 - projection.exposed / projection.all_reduce, 0.0) if network.ranks > 1 else 1.0
    return [
        f"one micro-batch of {one_pass.rows} rows: forward {show_seconds(one_pass.forward)}, backward "
        f"{show_seconds(one_pass.backward)} ({one_pass.source}); gradients {show_megabytes(one_pass.gradient_bytes)}",
        f"{network.ranks} ranks, {network.bandwidth / 1e9:g} GB/s each, {show_seconds(network.latency)} per message: an "
        f"all-reduce takes {show_seconds(projection.all_reduce)}, of which backward hides {hidden:.0%}",
        "",
        "DDP: one all-reduce per update (once), and one per micro-batch (each)",
        *update_table(one_pass, network, ranks_plan.micro_batches),
        "",
        "how large the batch must be, synchronised once per update",
        *batch_table(one_pass, network),
        "",
        "FSDP2: parameters freed after each pass, or kept until the last",
        *sharding_table(one_pass, network, ranks_plan.micro_batches),
    ]


def update_table(one_pass: PassSeconds, network: Network, micro_batches: Sequence[int]) -> list[str]:
    """Time and efficiency by the number of micro-batches."""
    rows = []
    for count in micro_batches:
        one = Projection(network=network, one_pass=one_pass, micro_batches=count)
        rows.append(
            [
                f"{count}",
                f"{one.batch:,}",
                show_seconds(one.seconds),
                show_seconds(one.seconds_each),
                f"{one.efficiency:.1%}",
                f"{one.efficiency_each:.1%}",
                show_megabytes(one.bytes_sent),
                show_megabytes(count * one.bytes_sent),
            ]
        )
    head = ["micro-batches", "batch", "once", "each", "efficiency once", "each", "sent once", "each"]
    return table(head, rows)


def batch_table(one_pass: PassSeconds, network: Network, efficiencies: Sequence[float] = EFFICIENCIES) -> list[str]:
    """The smallest batch for each efficiency."""
    rows = []
    for efficiency in efficiencies:
        one = Projection(network=network, one_pass=one_pass, micro_batches=1).reaching(efficiency)
        rows.append([f"{efficiency:.0%}", f"{one.micro_batches}", f"{one.batch:,}", f"{one.efficiency:.1%}"])
    return table(["efficiency", "micro-batches", "batch", "reached"], rows)


def ranks_table(one_pass: PassSeconds, network: Network, ranks: Sequence[int], micro_batches: int) -> list[str]:
    """What grows with the number of ranks."""
    rows = []
    for count in ranks:
        one = Projection(network=replace(network, ranks=count), one_pass=one_pass, micro_batches=micro_batches)
        rows.append(
            [
                f"{count}",
                show_seconds(one.all_reduce),
                show_seconds(one.exposed),
                f"{one.efficiency:.1%}",
                f"{one.efficiency_each:.1%}",
                f"{one.reaching(0.95).micro_batches}",
                f"{one.reaching(0.95).batch:,}",
            ]
        )
    head = ["ranks", "all-reduce", "exposed", "efficiency once", "each", "micro-batches for 95%", "batch"]
    return table(head, rows)


def sharding_table(one_pass: PassSeconds, network: Network, micro_batches: Sequence[int]) -> list[str]:
    """Freeing and keeping gathered parameters."""
    rows = []
    for count in micro_batches:
        projection = Projection(network=network, one_pass=one_pass, micro_batches=count)
        freed, kept = (Sharding(projection=projection, keeps=keeps) for keeps in (False, True))
        rows.append(
            [
                f"{count}",
                show_seconds(freed.seconds),
                show_seconds(kept.seconds),
                f"{freed.efficiency:.1%}",
                f"{kept.efficiency:.1%}",
                show_megabytes(freed.bytes_sent),
                show_megabytes(kept.bytes_sent),
                show_megabytes(freed.bytes_held),
                show_megabytes(kept.bytes_held),
            ]
        )
    head = ["micro-batches", "freed", "kept", "efficiency freed", "kept", "sent freed", "kept", "held freed", "kept"]
    return table(head, rows)


def ranks_plan_record(ranks_plan: RanksPlan) -> dict[str, Any]:
    """The same as plain values, for JSON."""
    one_pass, network = ranks_plan.one_pass, ranks_plan.network
    projections = [Projection(network=network, one_pass=one_pass, micro_batches=n) for n in ranks_plan.micro_batches]
    return {
        "source": one_pass.source,
        "rows": one_pass.rows,
        "forward_seconds": one_pass.forward,
        "backward_seconds": one_pass.backward,
        "gradient_bytes": one_pass.gradient_bytes,
        "ranks": network.ranks,
        "bandwidth": network.bandwidth,
        "latency": network.latency,
        "all_reduce_seconds": projections[0].all_reduce,
        "exposed_seconds": projections[0].exposed,
        "updates": [
            {
                "micro_batches": one.micro_batches,
                "batch": one.batch,
                "seconds": one.seconds,
                "seconds_each": one.seconds_each,
                "efficiency": one.efficiency,
                "efficiency_each": one.efficiency_each,
                "fsdp_freed_seconds": Sharding(projection=one, keeps=False).seconds,
                "fsdp_kept_seconds": Sharding(projection=one, keeps=True).seconds,
            }
            for one in projections
        ],
        "batch_for": {f"{share:g}": projections[0].reaching(share).batch for share in EFFICIENCIES},
    }
