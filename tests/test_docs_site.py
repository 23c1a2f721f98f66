"""The documentation's site: every page is reachable, every link leads somewhere, every public name is shown."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from trial_runs import REPOSITORY

import mmjax

DOCS = REPOSITORY / "docs"
SPEC = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
assert SPEC and SPEC.loader
site_hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_hooks)


def test_reference_pages_show_every_public_name() -> None:
    pages = site_hooks.reference_pages()
    shown = [line.removeprefix("::: ") for text in pages.values() for line in text.splitlines() if line[:3] == ":::"]
    assert sorted(name.rpartition(".")[2] for name in shown) == sorted(set(mmjax.__all__) - {"__version__"})
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert all(path in navigation for path in pages)


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    """Decisions are reached from the pages that speak of them."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = {path for path in re.findall(r"[\w/-]+\.md", navigation) if not path.startswith("reference/")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {path for path in pages if not path.startswith("adr/")} == listed


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    markdown = page.read_text()
    rewritten = site_hooks.outward_links(markdown, page.relative_to(DOCS).as_posix(), "https://host/tree")
    assert "](../../tests" not in rewritten and "](../tests" not in rewritten
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", rewritten)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_links_out_of_the_documentation_go_to_the_repository_or_are_text() -> None:
    markdown = "see [`the test`](../tests/test_docs_site.py#L1), [start](guide/start.md) and [a page](../docs/index.md)"
    there = markdown.replace("(../tests/", "(https://host/tests/")
    assert site_hooks.outward_links(markdown, "promises.md", "https://host") == there
    assert site_hooks.outward_links(markdown, "promises.md", "").startswith("see `the test`, [start]")
    with pytest.raises(FileNotFoundError, match=r"docs/guide/a\.md links to tests/gone\.py"):
        site_hooks.outward_links("[gone](../../tests/gone.py)", "guide/a.md", "")
