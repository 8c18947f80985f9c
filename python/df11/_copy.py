"""Containers, copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def copy_containers(container: Any, folder: Path) -> None:
    """Puts copies of all containers of a model into a folder."""
    for shard in container.shards:
        source = Path(shard["path"])
        target = folder / source.name
        if target.exists() and target.samefile(source):
            continue
        # Under its name only when it is whole.
        part = target.with_name(f".{target.name}.part")
        try:
            shutil.copyfile(source, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
