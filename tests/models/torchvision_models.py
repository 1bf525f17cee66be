"""Prints what torchvision_test.cpp compares with, a line for each thing.

    python torchvision_models.py --initial NAME ... --trained NAME ...

    model NAME
    meta PARAMETERS GIGA_MULTIPLY_ADDS IMAGE_SIZE        of the published weights
    param|buffer NAME SHAPE CRC32                        of state_dict() after torch.manual_seed(0)
    logits VALUE ...                                     of one image in evaluation, float32
    loss VALUE, grad NAME SCALAR_PRODUCT SUM_OF_SQUARES  of two images in training, float64

Logits, loss and gradients are those of the weights that fill() makes; SCALAR_PRODUCT is that of the
gradient and the parameter.
"""

import argparse
import zlib

import torch
import torchvision

MOST_EVALUATED = 200_000_000  # parameters
torch.set_num_threads(1)  # as the test: sums depend on it


def wave(shape, dtype):
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64)).reshape(shape).to(dtype)


def fill(model):
    """The same rules as fill() of torchvision_test.cpp."""
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        inputs = tensor.numel() // tensor.shape[0]
        if inputs > 1:
            tensor.mul_((2 / inputs) ** 0.5 / tensor.std().item())
            continue
        values = wave(tensor.shape, tensor.dtype)
        if name.endswith("running_var"):
            values = values * values * 0.5 + 1
        elif name.endswith("weight"):
            values = values * 0.1 + 1
        else:
            values = values * 0.1
        tensor.copy_(values)


def meta_of(name):
    try:
        weights = next(iter(torchvision.models.get_model_weights(name)))
    except ValueError:
        return "0 0 0"
    meta = weights.meta
    return f"{meta['num_params']} {meta['_ops']} {weights.transforms().crop_size[0]}"


def print_initial(name):
    print("model", name)
    print("meta", meta_of(name))
    torch.manual_seed(0)
    model = torchvision.models.get_model(name)
    parameters = dict(model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    for key, tensor in model.state_dict().items():
        kind = "param" if key in parameters else "buffer"
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        print(kind, key, shape, zlib.crc32(tensor.detach().numpy().reshape(-1).data))
    if count > MOST_EVALUATED:
        return
    with torch.no_grad():
        fill(model)
        logits = model.eval()(wave([1, 3, 64, 64], torch.float32))
    print("logits", *(f"{x:.9g}" for x in logits[0].tolist()))


def print_trained(name):
    print("model", name)
    torch.manual_seed(0)
    model = torchvision.models.get_model(name).double().train()
    with torch.no_grad():
        fill(model)
    torch.manual_seed(1)  # for dropout and stochastic depth
    logits = model(wave([2, 3, 96, 96], torch.float64))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2]))
    loss.backward()
    print("loss", f"{loss.item():.17g}")
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        product = (gradient * parameter.detach()).sum().item()
        print("grad", key, f"{product:.17g} {gradient.square().sum().item():.17g}")


parser = argparse.ArgumentParser()
parser.add_argument("--initial", nargs="*", default=[])
parser.add_argument("--trained", nargs="*", default=[])
args = parser.parse_args()
for name in args.initial:
    print_initial(name)
for name in args.trained:
    print_trained(name)
