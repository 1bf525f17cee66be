"""Counterpart of gpu_worker.cpp in Python: the same network, layers and commands with torch alone.

  network BATCH SIZE eager|compiled   a step of ResNet-50
  layers BATCH DIVISOR sync|cudnn     SyncBatchNorm with the exchange forced, or BatchNorm2d; + ReLU
  time COUNT, trace COUNT             as in gpu_worker.cpp
"""

import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "ddp"))
from ddp_step import ResNet, bottleneck  # noqa: E402

# As kResnet50Layers in ../resnet50_layers.h: channels, size of an image, layers.
LAYERS = [(64, 112, 1), (64, 56, 6), (256, 56, 4), (128, 56, 1), (128, 28, 7), (512, 28, 5),
          (256, 28, 1), (256, 14, 11), (1024, 14, 7), (512, 14, 1), (512, 7, 5), (2048, 7, 4)]
WAITING = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"}


def images(batch, channels, size, dtype):
    values = torch.randn(batch, channels, size, size, device="cuda", dtype=dtype)
    return values.contiguous(memory_format=torch.channels_last)


def network(batch, size, kind):
    net = ResNet((3, 4, 6, 3), bottleneck, 4, small=False).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9, fused=True)
    values = images(int(batch), 3, int(size), torch.float32)
    target = (torch.arange(int(batch)) % 10).cuda()
    forward = torch.compile(net) if kind == "compiled" else net

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(forward(values), target)
        loss.backward()
        optimizer.step()

    return step


def exchanged(norm, values):
    """SyncBatchNorm's forward in training, called directly: the module does not exchange in a world of one."""
    norm.num_batches_tracked.add_(1)
    return SyncBatchNorm.apply(values, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps,
                               norm.momentum, dist.group.WORLD, 1)


def layers(batch, divisor, kind):
    every = []
    for channels, size, count in LAYERS:
        channels //= int(divisor)
        shape = int(batch), channels, -(-size // int(divisor)), torch.bfloat16
        values, gradient = images(*shape).requires_grad_(), images(*shape)
        every += [(torch.nn.BatchNorm2d(channels).cuda(), values, gradient) for _ in range(count)]

    def step():
        outputs = [F.relu_(exchanged(norm, values) if kind == "sync" else norm(values))
                   for norm, values, _ in every]
        for norm, values, gradient in reversed(every):
            outputs.pop().backward(gradient)
            values.grad = norm.weight.grad = norm.bias.grad = None

    return step


def timed(step, count):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return {"seconds": (time.perf_counter() - begin) / count}


def traced(step, count):
    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
    on_gpu = [event.name for event in profile.events()
              if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_gpu)
    waits = sum(event.name in WAITING for event in profile.events()) - 1  # the profiler itself waits once
    return {"launches": (len(on_gpu) - copies) / count, "copies": copies / count, "waits": max(waits, 0) / count}


def main():
    dist.init_process_group("nccl")
    torch.backends.cudnn.benchmark = True
    step = None
    for line in sys.stdin:
        command, *words = line.split()
        if command in ("network", "layers"):
            step, answer = globals()[command](*words), {}
        else:
            answer = {"time": timed, "trace": traced}[command](step, int(words[0]))
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
