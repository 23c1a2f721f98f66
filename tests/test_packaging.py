"""What is installed: a command, the configurations, and packages that are named as an index has them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from trial_runs import REPOSITORY

from mmjax import __main__ as command
from mmjax.attention.settings import LIBRARIES
from mmjax.config.shipped import config_names
from mmjax.version import __version__

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LATE = {"jinja2", "soundfile", "tokenizers"}
"""Packages that machines of `make gpu` may lack: only what needs one may import it."""


def programs() -> set[str]:
    """Modules and packages of mmjax that can be run, but modules of its packages."""
    folder = REPOSITORY / "mmjax"
    files = {path.stem for path in folder.glob("[a-z]*.py") if '__name__ == "__main__"' in path.read_text()}
    return files | {path.parent.name for path in folder.glob("*/__main__.py")}


def test_every_program_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(command.COMMANDS) == programs()
    assert command.main(["--help"]) == 0 and command.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in command.COMMANDS)
    assert command.main(["--version"]) == 0 and capsys.readouterr().out == f"mmjax {__version__}\n"
    with pytest.raises(SystemExit) as ended:
        command.main(["trian"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: 'trian' is no command: did you mean 'train'?\n"


def test_a_command_runs_as_its_module_does(tmp_path: Path) -> None:
    words = ["reorder", "--cost=x"]
    named = subprocess.run([sys.executable, "-m", "mmjax", *words], capture_output=True, text=True, cwd=tmp_path)
    alone = [sys.executable, "-m", "mmjax.reorder", *words[1:]]
    module = subprocess.run(alone, capture_output=True, text=True, cwd=tmp_path)
    assert (named.returncode, named.stdout, named.stderr) == (module.returncode, module.stdout, module.stderr)
    assert named.returncode == 2 and "did you mean '--costs'?" in named.stderr


def imported(node: ast.AST) -> Iterator[str]:
    """The packages that a module imports when it is imported itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0]
        elif not isinstance(child, ast.FunctionDef | ast.Lambda) and "TYPE_CHECKING" not in ast.unparse(child)[:20]:
            yield from imported(child)


@pytest.mark.long
def test_small_packages_are_imported_where_they_are_needed() -> None:
    for path in (*(REPOSITORY / "mmjax").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")):
        assert not LATE & set(imported(ast.parse(path.read_text()))), f"{path}: import it in the function that needs it"
    probe = "import jinja2\nif TYPE_CHECKING:\n    import soundfile\ntry:\n    from tokenizers.x import y\nexcept: pass"
    assert set(imported(ast.parse(probe))) == {"jinja2", "tokenizers"}


def test_packages_to_install_are_named_as_an_index_has_them() -> None:
    """mmjax itself is on none: its extras are installed from a checkout, others by the names of dependencies."""
    wanted = [re.match(r"[\w-]+(\[\w+\])?", line)[0] for lines in EXTRAS.values() for line in lines]  # type: ignore[index]
    wanted += [re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]]  # type: ignore[index]
    wanted += ["notebook", "xprof", "."]
    pages = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md", *(REPOSITORY / "mmjax").rglob("*.py")]
    found = []
    for page in (*pages, *(REPOSITORY / "studies").rglob("*.py")):
        if "adr" in page.parts:
            continue
        for name in re.findall(r"pip install (?:-e )?'?([\w.\[\]-]+)", page.read_text()):
            extra = re.fullmatch(r"\.\[(\w+)\]", name)
            assert extra[1] in EXTRAS if extra else name.rstrip(".") in wanted or name == ".", f"{page}: {name}"
            found.append(name)
    assert len(found) >= 8
    for library in LIBRARIES.values():
        assert not library.package or f"{library.package}=={library.version}" in EXTRAS[library.package]


def test_extras_that_make_names_are_there() -> None:
    (line,) = re.findall(r"EXTRAS=(.*?);", (REPOSITORY / "Makefile").read_text())
    assert set(re.findall(r"\w+", line)) - {"or"} == set(EXTRAS) - {"dev", "docs"}


def test_make_installs_extras_and_says_how_to_go_on() -> None:
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # of a make that runs this test
    plain = {name: value for name, value in os.environ.items() if name not in outer}

    def shown(*words: str) -> str:
        command = ["make", "-n", *words]
        return subprocess.run(command, cwd=REPOSITORY, env=plain, capture_output=True, text=True, check=True).stdout

    assert "'.[wandb,tokamax]'" in shown("install", "EXTRAS=wandb,tokamax")
    assert "'.[" not in shown("install")
    assert "activate, and mmjax --help" in shown("train").splitlines()[-1]
    newest = shown("test-newest", "NEWEST_PYTHON=python9")
    assert "python9 --version" in newest and "VENV=.newest-venv" in newest and "LOCK= " in newest


# ---- what a wheel holds


def built(kind: str, source: Path, out: Path) -> Path:
    """A wheel or sdist of a source tree, made without a network."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.mark.long
def test_wheel_and_sdist_have_the_configurations(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    for name in ("mmjax", "configs"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    with tarfile.open(built("sdist", source, tmp_path)) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    wheel = built("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name for name in names if name.endswith(".gin")} == {f"mmjax/configs/{name}.gin" for name in config_names()}
    here = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "mmjax").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == here
    assert {"mmjax/data/tasks/digits/digits.npz", "mmjax/bench/gpu/kept.json"} <= set(names)
    (empty := tmp_path / "empty").mkdir()
    program = (
        "from mmjax import load_config; from mmjax.config.shipped import CONFIGS; print(CONFIGS);"
        "print(load_config(['digits_vlm_colocated']).devices, load_config(['configs/llava15.gin']).devices)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", program], cwd=empty, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "site" / "mmjax" / "configs"), "8", "8"], done.stderr
