"""The releases of libraries that df11 is tested with, and what to say about others.

`python -m df11._doctor` prints as JSON what `df11 doctor` tells of Python. Versions are read from
the metadata of what is installed; nothing large is imported.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

from . import __version__

#: The oldest and the newest release that `python/check` runs the tests with.
TESTED = {"transformers": ("5.17", "5.23"), "diffusers": ("0.40", "0.42")}
#: Others that the tests run with: PyTorch 2.11, and 2.13 with the newest vLLM. With those above
#: they are the extras of the package.
OTHERS = {
    "torch": ("2.11", "2.13"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "vllm": ("0.26", "0.32"),
}
#: What the libraries are told of in.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "diffusers", "vllm")


def within(library: str) -> str:
    """The tested releases as pip takes them: `>=5.17,<5.24`."""
    oldest, newest = (TESTED | OTHERS)[library]
    major, minor = _numbers(newest)
    return f">={oldest},<{major}.{minor + 1}"


def untested(library: str, version: str) -> str | None:
    """What to say of a release that the tests do not run with; None of one that they do."""
    oldest, newest = (TESTED | OTHERS)[library]
    if _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        return None
    span = oldest if oldest == newest else f"{oldest} to {newest}"
    return f"{library} {version} is not one of the tested releases, {span}"


def mismatch(library: str, version: str, lacking: str) -> str:
    """What to say if a release lacks something: too old, too new, or neither. `lacking`: what it
    lacks.
    """
    first, last = TESTED[library]
    oldest, newest = _numbers(first), _numbers(last)
    found = _numbers(version)
    said = f"{library} {version}"
    tested = f"df11 is tested with {first} to {last}"
    install = f"pip install '{library}{within(library)}'"
    if found < oldest:
        return f"{said} is too old for df11: it lacks {lacking}; {tested}: {install}"
    if found > newest:
        install = f"pip install -U df11, or {install}"
        return f"{said} is too new for this df11: it lacks {lacking}; {tested}: {install}"
    said = f"{said} is not as it was released"
    return f"{said}: it lacks {lacking}; {tested}: {install} --force-reinstall"


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor number of a release, a development version included."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


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
