"""The releases of transformers that df11 is tested with, and what to say about others."""

from __future__ import annotations

#: The oldest and the newest release that `python/check` runs the tests with.
TESTED = ("5.17", "5.23")


def mismatch(version: str, lacking: str) -> str:
    """What to say where a release lacks something: too old, too new, or neither. `lacking`: what it
    lacks.
    """
    oldest, newest = (_numbers(one) for one in TESTED)
    found = _numbers(version)
    said = f"transformers {version}"
    tested = f"df11 is tested with {TESTED[0]} to {TESTED[1]}"
    within = f"pip install 'transformers>={TESTED[0]},<{newest[0]}.{newest[1] + 1}'"
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
