#!/usr/bin/env python3
"""Products of routed experts by PyTorch in BF16, beside `linear_bench bench`.

Medians in microseconds, in CUDA graphs:

python3 kernels/bench/linear_peers.py
"""

import statistics

import torch

EXPERTS, ROUTED, SETS = 128, 8, 12


def routed(batch: int, turn: int) -> list[list[int]]:
    """The rows of x that each expert takes, by the rule of linear_bench.cu."""
    rows: list[list[int]] = [[] for _ in range(EXPERTS)]
    for b in range(batch):
        for k in range(ROUTED):
            rows[((turn * 8 + k) * 5 + b * 13 + (b * b * 7 + turn) % 11 * 16) % EXPERTS].append(b)
    return rows


def measure(launches: list) -> float:
    """Microseconds per launch; the launches take turns."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[1:])


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for rows, columns in ((1536, 2048), (2048, 768)):
        weights = torch.randn(EXPERTS, rows, columns, device="cuda", dtype=torch.bfloat16)
        for batch in (1, 8, 64):
            x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
            each, grouped = [], []
            for turn in range(SETS):
                of = routed(batch, turn)
                index = torch.tensor([b for e in of for b in e], device="cuda")
                used = [(e, torch.tensor(b, device="cuda")) for e, b in enumerate(of) if b]
                ends = torch.tensor([len(e) for e in of], device="cuda").cumsum(0).to(torch.int32)

                def per_expert(used=used, x=x, weights=weights):
                    for expert, of_expert in used:
                        torch.nn.functional.linear(x[of_expert], weights[expert])

                def at_once(index=index, ends=ends, x=x, weights=weights):
                    torch._grouped_mm(x[index], weights.transpose(1, 2), ends)

                each.append(per_expert)
                grouped.append(at_once)
            for name, launches in (("per expert", each), ("grouped", grouped)):
                try:
                    print(f"{rows}x{columns}, batch {batch}, {name}: {measure(launches):.2f} us")
                except RuntimeError as error:
                    print(f"{rows}x{columns}, batch {batch}, {name}: {str(error)[:100]}")


if __name__ == "__main__":
    main()
