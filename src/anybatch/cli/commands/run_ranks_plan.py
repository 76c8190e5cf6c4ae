"""The part of `anybatch plan` that looks at many ranks: what one synchronisation per update saves, as text and as JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anybatch.cli.folders import check_installed
from anybatch.cli.screen import say
from anybatch.cli.tables import table
from anybatch.errors import SettingsError
from anybatch.projection import Network, Pass, Projection, Sharding
from anybatch.training import Settings, check_task_exists, find_task

if TYPE_CHECKING:
    from anybatch.training import PassTime

EFFICIENCIES = (0.8, 0.9, 0.95, 0.99)
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B|bit|b)/?s", re.IGNORECASE)
_FLOPS = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)FLOPS?(?:/s)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")


def parse_bandwidth(text: str) -> float:
    """Bytes per second.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("200Gbit/s")
    (25000000000.0, 25000000000.0)
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise SettingsError(f"--bandwidth {text!r}: expected what a rank can send, such as 25GB/s or 200Gbit/s.")
    unit = _PREFIXES[found[2].upper()] if not found[3] else 1024 ** " KMGT".index(found[2].upper() or " ")
    return float(found[1]) * unit / (1 if found[4] == "B" else 8)


def parse_flops(text: str) -> float:
    """FLOPs per second.

    >>> parse_flops("150TFLOP/s")
    150000000000000.0
    """
    found = _FLOPS.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise SettingsError(f"--flops {text!r}: expected what a rank computes, such as 150TFLOP/s.")
    return float(found[1]) * _PREFIXES[found[2].upper()]


def parse_latency(text: str) -> float:
    """Seconds.

    >>> parse_latency("250ms")
    0.25
    """
    found = _LATENCY.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"--latency {text!r}: expected the time of one message, such as 10us.")
    return float(found[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A task's pass on a network, with the numbers of micro-batches to look at."""

    timed: "PassTime"
    network: Network
    micro_batches: tuple[int, ...]


def scale_command(
    task: str, settings: Settings, *, ranks: int, bandwidth: str, latency: str, flops: str | None, as_json: bool
) -> int:
    """Print what ranks would make of a task."""
    if ranks < 1:
        raise SettingsError(f"--ranks {ranks}: expected 1 or more.")
    network = Network(ranks=ranks, bandwidth=parse_bandwidth(bandwidth), latency=parse_latency(latency))
    scaled = scale_task(task, settings, network=network, flops=None if flops is None else parse_flops(flops))
    say(json.dumps(scale_record(scaled), indent=1) if as_json else "\n".join(scale_lines(scaled)))
    return 0


def scale_task(task: str, settings: Settings, *, network: Network, flops: float | None) -> Scaled:
    """Time one micro-batch of a task, for batches of up to 32 of them on each rank."""
    check_task_exists(task)
    check_installed("torchdata")
    build = find_task(task)  # torch is loaded from here on
    from anybatch.training import assemble, time_pass

    experiment = assemble(build, settings)
    rows = settings.micro_batch if isinstance(settings.micro_batch, int) else experiment.task.micro_batch
    batch = experiment.plan.batch
    asked = max(1, batch // (rows * network.ranks))
    counts = tuple(sorted({1, 2, 4, 8, 16, 32, asked}))
    return Scaled(timed=time_pass(experiment, rows=rows, flops=flops), network=network, micro_batches=counts)


def scale_lines(scaled: Scaled) -> list[str]:
    """What is known of a pass on many ranks, in words and tables."""
    one_pass, network = scaled.timed.one_pass, scaled.network
    projection = Projection(network=network, one_pass=one_pass, micro_batches=1)
    hidden = max(1 - projection.exposed / projection.all_reduce, 0.0) if network.ranks > 1 else 1.0
    return [
        f"one micro-batch of {one_pass.rows} rows: forward {show_seconds(one_pass.forward)}, backward "
        f"{show_seconds(one_pass.backward)} ({scaled.timed.source}); gradients {_megabytes(one_pass.gradient_bytes)}",
        f"{network.ranks} ranks, {network.bandwidth / 1e9:g} GB/s each, {show_seconds(network.latency)} per message: an "
        f"all-reduce takes {show_seconds(projection.all_reduce)}, of which backward hides {hidden:.0%}",
        "",
        "DDP: one all-reduce per update (once), and one per micro-batch (each)",
        *update_table(one_pass, network, scaled.micro_batches),
        "",
        "how large the batch must be, synchronised once per update",
        *batch_table(one_pass, network),
        "",
        "FSDP2: parameters freed after each pass, or kept until the last",
        *sharding_table(one_pass, network, scaled.micro_batches),
    ]


def update_table(one_pass: Pass, network: Network, micro_batches: Sequence[int]) -> list[str]:
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
                _megabytes(one.bytes_sent),
                _megabytes(count * one.bytes_sent),
            ]
        )
    head = ["micro-batches", "batch", "once", "each", "efficiency once", "each", "sent once", "each"]
    return table(head, rows)


def batch_table(one_pass: Pass, network: Network, efficiencies: Sequence[float] = EFFICIENCIES) -> list[str]:
    """The smallest batch for each efficiency."""
    rows = []
    for efficiency in efficiencies:
        one = Projection(network=network, one_pass=one_pass, micro_batches=1).reaching(efficiency)
        rows.append([f"{efficiency:.0%}", f"{one.micro_batches}", f"{one.batch:,}", f"{one.efficiency:.1%}"])
    return table(["efficiency", "micro-batches", "batch", "reached"], rows)


def ranks_table(one_pass: Pass, network: Network, ranks: Sequence[int], micro_batches: int) -> list[str]:
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


def sharding_table(one_pass: Pass, network: Network, micro_batches: Sequence[int]) -> list[str]:
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
                _megabytes(freed.bytes_sent),
                _megabytes(kept.bytes_sent),
                _megabytes(freed.bytes_held),
                _megabytes(kept.bytes_held),
            ]
        )
    head = ["micro-batches", "freed", "kept", "efficiency freed", "kept", "sent freed", "kept", "held freed", "kept"]
    return table(head, rows)


def scale_record(scaled: Scaled) -> dict[str, Any]:
    """The same as plain values, for JSON."""
    one_pass, network = scaled.timed.one_pass, scaled.network
    projections = [Projection(network=network, one_pass=one_pass, micro_batches=n) for n in scaled.micro_batches]
    return {
        "source": scaled.timed.source,
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


def show_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> show_seconds(0.0421), show_seconds(1e-05), show_seconds(0)
    ('42.1 ms', '10.0 us', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"


def _megabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
