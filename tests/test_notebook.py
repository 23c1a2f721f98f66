"""The notebook in a kernel of its own, as a reader runs it: without the devices and threads that tests set up."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
import numpy as np
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"
# What tests/conftest.py sets, which a reader has not.
UNSET = ("JAX_NUM_CPU_DEVICES", "NPROC", "JAX_PLATFORMS", "MPLBACKEND")


class Kernel:
    """Runs notebooks as Jupyter does: from the notebook's folder, in a process that ends with each run.

    Attributes:
      folder: everything that a kernel writes; emptied by nobody but the notebook.
    """

    def __init__(self, folder: Path, sockets: Path):
        self.folder, self.sockets = folder, sockets

    def run(self, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
        """The notebook with its outputs."""
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": path}
        environment |= {"IPYTHONDIR": str(self.folder / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
        # Sockets in a private folder: nobody else can talk to the kernel.
        manager = AsyncKernelManager(transport="ipc", connection_file=str(self.sockets / "k.json"))
        manager.shutdown_wait_time = 60
        resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
        client = NotebookClient(notebook, km=manager, timeout=280, resources=resources)
        client.execute(env=environment, cleanup_kc=True)
        return notebook


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel with a home and a temporary directory of its own."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    sockets = Path(tempfile.mkdtemp(prefix="nb-"))  # a socket's path has at most 107 characters
    yield Kernel(tmp_path, sockets)
    shutil.rmtree(sockets)


def notebook(steps: int | None = None) -> nbformat.NotebookNode:
    """The notebook, with other training steps where they are given."""
    found = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in found.cells if "parameters" in cell.metadata.get("tags", ())]
    if steps:
        parameters.source, changed = re.subn(r"^steps = \d+", f"steps = {steps}", parameters.source)
        assert changed == 1
    return found


def printed(cells: Sequence[nbformat.NotebookNode], stream: str = "stdout") -> str:
    """All text of a stream."""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == stream)


def pictures(cells: Sequence[nbformat.NotebookNode]) -> list[Image.Image]:
    """What was drawn inline."""
    data = [o.get("data", {}).get("image/png") for cell in cells for o in cell.get("outputs", ())]
    return [Image.open(io.BytesIO(base64.b64decode(png))) for png in data if png]


def assert_whole(done: nbformat.NotebookNode, times: int = 1) -> None:
    """Every picture is there and readable, layouts agree, and nothing warned."""
    assert len(pictures(done.cells)) == 6 * times
    for picture in pictures(done.cells):
        assert 400 < picture.width < 2400 and 150 < picture.height < 1200
        assert np.asarray(picture.convert("L")).std() > 5, "an empty picture"
    text = printed(done.cells)
    assert len(re.findall(r"^step \d: apart ([\d.]+), together \1,", text, re.MULTILINE)) >= 3 * times
    assert text.count("llm                37,280 parameters") == times
    assert "Warning" not in printed(done.cells, "stderr") + text


def test_the_notebook_is_kept_without_outputs() -> None:
    found = notebook()
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 22 for cell in code), "a cell is too long to be read at a glance"


def test_the_notebook_runs_and_leaves_nothing(kernel: Kernel) -> None:
    before = sorted(NOTEBOOK.parent.iterdir())
    done = kernel.run(notebook(steps=12))
    assert_whole(done)
    assert "'llm.1': 1}" in printed(done.cells)  # what 1F1B keeps in flight
    assert sorted(NOTEBOOK.parent.iterdir()) == before
    assert not list((kernel.folder / "tmp").iterdir())


@pytest.mark.slow
def test_the_notebook_reads_digits(kernel: Kernel) -> None:
    done = kernel.run(notebook())
    assert_whole(done)
    read, exchanged = re.findall(r"(\d+)%", re.search(r"digits read right.*", printed(done.cells))[0])  # type: ignore[index]
    assert int(read) > 60 and int(exchanged) < 25


@pytest.mark.slow
def test_cells_can_be_run_again(kernel: Kernel) -> None:
    """Each twice, then all from the top."""
    twice = notebook(steps=12)
    cells = [cell for cell in twice.cells if cell.cell_type == "code"]
    again = [cell for cell in cells for _ in range(2)] + cells
    twice.cells = [nbformat.v4.new_code_cell(cell.source) for cell in again]
    assert_whole(kernel.run(twice), times=3)
    assert not list((kernel.folder / "tmp").iterdir())


@pytest.mark.slow
def test_a_kernel_that_has_used_jax_is_told_what_to_do(kernel: Kernel) -> None:
    late = notebook(steps=12)
    late.cells.insert(0, nbformat.v4.new_code_cell("import jax\njax.devices()"))
    with pytest.raises(CellExecutionError, match=r"ConfigError.*World.devices=8: JAX was already started with 1 CPU"):
        kernel.run(late)
