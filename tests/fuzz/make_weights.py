"""Writes small files of weights, with which weights_fuzz begins, into a folder."""

import argparse
import collections
import json
import pathlib
import struct
import sys

import torch

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
state = collections.OrderedDict(a=torch.ones(2, 3), b=torch.ones(6)[::2].to(torch.bfloat16),
                                c=torch.tensor(3))
state["d"] = state["a"].T
run = {"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1, resume=None, ranks=[0, 1]),
       "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2, 3)}},
                     "param_groups": [{"lr": 0.1, "nesterov": False, "params": [0]}]}}
for name, value in [("state", state), ("run", run), ("parameter", {"p": torch.nn.Parameter(state["a"])})]:
    torch.save(value, folder / f"{name}.pth")
    torch.save(value, folder / f"{name}.legacy.pth", _use_new_zipfile_serialization=False)
    torch.save(value, folder / f"{name}.protocol4.pth", pickle_protocol=4,
               _use_new_zipfile_serialization=False)
header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                     "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]}}).encode()
(folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
