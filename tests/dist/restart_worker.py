"""Does the same as restart_worker.cpp, with the backend syncbn of Python's torch.distributed."""

import os
import sys

import torch
import torch.distributed as dist

import syncbn  # noqa: F401

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if os.environ["FAILS"] == os.environ["RANK"] else 2
if attempt == 1:
    os._exit(8)
dist.init_process_group("syncbn")
total = torch.ones(3)
dist.all_reduce(total)
if attempt == 0:
    os._exit(7)
dist.all_reduce(total)
# print() under torchrun's `python -u` writes the line and its end apart: ranks' lines would mix.
sys.stdout.write(f"rank {dist.get_rank()}: sum {total[0]:.0f}\n")
sys.stdout.flush()
dist.destroy_process_group()
