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
from torch.utils._python_dispatch import TorchDispatchMode

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


class Recorder(TorchDispatchMode):
    """Records batch norm's operators and the collectives, with the tensors' shapes, dtypes and memory formats."""

    OPERATORS = {"batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt",
                 "batch_norm_backward_reduce", "batch_norm_backward_elemt"}

    def __init__(self):
        super().__init__()
        self.calls = []

    @staticmethod
    def of_tensor(value):
        if not isinstance(value, torch.Tensor):
            return value
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
        is_channels_last = last is not None and value.is_contiguous(memory_format=last)
        return tuple(value.shape), value.dtype, is_channels_last

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in self.OPERATORS:
            self.calls.append((name, *map(self.of_tensor, arguments)))
        elif function.namespace == "c10d":
            tensors = torch.utils._pytree.tree_leaves(arguments)
            self.calls.append((name, *((one.numel(), one.dtype) for one in tensors if isinstance(one, torch.Tensor))))
        return function(*arguments, **(named or {}))


def calls_and_results(forward, layer, batch):
    """What a forward and a backward of the layer call, and all that they compute."""
    x = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    with Recorder() as recorder:
        y = forward(layer, x)
        factors = torch.linspace(-1, 1, y.shape[1], device="cuda", dtype=y.dtype)
        (y.movedim(1, -1) * factors).sum().backward()
    return recorder.calls, [y, x.grad, *(parameter.grad for parameter in layer.parameters()), *layer.buffers()]


def runs_pythons_operators():
    from syncbn import _C
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("syncbn")
    handle = _C.Layer("layer")

    def ours(layer, x):
        return _C.sync_batch_norm(x, layer.weight, layer.bias, layer.running_mean, layer.running_var,
                                  layer.num_batches_tracked, layer.momentum, layer.eps, handle, dist.group.WORLD)

    def compare(sizes, dtype=torch.float32, memory_format=torch.contiguous_format, dims=(4, 5), **options):
        # Python's empty rank sends zeros of the input's type, which the others of float16 do not expect.
        is_broken = dtype == torch.float16 and 0 in sizes
        batch = torch.randn(sizes[rank], 3, *dims).cuda().to(memory_format=memory_format)
        layers = [nn.SyncBatchNorm(3, **options).cuda(rank) for _ in range(2)]
        calls, results = calls_and_results(ours, layers[0], batch.to(dtype))
        wanted, others = calls_and_results(nn.SyncBatchNorm.forward, layers[1],
                                           batch if is_broken else batch.to(dtype))
        if is_broken:
            wanted = [tuple((one[0], dtype, one[2]) if isinstance(one, tuple) and len(one) == 3
                            and len(one[0]) == 4 else one for one in call) for call in wanted]
        assert 0 in sizes or Recorder.OPERATORS < {name for name, *_ in calls}, calls  # and collectives
        assert calls == wanted, f"{sizes} {dtype} {memory_format} {dims} {options}:\n{calls}\n{wanted}"
        for one, other in zip(results, others, strict=True):
            if other is not None and not is_broken:
                torch.testing.assert_close(one, other, rtol=0, atol=0)

    for sizes in ((3, 3), (4, 2), (3, 0)):
        for dtype in (torch.float32, torch.float16):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                compare(sizes, dtype, memory_format)
    compare((4, 2), affine=False)
    compare((4, 2), momentum=None)
    compare((4, 2), memory_format=torch.channels_last_3d, dims=(2, 4, 5))
    print("same calls as Python's", flush=True)
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
        done = ranks.run(trains, 2)
        self.expect_success(done, "trained on 0")
        self.expect_success(done, "trained on 1")

    def test_sync_batch_norm_calls_what_pythons_calls(self):
        done = ranks.run(runs_pythons_operators, 2)
        self.expect_success(done, "same calls as Python's")

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
