"""`python -m mmjax.attention.distribute --problem=FILE --cp=8 [--json]`: distributes blocks of tokens over cp ranks.

FILE is JSON and defines a mask token by token: {"intervals": [[first, last] of each query's keys, last exclusive]}, or
{"is": [kinds of each token], "attends": [kinds that it sees], "causal": true}, where kinds are bits of a number below
2³². With `--json` the output is one line: {"ranks": [[block, …] of each rank], "work": [pairs of each rank],
"seconds": run time of the method}. JAX is never imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.attention.distribution import METHODS, Ranks, Work
from mmjax.attention.pairs import Intervals, Pairs, Words, block_work, rank_work, round_work
from mmjax.configurable import ConfigError, one_of
from mmjax.flags import Flag, one_line_errors, parse_flags, run_plain
from mmjax.json_files import parse

USAGE = "python -m mmjax.attention.distribute"
FLAGS = (
    Flag(
        name="problem",
        doc='JSON file: {"intervals": [[first, last] of each query\'s keys]}, or {"is": [bits of each token], '
        '"attends": [bits], "causal": true}, bits for kinds.',
        required=True,
    ),
    Flag(name="cp", doc="context-parallel ranks.", default=1, required=True),
    Flag(name="block", doc="tokens of a block, which stay together; the last may be shorter.", default=128),
    Flag(name="method", doc=f"{', '.join(METHODS)}.", default="lpt"),
    Flag(name="json", doc="The ranks as one line of JSON instead of a summary of all methods.", default=False),
)
_EXAMPLE = '{"intervals": [[0, 1], [0, 2]]} or {"is": [1, 1], "attends": [1, 1], "causal": true}'
_KINDS = 2**32


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a summary of all methods, or with "--json" the blocks of each rank as a line of JSON; returns 0.

    ``argv`` are flags such as ["--problem=mask.json", "--cp=8"]; by default those of the process. The file of
    "--problem" is as for ``read_mask``. A wrong flag or file ends the process with one line on stderr and status 2.
    """
    with one_line_errors():
        values = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        cp, block, method = int(values["cp"]), int(values["block"]), str(values["method"])
        for name, value in (("cp", cp), ("block", block)):
            if value < 1:
                raise ConfigError(f"--{name}={value}: must be at least 1, such as 8")
        one_of("--method", method, METHODS)
        pairs = read_mask(Path(str(values["problem"])))
        work_N = block_work(pairs, block)
        output = as_json(work_N, cp, method) if values["json"] else summary(pairs, work_N, block, cp)
    print(output)
    return 0


def as_json(work_N: Work, cp: int, method: str) -> str:
    """A line of JSON, without a newline: {"ranks":[[0,3],[1,2]],"work":[5,5],"seconds":0.1}.

    They are the indices from 0 of each rank's blocks, the sum of their work, and the run time of the method.

    Args:
      work_N: the number of allowed pairs of each block, an int array [N], as ``pairs.block_work`` gives it.
      cp: the number of ranks.
      method: a key of ``METHODS``, such as "lpt".

    Raises:
      ConfigError: the method "exact" cannot solve the problem.
    """
    begun = time.perf_counter()
    rank_N = METHODS[method](work_N, cp)
    seconds = time.perf_counter() - begun
    ranks = [np.flatnonzero(rank_N == rank).tolist() for rank in range(cp)]
    result = {"ranks": ranks, "work": _loads(work_N, rank_N, cp).tolist(), "seconds": seconds}
    return json.dumps(result, separators=(",", ":"))


def summary(pairs: Pairs, work_N: Work, block: int, cp: int) -> str:
    """A table of all methods as text: a line about the mask, a header, and a line for each key of ``METHODS``.

    A line has the method, its blocks a rank, the busiest rank's pairs over the mean, in total and by rounds of a ring,
    and the run time in milliseconds; or the reason why the method fails.

    Args:
      pairs: the mask, as ``read_mask`` or ``pairs.pairs_of`` gives it.
      work_N: the number of allowed pairs of each block, ``block_work(pairs, block)``.
      block: tokens of a block.
      cp: the number of ranks.
    """
    share = work_N.sum() / pairs.tokens**2
    lines = [
        f"{pairs.tokens} tokens, {len(work_N)} blocks of {block}, {cp} ranks; the mask allows {share:.1%} of all pairs",
        f"{'method':12} {'blocks a rank':>14} {'fullest / mean':>15} {'by rounds / mean':>17} {'ms':>8}",
    ]
    for method, distribute in METHODS.items():
        begun = time.perf_counter()
        try:
            rank_N = distribute(work_N, cp)
        except ConfigError as error:
            lines.append(f"{method:12} {str(error).partition(': ')[2]}")
            continue
        milliseconds = 1e3 * (time.perf_counter() - begun)
        counts, loads = np.bincount(rank_N, minlength=cp), _loads(work_N, rank_N, cp)
        mean = max(loads.mean(), 1e-9)
        rounds = round_work(rank_work(pairs, block, rank_N, cp)) / mean
        blocks = f"{counts.min()}-{counts.max()}" if counts.min() < counts.max() else f"{counts.max()}"
        lines.append(f"{method:12} {blocks:>14} {loads.max() / mean:15.4f} {rounds:17.4f} {milliseconds:8.2f}")
    return "\n".join(lines)


def _loads(work_N: Work, rank_N: Ranks, cp: int) -> np.ndarray:
    """The work of each rank."""
    loads = np.zeros(cp, np.int64)
    np.add.at(loads, rank_N, work_N)
    return loads


# ---- the file --------------------------------------------------------------------------------------------------------


def read_mask(path: Path) -> Pairs:
    """Reads a mask from a JSON file: `Intervals` or `Words`, whose ``key_counts()`` are the keys that each query sees.

    The file is an object with the key "intervals" alone, a [first, last] pair of keys for each query, numbered from 0,
    last excluded ({"intervals": [[0, 1], [0, 2]]}), or with "is", "attends" (lists of a number for each token) and
    "causal" (true or false), the fields of `Words`.

    Raises:
      ConfigError: the file cannot be read, or its contents are wrong; the message says where.
    """
    flag_text = f"--problem={path}"
    try:
        value = parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{flag_text}: {(error.strerror or str(error)).lower()}; name a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{flag_text} is {error}; write {_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag_text} holds a {type(value).__name__}; write {_EXAMPLE}")
    if value.keys() == {"intervals"}:
        return _intervals(flag_text, value["intervals"])
    if value.keys() == {"is", "attends", "causal"}:
        return _words(flag_text, value)
    keys = ", ".join(map(repr, sorted(value))) or "nothing"
    raise ConfigError(f"{flag_text}: it has {keys}; write {_EXAMPLE}")


def _intervals(flag_text: str, value: Any) -> Intervals:
    array = _integers(flag_text, "intervals", value, 2)
    first_T, last_T = array[:, 0], array[:, 1]
    wrong = np.flatnonzero((first_T < 0) | (last_T < first_T) | (last_T > len(array)))
    if len(wrong):
        at = int(wrong[0])
        fix = f"give first and last with 0 <= first <= last <= {len(array)}, the number of tokens"
        raise ConfigError(f"{flag_text}: 'intervals'[{at}] is {array[at].tolist()}; {fix}")
    return Intervals(first_T, last_T)


def _words(flag_text: str, value: dict[str, Any]) -> Words:
    if not isinstance(value["causal"], bool):
        raise ConfigError(f"{flag_text}: 'causal' is {value['causal']!r}; write true or false")
    is_T, attends_T = (_integers(flag_text, name, value[name], 1) for name in ("is", "attends"))
    if len(is_T) != len(attends_T):
        raise ConfigError(f"{flag_text}: {len(is_T)} tokens in 'is' and {len(attends_T)} in 'attends'; give one each")
    for name, words in (("is", is_T), ("attends", attends_T)):
        wrong = np.flatnonzero((words < 0) | (words >= _KINDS))
        if len(wrong):
            at = int(wrong[0])
            raise ConfigError(f"{flag_text}: {name!r}[{at}] is {words[at]}; give 32 bits, 0 to {_KINDS - 1}")
    return Words(is_T, attends_T, value["causal"])


def _integers(flag_text: str, name: str, value: Any, dimensions: int) -> np.ndarray:
    expected = "a [first, last] pair of whole numbers" if dimensions == 2 else "a whole number"
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    is_valid = array.ndim == dimensions and array.size and array.dtype.kind in "iu" and array.shape[1:] in ((), (2,))
    if not is_valid:
        raise ConfigError(f"{flag_text}: {name!r} is not {expected} of each token; write {_EXAMPLE}")
    return array.astype(np.int64)


if __name__ == "__main__":
    run_plain(main)
