"""Checks Kineto's trace of a rank: check_trace.py TRACE STEPS LOADER_THREADS"""

import collections
import json
import sys

PHASES = ["loader", "to device", "forward", "backward", "optimizer", "vote"]


def main():
    path, *numbers = sys.argv[1:]
    steps, loader_threads = map(int, numbers)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["name"]].append(event)
    for phase in PHASES:
        found = len(spans[phase])
        assert found >= steps, f"{phase} is there {found} times"
    training = {event["tid"] for event in spans["forward"]}
    assert len(training) == 1, f"steps ran on {training}"
    assert len(spans["backward"]) == steps, f"backward is there {len(spans['backward'])} times"
    loading = {event["tid"] for event in spans["load samples"]}
    assert len(loading) == loader_threads, f"loads on {loading}"
    assert not training & loading
    assert spans["aten::cross_entropy_loss"] and spans["aten::convolution"]
    assert any(name.startswith("autograd::engine::evaluate_function") for name in spans)


main()
