"""Whether modules are still what they were (`mmspec.engine.revision`), and what knowing it leaves possible."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mmspec.engine.revision import Revision


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_weights_can_be_moved(dtype: torch.dtype) -> None:
    """`module.to` swaps tensors of classes of their own, as torchao's; weak references to them would refuse that."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    revision = Revision([layer])
    assert revision.is_current()
    layer.to(dtype)
    assert layer.weight.dtype == dtype and isinstance(layer.weight, TwoTensor) and not revision.is_current()
    revision = Revision([layer])
    assert revision.is_current()
    layer.weight = nn.Parameter(TwoTensor(layer.weight.a.clone(), layer.weight.b.clone()))
    assert not revision.is_current()
