"""A hook of mkdocs: what GitHub and the tests read in another way than the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Results that lie under benchmarks/ become files of the site, so that the links of the pages reach them."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.*")):
        uri = path.relative_to(ROOT).as_posix()
        # Tables as text: as pages they would have no place in the navigation.
        files.append(File.generated(config, re.sub(r"\.md$", ".txt", uri), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrites links out of ``docs/`` to ``benchmarks/``, which is outside the site, and the marks of blocks that no test runs.

    A fence with a second word is none for the site, and the page would end in its code.
    """
    markdown = markdown.replace("```python no-run\n", "```python\n")
    return re.sub(r"\]\(\.\./((?:\.\./)?benchmarks/[^)]*?)(\.md)?\)", lambda m: f"]({m[1]}{'.txt' if m[2] else ''})", markdown)
