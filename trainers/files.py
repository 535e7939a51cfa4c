"""Files that are replaced whole: what was there stays until all that comes in its place is on disk."""

from __future__ import annotations

from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) aside, then rename it to `path`; an OSError leaves `path` as it was."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
