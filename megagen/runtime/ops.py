"""The layer as a torch operator, so that ``torch.compile`` takes a call as one opaque step."""

import weakref
from itertools import count
from typing import Any

import torch

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = count()


def register(layer: Any) -> int:
    """A number that stands for the layer in compiled graphs as long as it lives."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def forward(
    handle: int,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None,
    num_tokens: int | torch.Tensor | None,
) -> torch.Tensor:
    """A layer call through the operator."""
    values, x_sf = x if isinstance(x, tuple) else (x, None)
    is_tensor = isinstance(num_tokens, torch.Tensor)
    on_device, on_host = (num_tokens, None) if is_tensor else (None, num_tokens)
    result = moe_forward(values, x_sf, topk_ids, topk_weights, on_device, on_host, handle)
    return result if out is None else out.copy_(result)


@torch.library.custom_op("megagen::moe_forward", mutates_args=())
def moe_forward(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    device_num_tokens: torch.Tensor | None,
    num_tokens: int | None,
    layer: int,
) -> torch.Tensor:
    """bfloat16 [T, H] = the call of the layer that is registered as ``layer``."""
    tokens = x if x_sf is None else (x, x_sf)
    limit = num_tokens if device_num_tokens is None else device_num_tokens
    return _layers[layer](tokens, topk_ids, topk_weights, None, limit)


@moe_forward.register_fake
def _(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    device_num_tokens: torch.Tensor | None,
    num_tokens: int | None,
    layer: int,
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
