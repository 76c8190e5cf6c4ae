"""One update, stage by stage: what `anybatch trace` leaves on disk, and shows in a notebook."""

from dataclasses import dataclass
from typing import ClassVar

from anybatch.faces import html_block, html_table, sentences, short
from anybatch.records.schema import Scalars, Shapes, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """One stage of the traced update; `micro_batch` is None for the whole batch."""

    stage: str
    micro_batch: int | None
    title: str
    facts: Scalars
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """One layer that the sample went through, with the shapes of all tensors that went in and came out."""

    name: str
    kind: str
    shapes_in: Shapes
    shapes_out: Shapes
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedImage:
    """What the sample looks like: rows of pixels from top to bottom, each one number (grey) or three, from 0 to 255."""

    width: int
    height: int
    channels: int
    pixels: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One update stage by stage, and one sample layer by layer."""

    file: ClassVar[str] = "trace.json"
    stages: tuple[TracedStage, ...]
    layers: tuple[TracedLayer, ...]
    images: tuple[TracedImage, ...] = ()
    """The sample, where it is an image; else nothing."""

    def __repr__(self) -> str:
        return f"Trace({len(self.stages)} stages, {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        stages = [
            [each.stage, "all" if each.micro_batch is None else each.micro_batch, each.title, _facts(each.facts)]
            for each in self.stages
        ]
        layers = [[each.name, each.kind, each.shapes_in, each.shapes_out] for each in self.layers]
        return html_block(
            "One update, stage by stage",
            html_table(["stage", "micro-batch", "what", "numbers"], stages),
            sentences(["One sample, layer by layer:"]),
            html_table(["layer", "kind", "in", "out"], layers),
        )


def _facts(facts: Scalars) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else short(value)}" for name, value in facts.items())
