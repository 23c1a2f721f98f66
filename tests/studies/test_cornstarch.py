"""The study `cornstarch`: predictions are what published stage times, and FLOPs, say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmjax.models.config import LLM
from mmjax.models.families import module_of
from studies.cornstarch import frozen, report
from studies.cornstarch.modules import EFFICIENCY, SHAPES, TOKENS, by_datasheet, by_tables
from studies.cornstarch.pairs import CUTS, SOURCES, Prediction, predictions, with_projectors
from studies.cornstarch.tables import AUDIO, END_TO_END, GPUS, PAIRS, VISION, Pair


def test_cornstarch_is_predicted_from_its_stage_times() -> None:
    large = next(model for model in frozen.MODELS if model.name == "LLM-M VLM-L")
    assert large.published == pytest.approx(1.54, abs=0.01)
    # By hand, as Eq. 1 and 2: (4 · 101.22 + 5 · 98.44 + 23 · 101.22) ms and (4 · 70.57 + 5 · 194.37 + 23 · 194.37) ms.
    by_hand = (4 * 70.57 + 28 * 194.37) / (27 * 101.22 + 5 * 98.44)
    assert large.same_stages == pytest.approx(by_hand, rel=0.02)


@pytest.mark.slow
def test_rows_and_table_of_cornstarch() -> None:
    models = {model.name: model for model in frozen.MODELS}
    assert len(models) == 18
    errors = {name: abs(model.same_stages / model.published - 1) for name, model in models.items()}
    assert max(error for name, error in errors.items() if "LLM-S" not in name) < 0.16
    assert sum(error < 0.1 for error in errors.values()) >= 10
    rows = list(frozen.rows())
    assert len(rows) == 54 and all(row.ok for row in rows)
    (table,) = frozen.tables().values()
    assert table in (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    lines = table.splitlines()
    assert len(lines) == 20 and all(line.count("|") == 7 for line in lines)


def test_the_small_llm_contradicts_its_own_stage_times() -> None:
    """A cut whose stages are all shorter is published as slower: no model of a pipeline gives that."""
    small = next(model for model in frozen.MODELS if model.name == "LLM-S VLM-S")
    longest = [max(map(sum, zip(case.forward, case.backward, strict=True))) for case in (small.aware, small.unaware)]
    assert longest[0] < longest[1] and small.published < 1 < small.same_stages


# ---- modality parallelism --------------------------------------------------------------------------------------------


def predicted(table: int, sizes: str, source: str = "datasheet", cut: str = CUTS[0]) -> Prediction:
    (pair,) = (pair for pair in PAIRS if (pair.table, pair.sizes) == (table, sizes))
    return Prediction(pair=pair, source=source, cut=cut)


def test_how_often_modality_parallelism_is_published_as_faster() -> None:
    wins = {table: sum(pair.published > 1 for pair in PAIRS if pair.table == table) for table in report.TABLES}
    assert wins == {2: 5, 7: 8, 8: 5} and len(PAIRS) == 27
    assert (
        {pair.modality[0] for pair in PAIRS if pair.table == 2}
        == {6}
        == {pair.colocated[0] for pair in PAIRS if pair.table == 2}
    )


@pytest.mark.parametrize(("table", "sizes"), [(2, "SL"), (7, "SS"), (7, "SM"), (8, "LM"), (8, "ML")])
def test_the_faster_way_is_the_published_one(table: int, sizes: str) -> None:
    one = predicted(table, sizes)
    assert one.agrees and abs(one.error) < 0.04


def test_a_pair_by_hand() -> None:
    """Where the LLM's last stage sets the pace, all others only fill and empty the pipeline."""
    one = predicted(8, "SS", "stage times")
    llm, vision, audio = (one.modules[name] for name in (LLM, VISION, AUDIO))
    last = (13 * llm.layer + llm.head) * (1 + llm.backward)  # 64 layers are 12, 13, 13, 13, 13
    others = (llm.layers * llm.layer + llm.head) * (1 + llm.backward) - last
    encoders = [own.layers * own.layer for own in (vision, audio)]
    apart = 24 * last + others + max(encoders)
    together = 24 * last + others + sum(encoders)
    assert one.ratio == pytest.approx(together * 6 / (apart * 7), rel=1e-9)


def test_encoders_have_no_backward_before_their_projector() -> None:
    placed = predicted(7, "LM")._apart
    graph = with_projectors(placed.graph)
    backward = {node.name: (node.backward, node.trainable) for node in graph.stages}
    assert backward["vision.2"] == backward["audio.1"] == (False, False)
    assert backward["vision.3"] == backward["audio.2"] == (True, True)
    assert backward["llm.0"] == backward["llm.1"] == (True, False)


def test_shapes_have_the_published_sizes() -> None:
    """Billions of parameters in Table 1, of which Llama's 1.2b and 8b have embeddings."""
    published = {
        LLM: {"S": 1.2, "M": 8, "L": 32}, VISION: {"S": 1, "M": 8, "L": 18}, AUDIO: {"S": 1.4, "M": 7, "L": 15},
    }  # fmt: skip
    tied = SHAPES[LLM]["S"].vocab * SHAPES[LLM]["S"].width
    for name, sizes in published.items():
        for size, billions in sizes.items():
            counted = module_of(SHAPES[name][size]).parameters() - tied * (name == LLM and size == "S")
            assert counted / 1e9 == pytest.approx(billions, rel=0.07), (name, size)


def test_both_sources_order_the_modules_alike() -> None:
    for name in (VISION, AUDIO, LLM):
        for source in (by_datasheet, by_tables):
            seconds = [source(name, size).layers * source(name, size).layer for size in "SML"]
            assert seconds == sorted(seconds)


def test_what_the_tables_contradict() -> None:
    """What `docs/cornstarch.md` says of them in numbers."""

    def peaks(pair: Pair) -> float:
        """How many A40s a GPU would have to be, at all that its datasheet has."""
        modules = Prediction(pair=pair, source="datasheet", cut=CUTS[0]).modules.values()
        seconds = sum((own.layers * own.layer + own.head) * (1 + own.backward) for own in modules)
        return max(pair.throughputs) * seconds * EFFICIENCY

    shares = [peaks(pair) for pair in PAIRS]
    assert min(shares) > 1.3 and 6.5 < max(shares) < 6.6
    llm = by_datasheet(LLM, "L")
    assert 1.36 * 1500 / TOKENS[LLM] * llm.layers * llm.layer * (1 + llm.backward) * EFFICIENCY > 2.6
    paces = [
        case.throughput * sum(case.stages) * max(map(sum, zip(case.forward, case.backward, strict=True))) / 1e3
        for model in frozen.MODELS
        for case in (model.aware, model.unaware)
    ]
    assert min(paces) > 1.6 and max(paces) < 6.1
    many = [pair.name for pair in PAIRS if 4 * max(pair.stages) > GPUS]
    assert len(many) == 27
    assert max(2 * max(pair.stages) for pair in PAIRS) <= GPUS
    medium = {(pair.table, pair.sizes): pair.modality[1] for pair in PAIRS if pair.sizes[0] == "M"}
    assert [medium[2, sizes] for sizes in ("MS", "MM", "ML")] == [2, 1, 2]
    assert [medium[7, sizes] for sizes in ("MS", "MM", "ML")] == [3, 2, 2]
    rates = {pair.sizes: pair.throughputs[1] for pair in PAIRS if pair.table == 8}
    assert rates["LL"] / rates["ML"] > 1.4


@pytest.mark.parametrize("source", SOURCES)
def test_how_many_encoders_have_the_stages_of_algorithm_1(source: str) -> None:
    own = [Prediction(pair=pair, source=source, cut=CUTS[0]) for pair in PAIRS]
    same = [ours == theirs for one in own for ours, theirs in zip(one.coupled, one.pair.modality[1:], strict=True)]
    assert sum(same) == 40 and len(same) == 54


@pytest.mark.long
def test_signs_and_errors_of_all_pairs() -> None:
    for source in SOURCES:
        even, timed = (predictions(source, cut) for cut in CUTS)
        wrong = {one.pair.name: one.pair.published for one in even if not one.agrees}
        assert set(wrong) == {"LLM-M VALM-LS", "LLM-L VALM-SM"} and min(wrong.values()) > 0.98
        assert sum(abs(one.error) for one in even) / len(even) < 0.04
        assert max(abs(one.error) for one in even) < 0.22
        assert {one.pair.name for one in timed if not one.agrees} == {*wrong, "LLM-S VALM-SM"}
        named = Prediction(pair=END_TO_END, source=source, cut=CUTS[0])
        assert named.error == pytest.approx(0.0, abs=0.04)


@pytest.mark.slow
def test_rows_and_tables_of_modality_parallelism() -> None:
    rows = list(report.rows())
    assert len(rows) == 54 + 4 * 28 + 2 * 27 + 27 and len({row.case for row in rows}) == len(rows)
    page = (Path(__file__).parents[2] / "docs" / "cornstarch.md").read_text(encoding="utf-8")
    signs, pairs = (report.tables()[name] for name in ("signs", "modality parallelism"))
    assert signs in page and pairs in page and len(pairs.splitlines()) == 29
