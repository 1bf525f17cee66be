"""Loads the files that export_test.cpp has written, and compares the outputs of their networks.

    python compare_exports.py FOLDER NAME ...

For each network, FOLDER has NAME.pth, .safetensors, .pt and .onnx, and NAME.expected with images and the
network's outputs for them. Prints a line for each network.
"""

import collections
import json
import sys

import onnx
import onnxruntime
import safetensors.torch
import torch
import torchvision

TOLERANCE = 1e-5  # relative to the largest output
INFO = {"classes": ["ant", "bee", "cat", "dog"], "mean": [0.5, 0.25, 0.125], "std": [0.5, 1, 2],
        "transforms": [{"type": "resize", "size": 40}]}
torch.set_num_threads(1)


def check_all_close(kind, found, expected):
    found = [found] if isinstance(found, torch.Tensor) else found
    assert len(found) == len(expected), (kind, len(found), len(expected))
    return max(check_close(kind, *pair) for pair in zip(found, expected))


def check_close(kind, found, expected):
    assert found.shape == expected.shape, (kind, found.shape, expected.shape)
    error = (found - expected).abs().max().item() / expected.abs().max().item()
    assert error <= TOLERANCE, f"{kind} differs by {error}"
    return error


def check_info(kind, info):
    assert info.pop("size") == [3, SIDE, SIDE], kind
    assert info == INFO, (kind, info)


def torchvisions(name):
    """Without initial values, except for RegNets, whose widths are computed with tensors."""
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        if hasattr(torchvision.models.segmentation, name):
            make = getattr(torchvision.models.segmentation, name)
            return make(num_classes=4, weights=None, weights_backbone=None, aux_loss=None)
        aux = {"aux_logits": True} if name in ("googlenet", "inception_v3") else {}
        return torchvision.models.get_model(name, num_classes=4, weights=None, **aux)


def run_onnx(path, images, outputs):
    model = onnx.load(path)
    onnx.checker.check_model(model)
    check_info("onnx", {entry.key: json.loads(entry.value) for entry in model.metadata_props})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == ["images"]
    assert session.get_inputs()[0].shape == ["N", 3, SIDE, SIDE]
    names = ["logits"] if outputs == 1 else [f"output_{number}" for number in range(outputs)]
    assert [port.name for port in session.get_outputs()] == names
    return [torch.from_numpy(found) for found in session.run(None, {"images": images.numpy()})]


@torch.no_grad()
def compare(path, name):
    expected = torch.load(path + ".expected", weights_only=True)
    images = expected.pop("images")
    outputs = list(expected.values())

    saved = torch.load(path + ".pth", weights_only=True)
    state = saved.pop("model")
    saved["transforms"] = json.loads(saved["transforms"])
    check_info("torch", saved)
    if name in torchvision.models.list_models():
        model = torchvisions(name)
        if name.startswith("mnasnet"):  # refuses a state dict without a version
            state = collections.OrderedDict(state)
            state._metadata = {"": {"version": 2}}
        model.load_state_dict(state, strict=True, assign=True)
        found = model.eval()(images)
        check_close("torch", found["out"] if isinstance(found, dict) else found, outputs[0])

    tensors = safetensors.torch.load_file(path + ".safetensors")
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[key], state[key]) for key in state)
    with safetensors.safe_open(path + ".safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format") == "pt"
    check_info("safetensors", {key: json.loads(value) for key, value in metadata.items()})

    extra = {"info.json": ""}
    script = torch.jit.load(path + ".pt", _extra_files=extra)
    check_info("torchscript", json.loads(extra["info.json"]))
    assert list(script.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in script.state_dict().items())
    script_error = max(check_all_close("torchscript", script(images), outputs) for _ in range(3))
    of_one = [output[:1] if len(output) == len(images) else output for output in outputs]
    check_all_close("torchscript, one image", script(images[:1]), of_one)

    found = run_onnx(path + ".onnx", images, len(outputs))
    onnx_error = check_all_close("onnx", found, outputs)
    print(name, f"torchscript {script_error:.1e} onnx {onnx_error:.1e}")


for name in sys.argv[2:]:
    images = torch.load(f"{sys.argv[1]}/{name}.expected", weights_only=True)["images"]
    SIDE = images.shape[-1]
    compare(f"{sys.argv[1]}/{name}", name)
