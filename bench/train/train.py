"""Counterpart of `train` in Python: DistributedDataParallel, DistributedSampler, DataLoader, SGD with a cosine
schedule, and the loss and accuracy of each epoch. run.py starts its ranks and reads its output."""

import argparse
import contextlib
import gzip
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench/ddp"))
from ddp_step import make_net  # noqa: E402


def data(options):
    if options.model == "digits":
        with gzip.open(ROOT / "data/digits.csv.gz", "rt") as file:
            rows = torch.tensor([[int(word) for word in line.split(",")] for line in file])
        rows = rows[: options.samples]
        return TensorDataset(rows[:, :64].reshape(-1, 1, 8, 8) / 16.0, rows[:, 64])
    images = torch.randn(options.samples, 3, options.size, options.size)
    return TensorDataset(images, torch.arange(options.samples) % 10)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--size", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--memory_format", default="contiguous")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--amp", default="none")
    parser.add_argument("--log_interval", type=int, default=0)
    parser.add_argument("--save_interval", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    memory_format = getattr(torch, f"{options.memory_format}_format"
                            if options.memory_format == "contiguous" else options.memory_format)
    net = make_net(options.model, options.size).to(memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=options.fused or None)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    ddp = DistributedDataParallel(net)
    dataset = data(options)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, options.batch, sampler=sampler, drop_last=True)
    precision = torch.autocast("cpu", torch.bfloat16) if options.amp == "bf16" else contextlib.nullcontext()
    log = open("log.jsonl", "w") if rank == 0 else None
    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3, dtype=torch.float64)
        dist.barrier()
        begin = time.perf_counter()
        for images, target in loader:
            images = images.contiguous(memory_format=memory_format)
            with precision:
                output = ddp(images)
                loss = F.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct = (output.argmax(1) == target).sum()
            sums += torch.stack((loss.detach() * len(target), correct, torch.tensor(len(target))))
            step += 1
            if log and options.log_interval and step % options.log_interval == 0:
                line = {"step": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0]}
                print(json.dumps(line), file=log, flush=True)
            if rank == 0 and options.save_interval and step % options.save_interval == 0:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.tmp")
                os.replace("last.tmp", "last.pt")
        dist.all_reduce(sums)
        seconds = time.perf_counter() - begin
        schedule.step()
        if rank == 0:
            loss, correct, samples = sums.tolist()
            print(json.dumps({"images_per_second": samples / seconds, "loss": loss / samples,
                              "accuracy": correct / samples}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads sometimes abort a process that ends normally


if __name__ == "__main__":
    main()
