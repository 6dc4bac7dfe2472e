"""Work on a GPU: descriptors made there, small runs gathered into and scattered from one buffer.

Importing it loads no CUDA; `cuda_available` says whether there is any. Nothing here knows torch:
memory, streams and events are addresses and handles.
"""

from pdxfer.cuda.device import (
    DeviceMemory,
    Event,
    PinnedMemory,
    Stream,
    copy,
    event_reached,
    stream_wait,
    synchronize,
)
from pdxfer.cuda.library import CudaError, cuda_available, load_cuda
from pdxfer.cuda.runs import (
    DeviceOutline,
    DeviceRegions,
    DeviceRuns,
    Staging,
    descriptors,
    gather,
    scatter,
    upload_outline,
    upload_regions,
    upload_runs,
)

__all__ = [
    "CudaError",
    "DeviceMemory",
    "DeviceOutline",
    "DeviceRegions",
    "DeviceRuns",
    "Event",
    "PinnedMemory",
    "Staging",
    "Stream",
    "copy",
    "cuda_available",
    "descriptors",
    "event_reached",
    "gather",
    "load_cuda",
    "scatter",
    "stream_wait",
    "synchronize",
    "upload_outline",
    "upload_regions",
    "upload_runs",
]
