"""Every command in README and docs is one that works: its program, its flags, its files and its shapes."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trial_runs import REPOSITORY, write_tiny

from mmjax.__main__ import COMMANDS
from mmjax.assembly.buckets import build_packer
from mmjax.bench import BENCHES
from mmjax.config import load_config
from mmjax.data import buckets
from mmjax.data.tokenizer import make_tokenizer
from mmjax.flags import Flags
from studies import STUDIES

DOCS = REPOSITORY / "docs"
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "studies" / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "families").glob("*.md")),
    *sorted((DOCS / "guide").glob("*.md")),
)
PROGRAM = re.compile(
    rf"(?:python -m (?:mmjax|studies)[\w.]*|mmjax (?:--?\w+|{'|'.join(COMMANDS)})\b|python -c|make [\w-]+)"
)

NAMES = {"mmjax.bench": set(BENCHES), "studies": set(STUDIES)}
"""What may be named, by program."""


ORACLES = Path(__file__).parent / "oracles"
FOLDERS = {
    "models/llava-1.5-7b-hf": ORACLES / "llava",
    "models/clip-vit-large-patch14-336": ORACLES / "vision" / "clip",
    "models/vicuna-7b-v1.5": ORACLES / "llm" / "llama2",
}
"""Small folders in the places of those that the pages name."""


class Parsed(Exception):
    """Ends a program when its command line is understood."""


def commands() -> list[str]:
    """All commands on the pages: lines of code blocks and code spans that begin with a program, without comments."""
    found: dict[str, None] = {}
    for page in PAGES:
        blocks = re.split(r"^```.*$", page.read_text(), flags=re.M)
        for number, text in enumerate(blocks):
            if text.startswith("\ncd examples/"):
                continue  # `test_own_encoder.py` and `test_anyres.py` run these, in processes of their own
            spans = re.findall(r"`([^`\n]+)`", text) if number % 2 == 0 else text.splitlines()
            for span in spans:
                begin = PROGRAM.search(span)
                if begin and not span[: begin.start()].strip(" $").removeprefix("srun"):
                    found[re.sub(r"\s+#.*| …", "", span[begin.start() :]).strip()] = None
    return list(found)


def spelled(command: str) -> list[list[str]]:
    """Its words, with and without each [part] that may be left out."""
    forms = [re.sub(r"\[[^]]*\]", "", command), re.sub(r"\[(?!NAME)([^]]*)\]", r"\1", command)]
    return [shlex.split(re.sub(r"\[.*?\]", "", form)) for form in dict.fromkeys(forms)]


def test_pages_have_commands() -> None:
    found = commands()
    assert len(found) > 30 and any(command.startswith("make train") for command in found)


def test_files_on_the_pages_are_there() -> None:
    """Paths of the repository, in commands and elsewhere, as a reader would open them."""
    folders = ("benchmarks", "configs", "docs", "examples", "mmjax", "notebooks", "studies", "tests")
    named = re.compile(rf"(?<![\w./])(?:{'|'.join(folders)})/[\w./-]*\w")
    found = {path: page for page in PAGES for path in named.findall(page.read_text())}
    missing = {path: page for path, page in found.items() if not (REPOSITORY / path).exists()}
    elsewhere = {"mmjax/accelerator", "benchmarks/mimo_throughput"}  # a label of Kubernetes; a folder of Megatron-LM
    assert len(found) > 40 and set(missing) <= elsewhere, missing


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an installed wheel is used from
    monkeypatch.setattr(buckets, "_STEPS", (4, 4))
    for words in spelled(command):
        if words[0] == "make":
            given = [word for word in words[1:] if word.islower() or "=" in word]
            done = subprocess.run(["make", "-n", *given], capture_output=True, text=True, cwd=REPOSITORY)
            assert done.returncode == 0, done.stderr
        elif words[1] == "-c":  # from the repository
            exec(compile(words[2].partition(";")[0], command, "exec"), {})  # what it imports is there
        else:
            program, *rest = as_module(words)
            understood(program, rest, write_tiny(tmp_path), monkeypatch)


def as_module(words: list[str]) -> list[str]:
    """The words of a command behind `python -m`."""
    if words[0] != "mmjax":
        return words[2:]
    return ["mmjax", *words[1:]] if words[1].startswith("-") else [f"mmjax.{words[1]}", *words[2:]]


def understood(program: str, words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises where `program` refuses its words, or a run its configuration."""
    module: Any = importlib.import_module(program)
    module = importlib.import_module(f"{program}.__main__") if hasattr(module, "__path__") else module
    if program == "mmjax.launch":
        assert words[0] == "-n" and int(words[1]) > 0
        at = next(at for at, word in enumerate(words) if word in ("-m", "mmjax"))
        program, *rest = as_module(words[at:] if words[at] == "mmjax" else ["python", *words[at:]])
        return understood(program, rest, tiny, monkeypatch)
    if program in NAMES:
        assert {word for word in words if not word.startswith("-")} <= NAMES[program]
    given = [word.replace("gin_file=F", f"gin_file={tiny}") for word in words]
    for named, folder in FOLDERS.items():
        given = [word.replace(named, str(folder)) for word in given]
    parse = getattr(module, "parse_flags", None)
    if not words or parse is None:
        return None  # a program by its name alone, or one without flags
    flags: list[Flags] = []

    def parsed(*args: Any, **about: Any) -> Flags:
        flags.append(parse(*args, **about))
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(module, "parse_flags", parsed)
        try:
            module.main(given)
        except Parsed:
            pass
        except SystemExit as ended:
            assert not ended.code
    if flags and flags[0].gin_files and program != "mmjax.plan":
        fits(flags[0].gin_files, flags[0].bindings)
    return None


@cache
def fits(gin_files: tuple[str, ...], bindings: tuple[str, ...]) -> None:
    """A run of it has shapes for its data, where these are here."""
    config = load_config(gin_files, bindings)
    if not config.data.settings.sources:
        build_packer(config, make_tokenizer(config.data.settings.tokenizer, config.model.media))
