"""Tables 2, 7 and 8 of Cornstarch, as printed.

Throughput is printed as inputs per second and GPU. Stages are those of (LLM, all encoders) where encoders are colocated
and of (LLM, vision, audio) in modality parallelism; a model is called by the sizes of its vision and audio encoders.
"""

from __future__ import annotations

from dataclasses import dataclass

VISION, AUDIO = "vision", "audio"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One model, trained in two ways.

    Attributes:
      table: number of the table, 2, 7 or 8.
      llm: size of the LLM, "S", "M" or "L".
      sizes: sizes of the vision and of the audio encoder.
      colocated: stages of the LLM and of all encoders together.
      modality: stages of the LLM, of the vision encoder and of the audio encoder.
      throughputs: of colocated encoders and of modality parallelism.
      cp: devices that share a sample's tokens in the LLM's stages, beside tp; in encoders' they are of no use.
    """

    table: int
    llm: str
    sizes: str
    colocated: tuple[int, int]
    modality: tuple[int, int, int]
    throughputs: tuple[float, float]
    cp: int = 1

    @property
    def stages(self) -> tuple[int, int]:
        """Stages of all modules, with colocated encoders and in modality parallelism."""
        return sum(self.colocated), sum(self.modality)

    @property
    def name(self) -> str:
        """Such as "LLM-M VALM-SL"."""
        return f"LLM-{self.llm} VALM-{self.sizes}"

    @property
    def published(self) -> float:
        """Throughput per GPU, of modality parallelism over colocated encoders."""
        return self.throughputs[1] / self.throughputs[0]


Printed = tuple[str, tuple[int, int], float, tuple[int, int, int], float]


def _pairs(table: int, llm: str, rows: tuple[Printed, ...]) -> tuple[Pair, ...]:
    return tuple(
        Pair(table=table, llm=llm, sizes=sizes, colocated=colocated, modality=modality, throughputs=(before, after))
        for sizes, colocated, before, modality, after in rows
    )


PAIRS = (
    *_pairs(2, "M", (
        ("SS", (6, 1), 3.09, (6, 1, 1), 2.68),
        ("SM", (6, 2), 2.64, (6, 1, 1), 2.73),
        ("SL", (6, 2), 2.57, (6, 1, 2), 2.25),
        ("MS", (6, 2), 2.57, (6, 2, 1), 2.29),
        ("MM", (6, 3), 2.21, (6, 1, 1), 2.22),
        ("ML", (6, 4), 1.91, (6, 2, 2), 2.05),
        ("LS", (6, 4), 1.95, (6, 3, 1), 1.92),
        ("LM", (6, 4), 1.88, (6, 3, 1), 1.97),
        ("LL", (6, 5), 1.74, (6, 3, 2), 1.82),
    )),
    *_pairs(7, "S", (
        ("SS", (3, 4), 6.31, (3, 1, 1), 8.82),
        ("SM", (1, 3), 5.20, (3, 1, 4), 4.99),
        ("SL", (1, 4), 4.31, (3, 1, 5), 4.61),
        ("MS", (2, 4), 5.18, (3, 3, 1), 5.24),
        ("MM", (1, 4), 3.93, (3, 2, 3), 4.66),
        ("ML", (1, 5), 3.40, (3, 2, 4), 3.78),
        ("LS", (1, 4), 3.82, (3, 5, 1), 3.96),
        ("LM", (1, 6), 2.96, (2, 4, 3), 3.42),
        ("LL", (1, 6), 2.76, (2, 3, 3), 3.25),
    )),
    *_pairs(8, "L", (
        ("SS", (5, 1), 1.57, (5, 1, 1), 1.33),
        ("SM", (5, 2), 1.37, (5, 1, 1), 1.36),
        ("SL", (5, 2), 1.33, (5, 1, 1), 1.37),
        ("MS", (4, 1), 1.57, (5, 1, 1), 1.37),
        ("MM", (4, 2), 1.32, (5, 1, 1), 1.37),
        ("ML", (6, 1), 1.04, (5, 1, 1), 0.93),
        ("LS", (4, 2), 1.31, (5, 1, 1), 1.36),
        ("LM", (4, 3), 1.10, (5, 1, 1), 1.33),
        ("LL", (4, 3), 1.09, (5, 1, 1), 1.36),
    )),
)  # fmt: skip
END_TO_END = Pair(
    table=6, llm="M", sizes="MM", colocated=(3, 4), modality=(4, 1, 1), throughputs=(1.0, 1.44), cp=2
)  # fmt: skip
"""The one ratio of §6.2 that the text has with its stages (§6.2.2, Table 6: tp 2 and cp 2)."""
GPUS = 24
"""All that there are (§6.1)."""
