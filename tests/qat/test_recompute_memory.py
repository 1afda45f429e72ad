"""Peak memory of a step that computes activations again, counted without a GPU: storages of tensors without data."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4deploy.models import build_unet
from fp4deploy.plugins.quantize import channels_last as channels_last  # defines the operators
from fp4deploy.qat import fused_unet
from fp4deploy.qat.operators.recompute import recomputing

IMAGE = (16, 352, 480)  # N, H, W


class Storages(TorchDispatchMode):
    """Bytes of the storages that operators make, as long as anything refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self._live:
                self._add(each.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_backward_needs_one_feature_map_more_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the first level's last activation; all else is written over what was kept, or freed before."""
    monkeypatch.setattr(fused_unet, "_compute_dtype", lambda x: torch.float16)
    n, h, w = IMAGE
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = fused_unet.fuse_unet(build_unet(12, 1.0).train())
        images = torch.empty(n, 3, h, w, dtype=torch.float16).to(memory_format=torch.channels_last)
        with Storages() as storages:
            with recomputing():
                logits = model._fused(images)
            kept, forward = storages.now, storages.peak
            logits.backward(torch.empty_like(logits))
    feature_map = 2 * n * h * w * 64
    # the forward: while the last concatenation is convolved, its two maps and the result
    assert forward < kept + 1.5 * feature_map
    assert storages.peak < kept + 1.5 * feature_map
