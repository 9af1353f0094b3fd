"""The arguments of a layer call: what the host can see is checked here, before any launch."""

from __future__ import annotations

from operator import index
from typing import NoReturn

import torch
from torch import bfloat16, float8_e4m3fn, float32, int32, int64

from megagen.contract import SF_BLOCK, Contract
from megagen.errors import InputError

ROW_ALIGN = 16  # bytes; rows are read 16 bytes at a time

RawInputs = tuple[int, int, int, int, int, bool, bool]
"""A call's inputs as the companion kernel takes them: addresses of x, its scale factors (or 0), topk_ids and
topk_weights; bytes from one row of x to the next; whether ids are int64; whether weights are bfloat16."""


class ArgumentCheck:
    """Checks the arguments of calls against one contract on one device.

    The checks are flat comparisons that read each attribute once, since they are a part of every call's host
    time (reading one takes 50-100 ns); what is wrong is put into words only once something is.
    """

    def __init__(self, contract: Contract, device: torch.device) -> None:
        self._hidden, self._top_k = contract.shape.hidden, contract.shape.top_k
        self._max_tokens = contract.max_tokens
        self._sf_dtype = float32 if contract.format == "fp8_block" else int32
        self._device = device

    def inputs(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[int, RawInputs]:
        """T of a call, and its inputs as the companion kernel takes them.

        Raises:
            InputError: names the argument that does not fit.
        """
        device, sf_address = self._device, 0
        try:
            shape = x.shape
            if (
                len(shape) != 2
                or shape[1] != self._hidden
                or x.dtype is not (bfloat16 if x_sf is None else float8_e4m3fn)
                or x.device != device
            ):
                self._explain_x(x, x_sf)
            tokens, address = shape[0], x.data_ptr()
            row, column = x.stride()
            row_bytes = 2 * row if x_sf is None else row
            if tokens > self._max_tokens:
                raise InputError(
                    f"x has {tokens} tokens, the buffer holds max_tokens={self._max_tokens}; split the batch "
                    "or make a larger buffer"
                )
            # From one row to the next may be anything if there is one only.
            if tokens and (address % ROW_ALIGN or column != 1 or (row_bytes % ROW_ALIGN and tokens > 1)):
                raise InputError(
                    f"x has strides {x.stride()} and starts at {address:#x}; rows must be contiguous "
                    f"and start at multiples of {ROW_ALIGN} bytes: give x.contiguous()"
                )
            pairs = (tokens, self._top_k)
            ids_type = topk_ids.dtype
            if (
                topk_ids.shape != pairs
                or (ids_type is not int64 and ids_type is not int32)
                or topk_ids.device != device
                or not topk_ids.is_contiguous()
            ):
                self._explain("topk_ids", topk_ids, pairs, (int32, int64))
            weights_type = topk_weights.dtype
            if (
                topk_weights.shape != pairs
                or (weights_type is not float32 and weights_type is not bfloat16)
                or topk_weights.device != device
                or not topk_weights.is_contiguous()
            ):
                self._explain("topk_weights", topk_weights, pairs, (float32, bfloat16))
            if x_sf is not None:
                groups = (tokens, self._hidden // SF_BLOCK)
                if (
                    x_sf.shape != groups
                    or x_sf.dtype is not self._sf_dtype
                    or x_sf.device != device
                    or not x_sf.is_contiguous()
                ):
                    self._explain("x's scale factors", x_sf, groups, (self._sf_dtype,))
                sf_address = x_sf.data_ptr()
        except AttributeError:
            for name, value in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
                _require_tensor(name, value)
            if x_sf is not None:
                _require_tensor("x's scale factors", x_sf)
            raise
        ids, weights = topk_ids.data_ptr(), topk_weights.data_ptr()
        return tokens, (
            address,
            sf_address,
            ids,
            weights,
            row_bytes,
            ids_type is int64,
            weights_type is bfloat16,
        )

    def output(self, out: torch.Tensor, tokens: int) -> None:
        """InputError unless ``out`` can take the result."""
        shape = (tokens, self._hidden)
        if (
            not isinstance(out, torch.Tensor)
            or out.shape != shape
            or out.dtype is not bfloat16
            or out.device != self._device
            or not out.is_contiguous()
            or out.data_ptr() % ROW_ALIGN
        ):
            self._explain("out", out, shape, (bfloat16,))

    def count(self, num_tokens: int | torch.Tensor, tokens: int) -> tuple[int, int]:
        """(num_tokens, address of a device count or 0) as kernels take them.

        Raises:
            InputError: no whole number within the rows of x, or a tensor that is no int32 on the device.
        """
        if isinstance(num_tokens, torch.Tensor):
            if num_tokens.numel() != 1 or num_tokens.dtype is not int32:
                self._explain("num_tokens", num_tokens, (1,), (int32,))
            if num_tokens.device != self._device:
                self._explain("num_tokens", num_tokens, tuple(num_tokens.shape), (int32,))
            return tokens, num_tokens.data_ptr()
        try:
            count = index(num_tokens)
        except TypeError as error:
            raise InputError(
                f"num_tokens={num_tokens!r} is a {type(num_tokens).__name__}; give an int, or an int32 on "
                f"{self._device}"
            ) from error
        if not 0 <= count <= tokens:
            raise InputError(f"num_tokens={count} is not within 0 and the {tokens} rows of x")
        return count, 0

    def _explain_x(self, x: torch.Tensor, x_sf: torch.Tensor | None) -> NoReturn:
        _require_tensor("x", x)
        if x_sf is None and x.dtype is float8_e4m3fn:
            raise InputError(f"x has dtype {x.dtype} but no scale factors; give x=(values, scale factors)")
        dtype = bfloat16 if x_sf is None else float8_e4m3fn
        self._explain("x", x, ("T", self._hidden), (dtype,))

    def _explain(
        self, name: str, tensor: torch.Tensor, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...]
    ) -> NoReturn:
        """Say in what a tensor differs from what is wanted."""
        _require_tensor(name, tensor)
        wanted = f"[{', '.join(map(str, shape))}]"
        if tensor.device != self._device:
            raise InputError(f"{name} is on {tensor.device}, the layer on {self._device}; move it there")
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            given = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{name} has dtype {given}; convert it to {allowed}")
        if tuple(tensor.shape) != shape and not (shape[0] == "T" and tuple(tensor.shape[1:]) == shape[1:]):
            raise InputError(f"{name} has shape {list(tensor.shape)}; this layer needs {wanted}")
        raise InputError(
            f"{name} {wanted} has strides {tensor.stride()} and starts at {tensor.data_ptr():#x}; it must be "
            f"contiguous and start at a multiple of {ROW_ALIGN} bytes: give {name}.contiguous()"
        )


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; give a torch.Tensor")
