"""Makes one site of docs/, of the README and the files beside it, and of each file or folder that these link to.

Links in the repository are relative and may leave docs/. This hook makes each point to the page of the same file.
"""

import os
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"(\]\(|\bsrc=\")([^)\s\"#]+)(#[^)\s\"]*)?(?=[)\"\s])")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".py": "python", ".yaml": "yaml", ".sh": "bash", ".txt": "cmake"}
TOP = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]

origins = {}  # path of a page in the site: the file or folder in the repository


def page_of(path):
    """The path in the site of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path in TOP or path.endswith((".md", ".png", ".svg", ".json")) and path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "repository/" + path + ("" if path.endswith(".md") else ".md")


def target_of(origin, link):
    """The path in the repository that a link leads to, or None."""
    if re.match(r"[a-z]+:", link):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(origin), link))
    return path if (ROOT / path).exists() else None


def block(path):
    language = LANGUAGES.get(path.suffix, "")
    return f"````{language}\n{path.read_text()}\n````\n"


def text_of(origin):
    path = ROOT / origin
    if path.is_dir():
        parts = [f"# {origin}\n"]
        readme = path / "README.md"
        if readme.exists():
            parts.append(readme.read_text())
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix in LANGUAGES:
                parts.append(f"## {file.relative_to(path)}\n\n{block(file)}")
        return "\n".join(parts)
    return path.read_text() if path.suffix == ".md" else f"# {origin}\n\n{block(path)}"


def on_files(files, config):
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + TOP
    seen = set()
    while pending:
        origin = pending.pop()
        if origin in seen:
            continue
        seen.add(origin)
        site_path = page_of(origin)
        origins[site_path] = origin
        text = text_of(origin)
        if not files.get_file_from_path(site_path):
            files.append(File.generated(config, site_path, content=text))
        if origin.endswith(".md"):
            targets = (target_of(origin, link) for _, link, _ in LINK.findall(text))
            pending += [path for path in targets if path and page_of(path).endswith(".md")]
    # scripts/docs adds doxygen's pages beside this one.
    files.append(File.generated(config, "api.md", content="# API\n\n<a href=\"api/index.html\">The public headers</a>\n"))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    origin = origins.get(here, here)
    if not origin.endswith(".md"):
        page.meta["search"] = {"exclude": True}
        return markdown

    def rewrite(match):
        before, link, anchor = match.groups()
        path = target_of(origin, link)
        if path is None:
            return match.group()
        return before + os.path.relpath(page_of(path), os.path.dirname(here) or ".") + (anchor or "")

    return LINK.sub(rewrite, markdown)
