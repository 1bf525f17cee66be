"""torch.nn.BatchNorm on whole batches: batch_norm_reference.py IN OUT

Both files are TorchScript modules with tensors as buffers. IN has input0, grad0, input1, ..., weight and bias
(none without affine) and momentum (negative: cumulative); OUT gets output0, grad_input0, ..., grad_weight,
grad_bias (sums over the batches), running_mean, running_var and num_batches_tracked.
"""

import sys

import torch
from torch import nn


def main(source, target):
    given = dict(torch.jit.load(source).named_buffers())
    first = given["input0"]
    layers = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    momentum = given["momentum"].item()
    affine = "weight" in given
    layer = layers[first.dim()](
        first.size(1), momentum=None if momentum < 0 else momentum, affine=affine
    ).to(first.dtype)
    if affine:
        layer.load_state_dict({"weight": given["weight"], "bias": given["bias"]}, strict=False)
    result = nn.Module()
    step = 0
    while f"input{step}" in given:
        x = given[f"input{step}"].clone().requires_grad_()
        y = layer(x)
        y.backward(given[f"grad{step}"])
        result.register_buffer(f"output{step}", y.detach())
        result.register_buffer(f"grad_input{step}", x.grad)
        step += 1
    if affine:
        result.register_buffer("grad_weight", layer.weight.grad)
        result.register_buffer("grad_bias", layer.bias.grad)
    for name, buffer in layer.named_buffers():
        result.register_buffer(name, buffer)
    torch.jit.script(result).save(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
