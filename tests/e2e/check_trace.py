"""Checks the trace of a profile: check_trace.py TRACE RANKS STEPS LOADER_THREADS LAYER..."""

import collections
import gzip
import json
import re
import sys

PHASES = ["loader", "to device", "forward", "backward", "optimizer", "vote"]
CALL = re.compile(r".*\(#\d+ of [^()]*\)")


def check_nesting(spans, where):
    """Spans of a track lie inside or behind each other, as viewers draw them."""
    ends = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], f"{where}: {name} overlaps what it is not inside of"
        ends.append(end)


def main():
    path, *numbers = sys.argv[1:5]
    ranks, steps, loader_threads = map(int, numbers)
    layers = sys.argv[5:]
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["ph"] == "M"}
    assert sorted(processes) == list(range(ranks)), processes
    for rank, name in processes.items():
        assert re.fullmatch(rf"rank {rank} \(.+\)", name), name
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    tracks = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            # Times have three decimals: compare them as integers.
            begin = round(1000 * e["ts"])
            tracks[e["pid"], names[e["pid"], e["tid"]]].append((begin, begin + round(1000 * e["dur"]), e["name"]))
    exchanges = collections.defaultdict(dict)
    for rank in range(ranks):
        loading = {track for (pid, track), spans in tracks.items()
                   if pid == rank and any(name == "load samples" for _, _, name in spans)}
        assert len(loading) == loader_threads, f"rank {rank} loads on {loading}"
        assert "training" not in loading
        step_spans = tracks[rank, "steps"]
        assert len(step_spans) == steps, step_spans
        assert all(a[1] <= b[0] for a, b in zip(step_spans, step_spans[1:])), step_spans
        first, last = step_spans[0][0], step_spans[-1][1]
        training = tracks[rank, "training"]
        assert all(first <= begin for begin, _, _ in training)
        for phase in PHASES:
            found = sum(name == phase for _, _, name in training)
            assert found >= steps, f"rank {rank} has {found} times {phase}"
        assert any(name.startswith("aten::") for _, _, name in training)
        seen = {name for _, _, name in tracks[rank, "layers"]}
        for layer in layers:
            for name in (layer, layer + " (backward)"):
                assert name in seen, f"rank {rank} lacks {name}; it has {sorted(seen)}"
        for (pid, track), spans in tracks.items():
            if pid != rank:
                continue
            check_nesting(spans, f"rank {rank}, {track}")
            if track.startswith(("layers", "exchanges")):
                for begin, end, name in spans:
                    assert first <= begin <= end <= last, f"{name} is outside of the steps"
            if track.startswith("exchanges"):
                for begin, end, name in spans:
                    assert CALL.fullmatch(name), name
                    exchanges[name][rank] = begin, end
    if ranks > 1:
        for what in ("DDP bucket 0", "SyncBatchNorm layer"):
            assert any(name.startswith(what) for name in exchanges), f"no {what} in {sorted(exchanges)}"
    for name, by_rank in exchanges.items():
        assert len(by_rank) == ranks, f"{name} is of ranks {sorted(by_rank)} alone"
        latest, earliest = max(b for b, _ in by_rank.values()), min(e for _, e in by_rank.values())
        assert latest <= earliest, f"{name}: a rank had the result before another one came"


main()
