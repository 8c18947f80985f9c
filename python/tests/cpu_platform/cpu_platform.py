"""Names the CPU to a build of vLLM for GPUs, which finds no platform on a machine without one."""


def name() -> str:
    return "vllm.platforms.cpu.CpuPlatform"
