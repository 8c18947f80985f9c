"""The releases of libraries that df11 is tested with, and what to say about others."""

from __future__ import annotations

#: The oldest and the newest release that `python/check` runs the tests with.
TESTED = {"transformers": ("5.17", "5.23"), "diffusers": ("0.40", "0.42")}


def mismatch(library: str, version: str, lacking: str) -> str:
    """What to say where a release lacks something: too old, too new, or neither. `lacking`: what it
    lacks.
    """
    first, last = TESTED[library]
    oldest, newest = _numbers(first), _numbers(last)
    found = _numbers(version)
    said = f"{library} {version}"
    tested = f"df11 is tested with {first} to {last}"
    within = f"pip install '{library}>={first},<{newest[0]}.{newest[1] + 1}'"
    if found < oldest:
        return f"{said} is too old for df11: it lacks {lacking}; {tested}: {within}"
    if found > newest:
        within = f"pip install -U df11, or {within}"
        return f"{said} is too new for this df11: it lacks {lacking}; {tested}: {within}"
    said = f"{said} is not as it was released"
    return f"{said}: it lacks {lacking}; {tested}: {within} --force-reinstall"


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor number of a release, a development version included."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
