"""The releases of libraries that df11 is tested with, and what to say about others."""

from __future__ import annotations

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
