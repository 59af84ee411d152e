"""The README and the pages of docs/ as tests see them: code, what it prints, links."""

import re
from pathlib import Path
from typing import NamedTuple

from helpers.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.M | re.S)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    prints: str  # what stands behind it as its output; "" if nothing does
    about: bool  # whether numbers in that are of one machine

    @property
    def runs(self) -> bool:
        """Whether a test runs it: else its title says why not."""
        return self.language == "python" and "not run" not in self.title


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    found = FENCE.findall(page.read_text())
    return [
        Block(
            language,
            title,
            text,
            after[2] if after[0] == "text" else "",
            after[1] != "prints",
        )
        for (language, title, text), after in zip(found, [*found[1:], ("", "", "")])
    ]


def links(page: Path) -> list[str]:
    """Relative targets of a page's links and pictures, without their anchors."""
    text = FENCE.sub("", page.read_text())
    return re.findall(r"\]\(<?(?!https?:|#|mailto:)([^)#>\s]+)", text)
