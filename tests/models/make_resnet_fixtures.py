"""Writes resnet18.txt and resnet50.txt next to this file: the parameters and outputs of torchvision's ResNets.

Made with torch 2.11.0 and torchvision 0.26.0:  python make_resnet_fixtures.py

A line for each entry of state_dict(), in its order: param|buffer, name, shape, and the sum and the
sum of squares of its initial values after torch.manual_seed(0). Then the first logits for a fixed
input with the fixed weights of fill(): "eval" with running statistics, "train" with the batch's.
In float64, because batch norm over two samples amplifies float32's rounding to differences of a few percent.
"""

import pathlib

import torch
import torchvision


def wave(shape):
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64)).reshape(shape)


def fill(model):
    """The same values as fill() of resnet_test.cpp."""
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        values = wave(tensor.shape)
        if tensor.dim() > 1:
            values *= (2.0 / (tensor.numel() / tensor.shape[0])) ** 0.5
        elif name.endswith("running_var"):
            values = 1 + 0.5 * values**2
        elif name.endswith("weight"):
            values = 1 + 0.1 * values
        else:
            values *= 0.1
        tensor.copy_(values)


def lines(make):
    torch.manual_seed(0)
    model = make()
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        kind = "param" if name in parameters else "buffer"
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        values = tensor.double()
        yield f"{kind} {name} {shape} {values.sum():.9g} {values.square().sum():.9g}"
    model.double()
    fill(model)
    images = wave([2, 3, 64, 64])
    for mode in ("eval", "train"):
        logits = model.train(mode == "train")(images)
        for sample, row in enumerate(logits[:, :5].tolist()):
            yield f"{mode} {sample} " + " ".join(f"{x:.9g}" for x in row)


with torch.no_grad():
    for make in (torchvision.models.resnet18, torchvision.models.resnet50):
        path = pathlib.Path(__file__).with_name(make.__name__ + ".txt")
        path.write_text("\n".join(lines(make)) + "\n")
