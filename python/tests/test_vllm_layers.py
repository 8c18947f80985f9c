"""Layers of vLLM with compressed weights, on one and on two ranks: those of the BF16 layers."""

import json
import socket
from pathlib import Path

import pytest
import torch
import vllm_layers
from torch import multiprocessing
from weights import container_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="vLLM chooses kernels for GPUs; test_vllm_gpu.py has the layers",
)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(container_of(vllm_layers.checkpoint(), tmp_path_factory.mktemp("layers")).path)


RANKS = {"one": (1, False), "two": (2, False), "experts apart": (2, True)}


@pytest.fixture(scope="module", params=RANKS)
def failures(
    request: pytest.FixtureRequest, container: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path_factory.mktemp("ranks")
    world, is_apart = RANKS[request.param]
    arguments = (world, port, str(container), str(out), is_apart)
    # Forks, as importing vLLM takes longer than all cases.
    multiprocessing.start_processes(
        vllm_layers.on_rank, arguments, nprocs=world, start_method="fork"
    )
    found: dict[str, str] = {}
    for file in sorted(out.iterdir()):
        found |= json.loads(file.read_text())
    assert len(list(out.iterdir())) == world
    return found


@pytest.mark.parametrize("case", vllm_layers.CASES)
def test_layers(failures: dict[str, str], case: str) -> None:
    if case == "experts" and not hasattr(torch.ops._C, "silu_and_mul"):
        pytest.skip("this build of vLLM has no activation of experts for CPUs")
    assert failures.get(case) is None, failures[case]


def test_numbers_of_tokens_share_configurations() -> None:
    """Those of vLLM's kernel of experts, each of which fixes an order of sums: few are measured."""
    from df11.vllm._grouped import _configuration  # which needs vLLM's kernel

    shapes = (128, 1536, 2048), (128, 2048, 768)
    found = {_configuration(*shapes, 8, None, tokens) for tokens in range(1, 4097)}
    assert 1 < len(found) < 16
    assert all(dict(one)["BLOCK_SIZE_M"] > 0 for one in found)
