"""The library releases with which df11 is tested, and messages about others.

`python -m df11._doctor` prints the Python part of `df11 doctor` as JSON. It reads versions from the
metadata of installed packages, and imports nothing large.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
from importlib import metadata

from ._native import __version__

#: The oldest and the newest release with which `python/check` has run the tests. The extras of the
#: package require the oldest and set no upper bound, because newer releases usually work. A release
#: that is known not to work goes into the extras as `!=`.
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "diffusers": ("0.40", "0.42"),
    "vllm": ("0.26", "0.33"),
}
_logged: set[str] = set()


def within(library: str) -> str:
    oldest, newest = TESTED[library]
    major, minor = _numbers(newest)
    return f">={oldest},<{major}.{minor + 1}"


def is_newer(library: str, version: str) -> bool:
    return _numbers(version) > _numbers(TESTED[library][1])


def untested(library: str, version: str) -> str | None:
    oldest, newest = TESTED[library]
    if _numbers(version) < _numbers(oldest):
        return f"{library} {version} is older than {oldest}, the oldest release that was tested"
    if is_newer(library, version):
        return f"{library} {version} is newer than {newest}, the newest release that was tested"
    return None


def log_newer() -> None:
    """Logs one line if imported libraries are newer than the tested releases, once for each
    library. df11 calls it when it first uses a library.
    """
    found = {name: _imported(name) for name in TESTED if name not in _logged}
    newer = {name: version for name, version in found.items() if is_newer(name, version or "0.0")}
    _logged.update(newer)
    if newer:
        messages = "; ".join(str(untested(name, str(version))) for name, version in newer.items())
        logging.getLogger("df11").warning("df11 %s: %s", __version__, messages)


def _imported(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__version__", None)


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
    """Major and minor; zeros for a version without numbers, such as a checkout's."""
    major, minor = re.findall(r"\d+", f"{version.partition('+')[0]}.0.0")[:2]
    return int(major), int(minor)


def report() -> dict[str, object]:
    """Text, value and remedy; the remedy is empty if every release is tested."""
    installed = {name: release for name in TESTED if (release := _release(name))}
    others = {name: message for name in installed if (message := untested(name, installed[name]))}
    known = [f"df11 {__version__}", *(f"{name} {release}" for name, release in installed.items())]
    text = f"{platform.python_version()} with {', '.join(known)}"
    if others:
        text += f"; {'; '.join(others.values())}"
    elif installed:
        text += "; all of these releases are tested"
    wanted = " ".join(f"'{name}{within(name)}'" for name in others)
    remedy = f"it may work; if not, install a tested release: pip install {wanted}"
    value = {"python": platform.python_version(), "df11": __version__, "libraries": installed}
    return {
        "text": text,
        "value": {**value, "untested": sorted(others)},
        "remedy": remedy if others else "",
    }


def _release(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(report()))
