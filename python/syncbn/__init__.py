"""The c10d backend "syncbn", and SyncBatchNorm on CPUs, for PyTorch.

    import syncbn, torch.distributed as dist
    dist.init_process_group("syncbn")
    model = DistributedDataParallel(syncbn.convert_sync_batchnorm(model))

docs/python.md describes its features and limits.
"""

import importlib
import os
import sys

import torch
import torch.distributed

from . import _built

if ".".join(torch.__version__.split(".")[:2]) != _built.TORCH:
    raise ImportError(
        f"syncbn {_built.VERSION} was built for torch {_built.TORCH}, and this is torch "
        f"{torch.__version__}; install the syncbn built for it, or build it against this torch "
        "(pip install --no-build-isolation)")

try:
    _C = importlib.import_module("syncbn._C")
except ModuleNotFoundError as error:
    if error.name != "syncbn._C":
        raise
    raise ImportError(
        f"syncbn {_built.VERSION} in {os.path.dirname(__file__)} was not built for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}; install it with this Python "
        "(pip install --no-build-isolation)") from error

from .batch_norm import SyncBatchNorm, convert_sync_batchnorm

__version__ = f"{_built.VERSION}+torch{_built.TORCH}"
__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class _Destroyer:
    """Destroys the groups together with Python's default group.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps each backend, and does not pass shutdown() on."""

    def finalize(self):
        _C.destroy_process_group()


def _create_backend(options, pg_options):
    if pg_options is not None:
        raise ValueError(f"syncbn: pg_options are not known, got {pg_options!r}")
    ranks = options.global_ranks_in_group
    if not ranks:  # the default group
        # lib/dist chooses the GPU by LOCAL_RANK, which mp.spawn does not set.
        chosen = torch.cuda.is_initialized() and "LOCAL_RANK" not in os.environ
        backend = _C.init_process_group(options.store, options.group_rank, options.group_size,
                                        options.timeout,
                                        gpu=torch.cuda.current_device() if chosen else None)
        if torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
            # What destroy_process_group() finalizes first.
            getattr(torch.distributed.distributed_c10d._world, "comms", []).append(_Destroyer())
        return backend
    if not _C.is_initialized():
        raise RuntimeError(
            "new_group: backend syncbn needs a default group of the same backend; call "
            'init_process_group("syncbn") first')
    # SyncBatchNorm's own groups have plain numbers as names.
    return _C.join_group(f"new_group {options.group_id}", ranks, options.timeout)


torch.distributed.Backend.register_backend("syncbn", _create_backend, extended_api=True,
                                           devices=["cpu", "cuda"])
