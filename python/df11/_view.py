"""Parameters whose memory holds their values only while their module runs."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn

_REMEDY = (
    "they are decoded anew before each use, and their memory holds other weights meanwhile, so that the result "
    "would be lost or wrong; merge adapters into the BF16 model, change weights there, compress that, and load it"
)


class View(nn.Parameter):
    """A parameter that is a view of an arena: libraries read it as any other, and nobody writes to it.

    All views of an arena share its version counter, which PyTorch bumps at each write in place and native
    decoding does not. PyTorch's own `data` goes round the counter, and adapters are merged by
    `weight.data += …`: here `data` keeps to it, and cannot be replaced.
    """

    @property
    def data(self) -> torch.Tensor:
        """Its memory, as `detach` gives it."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module._apply` assigns what it leaves as it is.
        if value is not self:
            refuse_writes()


def refuse_writes() -> NoReturn:
    """Says what to do instead."""
    raise RuntimeError(f"compressed weights cannot be changed: {_REMEDY}")
