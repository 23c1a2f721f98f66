"""The toy by two and by four real processes: losses, norms, parameters and moments equal one device's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import parity
import pytest
import several_toys
from several_toys import CASES
from test_toy_steps import wanted

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[2, 4])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases by so many processes."""
    folder = tmp_path_factory.mktemp("written")
    flags = ["-n", str(request.param), f"--devices_per_process={parity.DEVICES // request.param}"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):  # processes have to set these themselves
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")
        command = [sys.executable, "-m", "mmjax.launch", *flags, "-m", "several_toys", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_steps_of_several_processes_equal_one_device(name: str, written: Path) -> None:
    case = CASES[name]
    losses, norms, states = wanted(case.buckets, case.frozen, case.clip_norm, case.decay, case.modules, case.hand)
    for step, (loss, norm, leaves) in enumerate(several_toys.results(written, name)):
        assert loss == pytest.approx(losses[step], rel=1e-5)
        assert norm == pytest.approx(norms[step], rel=2e-5)
        assert not case.clip_norm or sum(n**2 for n in norm.values()) > case.clip_norm**2, "the case clips"
        for kind, want in states[step].items():
            parity.assert_close(parity.of_kind(leaves, kind), want, 1e-5, f"step {step}: {kind}")
