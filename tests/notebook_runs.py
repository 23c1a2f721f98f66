"""Runs notebooks in a kernel of their own, as a reader does: without the devices and threads that tests set up.

`python tests/notebook_runs.py` (`make notebook`) runs notebooks/quickstart.ipynb and keeps its outputs in it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"
# What tests/conftest.py sets, which a reader has not.
UNSET = ("JAX_NUM_CPU_DEVICES", "NPROC", "JAX_PLATFORMS", "MPLBACKEND")
_WIDTH, _COLOURS = 900, 256
"""Of a picture that is kept, at most."""


class Kernel:
    """Runs notebooks as Jupyter does: from the notebook's folder, in a process that ends with each run.

    Attributes:
      folder: everything that a kernel writes; emptied by nobody but the notebook.
      patience: seconds that a cell may take.
    """

    def __init__(self, folder: Path, sockets: Path, patience: int = 280):
        self.folder, self.sockets, self.patience = folder, sockets, patience

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
        client = NotebookClient(notebook, km=manager, timeout=self.patience, resources=resources, record_timing=False)
        client.execute(env=environment, cleanup_kc=True)
        return notebook


@contextmanager
def kernel_in(folder: Path) -> Iterator[Kernel]:
    """A kernel with a home and a temporary directory of its own in `folder`."""
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    sockets = Path(tempfile.mkdtemp(prefix="nb-"))  # a socket's path has at most 107 characters
    try:
        yield Kernel(folder, sockets)
    finally:
        shutil.rmtree(sockets)


def digest(notebook: nbformat.NotebookNode) -> str:
    """A digest of the notebook's code, which tells whether stored outputs belong to it."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def keep(done: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A notebook that was run, as it is kept: small pictures, one text a stream, and the digest of its code."""
    for cell in (cell for cell in done.cells if cell.cell_type == "code"):
        cell.metadata.pop("execution", None)
        kept: list[nbformat.NotebookNode] = []
        for output in cell.outputs:
            png = output.get("data", {}).get("image/png")
            if png:
                output.data["image/png"] = _smaller(png)
            streams = [one for one in kept if one.output_type == "stream" and one.name == output.get("name")]
            if output.output_type == "stream" and streams:
                streams[0].text += output.text
            else:
                kept.append(output)
        cell.outputs = kept
    done.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "mmjax": {"code": digest(done)},
        }
    )
    return done


def _smaller(png: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if image.width > _WIDTH:
        image = image.resize((_WIDTH, round(image.height * _WIDTH / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode() + "\n"


def main() -> int:
    """Runs the notebook and writes it with its outputs."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder, kernel_in(Path(folder)) as kernel:
        kernel.patience = 3600  # the machine may be busy
        done = kernel.run(nbformat.read(NOTEBOOK, as_version=4))
    nbformat.write(keep(done), NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
