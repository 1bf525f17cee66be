"""Counterpart of weights_read.cpp in Python. Writes the file first."""

import json
import sys
import time

import torch
import torchvision

network = torchvision.models.resnet50()
torch.save(network.state_dict(), sys.argv[1])
for line in sys.stdin:
    begin = time.perf_counter()
    weights = torch.load(sys.argv[1], mmap=True, weights_only=True)
    if line.strip() == "load":
        network.load_state_dict(weights)
    seconds = time.perf_counter() - begin
    del weights
    print(json.dumps({"seconds": seconds}), flush=True)
