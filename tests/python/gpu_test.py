"""CUDA tensors over the backend syncbn, on two GPUs, real or fake (tests/fake_cuda)."""

import ranks  # first: it skips the tests where there is no torch

import os
import tempfile

import torch
import torch._dynamo  # DDP and optimizers import it
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_test


def trains():
    import syncbn
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("syncbn")
    assert torch.cuda.current_device() == rank
    total = torch.full((5,), rank + 1.0, device="cuda")
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 5, total
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    assert total.tolist() == [6.0] * 5, total
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu)
    assert on_cpu.tolist() == [2.0] * 2, on_cpu
    assert "libnccl" in open("/proc/self/maps").read()

    torch.manual_seed(0)
    model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))).cuda()
    alone = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    alone.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model, device_ids=[rank])
    x = torch.randn(8, 6)
    ddp(x[rank::2].cuda()).square().mean().backward()
    alone(x).square().mean().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    print("trained on", torch.cuda.current_device(), flush=True)
    dist.destroy_process_group()


def trains_without_launcher(rank, port):
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank))
    trains()


def imagenet_example(rank, ranks_of_node, urls, folder):
    import syncbn  # noqa: F401
    torch.cuda.set_device(rank)
    ddp_test.train_as_imagenet_example(rank, ranks_of_node, "syncbn", urls[0], folder, device=f"cuda:{rank}")
    dist.destroy_process_group()
    ddp_test.train_as_imagenet_example(rank, ranks_of_node, "gloo", urls[1], folder)


def fork(function, *arguments):
    """Runs function(rank, ...) on two ranks that need not import torch, which takes longer than the tests."""
    mp.start_processes(function, arguments, nprocs=2, start_method="fork")


class GpuTest(ranks.RanksTest):
    def setUp(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("two-gpus")

    def test_trains_over_nccl(self):
        done = ranks.run("trains", 2)
        self.expect_success(done, "trained on 0")
        self.expect_success(done, "trained on 1")

    def test_takes_the_current_gpu_where_no_launcher_sets_local_rank(self):
        fork(trains_without_launcher, ranks.free_port())

    def test_a_program_like_pytorchs_imagenet_example_trains_as_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            fork(imagenet_example, 2, [f"tcp://127.0.0.1:{ranks.free_port()}" for _ in range(2)], folder)
            gloo, ours = (torch.load(f"{folder}/{backend}.pt", map_location="cpu") for backend in ("gloo", "syncbn"))
        torch.testing.assert_close(ours, gloo, rtol=1e-3, atol=1e-4)
        self.assertEqual(int(ours["correct"][1]), 9)


if __name__ == "__main__":
    ranks.main(globals())
