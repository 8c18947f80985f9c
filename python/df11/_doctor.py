"""The releases of libraries that df11 is tested with, and what to say about others.

`python -m df11._doctor` prints as JSON what `df11 doctor` tells of Python. Versions are read from
the metadata of what is installed; nothing large is imported.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

from . import __version__

#: The oldest and the newest release that `python/check` runs the tests with (PyTorch 2.13 with the
#: newest vLLM alone). They are the extras of the package.
TESTED = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.23"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "diffusers": ("0.40", "0.42"),
    "vllm": ("0.26", "0.32"),
}


def within(library: str) -> str:
    oldest, newest = TESTED[library]
    major, minor = _numbers(newest)
    return f">={oldest},<{major}.{minor + 1}"


def untested(library: str, version: str) -> str | None:
    oldest, newest = TESTED[library]
    if _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        return None
    span = oldest if oldest == newest else f"{oldest} to {newest}"
    return f"{library} {version} is not one of the tested releases, {span}"


def mismatch(library: str, version: str, lacking: str) -> str:
    oldest, newest = TESTED[library]
    install = f"pip install '{library}{within(library)}'"
    if _numbers(version) < _numbers(oldest):
        what = "is too old for df11"
    elif _numbers(version) > _numbers(newest):
        what, install = "is too new for this df11", f"pip install -U df11, or {install}"
    else:
        what, install = "is not as it was released", f"{install} --force-reinstall"
    tested = f"df11 is tested with {oldest} to {newest}"
    return f"{library} {version} {what}: it lacks {lacking}; {tested}: {install}"


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def told() -> dict[str, object]:
    """Text, value and remedy, which is empty if every release is one that is tested."""
    found = {name: release for name in TESTED if (release := _release(name))}
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
