"""What the site has beside the pages of docs/: the lessons, and the changelog."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from anybatch.app.lessons.pages.lesson_page import write_learn_site

ROOT = Path(__file__).parent.parent.parent


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    changelog = re.sub(r"\]\(docs/", "](", (ROOT / "CHANGELOG.md").read_text())
    files.append(File.generated(config, "changelog.md", content=changelog))
    with TemporaryDirectory() as folder:
        write_learn_site(Path(folder))
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                name = f"lessons/{path.relative_to(folder).as_posix()}"
                files.append(File.generated(config, name, content=path.read_bytes()))
    return files
