"""What users choose of the plugin, by `--model-loader-extra-config`."""

from __future__ import annotations

from typing import Any

#: Options with their values; the first is the default.
OPTIONS = {"mode": ("fused", "exact"), "residence": ("auto", "fast", "stored")}


class Options:
    """The options of a model, which its layers share."""

    def __init__(self) -> None:
        self.mode, self.residence = (values[0] for values in OPTIONS.values())

    @property
    def exact(self) -> bool:
        """Whether products have the bits of the BF16 model."""
        return self.mode == "exact"

    def choose(self, options: dict[str, Any]) -> None:
        """Takes over options that a user named.

        # Errors
        `ValueError` for a value that an option does not have.
        """
        for name, value in options.items():
            if value not in OPTIONS[name]:
                known = ", ".join(OPTIONS[name])
                raise ValueError(
                    f"--model-loader-extra-config: {name}={value!r} is unknown; choose one of "
                    f"{known}"
                )
            setattr(self, name, value)
