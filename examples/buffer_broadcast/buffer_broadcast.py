"""The experiment of buffer_broadcast.cpp in PyTorch: the same numbers, but for the part with
SyncBatchNorm (PyTorch's takes no CPU tensors) and the unused forward (an in-place error in 2.11).

    syncbn-launch --standalone --nproc_per_node=2 buffer_broadcast.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(5)
        self.seen = []

    def forward(self, images):
        self.seen.append(self.batch_norm.running_mean.clone())
        features = self.conv(images)
        self.batch_mean = features.detach().mean((0, 2, 3))
        return self.batch_norm(features).sum()


def images():
    return torch.full((7, 3, 5, 5), float(dist.get_rank() % 2))


def print_on_ranks(what, values):
    everyones = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, values)
    if dist.get_rank() > 0:
        return
    for rank, theirs in enumerate(everyones):
        label = what if rank == 0 else ""
        print(f"  {label:<29}rank {rank}" + "".join(f"{value:9.4f}" for value in theirs.tolist()))


def run(broadcast_buffers):
    if dist.get_rank() == 0:
        print(f"broadcast_buffers = {str(broadcast_buffers).lower()}")
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, broadcast_buffers=broadcast_buffers)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    loss = ddp(images()).square().mean()
    after_forward = net.batch_norm.running_mean.clone()
    loss.backward()
    after_backward = net.batch_norm.running_mean.clone()
    optimizer.step()
    batch_mean = net.batch_mean
    ddp(images())

    print_on_ranks("mean of the first batch", batch_mean)
    print_on_ranks("inside the first forward", net.seen[0])
    print_on_ranks("after the first forward", after_forward)
    print_on_ranks("after backward", after_backward)
    print_on_ranks("inside the second forward", net.seen[1])
    print_on_ranks("after the second forward", net.batch_norm.running_mean)


def run_with_unused_forward():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    loss = ddp(images()).square().mean()
    ddp(images())  # overwrites the buffers, although its result is not used
    try:
        loss.backward()
        said = "works"
    except RuntimeError as error:
        said = str(error).split(":")[0]
    if dist.get_rank() == 0:
        print(f"an unused forward before the backward: {said}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(broadcast_buffers=True)
    run(broadcast_buffers=False)
    run_with_unused_forward()
    dist.destroy_process_group()
