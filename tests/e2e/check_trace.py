"""Checks the trace of a profile: check_trace.py TRACE RANKS STEPS LOADER_THREADS LAYER..."""

import collections
import gzip
import json
import re
import sys

PHASES = ["loader", "to device", "forward", "backward", "optimizer", "vote"]
CALL = re.compile(r".*\(#\d+ of [^()]*\)")


METADATA = {"process_name": ("name", str), "process_sort_index": ("sort_index", int),
            "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def unique(pairs):
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key twice: {keys}"
    return dict(pairs)


def no_constant(text):
    raise AssertionError(f"{text} is no JSON")


def check_format(trace):
    """Checks the rules of the Trace Event Format (Google's document, JSON Object Format) for complete events and
    metadata, which are all that a profile writes. Perfetto's reader, which no package index has, drops or misplaces
    events that break them."""
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    seen = set()
    for e in trace["traceEvents"]:
        assert isinstance(e["name"], str) and e["name"], e
        for key in ("pid", "tid"):
            # Perfetto stores them in 32 bits; Python would accept true as an int.
            assert type(e[key]) is int and 0 <= e[key] < 2**31, e
        if e["ph"] == "M":
            key, kind = METADATA[e["name"]]
            assert list(e["args"]) == [key] and type(e["args"][key]) is kind, e
            place = e["name"], e["pid"], e["tid"] if e["name"].startswith("thread") else None
            assert place not in seen, f"twice: {e}"
            seen.add(place)
            continue
        # No separate begin or end events and no flows: these need partners with the same id.
        assert e["ph"] == "X", e
        for key in ("ts", "dur"):
            assert type(e[key]) in (int, float) and 0 <= e[key] < 2**53, e
        # Metadata comes first, and every event is in a process and a thread that have names.
        for place in (("process_name", e["pid"], None), ("thread_name", e["pid"], e["tid"])):
            assert place in seen, f"{e} is not preceded by {place}"


def check_nesting(spans, where):
    """Checks that spans of a track nest or follow each other, since viewers draw them like that."""
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
        trace = json.load(file, object_pairs_hook=unique, parse_constant=no_constant)
    check_format(trace)
    events = trace["traceEvents"]
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
