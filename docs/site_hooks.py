"""What `mkdocs.yml` leaves to code: reference pages of the public names, and links that leave `docs/`."""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
GROUPS = {
    "recipe": ("Configuration", ("config", "configurable", "checkpoint", "optimizer_config")),
    "mesh": ("Mesh and boundaries", ("mesh",)),
    "models": ("Models", ("models",)),
    "data": ("Data", ("data",)),
    "schedule": ("Schedules", ("schedule", "pipeline")),
    "runs": ("Runs", ()),
}
"""Reference pages: their titles and the packages whose public names they show; the last has all others."""
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?P<anchor>#[^)]*)?\)")


def public_names() -> dict[str, str]:
    """The modules of mmjax's public names, by name."""
    tree = ast.parse((REPOSITORY / "mmjax" / "__init__.py").read_text())
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    return {
        alias.asname or alias.name: node.module
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def reference_pages() -> dict[str, str]:
    """Markdown of the reference pages, by path in `docs/`."""
    pages = {key: f"# {title}\n" for key, (title, _) in GROUPS.items()}
    owners = {package: key for key, (_, packages) in GROUPS.items() for package in packages}
    for name, module in sorted(public_names().items()):
        key = owners.get(module.split(".")[1], "runs")
        pages[key] += f"\n::: {module}.{name}\n"
    return {f"reference/{key}.md": text for key, text in pages.items()}


def outward_links(markdown: str, page: str, repository_url: str) -> str:
    """The page with links that leave `docs/` turned into links to the repository, or into their text without a URL.

    Args:
      markdown: the page.
      page: its path in `docs/`.
      repository_url: where a browser finds the files of the repository; may be empty.

    Raises:
      FileNotFoundError: the repository has no such file.
    """

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match["target"]))
        if path.startswith("docs/"):
            return match[0]
        if not (REPOSITORY / path).exists():
            raise FileNotFoundError(f"docs/{page} links to {path}, which the repository does not have")
        return f"[{match['text']}]({repository_url}/{path}{match['anchor'] or ''})" if repository_url else match["text"]

    return LINK.sub(replace, markdown)


# ---- events of mkdocs ------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds the reference pages."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  in an environment of its own

    for path, text in reference_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites a page's links."""
    del config, files
    return outward_links(markdown, page.file.src_path, os.environ.get("MMJAX_REPOSITORY_URL", "").rstrip("/"))
