"use strict";

const compared = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
page.replaceChildren();

// The best first, as in the table.
const groups = compared.groups.sort((a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity));
const all = groups.flatMap((group) => group.runs);
const nav = element("nav", { "aria-label": "Sections" });

function head() {
  const text = [compared.task, `${all.length} run${all.length > 1 ? "s" : ""}`,
    groups.length < all.length ? `${groups.length} configurations` : null];
  page.append(element("header", {}, element("h1", {}, "Comparison of runs"),
      element("p", { class: "muted" }, text.filter(Boolean).join(" · ")), nav));
}

// ---- the table -----------------------------------------------------------------------------------

function results() {
  const first = groups.find((group) => Object.keys(group.result).length > 0)?.result ?? {};
  const best = Object.keys(first).find((name) => name.startsWith("best_") && !["best_epoch", "best_mode"].includes(name));
  const columns = best ? [best, "best_epoch", best.slice(5)] : [];
  columns.push(...Object.keys(first).filter((name) => name.endsWith("_loss") && !/ema_/.test(name) && !columns.includes(name)), "seconds");
  const seen = columns.filter((name) => groups.some((group) => name in group.result));
  const rows = groups.map((group, i) => [
    element("td", { class: "left" }, element("span", { class: "swatch", style: `background: var(--series-${i % 8})` }), group.values[0]),
    ...group.values.slice(1).map((value) => element("td", { class: "left" }, element("code", {}, value))),
    ...seen.map((name) => shown(name, group.result[name])), element("td", { class: "left", title: group.state }, group.state.length > 40 ? `${group.state.slice(0, 39)}…` : group.state)]);
  const made = table(["run", ...compared.keys, ...seen.map((name) => name.replaceAll("_", " ")), "state"], rows);
  for (const place of [...compared.keys.keys()].map((i) => i + 1).concat(compared.keys.length + seen.length + 1)) {
    made.querySelectorAll("thead th")[place].className = "left";
  }
  section(page, nav, "results", "Results", element("p", { class: "hint" },
      "The best first, with the keys that differ. Finished runs that differ only in their seeds are one line: mean ± standard deviation."),
      element("div", { class: "scroll" }, made));
}

// ---- curves --------------------------------------------------------------------------------------

/** Mean, least and largest value of runs at each epoch that all of them have. */
function meanOf(runs, name) {
  const tables = runs.filter((run) => run.epochs[name]).map((run) => new Map(run.epochs.epoch.map((epoch, i) => [epoch, run.epochs[name][i]])));
  const made = { steps: [], values: [], low: [], high: [] };
  if (tables.length === 0) return made;
  for (const epoch of tables[0].keys()) {
    const found = tables.map((one) => one.get(epoch)).filter((value) => value !== null && value !== undefined);
    if (found.length < tables.length) continue;
    made.steps.push(epoch);
    made.values.push(found.reduce((a, b) => a + b, 0) / found.length);
    made.low.push(Math.min(...found));
    made.high.push(Math.max(...found));
  }
  return made;
}

/** What tells a configuration from the others: its keys, if they are few. */
function labelOf(group) {
  const keys = compared.keys.map((key, i) => [key.split(".").at(-1), group.values[i + 1]]).filter(([key]) => key !== "seed" || group.runs.length === 1);
  return keys.length > 0 && keys.length <= 3 && groups.length > 1 ? keys.map(([key, value]) => `${key}=${value}`).join(", ") : group.values[0];
}

function curveOf(group, i, name) {
  const common = { label: labelOf(group), color: i, dash: i >= 8 ? [6, 3] : undefined };
  if (group.runs.length > 1) return { ...common, ...meanOf(group.runs, name) };
  const { epochs } = group.runs[0];
  return { ...common, steps: epochs.epoch ?? [], values: epochs[name] ?? [] };
}

function curves() {
  const names = [...new Set(all.flatMap((run) => Object.keys(run.epochs)))].filter((name) => !["epoch", "step", "seconds"].includes(name));
  const best = Object.keys(groups[0].result).find((name) => name.startsWith("best_") && !["best_epoch", "best_mode"].includes(name))?.slice(5);
  const isOfClass = (name) => /^(val|test)_(ema_)?(accuracy|iou|ap)_/.test(name);
  const rank = (name) => name === best ? 0 : /^(val|test)_loss$/.test(name) ? 1 : name === "train_loss" ? 2 : name === "lr" ? 4 : /^(train|val|test)_/.test(name) ? 3 : 5;
  const sorted = names.filter((name) => !isOfClass(name)).sort((a, b) => rank(a) - rank(b));
  const lastEpoch = Math.max(1, ...all.flatMap((run) => lastOf(run.epochs.epoch ?? []) ?? 1));
  const overEpochs = chartGroup("epoch", [lastEpoch > 1 ? 1 : 0, lastEpoch], (epoch) => `epoch ${Math.round(epoch)}`);
  const made = sorted.flatMap((name) => {
    const found = groups.map((group, i) => curveOf(group, i, name)).filter((curve) => curve.values.some((value) => value !== null));
    if (found.length === 0) return [];
    return [chart(overEpochs, titled(name), name, found, { canBeLog: name.endsWith("loss") })];
  });
  const front = made.slice(0, 6).map((one) => one.figure);
  const others = made.slice(6).map((one) => one.figure);
  section(page, nav, "curves", "Curves over epochs",
      element("p", { class: "hint" }, "Drag to zoom, double-click for all. With the keyboard: arrows move the cursor, + and − zoom, 0 shows all. Bands reach from the lowest to the highest of a configuration's seeds."),
      element("div", { class: "charts" }, front),
      others.length > 0 ? element("details", {}, element("summary", {}, `${others.length} more`), element("div", { class: "charts" }, others)) : null);
  return made;
}

// ---- runs ----------------------------------------------------------------------------------------

function runs() {
  section(page, nav, "runs", "Runs", values(all.map((run) => [run.name, run.folder])));
}

head();
results();
const made = curves();
runs();
drawCharts(made);
