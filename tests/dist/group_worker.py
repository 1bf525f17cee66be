"""Does the same as group_worker.cpp with Python's torch.distributed: group_worker.py [init_method]."""

import os
import sys

import torch
import torch.distributed as dist

backend = os.environ.get("WORKER_BACKEND", "gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    **({"backend": backend} if backend else {}),
    **({"init_method": sys.argv[1], "rank": rank, "world_size": world_size} if sys.argv[1:] else {}),
)
total = torch.full((5,), rank + 1.0)
dist.all_reduce(total)
sent = torch.full((2, 2), 10.0 * rank)
dist.broadcast(sent, world_size - 1)
rows = [torch.empty(3) for _ in range(world_size)]
dist.all_gather(rows, torch.full((3,), float(rank)))
gathered = "".join(f" {row[0]:.0f}" for row in rows)
dist.barrier()
outer = torch.full((1,), rank + 1.0)
group = dist.new_group([0, world_size - 1])
if rank in (0, world_size - 1):
    dist.all_reduce(outer, group=group)
# print() under torchrun's `python -u` writes the line and its end apart: ranks' lines would mix.
sys.stdout.write(
    f"rank {rank}: sum {total[0]:.0f}, sent {sent[0, 0]:.0f}, gathered{gathered}, "
    f"outer {outer[0]:.0f}\n"
)
sys.stdout.flush()
for _ in range(2):
    dist.new_group([int(one) for one in os.environ["CPP_RANKS"].split()])
dist.barrier()
dist.destroy_process_group()
