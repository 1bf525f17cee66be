"""Counterpart of ddp_step.cpp in Python: the same networks, options and commands with torch's DDP."""

import math
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CLASSES = 10
BOXES = [[0.1, 0.1, 0.4, 0.5], [0.3, 0.2, 0.9, 0.8], [0.55, 0.6, 0.65, 0.7]]  # of the image's size


def conv(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, bias=False)


def init_convolutions(net):
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Digits(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.conv2 = conv(1, width, 3), conv(width, 2 * width, 3)
        self.conv3, self.fc = conv(2 * width, 4 * width, 3), nn.Linear(4 * width, CLASSES)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(2 * width)
        self.bn3 = nn.BatchNorm2d(4 * width)
        init_convolutions(self)

    def forward(self, x):
        x = F.relu_(self.bn1(self.conv1(x)))
        x = F.relu_(self.bn2(self.conv2(x)))
        x = F.max_pool2d(x, 2)
        x = F.relu_(self.bn3(self.conv3(x)))
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride, convs):
        super().__init__()
        # Made first and registered last, as in torchvision: weights are initialised in the order of creation.
        downsample = None
        if stride != 1 or inputs != outputs:
            downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.convs = nn.ModuleList(conv(*shape) for shape in convs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(shape[1]) for shape in convs)
        self.downsample = downsample

    def forward(self, x):
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convs, self.norms)):
            if index > 0:
                y = F.relu_(y)
            y = norm(convolution(y))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu_(y)


def basic(inputs, width, stride):
    return Block(inputs, width, stride, [(inputs, width, 3, stride), (width, width, 3)])


def bottleneck(inputs, width, stride):
    shapes = [(inputs, width, 1), (width, width, 3, stride), (width, 4 * width, 1)]
    return Block(inputs, 4 * width, stride, shapes)


class ResNet(nn.Module):
    def __init__(self, depths, block, expansion, small):
        super().__init__()
        self.small = small
        self.conv1 = conv(3, 64, 3) if small else conv(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        blocks, inputs = [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                blocks.append(block(inputs, width, 2 if stage > 0 and index == 0 else 1))
                inputs = expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, CLASSES)
        init_convolutions(self)

    def forward(self, x):
        x = F.relu_(self.bn1(self.conv1(x)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, 1)
        return self.fc(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        from torchvision.models.segmentation import deeplabv3_resnet50
        self.net = deeplabv3_resnet50(weights_backbone=None, num_classes=CLASSES)

    def forward(self, x):
        return self.net(x)["out"]


class RetinaNet(nn.Module):
    """torchvision's network without its transform, which would resize the images."""

    def __init__(self):
        super().__init__()
        from torchvision.models.detection import image_list, retinanet_resnet50_fpn
        self.net = retinanet_resnet50_fpn(weights_backbone=None, num_classes=CLASSES)
        self.images = image_list.ImageList

    def forward(self, x):
        features = list(self.net.backbone(x).values())
        images = self.images(x, [x.shape[2:]] * len(x))
        return self.net.head(features), self.net.anchor_generator(images, features)


def make_net(model, size):
    if model == "digits":
        return Digits()
    if model == "deeplabv3_resnet50":
        return DeepLab()
    if model == "retinanet_resnet50_fpn":
        return RetinaNet()
    small = size < 64
    if model == "resnet18":
        return ResNet((2, 2, 2, 2), basic, 1, small)
    return ResNet((3, 4, 6, 3), bottleneck, 4, small)


class Job:
    def __init__(self, model, batch, size, memory_format, fused):
        torch.manual_seed(0)
        net = make_net(model, size)
        channels = 1 if model == "digits" else 3
        torch.manual_seed(1 + dist.get_rank())
        self.input = torch.randn(batch, channels, size, size)
        if memory_format == "channels_last":
            net = net.to(memory_format=torch.channels_last)
            self.input = self.input.contiguous(memory_format=torch.channels_last)
        boxes = size * torch.tensor(BOXES)
        self.boxes = [{"labels": torch.tensor([1, 2, 3]), "boxes": boxes}] * batch
        shape = (batch, size, size) if model == "deeplabv3_resnet50" else (batch,)
        self.target = torch.arange(math.prod(shape)).reshape(shape) % CLASSES
        self.optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9, fused=fused or None)
        self.ddp = DistributedDataParallel(net)

    def forward(self):
        self.optimizer.zero_grad()
        output = self.ddp(self.input)
        if isinstance(self.ddp.module, RetinaNet):
            return sum(self.ddp.module.net.compute_loss(self.boxes, *output).values())
        return F.cross_entropy(output, self.target)

    def steps(self, count):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            loss = self.forward()
            loss.backward()
            self.optimizer.step()
            value = loss.item()
        return {"seconds": (time.perf_counter() - begin) / count, "loss": value}

    def overlap(self, count):
        both = [], []
        for _ in range(count):
            both[0].append(self.backward_time())
            with self.ddp.no_sync():
                both[1].append(self.backward_time())
        return {"backward": statistics.median(both[0]), "no_sync": statistics.median(both[1])}

    def backward_time(self):
        loss = self.forward()
        dist.barrier()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    @staticmethod
    def all_reduce(size, count):
        tensor = torch.ones(size // 4)
        times = []
        for _ in range(count):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
            tensor.fill_(1)
        return {"seconds": statistics.median(times)}

    def memory(self):
        return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "init_seconds": self.init_seconds}


def main():
    model, batch, size, memory_format, fused, backend = [*sys.argv[1:], "gloo"][:6]
    if backend == "syncbn":
        import syncbn  # noqa: F401
    begin = time.perf_counter()
    dist.init_process_group(backend)
    init_seconds = time.perf_counter() - begin
    job = Job(model, int(batch), int(size), memory_format, fused == "1")
    job.init_seconds = init_seconds
    for line in sys.stdin:
        command, *numbers = line.split()
        answer = getattr(job, command)(*map(int, numbers))
        print(str(answer).replace("'", '"'), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS"), "run.py sets it"
    main()
