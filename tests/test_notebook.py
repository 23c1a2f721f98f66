"""The notebook in a kernel of its own, as a reader runs it: without the devices and threads that tests set up."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient.exceptions import CellExecutionError
from notebook_runs import NOTEBOOK, Kernel, digest, kernel_in
from PIL import Image


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel with a home and a temporary directory of its own."""
    with kernel_in(tmp_path) as made:
        yield made


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
    """The images among the cells' outputs."""
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


def test_the_notebook_is_kept_with_the_outputs_of_its_code() -> None:
    found = notebook()
    nbformat.validate(found)
    assert found.metadata["mmjax"]["code"] == digest(found), "its code has changed: run `make notebook`"
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(len(cell.source.splitlines()) <= 22 for cell in code), "a cell is too long to be read at a glance"
    assert_whole(found)
    assert NOTEBOOK.stat().st_size < 400_000
    texts = [text for cell in code for output in cell.outputs for text in _texts(output)]
    assert not [text for text in texts if re.search(r"(?<![\w.<>])/(?!\d)\w+/", text)], "a path of some machine"
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    read, exchanged = shares(found)
    assert read > 60 and exchanged < 25


def _texts(output: nbformat.NotebookNode) -> list[str]:
    data = output.get("data", {})
    return [output.get("text", ""), *(value for kind, value in data.items() if kind.startswith("text/"))]


def shares(done: nbformat.NotebookNode) -> tuple[float, float]:
    """Per cent of digits read right; and with images exchanged."""
    (line,) = re.findall(r"digits read right.*", printed(done.cells))
    read, exchanged = re.findall(r"([\d.]+)%", line)
    return float(read), float(exchanged)


@pytest.mark.long
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
    read, exchanged = shares(done)
    assert read > 60 and exchanged < 25


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
