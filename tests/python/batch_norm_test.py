"""syncbn.SyncBatchNorm on CPU tensors, compared with torch.nn's layers in float64 on the whole batch."""

import ranks  # first: it skips the tests where there is no torch

import copy
import os
import pickle
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES = [5, 0, 3]  # batch sizes of the ranks
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def batch(rank, dtype, offset=0.0):
    """This rank's input, whose mean and scale differ from the other ranks'."""
    generator = torch.Generator().manual_seed(rank)
    return ((rank + 1) * torch.randn(SIZES[rank], 4, 3, 2, generator=generator) + offset).to(dtype)


def whole(dtype, offset=0.0):
    return torch.cat([batch(rank, dtype, offset) for rank in range(len(SIZES))]).double()


def own_part(tensor, rank):
    begin = sum(SIZES[:rank])
    return tensor[begin:begin + SIZES[rank]]


def scaled(layer):
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(torch.linspace(0.5, 2, 4))
            layer.bias.copy_(torch.linspace(-1, 1, 4))
    return layer


def compare(options, dtype, group=None):
    """Compares two training steps, backward and evaluation with nn.BatchNorm2d in float64."""
    import syncbn
    rank = dist.get_rank()
    tolerance = TOLERANCE[dtype]
    layer = scaled(syncbn.SyncBatchNorm(4, process_group=group, **options))
    reference = scaled(nn.BatchNorm2d(4, **options)).double()
    close = lambda one, other, what: torch.testing.assert_close(
        one.double(), other, rtol=tolerance, atol=20 * tolerance,
        msg=lambda text: f"{what} with {options} in {dtype}: {text}")
    for step in range(2):
        x = batch(rank, dtype, offset=step).requires_grad_()
        all_x = whole(dtype, offset=step).requires_grad_()
        y, all_y = layer(x), reference(all_x)
        assert y.dtype == dtype
        close(y, own_part(all_y, rank), "output")
        slope = torch.linspace(-1, 1, all_y.numel(), dtype=torch.float64).view_as(all_y)
        layer.zero_grad()
        reference.zero_grad()
        y.backward(own_part(slope, rank).to(dtype))
        all_y.backward(slope.to(dtype).double())
        close(x.grad, own_part(all_x.grad, rank), "gradient of the input")
        for name, parameter in layer.named_parameters():
            total = parameter.grad.clone()
            dist.all_reduce(total)
            close(total / 10, dict(reference.named_parameters())[name].grad / 10, f"gradient of {name}")
    for name, buffer in layer.named_buffers():
        close(buffer, dict(reference.named_buffers())[name].double(), name)
    assert list(layer.state_dict()) == list(reference.state_dict())
    layer.eval(), reference.eval()
    x = batch(2, dtype)
    close(layer(x), reference(x.double()), "evaluation")


def equals_whole_batch():
    import syncbn  # noqa: F401
    dist.init_process_group(os.environ["BACKEND"])
    cases = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 1e-2, "momentum": 0.7}]
    for dtype in (torch.float32, torch.bfloat16):
        for options in cases:
            compare(options, dtype)
    compare({}, torch.float32, dist.group.WORLD)
    compare({}, torch.float32, dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        print("equal", flush=True)
    dist.destroy_process_group()


class Block(nn.Module):
    """A block as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)) + self.downsample(x))
        return self.fc(out.mean((2, 3)))


@ranks.in_group
def converted_equals_one_process(rank):
    """DDP with converted layers trains the same parameters as one process with the whole batch."""
    import syncbn
    size = dist.get_world_size()
    torch.manual_seed(0)
    alone = Block().double()
    ddp = DistributedDataParallel(syncbn.convert_sync_batchnorm(copy.deepcopy(alone)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
    data = torch.randn(5, size * 4, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for x in data:
        for optimizer, model, part in zip(optimizers, (ddp, alone), (x[rank::size], x)):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    for (name, one), other in zip(ddp.module.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")
    if rank == 0:
        print("equal", flush=True)


def different_layers():
    import syncbn
    dist.init_process_group("syncbn")
    model = syncbn.convert_sync_batchnorm(nn.ModuleDict({"one": nn.BatchNorm2d(4), "two": nn.BatchNorm2d(4)}))
    x = torch.randn(2, 4, 3, 3)
    for layer in model.values():  # after this, each rank knows both names
        layer(x)
    ranks.tell_refusal(lambda: model["one" if dist.get_rank() == 0 else "two"](x))
    os._exit(0)


class SyncBatchNormTest(ranks.RanksTest):
    def test_equals_batch_norm_on_the_whole_batch(self):
        self.expect_success(ranks.run(equals_whole_batch, 3, BACKEND="syncbn"), "equal")

    def test_equals_batch_norm_on_the_whole_batch_over_a_default_group_of_gloo(self):
        self.expect_success(ranks.run(equals_whole_batch, 3, BACKEND="gloo"), "equal")

    def test_converted_network_under_ddp_equals_one_process(self):
        self.expect_success(ranks.run(converted_equals_one_process, 2), "equal")

    def test_ranks_in_different_layers_are_named(self):
        _, output = ranks.run(different_layers, 2)
        for rank in range(2):
            self.assertRegex(output, rf"rank {rank}: .*different layers: .*'one'.*'two'")


class ModuleTest(unittest.TestCase):
    """One process without a group."""

    def test_needs_no_group_in_one_process(self):
        import syncbn
        x = torch.randn(6, 4, 3)
        torch.testing.assert_close(syncbn.SyncBatchNorm(4)(x), nn.BatchNorm1d(4)(x))

    def test_gradients_of_gradients(self):
        import syncbn
        layer = syncbn.SyncBatchNorm(2).double()
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        self.assertTrue(torch.autograd.gradcheck(layer, x))
        self.assertTrue(torch.autograd.gradgradcheck(layer, x))

    def test_refuses_to_train_alone_in_a_job(self):
        import syncbn
        os.environ["WORLD_SIZE"] = "2"
        try:
            with self.assertRaisesRegex(RuntimeError, "WORLD_SIZE=2 and no process group"):
                syncbn.SyncBatchNorm(4)(torch.randn(2, 4))
        finally:
            del os.environ["WORLD_SIZE"]

    def test_state_dict_is_that_of_torch(self):
        import syncbn
        layer = nn.SyncBatchNorm(4, eps=1e-3, momentum=None)
        ours = syncbn.SyncBatchNorm(4, 1e-3, None, True, True, None, device="cpu", dtype=torch.float64)
        ours.load_state_dict(layer.state_dict())
        layer.load_state_dict(ours.state_dict())
        self.assertEqual(ours.extra_repr(), layer.extra_repr())
        self.assertEqual(ours.weight.dtype, torch.float64)

    def test_convert_keeps_what_belongs_to_a_layer(self):
        import syncbn
        shared = nn.BatchNorm2d(4)
        shared.note = "kept"
        calls = []
        shared.register_forward_hook(lambda *_: calls.append(1))
        model = nn.Sequential(shared, nn.Sequential(shared, nn.InstanceNorm2d(4)), nn.SyncBatchNorm(4))
        weight = shared.weight
        self.assertIs(syncbn.convert_sync_batchnorm(model), model)
        self.assertIs(model[1][0], model[0])
        self.assertIs(model[0].weight, weight)
        self.assertEqual(model[0].note, "kept")
        self.assertEqual([type(one).__name__ for one in (model[0], model[1][1], model[2])],
                         ["SyncBatchNorm", "InstanceNorm2d", "SyncBatchNorm"])
        self.assertIsInstance(model[2], syncbn.SyncBatchNorm)
        model(torch.randn(2, 4, 3, 3))
        self.assertEqual(len(calls), 2)

    def test_converts_a_layer_by_itself(self):
        import syncbn
        self.assertIsInstance(syncbn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), syncbn.SyncBatchNorm)

    def test_refuses_layers_with_a_forward_of_their_own(self):
        import syncbn

        class WithActivation(nn.BatchNorm2d):  # as timm's BatchNormAct2d
            def forward(self, input):
                return super().forward(input).relu()

        patched = nn.BatchNorm2d(2)
        patched.forward = lambda input: input
        for layer in (WithActivation(2), patched):
            model = nn.Sequential(nn.BatchNorm2d(2), layer)
            with self.assertRaisesRegex(ValueError, rf"layer '1', a {type(layer).__name__}, has a forward\(\) of its own"):
                syncbn.convert_sync_batchnorm(model)
            self.assertIs(type(model[0]), nn.BatchNorm2d)

    def test_converts_torchs_own_classes(self):
        import syncbn
        for layer in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), syncbn.SyncBatchNorm(2)):
            self.assertIs(type(syncbn.convert_sync_batchnorm(layer)), syncbn.SyncBatchNorm)

    def test_refuses_lazy_layers(self):
        import syncbn
        with self.assertRaisesRegex(ValueError, "layer '1' is lazy"):
            syncbn.convert_sync_batchnorm(nn.Sequential(nn.ReLU(), nn.LazyBatchNorm2d()))

    def test_copies_and_pickles_after_a_forward(self):
        import syncbn
        layer = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4)))
        x = torch.randn(2, 4, 3, 3)
        layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(other(x), copy.deepcopy(layer)(x))

    def test_refuses_input_of_the_wrong_shape(self):
        import syncbn
        with self.assertRaisesRegex(RuntimeError, "4"):
            syncbn.SyncBatchNorm(4)(torch.randn(2, 3, 5))


if __name__ == "__main__":
    ranks.main(globals())
