"""The page of scripts/gpu-check: one self-contained HTML file."""

import collections
from html import escape

STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --soft: #5c6675; --back: #ffffff; --line: #dde2ea; --panel: #f5f7fa;
  --good: #1a7f4b; --bad: #b3261e; --wait: #8a5a00; --bar: #3567c2; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ef; --soft: #9aa5b5; --back: #14181f; --line: #2c3441;
  --panel: #1c222c; --good: #56c68b; --bad: #ff8a80; --wait: #e5b454; --bar: #7aa5f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { margin: .35rem 0; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .wait { color: var(--wait); }
.banner { background: var(--panel); border-left: 4px solid var(--wait); padding: .6rem .9rem; margin: 1rem 0; }
pre { background: var(--panel); padding: .75rem; overflow-x: auto; font-size: 12.5px; margin: .25rem 0 1rem; }
.track { position: relative; width: 11rem; height: 1.1rem; background: var(--panel); margin-top: .2rem; }
.span { position: absolute; top: .3rem; height: .5rem; background: var(--bar); opacity: .45; min-width: 2px; }
.dot { position: absolute; top: .15rem; height: .8rem; width: 3px; background: var(--bar); }
.aim { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--text); }
"""
CLASSES = {"ok": "good", "met": "good", "failed": "bad", "missed": "bad"}
# Tests and benchmarks that a machine with fewer GPUs cannot run, by the number they need.
NEVER = {2: "exchanges over NCCL, training on several ranks, ranks that fail (dist_gpu_faults_test), and the "
            "benchmark's parts sync-cost and scaling",
         8: "the targets of those parts"}


def cell(value, kind=""):
    text = f"{value:,.1f}" if isinstance(value, float) else str(value)
    kind = "number" if isinstance(value, (int, float)) and not kind else kind
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def table(heads, rows):
    """Makes a table of values. Strings are HTML; (string, class) sets a class. Heads align as their columns do."""
    kinds = ["number" if isinstance(one, (int, float)) or (isinstance(one, tuple) and one[1] == "number") else ""
             for one in (rows[0] if rows else heads)]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in zip(heads, kinds))
    body = "".join("<tr>" + "".join(cell(*one) if isinstance(one, tuple) else cell(one) for one in row) + "</tr>"
                   for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def status(word):
    return word, CLASSES.get(word, "wait")


def machine(report):
    it = report["machine"]
    rows = [("GPU", f"{it['gpus']} &times; {escape(it['gpu'])}, {escape(it['memory'])}"), ("driver", it["driver"]),
            ("torch's CUDA", it['cuda']), ("NCCL, cuDNN", f"{it['nccl']}, {it['cudnn']}"),
            ("torch", it["torch"]), ("processor cores", str(it["cores"])),
            ("commit", f"{escape(it['commit'])}, sources {it['sources']}")]
    return table(["machine", ""], rows)


def stages(report):
    rows = []
    for stage in report["stages"]:
        parts = {name: part for name, part in report["parts"].items() if name.startswith(stage + "/")}
        counts = collections.Counter(part["status"] for part in parts.values())
        seconds = sum(part.get("seconds", 0) for part in parts.values())
        word = ("not run" if not parts else "failed" if counts["failed"] else
                "unfinished" if counts["unfinished"] else "ok")
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        rows.append((stage, status(word), said, float(seconds)))
    return table(["stage", "", "parts", "seconds"], rows)


def tests(report):
    run, failed, skipped = 0, [], collections.Counter()
    for name, part in report["parts"].items():
        if name.startswith("tests/"):
            data = part.get("data", {})
            run += data.get("run", 0)
            failed += data.get("failed", [])
            skipped.update(data.get("skipped", {}))
    said = f"<p>{run} run, {len(failed)} failed, {sum(skipped.values())} skipped.</p>"
    rows = [(escape(name), ("failed", "bad")) for name in failed]
    rows += [(f"{count} tests", (f"skipped: {escape(reason)}", "wait")) for reason, count in skipped.most_common()]
    return said + (table(["", ""], rows) if rows else "")


def bench(report, key):
    """All entries under `key` in the parts of the stage bench."""
    return [entry for name, part in report["parts"].items() if name.startswith("bench/")
            for entry in part.get("data", {}).get(key, [])]


def chart(row):
    """Draws the interval of a ratio as a band, its median as a mark, and the target as a line."""
    top = 1.25 * max(row["interval"][1], row["target"] or 1)
    low, high = (100 * end / top for end in row["interval"])
    aim = f'<div class="aim" style="left:{100 * row["target"] / top:.1f}%"></div>' if row["target"] else ""
    return (f'<div class="track"><div class="span" style="left:{low:.1f}%;width:{high - low:.1f}%"></div>'
            f'<div class="dot" style="left:{100 * row["ratio"] / top:.1f}%"></div>{aim}</div>')


def ratio_rows(report, key):
    rows = []
    for row in bench(report, key):
        target, ratio = row["target"], row["ratio"]
        met = target is None or (ratio >= target if row["at_least"] else ratio <= target)
        aim = "none" if target is None else f"at {'least' if row['at_least'] else 'most'} {target}"
        verdict = (("not a GPU's", "wait") if report["fake"] else
                   status("no target" if target is None else "met" if met else "missed"))
        rows.append((escape(row["name"]), (f"{ratio:.3f}", "number"),
                     (f"{row['interval'][0]:.3f} &ndash; {row['interval'][1]:.3f}", "number"), (aim, "number"),
                     verdict, chart(row), *((f"{one:.2f}", "number") for one in row["milliseconds"])))
    return rows


def ratios(report):
    said = ("<p class='soft'>Steps: how many times as fast as Python. Layers: our time / the other's. Medians and "
            "intervals of 95 % over pairs that ran in turn on one GPU; in the picture, the line is the target.</p>")
    return said + table(["", "ratio", "interval", "target", "", "", "ours, ms", "other, ms"],
                        ratio_rows(report, "rows"))


def several(report):
    return table(["", "ratio", "interval", "target", "", "", "first, ms", "second, ms"],
                 ratio_rows(report, "several"))


def traces(report):
    rows = [(escape(row["name"]), *(float(row[key]) for key in ("launches", "copies", "waits")))
            for row in bench(report, "traces")]
    return table(["", "kernels launched", "copies and fills", "waits of the host"], rows)


def training(report):
    rows = []
    for name, part in report["parts"].items():
        if name.startswith("train/") and part.get("data"):
            data = part["data"]
            rows.append((escape(name.removeprefix("train/")), data["world_size"],
                         (f"{100 * data['test_accuracy']:.1f} %", "number"), (f"{data['train_loss']:.3f}", "number"),
                         float(data["images_per_second"])))
    return table(["run", "ranks", "test accuracy", "training loss", "images/s"], rows)


def not_run(report):
    started = {name.split("/")[0] for name in report["parts"]}
    rows = [(f"stage {stage}", "") for stage in report["stages"] if stage not in started]
    rows += [(escape(name), escape(part.get("note") or "")) for name, part in report["parts"].items()
             if part["status"] == "unfinished"]
    return table(["", "why"], rows + [(entry, f"needs {gpus} GPUs") for gpus, entry in NEVER.items()
                                      if report["machine"]["gpus"] < gpus])


def failures(report):
    return "".join(f"<p><b>{escape(name)}</b>: {escape(part.get('note') or '')}</p>"
                   f"<pre>{escape(chr(10).join(part.get('log', [])))}</pre>"
                   for name, part in report["parts"].items() if part["status"] == "failed")


def page(report):
    failed = failures(report)
    sections = {"Machine": machine, "Stages": stages, "Tests": tests, "Beside Python's torch": ratios,
                "Several GPUs": several, "Launches and waits": traces, "Training": training,
                "What has not run": not_run}
    body = "".join(f"<h2>{name}</h2>{make(report)}" for name, make in sections.items())
    counts = collections.Counter(part["status"] for part in report["parts"].values())
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    banner = ('<div class="banner">The CUDA devices are fake: operators run on the CPU, and no number here is a '
              "GPU's.</div>" if report["fake"] else "")
    return ('<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>gpu-check</title><style>{STYLE}</style><h1>syncbn on a GPU</h1><p class='soft'>{said}</p>"
            f"{banner}{'<h2>Failures</h2>' + failed if failed else ''}{body}</html>\n")
