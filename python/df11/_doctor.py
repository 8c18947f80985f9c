"""What `df11 doctor` tells of Python: `python -m df11._doctor` prints it as JSON.

Versions are read from the metadata of what is installed; nothing large is imported.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

from . import __version__
from ._versions import untested, within

#: What the libraries are told of in.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "diffusers", "vllm")


def told() -> dict[str, object]:
    """Text, value and remedy, which is empty if every release is one that is tested."""
    found = {name: release for name in _LIBRARIES if (release := _release(name))}
    others = {name: told for name in found if (told := untested(name, found[name]))}
    known = [f"df11 {__version__}", *(f"{name} {release}" for name, release in found.items())]
    text = f"{platform.python_version()} with {', '.join(known)}"
    if others:
        text += f"; {'; '.join(others.values())}"
    elif found:
        text += "; each is a release that is tested"
    wanted = " ".join(f"'{name}{within(name)}'" for name in others)
    value = {"python": platform.python_version(), "df11": __version__, "libraries": found}
    return {
        "text": text,
        "value": {**value, "untested": sorted(others)},
        "remedy": f"it may work; what is tested: pip install {wanted}" if others else "",
    }


def _release(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(told()))
