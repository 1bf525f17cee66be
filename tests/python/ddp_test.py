"""DistributedDataParallel over the backend syncbn."""

import ranks  # first: it skips the tests where there is no torch

import os
import pathlib
import signal
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 5


def train(group, register_hook=lambda ddp: None):
    """The parameters and buffers after some steps of DDP over `group`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 10))
    # Several buckets, some of which are full before backward ends.
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.005)
    register_hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(torch.randn(16, 1, 8, 8)),
                                           torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@ranks.in_group
def equals_gloo(rank):
    gloo = dist.new_group(backend="gloo")
    ours, theirs = train(dist.group.WORLD), train(gloo)
    assert dist.get_backend() == "syncbn"
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if rank == 0:
        print("equal", len(ours), flush=True)


@ranks.in_group
def equals_gloo_with_power_sgd(rank):
    buckets = set()

    # Its callbacks start collectives, which have to precede those of the next bucket.
    def hook(state, bucket):
        buckets.add(bucket.index())
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    def train_over(group):
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        return train(group, lambda ddp: ddp.register_comm_hook(state, hook))

    ours, theirs = train_over(dist.group.WORLD), train_over(dist.new_group(backend="gloo"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len(buckets) > 1
    if rank == 0:
        print("equal", len(ours), flush=True)


# A hook in Python takes each bucket's future while other buckets are exchanged.
@ranks.in_group
def many_buckets_with_a_hook(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)]), bucket_cap_mb=0.01)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for _ in range(100):
        ddp(torch.randn(4, 64)).sum().backward()
    if rank == 0:
        print("trained", flush=True)


def wait_for_rank_0(event):
    done = pathlib.Path(os.environ["EVENTS"], event)
    if os.environ["RANK"] == "0":
        done.touch()
    while not done.exists():
        time.sleep(0.01)


def starts_again():
    import syncbn  # noqa: F401
    for attempt in range(2):
        dist.init_process_group("syncbn")
        total = torch.ones(3) * (attempt + 1)
        dist.all_reduce(total)
        assert total.tolist() == [2.0 * (attempt + 1)] * 3
        if dist.get_rank() == 0:
            print("attempt", attempt, flush=True)
        dist.destroy_process_group()
        wait_for_rank_0(f"destroyed {attempt}")  # torch's clients would find its old store


def killed_before_backward():
    import syncbn  # noqa: F401
    dist.init_process_group("syncbn")
    ddp = DistributedDataParallel(nn.Linear(3, 4))
    loss = ddp(torch.ones(2, 3)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.tell_refusal(loss.backward)
    os._exit(0)


def train_as_imagenet_example(rank, ranks_of_node, backend, url, folder, device="cpu"):
    """Makes the calls of a rank of pytorch/examples' imagenet/main.py, in the same order."""
    dist.init_process_group(backend=backend, init_method=url, world_size=ranks_of_node, rank=rank)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(21, 3, 12, 12), torch.randint(7, (21,)))
    train_set, val_set = Subset(samples, range(12)), Subset(samples, range(12, 21))
    model = DistributedDataParallel(nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)
    ).to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    train_sampler = DistributedSampler(train_set)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    # Forks the loader's worker while the backend's threads run, as under a launcher; to spawn it takes seconds.
    train_loader = DataLoader(train_set, batch_size=2, shuffle=False, num_workers=1, multiprocessing_context="fork",
                              sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=2, shuffle=False, sampler=val_sampler)

    correct = torch.zeros(2, device=device)

    def validate(loader):
        with torch.no_grad():
            for images, target in loader:
                target = target.to(device, non_blocking=True)
                hits = (model(images.to(device, non_blocking=True)).argmax(1) == target).sum()
                correct.add_(torch.tensor([hits, len(target)], device=device))

    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images.to(device, non_blocking=True)), target.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        correct.zero_()
        validate(val_loader)
        dist.all_reduce(correct, dist.ReduceOp.SUM, async_op=False)
        # The samples that drop_last left over.
        validate(DataLoader(Subset(val_set, range(len(val_sampler) * ranks_of_node, len(val_set)))))
        scheduler.step()
        if rank % ranks_of_node == 0:
            torch.save({"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "correct": correct}, f"{folder}/{backend}.pt")


def example_worker(rank, ranks_of_node, urls, folder):
    import syncbn  # noqa: F401
    train_as_imagenet_example(rank, ranks_of_node, "gloo", urls[0], folder)
    dist.destroy_process_group()
    # Like the example, ends without destroy_process_group().
    train_as_imagenet_example(rank, ranks_of_node, "syncbn", urls[1], folder)


def imagenet_example():
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"tcp://127.0.0.1:{ranks.free_port()}" for _ in range(2)]
        mp.start_processes(example_worker, (2, urls, folder), nprocs=2, start_method="fork")
        gloo, ours = (torch.load(f"{folder}/{backend}.pt") for backend in ("gloo", "syncbn"))
    torch.testing.assert_close(ours, gloo, rtol=0, atol=0)
    print("equal, of", int(ours["correct"][1]), "samples")


class DdpTest(ranks.RanksTest):
    def test_parameters_equal_gloos_bit_for_bit_on_two_ranks(self):
        # 1 refuses ranks that do not share memory; otherwise Gloo might be compared with itself.
        self.expect_success(ranks.run(equals_gloo, 2, SYNCBN_SHARED_MEMORY="1"), "equal 11")

    def test_power_sgd_of_several_buckets_equals_gloos(self):
        self.expect_success(ranks.run(equals_gloo_with_power_sgd, 2, SYNCBN_SHARED_MEMORY="1"), "equal 11")

    def test_backward_names_a_killed_rank(self):
        output = ranks.run_each(killed_before_backward, 2)[0][1]
        self.assertRegex(output, r"rank 0 of 2 on \S+: all_reduce #\d+ of group '0' failed: "
                         r"rank 1 \(\S+, process \d+\) died")

    def test_a_program_like_pytorchs_imagenet_example_equals_gloos(self):
        self.expect_success(ranks.run(imagenet_example, 1), "equal, of 9 samples")

    def test_a_second_default_group_after_the_first_was_destroyed(self):
        with tempfile.TemporaryDirectory() as folder:  # with DETAIL, torch wraps the backend
            done = ranks.run(starts_again, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL", EVENTS=folder)
        self.expect_success(done, "attempt 1")

    def test_a_hook_in_python_with_many_buckets(self):
        for count in (2, 3):
            self.expect_success(ranks.run(many_buckets_with_a_hook, count), "trained")


if __name__ == "__main__":
    ranks.main(globals())
