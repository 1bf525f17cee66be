"""Prints the reference for torchvision_test.cpp, in these lines.

    python torchvision_models.py [--initial NAME[:OPTION=true] ... --trained NAME[:OPTION=true] ... OPTION ... --end]...

    model NAME[:OPTION=true]
    meta PARAMETERS GIGA_MULTIPLY_ADDS IMAGE_SIZE        of the published weights; 0 0 0: none
    param|buffer NAME SHAPE CRC32                        of state_dict() after torch.manual_seed(0)
    logits VALUE ...                                     of one image in evaluation, float32 (of
                                                         detectors all predictions): all, or about
                                                         1000 evenly spaced ones
    loss VALUE, grad NAME SCALAR_PRODUCT SUM_OF_SQUARES  of two images in training, float64

Logits, loss and gradients are for the weights of fill(); SCALAR_PRODUCT is that of the gradient and the
parameter.
"""

import argparse
import sys
import zlib

import torch
import torch.nn.functional as F
import torchvision
from torchvision.models.detection.image_list import ImageList

import other_networks

MOST_EVALUATED = 200_000_000  # number of parameters
torch.set_num_threads(1)  # as in the test: sums depend on it
sys.stdout = open(1, "w", buffering=1 << 26)  # the test reads at the end; a pipe would be full before


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


def split(spec):
    name, _, option = spec.partition(":")
    key, _, value = option.partition("=")
    return name, {key: value == "true"} if option else {}


def segments(name):
    known = name in other_networks.ALL or hasattr(torchvision.models.segmentation, name)
    return known and not detects(name)


def detects(name):
    return name == "retinanet_resnet18_fpn" or hasattr(torchvision.models.detection, name)


def make(spec):
    name, options = split(spec)
    torch.manual_seed(0)
    if name in other_networks.ALL:
        return other_networks.ALL[name](args.classes, **options)
    if segments(name) or detects(name):
        options["weights_backbone"] = None
    return torchvision.models.get_model(name, num_classes=args.classes, **options)


def options_of_weights(name):
    if name == "googlenet":
        return {"aux_logits": False}
    return {"aux_loss": True} if segments(name) and name[:6] != "lraspp" else {}


def meta_of(spec, model):
    name, options = split(spec)
    if options != options_of_weights(name):
        return "0 0 0"
    try:
        weights = next(iter(torchvision.models.get_model_weights(name)))
    except ValueError:
        return "0 0 0"
    meta, operations, transforms = weights.meta, weights.meta["_ops"], weights.transforms()
    if detects(name):
        # FrozenBatchNorm2d, which all but the v2 detectors have, counts as 0.
        norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        frozen = 0 if name[-2:] == "v2" else sum(2 * norm.num_features for norm in norms)
        return f"{meta['num_params'] + frozen} 0 0"
    if not segments(name):
        return f"{meta['num_params']} {operations} {transforms.crop_size[0]}"
    size = transforms.resize_size[0]
    if options:  # torchvision counts the auxiliary head, which is not used in evaluation
        weights = sum(p.numel() for p in model.aux_classifier.parameters() if p.dim() == 4)
        operations -= weights * (size // 8) ** 2 / 1e9
    return f"{meta['num_params']} {operations} {size}"


def outputs_of(model, images):
    """The logits, and those of auxiliary heads or the other predictions of a detector."""
    if hasattr(model, "anchor_generator"):
        return list(model.head(list(model.backbone(images).values())).values())
    outputs = model(images)
    if isinstance(outputs, dict):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def print_initial(name):
    print("model", name)
    model = make(name)
    print("meta", meta_of(name, model))
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
        side = args.evaluated_side
        outputs = outputs_of(model.eval(), wave([1, 3, side, side], torch.float32))
    predictions = outputs if detects(split(name)[0]) else outputs[:1]
    logits = torch.cat([output.flatten() for output in predictions])
    logits = logits[:: max(1, len(logits) // 1000)]
    print("logits", *(f"{x:.9g}" for x in logits.tolist()))


def class_loss(model, name, images):
    side = args.trained_side
    outputs = outputs_of(model, images)
    target = torch.tensor([1, 2])
    if segments(name):
        target = torch.arange(2 * side * side).reshape(2, side, side) % (args.classes + 1)
    losses = [F.cross_entropy(x, target, ignore_index=args.classes) for x in outputs]
    return losses[0] + args.aux_weight * sum(losses[1:])


def detection_loss(model, images):
    """The loss for an image with the boxes of detection_target() in torchvision_test.cpp, and one without boxes."""
    features = list(model.backbone(images).values())
    anchors = model.anchor_generator(ImageList(images, [images.shape[2:]] * 2), features)
    boxes = [[5.3, 10.1, 60.2, 71.7], [30.4, 20.9, 94.5, 50.6], [8.8, 7.7, 24.1, 31.2]]
    targets = [
        {"boxes": images.new_tensor(boxes), "labels": torch.tensor([1, 2, 90])},
        {"boxes": images.new_empty(0, 4), "labels": torch.empty(0, dtype=torch.long)},
    ]
    arguments = [targets, model.head(features), anchors]
    if isinstance(model, torchvision.models.detection.FCOS):
        arguments.append([x.shape[2] * x.shape[3] for x in features])
    return sum(model.compute_loss(*arguments).values())


def print_trained(spec):
    name = split(spec)[0]
    print("model", spec)
    model = make(spec).double().train()
    with torch.no_grad():
        fill(model)
    torch.manual_seed(1)  # for dropout and stochastic depth
    side = args.trained_side
    images = wave([2, 3, side, side], torch.float64)
    loss = detection_loss(model, images) if detects(name) else class_loss(model, name, images)
    loss.backward()
    print("loss", f"{loss.item():.17g}")
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        product = (gradient * parameter.detach()).sum().item()
        print("grad", key, f"{product:.17g} {gradient.square().sum().item():.17g}")


parser = argparse.ArgumentParser()
parser.add_argument("--initial", nargs="*", default=[])
parser.add_argument("--trained", nargs="*", default=[])
parser.add_argument("--classes", type=int)
parser.add_argument("--evaluated_side", type=int)
parser.add_argument("--trained_side", type=int)
parser.add_argument("--aux_weight", type=float)
rest = sys.argv[1:]
while rest:
    end = rest.index("--end")
    args = parser.parse_args(rest[:end])
    rest = rest[end + 1:]
    for name in args.initial:
        print_initial(name)
    for name in args.trained:
        print_trained(name)
