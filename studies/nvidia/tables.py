"""Steps published by Karnati et al. ("Heterogeneous Parallelism for Multimodal Large Language Model Training").

Their Tables A2 to A5: an encoder and an LLM on H100s in three modes, homogeneous (H: one grid for both), colocated (C:
own layouts on the same devices) and non-colocated (NC: devices of their own). Figures are theirs, as printed;
`checks` checks whether they agree with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mmjax.mesh.layout import Layout

ON_PAR = "on par"

# Encoder + LLM, percent of vision tokens, devices; layouts as tp/cp/pp/dp: of H (encoder, LLM), of C (encoder, LLM);
# optimizer instances of C's encoder; gain of TFLOPS per device in percent; peak GB of H and C; ms of a step of H and C.
A2 = """
1B+14B   50    72  4/1/1/18 4/1/1/18  2/1/1/36  2/1/2/18  1  +12.1   57.2 57.1   7570  6750
1B+14B   75    72  4/1/1/18 4/1/1/18  1/1/1/72  2/1/2/18  1  +13.5   57.2 57.6   7780  6840
1B+14B   87.5  72  4/1/1/18 4/1/1/18  1/1/1/72  2/1/2/18  1  +12.7   57.2 57.8   7660  6800
3B+14B   50    72  4/1/1/18 4/1/1/18  2/1/1/36  2/1/2/18  1  +12.9   59.7 57.3   7850  6970
3B+14B   75    72  4/1/1/18 4/1/1/18  1/1/1/72  2/1/2/18  1  +12.7   59.7 57.7   8020  7140
3B+14B   87.5  72  4/1/1/18 4/1/1/18  1/1/1/72  2/1/2/18  1  +14.0   59.7 57.9   8130  7150
1B+32B   75    72  4/1/1/18 4/1/1/18  1/1/1/72  4/1/2/9   1  on-par  66.2 55.2  14210 14380
3B+32B   50    72  4/1/1/18 4/1/1/18  1/1/1/72  4/1/2/9   1  on-par  68.7 54.2  14330 14750
3B+32B   75    72  4/1/1/18 4/1/1/18  1/1/1/72  4/1/2/9   1  +11.1   68.7 55.3  14370 12950
3B+32B   87.5  72  4/1/1/18 4/1/1/18  1/1/1/72  4/1/2/9   1  +13.1   68.7 55.8  14630 12910
1B+70B   50   256  8/1/1/32 8/1/1/32  1/1/1/256 8/1/2/16  4  +16.5   61.5 47.2   8441  7244
1B+70B   75   256  8/1/1/32 8/1/1/32  1/1/1/256 8/1/2/16  4  +15.1   61.5 47.8   8415  7312
3B+70B   50   256  8/1/1/32 8/1/1/32  1/1/1/256 8/1/2/16  4  +13.9   62.7 48.8   8471  7434
3B+70B   75   256  8/1/1/32 8/1/1/32  1/1/1/256 8/1/2/16  4  +12.7   62.7 49.4   8452  7501
1B+120B  50   256  8/1/1/8  8/1/4/8   1/1/1/256 8/1/4/8   8  +16.6   57.2 54.0  15258 13081
1B+120B  75   256  8/1/1/8  8/1/4/8   1/1/1/256 8/1/4/8   8  +13.9   63.2 55.4  15169 13319
3B+120B  50   256  8/1/1/8  8/1/4/8   2/1/1/128 8/1/4/8   2  +21.5   60.5 66.2  15093 12420
3B+120B  75   256  8/1/1/8  8/1/4/8   2/1/1/128 8/1/4/8   2  +21.6   60.5 67.6  15303 12579
6B+120B  50   256  8/1/1/8  8/1/4/8   2/1/1/128 8/1/4/8   1  -0.7    53.6 68.0  17890 18020
7.2B+120B 50  256  8/1/1/8  8/1/4/8   4/1/1/64  8/1/4/8   1  -0.3    53.6 64.4  17980 18040
12B+120B 50   256  8/1/1/8  8/1/4/8   4/1/1/64  8/1/4/8   1  -8.0    66.9 69.6  15860 18190
"""

# Encoder + LLM, tokens, percent of vision tokens, devices, batch, microbatches; layouts of H, of C (encoder, LLM); gain
# in percent; peak GB of H and C; ms of forward and backward of H and C.
A3 = """
1B+7B   16K  50  16  8  2  2/2/1/4   1/1/1/16  2/2/1/4    +6.6   54.5 50.2   1300 1221
1B+7B   16K  75  16  8  2  2/2/1/4   1/1/1/16  2/2/1/4    +8.5   59.6 52.2   1352 1248
1B+7B   32K  50  16  4  2  2/4/1/2   1/1/1/16  2/4/1/2   +11.7   65.3 50.7   1836 1644
1B+7B   32K  75  16  4  2  2/4/1/2   1/1/1/16  2/4/1/2   +20.3   75.6 52.7   1980 1640
1B+7B   64K  50  32  4  2  4/8/1/1   1/1/1/32  2/8/1/2   +34.3   54.0 48.4   3966 2937
1B+7B   64K  75  32  4  2  4/8/1/1   1/1/1/32  2/8/1/2   +49.3   68.9 50.3   4457 2973
1B+7B  128K  50  64  4  2  4/16/1/1  1/1/1/64  2/16/1/2  +17.8   25.1 48.6   6321 5381
1B+7B  128K  75  64  4  2  4/16/1/1  1/1/1/64  2/16/1/2  +24.8   26.6 50.4   6614 5291
1B+14B  16K  50  16  4  1  4/1/1/4   2/1/1/8   4/1/1/4    +0.1   75.1 73.8   1202 1205
1B+14B  16K  75  16  4  1  8/1/1/2   2/1/1/8   4/1/1/4   +16.3   50.4 76.3   1438 1211
1B+14B  32K  50  32  4  1  4/2/1/4   2/1/1/16  4/2/1/4    +2.9   76.6 67.8   1628 1583
1B+14B  32K  75  32  4  1  8/2/1/2   2/1/1/16  4/2/1/4   +21.3   53.5 70.3   1962 1585
1B+14B  64K  50  32  4  2  8/4/1/1   2/1/1/16  4/4/1/2   +23.9   61.2 69.1   5687 4579
1B+14B  64K  75  32  4  2  8/4/1/1   2/1/1/16  4/4/1/2   +30.3   73.2 71.6   5848 4479
1B+14B 128K  50  64  4  2  4/8/2/1   2/1/1/32  4/8/1/2   +29.8   55.4 63.0   9397 7184
1B+14B 128K  75  64  4  2  4/8/2/1   2/1/1/32  4/8/1/2   +34.0   55.8 62.9   9692 7175
"""

# Encoder + LLM, tokens, percent of vision tokens, devices of H and NC, batch; layouts of H, of NC (encoder, LLM); gains
# in percent of tokens per second and of TFLOPS per device; peak GB of H and NC; ms of a step of H and NC.
A4 = """
6B+120B    8K 50   256 264 256  8/1/4/8   1/1/1/8  8/1/2/16   +5.9 +2.7  64.8 76.6  17700 16710
6B+120B    8K 75   256 264 256  8/1/4/8   1/1/1/8  8/1/2/16   +4.4 +1.3  53.6 76.8  17600 16860
6B+120B    8K 50   512 520 512  8/1/4/16  1/1/1/8  8/1/2/32   +4.0 +2.4  50.4 73.5  17870 17180
6B+120B   16K 50   256 264 256  8/2/4/4   1/1/1/8  8/2/4/4    +0.7 -2.3  53.6 53.6  38380 38110
6B+120B   16K 75   256 264 256  8/2/4/4   2/1/1/4  8/2/4/4    +3.3 +0.2  53.6 63.8  38120 36900
6B+120B   16K 50   512 520 512  8/2/4/8   1/1/1/8  8/2/2/16   +5.1 +3.5  50.4 74.6  38400 36550
7.2B+120B  8K 50   256 264 256  8/1/4/8   1/1/1/8  8/1/2/16   +7.1 +3.8  53.6 76.6  17980 16790
7.2B+120B  8K 75   256 264 256  8/1/2/16  1/1/1/8  8/1/2/16  +13.0 +9.6  77.2 73.3  16210 14340
7.2B+120B 16K 50   256 264 256  8/2/4/4   1/1/1/8  8/2/4/4    +5.5 +2.3  53.6 63.2  38260 36260
7.2B+120B 16K 75   256 264 256  8/2/4/4   2/1/1/4  8/2/4/4    +3.6 +0.4  53.6 63.8  38380 37070
7.2B+120B 16K 50   512 520 512  8/2/4/8   1/1/1/8  8/2/2/16   +4.9 +3.3  50.4 74.6  38450 36650
12B+120B   8K 50   256 264 256  8/1/4/8   2/1/1/4  8/1/2/16   +7.3 +4.1  66.9 73.1  15860 14780
12B+120B   8K 75   256 264 256  8/1/4/8   2/1/1/4  8/1/2/16  +12.7 +9.3  67.0 73.3  16690 14810
12B+120B   8K 87.5 256 264 256  8/1/4/8   2/1/1/4  8/1/2/16   +9.5 +6.2  67.0 73.4  17020 15540
12B+120B  16K 50   256 264 256  8/2/4/4   2/1/1/4  8/2/4/4    +5.6 +2.4  56.3 63.2  38430 36400
12B+120B  16K 50   512 520 512  8/2/4/8   2/1/1/4  8/2/2/16   +2.5 +0.9  52.6 74.6  38370 37430
"""

# Encoder + LLM, percent of vision tokens, devices of H, C and NC; layouts of C's and NC's encoder ("H": as in H), the
# former's optimizer instances; gains in percent of tokens per second / TFLOPS per device, of C over H, of NC over H and
# of C over NC; the best mode.
A5 = """
1B+14B    50    72  72  72  2/1/1/36  1/1/1/8  1  +12.1/+12.1  -11.3/-11.3  +26.4/+26.3  C
1B+14B    87.5  72  72  72  1/1/1/72  1/1/1/8  1  +12.7/+12.7  -10.5/-10.5  +25.9/+25.8  C
3B+14B    50    72  72  72  2/1/1/36  1/1/1/8  1  +12.9/+12.9   -8.6/-8.6   +23.5/+23.5  C
3B+14B    87.5  72  72  72  1/1/1/72  1/1/1/8  1  +14.0/+14.0   -5.4/-5.4   +20.5/+20.6  C
1B+32B    75    72  72  72  1/1/1/72  1/1/1/8  1  on-par/-0.9  -10.2/-10.2  +11.4/+10.4  H/C
3B+32B    50    72  72  72  1/1/1/72  1/1/1/8  1  on-par/-0.1  -10.1/-10.1  +11.2/+11.1  H/C
3B+32B    87.5  72  72  72  1/1/1/72  1/1/1/8  1  +13.1/+13.1   -7.8/-7.8   +22.7/+22.7  C
1B+70B    50   256 256 264  1/1/1/256 1/1/1/8  4  +16.5/+16.5   +7.3/+4.0    +8.6/+12.0  C
3B+70B    50   256 256 264  1/1/1/256 1/1/1/8  4  +13.9/+13.9   +9.3/+6.0    +4.2/+7.5   C
1B+120B   50   256 256 264  1/1/1/256 1/1/1/8  8  +16.6/+16.6   -3.0/-0.5   +20.2/+17.2  C
3B+120B   50   256 256 264  2/1/1/128 1/1/1/8  2  +21.5/+21.5   -9.9/-7.7   +34.9/+31.6  C
6B+120B   50   256 256 264  H         1/1/1/8  1  C=H           +5.9/+2.7    -5.6/-2.6   NC
7.2B+120B 50   256 256 264  H         1/1/1/8  1  C=H           +7.1/+3.8    -6.6/-3.7   NC
12B+120B  50   256 256 264  H         2/1/1/4  1  C=H           +7.3/+4.1    -6.8/-3.9   NC
"""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One mode of a workload, as measured.

    Attributes:
      mode: "H", "C" or "NC".
      encoder: the encoder's layout; in NC its ranks come behind the LLM's.
      llm: the LLM's layout.
      memory: GB of the fullest device.
      step: seconds of a step; in Table A3 of forward and backward alone.
    """

    mode: str
    encoder: Layout
    llm: Layout
    memory: float
    step: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload of Tables A2 to A4 in two modes.

    Attributes:
      table: "A2", "A3" or "A4".
      encoder: name of the encoder.
      llm: name of the LLM.
      tokens: tokens of a sample.
      vision: percent of the tokens that are vision tokens.
      batch: samples of a step.
      devices: devices of both runs, as printed.
      microbatches: microbatches of C where they are printed, else 0.
      base: the run of H.
      compared: the run of the mode that is compared with H.
      gain: gain in tokens per second, percent; None for "on par".
      gain_per_device: gain in TFLOPS per device, percent; None for "on par".
    """

    table: str
    encoder: str
    llm: str
    tokens: int
    vision: float
    batch: int
    devices: tuple[int, int]
    microbatches: int = 0
    base: MeasuredRun
    compared: MeasuredRun
    gain: float | None
    gain_per_device: float | None

    @property
    def name(self) -> str:
        """A unique name of the row."""
        workload = f"{self.encoder}+{self.llm} {self.tokens // 1024}K {self.vision:g} %"
        return f"{self.table} {workload} on {self.devices[0]}"

    @property
    def workload(self) -> tuple[str, str, int, float, int]:
        """(encoder, LLM, tokens, percent of vision tokens, devices of H)."""
        return self.encoder, self.llm, self.tokens, self.vision, self.devices[0]

    @property
    def gain_of_steps(self) -> float:
        """The gain in tokens per second, percent, that follows from the step times."""
        return (self.base.step / self.compared.step - 1) * 100

    @property
    def measured(self) -> float:
        """The gain in tokens per second, percent, as printed; 0 for "on par"."""
        return self.gain or 0.0


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Gains in tokens per second and in TFLOPS per device, percent; None for "on par"."""

    tokens: float | None
    per_device: float | None

    @property
    def both(self) -> tuple[float, float]:
        """Both gains, with 0 for "on par"."""
        return self.tokens or 0.0, self.per_device or 0.0


@dataclass(frozen=True, kw_only=True)
class ModeRanking:
    """A workload of Table A5, in all modes.

    Attributes:
      devices: devices of H, C and NC.
      colocated: the encoder's layout in C; None where C is H.
      island: the encoder's layout in NC.
      c: gains of C over H; None where C is H.
      nc: gains of NC over H.
      c_over_nc: gains of C over NC.
      best: modes that the table calls best.
    """

    encoder: str
    llm: str
    vision: float
    devices: tuple[int, int, int]
    colocated: Layout | None
    island: Layout
    c: Gains | None
    nc: Gains
    c_over_nc: Gains
    best: tuple[str, ...]

    @property
    def name(self) -> str:
        """A unique name of the workload."""
        return f"A5 {self.encoder}+{self.llm} {self.vision:g} %"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The same workload in Tables A2 and A4."""
        workload = (self.encoder, self.llm, 8192, self.vision, self.devices[0])
        return tuple(row for row in ROWS if row.workload == workload)


# ---- reading -------------------------------------------------------------------------------------------------------


def _layout(text: str, *, rank_offset: int = 0, optimizer_instances: int = 1) -> Layout:
    tp, cp, pp, dp = map(int, text.split("/"))
    return Layout(
        tp=tp, cp=cp, pp=pp, dp=dp, rank_offset=rank_offset, optimizer_instances=optimizer_instances
    )  # fmt: skip


def _first_stage(text: str) -> Layout:
    """The layout of an encoder that inherits the LLM's layout: it is on the first stage."""
    tp, cp, _, dp = text.split("/")
    return _layout(f"{tp}/{cp}/1/{dp}")


def _percent(text: str) -> float | None:
    return None if text.replace("-", " ") == ON_PAR else float(text)


def _runs(mode: str, layouts: tuple[Layout, ...], cells: list[str]) -> tuple[MeasuredRun, MeasuredRun]:
    """The runs of H and of another mode, from four layouts (encoder, LLM of each) and the cells of GB and ms."""
    memory, steps = [float(cell) for cell in cells[:2]], [float(cell) / 1e3 for cell in cells[2:]]
    base, compared = (
        MeasuredRun(mode=run_mode, encoder=encoder, llm=llm, memory=gb, step=step)
        for run_mode, encoder, llm, gb, step in zip(
            ("H", mode), layouts[::2], layouts[1::2], memory, steps, strict=True
        )
    )
    return base, compared


def _row_of_a2(cells: list[str]) -> Row:
    encoder, llm = cells[0].split("+")
    devices, gain = int(cells[2]), _percent(cells[8])
    layouts = (
        _layout(cells[3]),
        _layout(cells[4]),
        _layout(cells[5], optimizer_instances=int(cells[7])),
        _layout(cells[6]),
    )
    base, compared = _runs("C", layouts, cells[9:])
    return Row(
        table="A2", encoder=encoder, llm=llm, tokens=8192, vision=float(cells[1]), batch=288 if devices == 72 else 256,
        devices=(devices, devices), base=base, compared=compared, gain=gain, gain_per_device=gain,
    )  # fmt: skip


def _row_of_a3(cells: list[str]) -> Row:
    encoder, llm = cells[0].split("+")
    devices, gain = int(cells[3]), _percent(cells[9])
    layouts = (_first_stage(cells[6]), *map(_layout, cells[6:9]))
    base, compared = _runs("C", layouts, cells[10:])
    return Row(
        table="A3", encoder=encoder, llm=llm, tokens=1024 * int(cells[1][:-1]), vision=float(cells[2]),
        batch=int(cells[4]), devices=(devices, devices), microbatches=int(cells[5]), base=base, compared=compared,
        gain=gain, gain_per_device=gain,
    )  # fmt: skip


def _row_of_a4(cells: list[str]) -> Row:
    encoder, llm = cells[0].split("+")
    encoder_layout = _layout(cells[8])
    layouts = (
        _first_stage(cells[6]),
        _layout(cells[6]),
        _layout(cells[7], rank_offset=encoder_layout.size),
        encoder_layout,
    )
    base, compared = _runs("NC", layouts, cells[11:])
    return Row(
        table="A4", encoder=encoder, llm=llm, tokens=1024 * int(cells[1][:-1]), vision=float(cells[2]),
        batch=int(cells[5]), devices=(int(cells[3]), int(cells[4])), base=base, compared=compared,
        gain=_percent(cells[9]), gain_per_device=_percent(cells[10]),
    )  # fmt: skip


def _gains(cell: str) -> Gains:
    tokens, per_device = cell.split("/")
    return Gains(tokens=_percent(tokens), per_device=_percent(per_device))


def _ranking(cells: list[str]) -> ModeRanking:
    encoder, llm = cells[0].split("+")
    h, c, nc, instances = (int(cells[at]) for at in (2, 3, 4, 7))
    return ModeRanking(
        encoder=encoder, llm=llm, vision=float(cells[1]), devices=(h, c, nc),
        colocated=None if cells[5] == "H" else _layout(cells[5], optimizer_instances=instances),
        island=_layout(cells[6], rank_offset=nc - _layout(cells[6]).size),
        c=None if cells[8] == "C=H" else _gains(cells[8]), nc=_gains(cells[9]), c_over_nc=_gains(cells[10]),
        best=tuple(cells[11].split("/")),
    )  # fmt: skip


def _lines(table: str) -> Iterator[list[str]]:
    return map(str.split, table.strip().splitlines())


ROWS = (*map(_row_of_a2, _lines(A2)), *map(_row_of_a3, _lines(A3)), *map(_row_of_a4, _lines(A4)))
"""The rows of Tables A2, A3 and A4."""
RANKINGS = tuple(map(_ranking, _lines(A5)))
"""The workloads of Table A5."""
