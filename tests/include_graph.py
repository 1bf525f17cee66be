#!/usr/bin/env python3
"""Fails if folders of lib/ include each other in a cycle, or if comm of lib/dist includes parallel."""

import pathlib
import re
import sys

LIB = pathlib.Path(__file__).resolve().parent.parent / "lib"
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
SOURCES = {".h", ".inc", ".cpp"}
# The public headers of comm. The other ones in lib/dist/include belong to parallel.
COMM_HEADERS = {"call_trace", "collectives", "peer_error", "plain_message", "process_group", "process_group_ptr", "spawn", "work", "world_rank"}


def folder_of(file):
    """The graph node of a file: a module's public headers, or a folder of its sources."""
    parts = file.relative_to(LIB).parts
    if parts[1] == "src":
        return "/".join(parts[:-1])
    if parts[:2] == ("dist", "include"):
        return "dist/include/" + ("comm" if file.stem in COMM_HEADERS else "parallel")
    return "/".join(parts[:2])


def included_files():
    """Yields all pairs of files in lib/ of which the first includes the second."""
    files = [file for file in LIB.glob("*/*/**/*") if file.suffix in SOURCES and "gloo_names" not in file.parts]
    for file in files:
        module = LIB / file.relative_to(LIB).parts[0]
        roots = [file.parent, *LIB.glob("*/include"), module / "src", module / "src/comm", module / "src/parallel"]
        for name in INCLUDE.findall(file.read_text()):
            found = next((root / name for root in roots if (root / name).is_file()), None)
            if found:
                yield file, found.resolve()


def circle(edges):
    """The nodes of a cycle, or None."""
    done = set()

    def visit(node, path):
        if node in path:
            return path[path.index(node):] + [node]
        if node in done:
            return None
        for target in sorted(edges.get(node, {})):
            if found := visit(target, path + [node]):
                return found
        done.add(node)
        return None

    return next(filter(None, (visit(node, []) for node in sorted(edges))), None)


def main():
    folders, modules, errors = {}, {}, []
    for file, target in included_files():
        text = f"{file.relative_to(LIB)} includes {target.relative_to(LIB)}"
        for edges, a, b in (
            (folders, folder_of(file), folder_of(target)),
            (modules, file.relative_to(LIB).parts[0], target.relative_to(LIB).parts[0]),
        ):
            if a != b:
                edges.setdefault(a, {}).setdefault(b, []).append(text)
        if re.match(r"dist/(src|include)/comm", folder_of(file)) and re.match(
            r"dist/(src|include)/parallel", folder_of(target)
        ):
            errors.append(f"comm must not know parallel: {text}")
    if not folders:
        errors.append(f"no includes found in {LIB}")
    for kind, edges in (("folders", folders), ("modules", modules)):
        # Finds all cycles: removes the edge that closes a cycle before it searches for the next one.
        edges = {node: dict(targets) for node, targets in edges.items()}
        while nodes := circle(edges):
            errors.append(f"circle of {kind}: {' -> '.join(nodes)}")
            for a, b in zip(nodes, nodes[1:]):
                errors += [f"    {text}" for text in edges[a][b]]
            del edges[nodes[-2]][nodes[-1]]
    print("\n".join(errors) or f"no circle between {len(folders)} folders")
    return 1 if errors else 0


sys.exit(main())
