"""What mkdocs is told beside mkdocs.yml: pages from outside docs/, and links that lead there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Markdown and notebooks of other folders, pages here under the same paths.
PAGES = ("CHANGELOG.md", "benchmarks/README.md", "benchmarks/RESULTS.md")
_LINK = re.compile(r"(\[[^\]]*\])\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


@event_priority(100)  # before the plug-in that renders notebooks sees the list
def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside, and one for each file that a page links to."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in (*PAGES, *(str(file.relative_to(ROOT)) for file in notebooks)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    for source in sorted({target for page in files for target in _sources(page)}):
        text = f"# `{source}`\n\n````\n{(ROOT / source).read_text()}\n````\n"
        files.append(File.generated(config, f"files/{source}.md", content=text))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Notebooks: links to pages, and a badge for Colab where the project's address is known."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def replaced(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1]).removeprefix("docs/")
        file = files.get_file_from_path(target)
        return f'href="{file.url_relative_to(page.file)}{match[2]}"' if file else match[0]

    html = re.sub(r'href="([\w./]+\.(?:md|ipynb))((?:#[^"]*)?)"', replaced, html)
    address = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(?:\.git)?/?", config.repo_url or "")
    if address is None:
        return html
    link = f"https://colab.research.google.com/github/{address[1]}/blob/main/{page.file.src_uri}"
    return f'<p><a class="md-button colab" href="{link}">Open in Colab</a></p>\n{html}'


def _sources(page: Any) -> list[str]:
    """Files of the repository, no pages, that a page links to."""
    if not page.src_uri.endswith(".md") or page.abs_src_path is None:
        return []
    links = _LINK.findall(Path(page.abs_src_path).read_text(encoding="utf-8"))
    targets = [_target(page.src_uri, link) for _, link, _ in links]
    return [target for target in targets if _is_source(target)]


def _target(page: str, link: str) -> str:
    """A link's target by its path in the repository."""
    folder = (ROOT if (ROOT / page).exists() else ROOT / "docs") / Path(page).parent
    target = (folder / link).resolve()
    return str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else ""


def _is_source(target: str) -> bool:
    path = ROOT / target
    return bool(target) and path.is_file() and path.suffix not in (".md", ".svg", ".ipynb")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that lead out of docs/ lead to the pages that are made of their targets."""
    depth = page.file.src_uri.count("/")

    def replaced(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = _target(page.file.src_uri, link)
        up = "../" * depth
        if target in PAGES or target.endswith(".ipynb"):
            return f"{text}({up}{target}{anchor})"
        if target.startswith("docs/") and target.endswith((".md", ".svg")):
            return f"{text}({up}{target.removeprefix('docs/')}{anchor})"
        if _is_source(target):
            return f"{text}({up}files/{target}.md)"
        return text[1:-1]  # a folder, or a page that is not here: its name alone

    return _LINK.sub(replaced, markdown)
