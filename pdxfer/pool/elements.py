"""Elements as a pool stores them: scaled, converted, floats of 8 bits as bytes."""

from __future__ import annotations

import torch

from pdxfer.pool.refusals import ShapeError
from pdxfer.pool.rows import stored_dtype

Scale = float | torch.Tensor | None
"""What quantised rows are multiples of."""


def storable(
    rows: torch.Tensor, scale: Scale, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`rows` as a pool of `dtype` stores them; `rows` itself stays as it is.

    A scale divides only what is still to be converted: rows of `dtype` were scaled by who made
    them. Eight-bit floats saturate instead of becoming NaN.
    """
    store = stored_dtype(str(dtype).removeprefix("torch."))
    if rows.dtype != dtype:
        if scale is not None:
            if isinstance(scale, torch.Tensor) and scale.numel() != 1:
                raise ShapeError(f"scale has {scale.numel()} values; one is for the whole tensor")
            value = scale.to(rows.device) if isinstance(scale, torch.Tensor) else scale
            rows = torch.div(rows, value).to(rows.dtype)
        if store != dtype and rows.is_floating_point():
            end = torch.finfo(dtype).max
            rows = rows.clamp(-end, end)
    converted = rows.to(device=device, dtype=dtype)
    return converted if store == dtype else converted.contiguous().view(store)
