"""Networks that torchvision lacks, written from their papers, for torchvision_models.py."""

from functools import partial

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.models.segmentation._utils import _SimpleSegmentationModel
from torchvision.models.segmentation.deeplabv3 import ASPP
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.ops.feature_pyramid_network import LastLevelP6P7


def conv_norm(inputs, outputs, kernel):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def scaled_to(x, like):
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


def resnet(depth, dilated):
    make = getattr(torchvision.models, f"resnet{depth}")
    return make(weights=None, replace_stride_with_dilation=dilated)


class UNet(nn.Module):
    """U-Net with padding and batch norm."""

    def __init__(self, classes, width=64):
        super().__init__()

        def two_convs(inputs, outputs):
            return nn.Sequential(conv_norm(inputs, outputs, 3), conv_norm(outputs, outputs, 3))

        widths = [width << i for i in range(5)]
        self.encoder = nn.ModuleList(map(two_convs, [3, *widths], widths))
        self.up, self.decoder = nn.ModuleList(), nn.ModuleList()
        for low, high in zip(widths[:0:-1], widths[-2::-1]):
            self.up.append(nn.ConvTranspose2d(low, high, 2, stride=2))
            self.decoder.append(two_convs(low, high))
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skipped = []
        for level in self.encoder:
            x = level(F.max_pool2d(x, 2) if skipped else x)
            skipped.append(x)
        for up, level, skip in zip(self.up, self.decoder, skipped[-2::-1]):
            x = up(x)
            x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
            x = level(torch.cat([skip, x], 1))
        return self.classifier(x)


class PyramidMeans(nn.Module):
    def __init__(self, inputs, grids=(1, 2, 3, 6)):
        super().__init__()
        channels = inputs // len(grids)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(grid), *conv_norm(inputs, channels, 1)) for grid in grids
        )

    def forward(self, x):
        return torch.cat([x, *(scaled_to(branch(x), x) for branch in self.branches)], 1)


def pspnet(classes, depth, aux_loss=False):
    layers = {"layer4": "out", "layer3": "aux"} if aux_loss else {"layer4": "out"}
    backbone = IntermediateLayerGetter(resnet(depth, [False, True, True]), layers)
    aux = FCNHead(1024, classes) if aux_loss else None
    head = nn.Sequential(
        PyramidMeans(2048), *conv_norm(4096, 512, 3), nn.Dropout(0.1), nn.Conv2d(512, classes, 1)
    )
    return _SimpleSegmentationModel(backbone, head, aux)


class DeepLabPlusHead(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.aspp = ASPP(2048, [6, 12, 18])
        self.project = conv_norm(256, 48, 1)
        self.classifier = nn.Sequential(
            conv_norm(304, 256, 3), conv_norm(256, 256, 3), nn.Conv2d(256, classes, 1)
        )

    def forward(self, low, high):
        return self.classifier(torch.cat([self.project(low), scaled_to(self.aspp(high), low)], 1))


class DeepLabPlus(nn.Module):
    def __init__(self, classes, depth):
        super().__init__()
        layers = {"layer1": "low", "layer4": "high"}
        self.backbone = IntermediateLayerGetter(resnet(depth, [False, False, True]), layers)
        self.classifier = DeepLabPlusHead(classes)

    def forward(self, x):
        return scaled_to(self.classifier(**self.backbone(x)), x)


class Dcgan(nn.Module):
    """PyTorch's example (examples/dcgan/main.py) as one module, for images of 64 x 64 pixels."""

    def __init__(self, latent=100, width=64, channels=3):
        super().__init__()
        widths = [width << i for i in range(4)]
        up, down = [], []
        for inputs, outputs in zip([latent, *widths[:0:-1]], widths[::-1]):
            stride, padding = (1, 0) if not up else (2, 1)
            up += [
                nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(True),
            ]
        up += [nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False), nn.Tanh()]
        self.generator = nn.Module()
        self.generator.main = nn.Sequential(*up)
        self.generator.apply(self.init)
        for inputs, outputs in zip([channels, *widths], widths):
            down.append(nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False))
            if inputs != channels:
                down.append(nn.BatchNorm2d(outputs))
            down.append(nn.LeakyReLU(0.2, inplace=True))
        down.append(nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False))
        self.discriminator = nn.Module()
        self.discriminator.main = nn.Sequential(*down)
        self.discriminator.apply(self.init)

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, noise):
        images = self.generator.main(noise[:, :, None, None])
        return images, self.discriminator.main(images).flatten()


def retinanet_resnet18_fpn(classes):
    """Built like torchvision's detector with ResNet-50."""
    backbone = _resnet_fpn_extractor(resnet(18, dilated=None), 5, returned_layers=[2, 3, 4],
                                     extra_blocks=LastLevelP6P7(256, 256))
    return RetinaNet(backbone, classes)


ALL = {
    "retinanet_resnet18_fpn": retinanet_resnet18_fpn,
    "unet": UNet,
    "pspnet_resnet50": partial(pspnet, depth=50),
    "pspnet_resnet101": partial(pspnet, depth=101),
    "deeplabv3plus_resnet50": partial(DeepLabPlus, depth=50),
    "deeplabv3plus_resnet101": partial(DeepLabPlus, depth=101),
}
