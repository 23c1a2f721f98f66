"""Blocks of tokens over context-parallel ranks: counts of pairs, every method, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.attention.distribute import main
from mmjax.attention.distribution import METHODS, exact, lpt, lpt_by_work
from mmjax.attention.pairs import Intervals, Pairs, Words, block_work, rank_work, round_work

EQUAL = tuple(name for name in METHODS if name not in ("exact", "lpt-by-work"))


@st.composite
def masks(draw: st.DrawFn) -> tuple[Pairs, np.ndarray]:
    """A mask, and the same pair by pair: [query, key]."""
    rng, tokens = np.random.default_rng(draw(st.integers(0, 2**16))), draw(st.integers(1, 40))
    keys = np.arange(tokens)
    if draw(st.booleans()):
        first, last = np.sort(rng.integers(0, tokens + 1, (2, tokens)), axis=0)
        return Intervals(first, last), (keys >= first[:, None]) & (keys < last[:, None])
    kinds, attended = rng.integers(0, 2**32, (2, tokens)) & rng.choice([0b101, 2**31, 2**32 - 1], (2, tokens))
    causal = draw(st.booleans())
    seen = (kinds[None, :] & attended[:, None]) != 0
    return Words(kinds, attended, causal), seen & (keys <= keys[:, None]) if causal else seen


@settings(max_examples=80, deadline=None)
@given(masks(), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_pairs_are_counted(case: Any, block: int, ranks: int, seed: int) -> None:
    mask, seen = case
    assert (mask.key_counts() == seen.sum(axis=1)).all()
    starts = np.arange(0, len(seen), block)
    assert (block_work(mask, block) == [seen[start : start + block].sum() for start in starts]).all()
    rank_N = np.random.default_rng(seed).integers(0, ranks, len(starts))
    rank_T = np.repeat(rank_N, block)[: len(seen)]
    work_RR = rank_work(mask, block, rank_N, ranks)
    for r, k in np.ndindex(work_RR.shape):
        assert work_RR[r, k] == seen[rank_T == r][:, rank_T == k].sum()
    by_round = [max(work_RR[r, (r + k) % ranks] for r in range(ranks)) for k in range(ranks)]
    assert round_work(work_RR) == sum(by_round)


works = st.lists(st.integers(0, 10**6), min_size=1, max_size=60).map(lambda work: np.array(work, np.int64))


@settings(max_examples=100, deadline=None)
@given(works, st.integers(1, 9))
def test_every_block_has_a_rank_and_lpt_keeps_its_bound(work: np.ndarray, ranks: int) -> None:
    """Equally many blocks a rank, and no rank more than the mean and the work of one block (§4.3.2)."""
    for name in EQUAL:
        found = METHODS[name](work, ranks)
        counts = np.bincount(found, minlength=ranks)
        assert len(found) == len(work) and len(counts) == ranks
        assert counts.max() <= -(-len(work) // ranks) + (name == "zigzag")
    for method in (lpt, lpt_by_work):
        assert np.bincount(method(work, ranks), work, ranks).max() <= work.sum() / ranks + work.max()


def test_where_blocks_are() -> None:
    work = np.arange(8)
    assert METHODS["contiguous"](work, 2).tolist() == [0] * 4 + [1] * 4
    assert METHODS["striped"](work, 2).tolist() == [0, 1] * 4
    assert METHODS["zigzag"](work, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert METHODS["random"](work, 2).tolist() == METHODS["random"](work, 2).tolist()
    # The heaviest first, to whoever has the least: 7 and 4, then 6 and 5, 3 and 0, 2 and 1.
    assert METHODS["lpt-by-work"](work, 2).tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_few_blocks_more_than_ranks_and_ranks_without_blocks() -> None:
    assert sorted(lpt(np.array([5, 1, 1]), 8).tolist()) != [0, 0, 0]
    assert np.bincount(lpt(np.array([5, 1, 1]), 8), minlength=8).max() == 1
    assert lpt(np.array([4, 3, 2, 1]), 1).tolist() == [0] * 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_lpt_is_near_the_exact_solution(ranks: int) -> None:
    work = np.random.default_rng(0).integers(1, 1000, 12)
    best = np.bincount(exact(work, ranks), work, ranks).max()
    found = np.bincount(lpt(work, ranks), work, ranks).max()
    assert work.sum() / ranks <= best <= found <= 1.05 * best


def test_a_million_tokens() -> None:
    """Under a causal mask with media in it: the fullest of eight ranks has 0.1 % more than the mean at most."""
    tokens = 2**20
    first, last = np.zeros(tokens, np.int64), np.arange(1, tokens + 1)
    rng = np.random.default_rng(0)
    for start in rng.integers(0, tokens - 50_000, 12):
        first[start : start + 50_000], last[start : start + 50_000] = start, start + 50_000
    work = block_work(Intervals(first, last), 128)
    assert np.bincount(lpt(work, 8), work, 8).max() <= 1.001 * work.sum() / 8


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({"intervals": [[0, q + 1] for q in range(100)]}))
    return path


def test_the_command_prints_one_line_of_json_and_never_imports_jax(problem: Path) -> None:
    code = "import runpy, sys; sys.modules['jax'] = None; "
    code += "runpy.run_module('mmjax.attention.distribute', run_name='__main__')"
    args = [f"--problem={problem}", "--cp=3", "--block=8", "--method=lpt", "--json"]
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    found = json.loads(line)
    assert found.keys() == {"ranks", "work", "seconds"} and 0 <= found["seconds"] < 1
    assert sorted(block for rank in found["ranks"] for block in rank) == list(range(13))
    assert sorted(map(len, found["ranks"])) == [4, 4, 5]
    pairs = [sum(q + 1 for block in rank for q in range(8 * block, min(100, 8 * block + 8))) for rank in found["ranks"]]
    assert found["work"] == pairs and sum(pairs) == 5050


def test_words_and_intervals_of_one_mask_are_distributed_alike(tmp_path: Path, capsys: Any, problem: Path) -> None:
    words = tmp_path / "words.json"
    words.write_text(json.dumps({"is": [2] * 100, "attends": [3] * 100, "causal": True}))
    ranks = []
    for path in (problem, words):
        assert main([f"--problem={path}", "--cp=4", "--block=5", "--json"]) == 0
        ranks.append(json.loads(capsys.readouterr().out)["ranks"])
    assert ranks[0] == ranks[1]


def test_the_summary_shows_every_method(problem: Path, capsys: Any) -> None:
    assert main([f"--problem={problem}", "--cp=2", "--block=5"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "100 tokens, 20 blocks of 5, 2 ranks; the mask allows 50.5% of all pairs" and "by rounds" in head
    table = {name: [float(value) for value in values[-3:-1]] for name, *values in (row.split() for row in rows)}
    assert list(table) == list(METHODS)
    assert table["exact"][0] <= table["lpt"][0] < 1.01 < table["contiguous"][0]
    assert main([f"--problem={problem}", "--cp=20", "--block=1"]) == 0
    assert "exact        100 blocks on 20 ranks are more than 512 choices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            '{"intervals": [[0, 1], [0, 3]]}',
            "'intervals'[1] is [0, 3]; give first and last with 0 <= first <= last <= 2",
        ),
        ('{"intervals": [[0, 1], [0.5, 2]]}', "'intervals' is not a [first, last] pair of whole numbers of each token"),
        ('{"intervals": []}', "'intervals' is not a [first, last] pair"),
        ('{"is": [1], "attends": [1, 1], "causal": true}', "1 tokens in 'is' and 2 in 'attends'; give one each"),
        ('{"is": [1], "attends": [-1], "causal": true}', "'attends'[0] is -1; give 32 bits, 0 to 4294967295"),
        ('{"is": [1], "attends": [1], "causal": 1}', "'causal' is 1; write true or false"),
        ('{"is": [1], "attends": [1]}', "it has 'attends', 'is'; write {"),
        ("[]", "holds a list; write {"),
        ("{", "is not JSON ("),
    ],
)
def test_what_is_no_problem_is_one_line(tmp_path: Path, capsys: Any, given: str, message: str) -> None:
    path = tmp_path / "problem.json"
    path.write_text(given)
    with pytest.raises(SystemExit) as end:
        main([f"--problem={path}", "--cp=2"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cp=0"], "--cp=0: must be at least 1"),
        (["--cp=2", "--block=0"], "--block=0: must be at least 1"),
        (["--cp=2", "--method=ltp"], "--method='ltp': legal: 'lpt', 'lpt-by-work'"),
        (["--cp=2", "--problem=nowhere.json"], "--problem=nowhere.json: no such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_line(problem: Path, capsys: Any, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main([f"--problem={problem}", *flags])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
