"""Trains with Python's DDP the cases that ddp_parity_worker.cpp trains with ours.

    ddp_parity.py FOLDER "net=mlp optimizer=sgd bucket_cap_mb=0.01" ...

Each argument is one case; ddp_parity_test.cpp lists them. Rank R writes the bytes of all parameters and
buffers, before the first step and after each step, to FOLDER/<number of the case>.rankR.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
FLAGS = [
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.second = nn.Linear(64, 33)
        self.third = nn.Linear(33, 7)

    def forward(self, x, route):
        return [self.third(torch.relu(self.second(torch.relu(self.first(x)))))]


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2)
        self.second_norm = nn.BatchNorm2d(12)
        self.last = nn.Linear(12, 5)

    def forward(self, x, route):
        x = torch.relu(self.first_norm(self.first(x.view(-1, 3, 8, 8))))
        x = torch.relu(self.second_norm(self.second(x)))
        return [self.last(x.mean((2, 3)))]


class Heads(nn.Module):
    """Has two outputs; with loss=first, the second head gets no gradient."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(20, 40)
        self.left = nn.Linear(40, 3)
        self.right = nn.Linear(40, 6)

    def forward(self, x, route):
        x = torch.relu(self.trunk(x))
        return [self.left(x), self.right(x)]


class Branches(nn.Module):
    """The rank and the step determine which branch is used; every fourth time it is neither."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(20, 40)
        self.left = nn.Linear(40, 40)
        self.right = nn.Linear(40, 40)
        self.last = nn.Linear(40, 4)

    def forward(self, x, route):
        x = torch.relu(self.trunk(x))
        if route % 4 in (0, 1):
            x = self.left(x)
        elif route % 4 == 2:
            x = self.right(x)
        return [self.last(x)]


NETS = {"mlp": Mlp, "conv": Conv, "heads": Heads, "branches": Branches}
INPUTS = {"conv": 3 * 8 * 8}


def make_optimizer(name, fused, parameters):
    how = {"fused": True} if fused else {"foreach": True}
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, **how)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2, **how)


def register_hook(name, ddp):
    hooks = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    if name in hooks:
        ddp.register_comm_hook(None, hooks[name])
    elif name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # needs numpy

        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=5, random_seed=3
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def loss_of(outputs, only_first):
    total = None
    for output in outputs[:1] if only_first else outputs:
        loss = nn.functional.mse_loss(output, torch.randn(output.shape))
        total = loss if total is None else total + loss
    return total


def write_state(file, net):
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            file.write(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))


def train(case, file):
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)  # different weights on each rank, of which DDP takes rank 0's
    net = NETS[case["net"]]()
    options = {flag: case[flag] == "1" for flag in FLAGS if flag in case}
    if "bucket_cap_mb" in case:
        options["bucket_cap_mb"] = float(case["bucket_cap_mb"])
    ddp = DistributedDataParallel(net, **options)
    register_hook(case.get("hook"), ddp)
    optimizer = make_optimizer(case["optimizer"], case.get("fused") == "1", net.parameters())
    backwards = int(case.get("backwards", 1))

    write_state(file, net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for backward in range(backwards):
            torch.manual_seed(1000 + 100 * step + 10 * backward + rank)
            x = torch.randn(4 + rank, INPUTS.get(case["net"], 20))
            with ddp.no_sync() if backward + 1 < backwards else contextlib.nullcontext():
                route = 0 if case.get("route") == "fixed" else step + rank
                loss_of(ddp(x, route), case.get("loss") == "first").backward()
        optimizer.step()
        write_state(file, net)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, words in enumerate(sys.argv[2:]):
        case = dict(word.split("=") for word in words.split())
        with open(os.path.join(sys.argv[1], f"{number}.rank{dist.get_rank()}"), "wb") as file:
            train(case, file)
    dist.destroy_process_group()
