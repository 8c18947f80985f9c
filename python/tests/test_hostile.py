"""Arguments of every kind for operators, files that lie, and memory that is asked for: in processes
of their own (`hostile.py`), which must not crash.
"""

import tempfile
from typing import Any

import pytest
import torch
from conftest import run
from weights import WEIGHTS, compressed, same

import df11
from df11._tensor import rebuild


def apart(call: str) -> None:
    """Runs a function of `hostile` in a process of its own."""
    script = f"import faulthandler; faulthandler.enable(); import hostile; hostile.{call}"
    with tempfile.NamedTemporaryFile("r") as last:
        try:
            run(script, SAID=last.name)
        except AssertionError as error:
            raise AssertionError(f"the last that was tried: {last.read()[:2000]}") from error


@pytest.mark.parametrize("what", ["operators", "layouts", "routes", "memory"])
def test_nothing_crashes_and_all_is_refused_or_right(what: str) -> None:
    apart(f"{what}()")


@pytest.mark.parametrize("columns", [0, -1])
def test_attributes_that_lie_are_refused(columns: int) -> None:
    """Parts from a file, too: a matrix without columns has no windows."""
    tensor = compressed("q")
    tensor.matrix_shape = 128, columns
    assert same(tensor[1:3], WEIGHTS["q"][1:3])


@pytest.mark.parametrize("seed", range(3))
def test_files_that_lie_are_refused_or_decoded(seed: int) -> None:
    apart(f"files({seed}, 400)")


def test_what_a_file_says_is_checked() -> None:
    arrays, told, _ = compressed("q").__reduce_ex__(2)[1]
    assert same(rebuild(arrays, told), WEIGHTS["q"])
    part = told["parts"][0]

    def refused(error: Any, match: str, arrays: Any = arrays, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            rebuild(arrays, {**told, **changes})

    refused(ValueError, "names", more=1)
    refused(TypeError, "whole numbers", shape=[128.0, 256])
    refused(TypeError, "whole numbers", shape=[True, 256 * 128])
    refused(TypeError, "a list was kept", shape=128)
    refused(ValueError, "no compressed tensor", shape=[-128, -256])
    refused(ValueError, "no compressed tensor", exact=1)
    refused(ValueError, "8 numbers", parts=[part[:7]])
    refused(ValueError, "kind of a part", parts=[[-1, *part[1:]]])
    refused(ValueError, "kind of a part", parts=[])
    refused(ValueError, "staged bytes", parts=[[*part[:3], -1, *part[4:]]])
    refused(ValueError, "4 arrays", arrays=arrays[:3])
    refused(ValueError, "one device", arrays=[*arrays[:3], arrays[3].to("meta")])
    refused(TypeError, "uint8", arrays=[*arrays[:3], arrays[3].view(torch.int8)])
    refused(TypeError, "tensors", arrays=[*arrays[:3], 7])
    refused(df11.ParameterError, "arrays of", arrays=[*arrays[:3], arrays[3][:-1]])
    refused(ValueError, "weights", parts=[[*part[:1], 2**40, 2**40, 0, 0, 128, 0, 256]])
