"""Model of the time and bytes of synchronising as ranks grow; benchmarks/scale.py makes docs/benchmarks/scale.md from it.

    all-reduce in a ring   2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency, for each bucket of 25 MiB
    overlapped             max(compute + transfer / buckets, compute / buckets + transfer): buckets wait for each other
    exposed                what of the all-reduce runs when backward has ended
    once per update        K (forward + backward) + exposed
    once per micro-batch   K (forward + backward + exposed)

The model assumes that all ranks are equally fast and that communication does not slow compute. That is the best case for both
ways, and so for their difference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.display import table
from anybatch.errors import ParallelError
from anybatch.parallel import BUCKET_BYTES

EFFICIENCIES = (0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What connects the ranks."""

    ranks: int
    bandwidth: float
    """Bytes per second that a rank can send, while it receives as many."""
    latency: float = 10e-6
    """Seconds that a message takes, however short."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.bandwidth > 0 or not self.latency >= 0:
            raise ParallelError(f"{self!r}: expected 1 rank or more, a bandwidth above 0 and a latency of 0 or more.")

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds to sum `num_bytes` over all ranks, in a ring.

        >>> Network(ranks=2, bandwidth=1e9, latency=0).all_reduce(1e9)
        1.0
        """
        return 2 * self.all_gather(num_bytes)

    def all_gather(self, num_bytes: float) -> float:
        """Seconds until each rank has all `num_bytes`, of which it had its part; a reduce-scatter takes as long."""
        others = self.ranks - 1
        return others / self.ranks * num_bytes / self.bandwidth + others * self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """What forward and backward of one micro-batch take on one rank."""

    rows: int
    forward: float
    """Seconds."""
    backward: float
    """Seconds."""
    gradient_bytes: float
    parameter_bytes: float

    def __post_init__(self) -> None:
        if self.rows < 1 or min(self.forward, self.backward, self.gradient_bytes, self.parameter_bytes) <= 0:
            raise ParallelError(f"{self!r}: expected 1 row or more, and times and sizes above 0.")

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def num_buckets(self) -> int:
        """Parts in which gradients and parameters travel."""
        return math.ceil(self.gradient_bytes / BUCKET_BYTES)

    def all_reduce(self, network: Network) -> float:
        """Seconds to sum the gradients over ranks, bucket by bucket."""
        return self.num_buckets * network.all_reduce(self.gradient_bytes / self.num_buckets)

    def exposed(self, network: Network) -> float:
        """Seconds of the all-reduce that backward does not hide."""
        return overlapped(self.backward, self.all_reduce(network), self.num_buckets) - self.backward


def overlapped(compute: float, transfer: float, parts: int) -> float:
    """Seconds of `parts` equal steps of compute, each with its share of `transfer`, which goes on beside the other steps.

    Either the transfer of each step follows it (gradients), or it comes before it (parameters): steps and transfers each in
    their order, one at a time. The slower of both sets the pace, and one step of the faster stands alone.

    >>> overlapped(4, 2, 2), overlapped(4, 8, 2), overlapped(4, 0, 2)
    (5.0, 10.0, 4.0)
    """
    return max(compute + transfer / parts, compute / parts + transfer) if transfer > 0 else float(compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One update of `micro_batches` passes on each rank, synchronised once and synchronised at every pass."""

    network: Network
    one_pass: PassSeconds
    micro_batches: int

    @property
    def batch(self) -> int:
        """Rows of the batch, over all ranks."""
        return self.network.ranks * self.micro_batches * self.one_pass.rows

    @property
    def all_reduce(self) -> float:
        """Seconds of one all-reduce of the gradients, hidden or not."""
        return self.one_pass.all_reduce(self.network)

    @property
    def exposed(self) -> float:
        """Seconds of the all-reduce that the last backward pass does not hide."""
        return self.one_pass.exposed(self.network)

    @property
    def seconds(self) -> float:
        """The update, synchronised once."""
        return self.micro_batches * self.one_pass.seconds + self.exposed

    @property
    def seconds_each(self) -> float:
        """The update, synchronised at every micro-batch."""
        return self.micro_batches * (self.one_pass.seconds + self.exposed)

    @property
    def efficiency(self) -> float:
        """The share of time that is compute; 1 is what N ranks would do without talking."""
        return self.micro_batches * self.one_pass.seconds / self.seconds

    @property
    def efficiency_each(self) -> float:
        """The same, synchronised at every micro-batch: more of them do not help."""
        return self.one_pass.seconds / (self.one_pass.seconds + self.exposed)

    @property
    def bytes_sent(self) -> float:
        """Bytes that each rank sends in one update that synchronises once; synchronising every micro-batch multiplies it."""
        return 2 * (self.network.ranks - 1) / self.network.ranks * self.one_pass.gradient_bytes

    def reaching(self, efficiency: float) -> "Projection":
        """With the fewest micro-batches that make one synchronisation this efficient: how large the batch must be.

        K >= efficiency / (1 - efficiency) * exposed / (forward + backward)
        """
        if not 0 < efficiency < 1:
            raise ParallelError(f"efficiency={efficiency!r}: expected a share between 0 and 1, such as 0.95.")
        fewest = efficiency / (1 - efficiency) * self.exposed / self.one_pass.seconds
        return replace(self, micro_batches=max(1, math.ceil(fewest - 1e-9)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The same update under FSDP2: parameters are gathered for use, gradients scattered in the last backward pass.

    `keeps` says that parameters stay gathered from the first forward to the last backward (`reshard=False`); else they are
    freed after each forward and each backward. What is gathered or scattered overlaps with the pass it belongs to.
    """

    projection: Projection
    keeps: bool

    @property
    def bytes_sent(self) -> float:
        """Bytes that each rank sends in one update."""
        gathers = 1 if self.keeps else 2 * self.projection.micro_batches
        one_pass, ranks = self.projection.one_pass, self.projection.network.ranks
        return (ranks - 1) / ranks * (gathers * one_pass.parameter_bytes + one_pass.gradient_bytes)

    @property
    def bytes_held(self) -> float:
        """Parameters on a rank between two passes. Gradients are whole on each rank until the last pass, either way."""
        one_pass = self.projection.one_pass
        return one_pass.parameter_bytes if self.keeps else one_pass.parameter_bytes / self.projection.network.ranks

    @property
    def seconds(self) -> float:
        """The update."""
        one_pass, network, count = self.projection.one_pass, self.projection.network, self.projection.micro_batches
        parts = one_pass.num_buckets
        gather = parts * network.all_gather(one_pass.parameter_bytes / parts)
        scatter = parts * network.all_gather(one_pass.gradient_bytes / parts)
        first = overlapped(one_pass.forward, gather, parts)
        if self.keeps:
            return first + (count - 1) * one_pass.seconds + overlapped(one_pass.backward, scatter, parts)
        again = overlapped(one_pass.backward, gather, parts)
        return count * first + (count - 1) * again + overlapped(one_pass.backward, gather + scatter, parts)

    @property
    def efficiency(self) -> float:
        """The share of time that is compute."""
        return self.projection.micro_batches * self.projection.one_pass.seconds / self.seconds


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


def show_megabytes(number: float) -> str:
    """Bytes in decimal units, as networks count them.

    >>> show_megabytes(51_240), show_megabytes(2.5e9)
    ('0.0512 MB', '2.5 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def show_seconds(seconds: float) -> str:
    """Write seconds with a suitable unit.

    >>> show_seconds(0.0421), show_seconds(1e-05), show_seconds(0)
    ('42.1 ms', '10.0 us', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"
