import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    count = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args[0] if marker.args else 1) if marker else 0
        if needed > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs that PyTorch can use"))
