"""Names the project's public address in a package, where the builder gives it.

pyproject.toml has the rest. A page of a package index cannot follow a README's relative links and
pictures. With `PROJECT_URL`, a repository's address, they become absolute, and the package names
the address; without it they stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute_links(text: str, url: str, ref: str = "HEAD") -> str:
    """A page with its relative links as absolute ones.

    Args:
        text: Markdown.
        url: of the repository, as GitHub, GitLab and Gitea lay it out.
        ref: a tag, a branch or a commit.
    """

    def replace(match: re.Match[str]) -> str:
        mark, words, path = match.groups()
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/{ref}/{path})"

    return LINK.sub(replace, text)


def metadata(url: str) -> dict[str, object]:
    """What depends on the address; no link where there is none."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    page = {"long_description": text, "long_description_content_type": "text/markdown"}
    if not url:
        return {**page, "project_urls": {}}
    urls = {"Source": url, "Documentation": f"{url}/tree/HEAD/docs", "Issues": f"{url}/issues"}
    return {**page, "long_description": absolute_links(text, url), "project_urls": urls}


if __name__ == "__main__":
    from setuptools import setup  # a build has it, a test run perhaps not

    setup(**metadata(os.environ.get("PROJECT_URL", "").rstrip("/")))
