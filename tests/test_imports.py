"""Imports run downwards: no modules import each other in a circle, and no package imports one that stands above it.

The packages are those of mmjax, and `benchmarks` and `studies`, which stand above all of it.

All imports count: those inside functions and those for types alone, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

STANDS_ON = {
    "configurable": "",
    "jax_compat": "",
    "jaxprs": "",
    "temporaries": "jaxprs",
    "schedule": "",
    "sigterm": "",
    "version": "",
    "exports": "configurable",
    "fields": "configurable",
    "flags": "configurable sigterm",
    "json_files": "configurable",
    "attention": "flags jax_compat json_files",
    "optimizer_config": "configurable",
    "user_code": "configurable",
    "optimizer": "optimizer_config",
    "data": "attention user_code schedule version",
    "mesh": "flags jax_compat temporaries",
    "weights": "json_files mesh",
    "checkpoint": "exports weights",
    "models": "data weights",
    "reference": "models optimizer_config",
    "pipeline": "models optimizer schedule",
    "recipe": "checkpoint data fields pipeline",
    "config": "recipe",
    "restarts": "config",
    "planner": "restarts",
    "progress": "mesh",
    "assembly": "config progress",
    "latents": "models progress",
    "train_autoencoder": "latents optimizer",
    "viz": "assembly",
    # Commands with rooms of their own: a folder has the command and what only it does.
    "eval": "viz",
    "train": "eval",
    "generate": "train",
    "export": "train",
    "inspect": "eval",
    "compile": "assembly planner",
    "plan": "compile",
    "profile": "plan",
    "parity": "reference train",
    # Other commands. The first four never import JAX.
    "__main__": "flags version",  # runs any of them by name
    "launch": "restarts",
    "reorder": "data flags",
    "sample_data": "data flags",
    "serve": "data flags",
    "check": "parity",
    "run": "export generate parity plan",  # a run in Python
    "mmjax": "run",  # mmjax/__init__.py
    "bench": "launch mmjax parity train",
    # Beside mmjax/.
    "benchmarks": "bench profile",
    "studies": "bench planner",
}
"""From the lowest to the highest: what each package, or module beside the packages, stands on. It may import these and
all that they stand on."""

Graph = Mapping[str, Mapping[str, int]]
"""The modules that each module imports, and the first line that does."""


def graph_of(sources: Mapping[str, str]) -> Graph:
    """The imports among modules, given by their names."""
    graph: dict[str, dict[str, int]] = {name: {} for name in sources}
    for name, found in graph.items():
        for target, line in _imports(sources, name):
            found[target] = min(line, found.get(target, line))
    return graph


def _imports(sources: Mapping[str, str], name: str) -> Iterator[tuple[str, int]]:
    """The modules among `sources` that module `name` imports, with lines.

    A module of a package is imported without the package's own file, although Python runs that first.
    """
    for node in ast.walk(ast.parse(sources[name])):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: write the whole name"
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for one in wanted:
            found = one if one in sources else one.rpartition(".")[0]
            if found in sources:
                yield found, node.lineno
            else:
                package = one.partition(".")[0]
                assert package not in ("mmjax", "benchmarks", "studies"), f"{name}:{node.lineno}: {one} is no module"


def circles(graph: Graph) -> set[frozenset[str]]:
    """Modules of which each reaches each by imports."""
    reached = {name: _reached(graph, name) for name in graph}
    return {frozenset(one for one in reached[name] if name in reached[one]) for name in graph if name in reached[name]}


def _reached(graph: Graph, name: str) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        new = graph[todo.pop()].keys() - found
        found |= new
        todo += new
    return found


def upwards(graph: Graph, stands_on: Mapping[str, str]) -> list[str]:
    """A line for each import of a package that the importing one does not stand on."""
    below: dict[str, set[str]] = {}
    for package, names in stands_on.items():
        direct = names.split()
        assert below.keys() >= set(direct), f"{package} stands on what comes later: {set(direct) - below.keys()}"
        below[package] = {package}.union(*(below[one] for one in direct))
    return [
        f"{name}:{line} imports {target}"
        for name, imported in graph.items()
        for target, line in imported.items()
        if package_of(target) not in below[package_of(name)]
    ]


def package_of(name: str) -> str:
    """The row of `STANDS_ON` for a module."""
    first, *rest = name.split(".")
    return rest[0] if rest and first == "mmjax" else first


@cache
def whole_graph() -> Graph:
    """The imports in mmjax, benchmarks and studies."""
    paths = [path for package in ("mmjax", "benchmarks", "studies") for path in (REPOSITORY / package).rglob("*.py")]
    files = {path.relative_to(REPOSITORY).with_suffix(""): path for path in paths}
    return graph_of({".".join(at.parts).removesuffix(".__init__"): path.read_text() for at, path in files.items()})


def test_no_modules_import_each_other() -> None:
    assert not [sorted(circle) for circle in circles(whole_graph())]


def test_no_import_runs_upwards() -> None:
    assert {package_of(name) for name in whole_graph()} == set(STANDS_ON), "give each package a row"
    wrong = upwards(whole_graph(), STANDS_ON)
    assert not wrong


NAMES_FAMILIES = {
    "mmjax": "public names",
    "mmjax.models.families": "the registry",
    "mmjax.models.pretrained": "folders of Qwen-Image keep the projector in the generator",
    "mmjax.models.projector.weights": "Qwen's folders keep the projector in the tower, or in the generator",
    **{
        f"mmjax.models.latent_encoder.{name}": "the encoder of an autoencoder"
        for name in ("config", "layers", "module", "weights")
    },
    "mmjax.parity.shrink": "smaller settings of each family",
    "mmjax.assembly.latents": "pictures of a generator's latents",
    "mmjax.assembly.vocoders": "waveforms of a generator's frames",
    **{
        f"mmjax.{name}": "a command about autoencoders"
        for name in (
            *("latents.checking", "latents.making", "latents.running"),
            *("train_autoencoder.__main__", "train_autoencoder.checkpoints", "train_autoencoder.running"),
            *("train_autoencoder.settings", "train_autoencoder.step"),
        )
    },
}
"""Modules outside a family's folder that import from it; beside these, the dense reference and benchmarks do."""


def test_families_are_named_in_their_folders_and_in_the_registry() -> None:
    folders = {
        f"mmjax.models.{name}"
        for name in (
            *("autoencoder", "dit", "latent_encoder", "llama", "mmdit", "temporal", "unet", "vit", "vocoder"),
            "whisper",
        )
    }
    importing = {
        name
        for name, imported in whole_graph().items()
        for folder in folders
        if not name.startswith(folder) and any(target.startswith(f"{folder}.") for target in imported)
    }
    assert {name for name in importing if package_of(name) not in ("reference", "bench", "benchmarks", "studies")} == {
        *NAMES_FAMILIES
    }


@pytest.mark.parametrize(
    "line",
    [
        "import mmjax.b.c",
        "import mmjax.b.c as other",
        "from mmjax.b import c",
        "from mmjax.b.c import name",
        "def late():\n    from mmjax.b import c",
        "if TYPE_CHECKING:\n    from mmjax.b.c import Name",
        "try:\n    import mmjax.b.c\nexcept ImportError:\n    pass",
    ],
)
def test_every_way_to_import_counts(line: str) -> None:
    sources = {"mmjax": "", "mmjax.a": line, "mmjax.b": "from mmjax.b.c import name", "mmjax.b.c": "import mmjax.a"}
    graph = graph_of(sources)
    assert graph["mmjax.a"].keys() == {"mmjax.b.c"}
    assert circles(graph) == {frozenset({"mmjax.a", "mmjax.b.c"})}
    assert upwards(graph, {"mmjax": "", "a": "", "b": "a"}) == [
        f"mmjax.a:{2 if chr(10) in line else 1} imports mmjax.b.c"
    ]


def test_a_package_and_its_own_modules_are_no_circle() -> None:
    names = {"mmjax.b": "from mmjax.b.c import name", "mmjax.b.c": "from mmjax.b import d", "mmjax.b.d": "x = 1"}
    assert not circles(graph_of(names))
    back = {**names, "mmjax.b.d": "from mmjax.b import name"}  # a name of the package's own file
    assert circles(graph_of(back)) == {frozenset(names)}


def test_rows_stand_on_earlier_rows() -> None:
    with pytest.raises(AssertionError, match=r"a stands on what comes later: \{'b'\}"):
        upwards({}, {"a": "b", "b": ""})
    assert upwards(graph_of({"mmjax.c": "import mmjax.a", "mmjax.a": ""}), {"a": "", "b": "a", "c": "b"}) == []


LATE = ("jinja2", "safetensors", "soundfile", "tokenizers")
"""Packages that machines which read no folders and no recordings lack."""


@pytest.mark.long
def test_packages_for_folders_and_recordings_are_imported_late() -> None:
    early = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in (REPOSITORY / "mmjax").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.partition(".")[0] in LATE
    ]
    assert not early
