"""Detection of useful bfloat16."""

from __future__ import annotations

import pytest
import torch

from mmspec.cpu import bf16


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_accelerators_use_bfloat16(device: str) -> None:
    assert bf16.bf16_is_faster(torch.device(device))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("faster", [True, False])
def test_a_cpu_uses_bfloat16_only_if_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert bf16._fastest_type() in ("float32", "bfloat16")
    monkeypatch.setattr(bf16, "_fastest_type", lambda: "bfloat16" if faster else "float32")
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert bf16.bf16_is_faster(cpu) == (native and faster)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not bf16.bf16_is_faster(cpu), "a torch without oneDNN has no bfloat16 products"
