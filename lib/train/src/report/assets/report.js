"use strict";

const run = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
page.replaceChildren();

const epochs = run.epochs;
const steps = run.steps;
const lastStep = Math.max(1, lastOf(epochs.step ?? []) ?? 0, lastOf(steps.step ?? []) ?? 0);

/** The epoch that a step is in, from 1. */
function epochOf(step) {
  const place = (epochs.step ?? []).findIndex((last) => step <= last);
  return place < 0 ? lastOf(steps.epoch ?? []) ?? lastOf(epochs.epoch ?? []) : epochs.epoch[place];
}
function noteOf(step) { return `step ${count(Math.round(step))}, epoch ${epochOf(step)}`; }

const overSteps = chartGroup("step", [0, lastStep], noteOf);
const overRecall = chartGroup("recall_share", [0, 1], (recall) => `recall ${shown("recall", recall)}`);

// ---- the head ------------------------------------------------------------------------------------

const nav = element("nav", { "aria-label": "Sections" });

function head() {
  const last = (name) => lastOf(epochs[name] ?? []);
  const start = run.start ?? {};
  const parts = [run.task, run.model, run.data, start.world_size ? `${start.world_size} rank${start.world_size > 1 ? "s" : ""}` : null, run.state];
  const pairs = [];
  if (run.best) {
    pairs.push([`Best ${run.best.name.replaceAll("_", " ")}, epoch ${run.best.epoch}`, shown(run.best.name, run.best.value)]);
    pairs.push(["At the end", shown(run.best.name, run.best.last)]);
  }
  for (const name of ["train_loss", "val_loss", "test_loss"]) if (last(name) !== undefined) pairs.push([titled(name), shown(name, last(name))]);
  pairs.push(["Epochs", shown("epoch", last("epoch") ?? 0)], ["Steps", count(lastStep)]);
  if (last("seconds") !== undefined) pairs.push(["Time", seconds(last("seconds"))]);
  if (last("images_per_second")) pairs.push(["Images per second", shown("images_per_second", last("images_per_second"))]);
  for (const name of ["memory_bytes", "gpu_memory_bytes"]) if (last(name)) pairs.push([titled(name), shown(name, last(name))]);
  page.append(element("header", {}, element("h1", {}, run.name),
      element("p", { class: "muted" }, parts.filter(Boolean).join(" · ")), values(pairs, "figures"), nav));
}

// ---- curves --------------------------------------------------------------------------------------

const groupNames = /^(train|val|test)_(ema_)?(.+)$/;
const splitColors = { train: 0, val: 1, test: 1 };

/** The curves of each chart, by the name that their values have. */
function groups() {
  const found = new Map();
  const add = (name, curve) => {
    if (curve.values.every((value) => value === null)) return;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(curve);
  };
  for (const [name, list] of Object.entries(epochs)) {
    if (["epoch", "step", "seconds"].includes(name) || (name === "lr" && steps.lr)) continue;
    const match = name.match(groupNames);
    const [, split, average, metric] = match ?? [null, null, null, name];
    const label = split ? split + (average ? " ema" : "") : "";
    add(metric, { label, steps: epochs.step, values: list, color: average ? 2 : split ? splitColors[split] : 0, dash: average ? [6, 3] : undefined });
  }
  for (const [name, list] of Object.entries(steps)) {
    if (["epoch", "step", "loss_min", "loss_max"].includes(name)) continue;
    if (found.has(name) && name !== "loss" && name !== "lr") continue;
    const isLoss = name === "loss";
    add(name, { label: isLoss ? "step" : "", steps: steps.step, values: list, color: isLoss ? 7 : 0, isFaint: isLoss && !steps.loss_min,
      low: isLoss ? steps.loss_min : undefined, high: isLoss ? steps.loss_max : undefined });
  }
  // What is drawn first lies below.
  for (const curves of found.values()) curves.sort((a, b) => (b.color === 7) - (a.color === 7));
  return found;
}

function curves() {
  const all = groups();
  const bestMetric = run.best ? run.best.name.match(groupNames)?.[3] : null;
  const bestPlace = run.best ? (epochs.epoch ?? []).findIndex((epoch) => epoch >= run.best.epoch) : -1;
  const best = bestPlace < 0 ? null : epochs.step[bestPlace];
  const isMetric = (name) => all.get(name).some(({ label }) => label !== "");
  const rank = (name) => name === "loss" ? 0 : name === bestMetric ? 1 : isMetric(name) ? 5 : name === "lr" ? 2 : name === "images_per_second" ? 3 : 4;
  const names = [...all.keys()].sort((a, b) => rank(a) - rank(b));
  const made = names.map((name) => chart(overSteps, titled(name), name, all.get(name),
      { best: rank(name) < 2 || isMetric(name) ? best : null, canBeLog: name.endsWith("loss") }));
  if (made.length === 0) return [];
  const figuresOf = (isFront) => names.flatMap((name, i) => (rank(name) < 5) === isFront ? [made[i].figure] : []);
  const others = figuresOf(false);
  const front = others.length <= 2 ? [...figuresOf(true), ...others] : figuresOf(true);
  section(page, nav, "curves", "Curves",
      element("p", { class: "hint" }, "Drag to zoom, double-click for all. With the keyboard: arrows move the cursor, + and − zoom, 0 shows all."),
      element("div", { class: "charts" }, front),
      others.length > 2 ? element("details", {}, element("summary", {}, `${others.length} more metrics`), element("div", { class: "charts" }, others)) : null);
  return made;
}

// ---- the time of a step --------------------------------------------------------------------------

const partColors = { data: 4, forward: 0, backward: 1, exchange: 3, optimizer: 2, rest: 7 };

function stepTime() {
  const time = run.step_time;
  if (!time) return;
  const hasOptimizer = (time.optimizer ?? []).some((one) => one > 0);  // not on GPUs
  const parts = Object.keys(partColors).filter((part) => part !== "optimizer" || hasOptimizer);
  const rest = time.whole.map((whole, rank) => Math.max(0, whole - parts.slice(0, -1).reduce((sum, part) => sum + time[part][rank], 0)));
  const of = { ...time, rest };
  const longest = Math.max(...time.whole);
  const own = (time.own ?? []).some((one) => one > 0) ? [time.own] : [];  // not on GPUs
  const memory = time.memory_bytes ? [time.memory_bytes] : [];  // not in older logs
  const rows = time.whole.map((whole, rank) => [String(time.ranks?.[rank] ?? rank), ...memory.map((bytes) => shown("memory_bytes", bytes[rank])), seconds(whole), ...own.map((times) => seconds(times[rank])), ...parts.map((part) => seconds(of[part][rank])),
    element("td", { class: "left" }, element("span", { class: "parts", role: "img", "aria-label": parts.map((part) => `${part} ${seconds(of[part][rank])}`).join(", ") },
        parts.map((part) => element("i", { style: `width: ${(100 * of[part][rank] / longest).toFixed(2)}%; background: var(--series-${partColors[part]})` }))))]);
  const heads = parts.map((part) => [element("span", { class: "swatch", style: `background: var(--series-${partColors[part]})` }), part]);
  section(page, nav, "time", "Time and memory of a step",
      element("p", { class: "hint" }, `Means of epoch ${time.epoch} by rank. Forward and backward include the exchange of batch norm's statistics; exchange is that of gradients, as far as backward does not hide it.`
          + (own.length ? " Own is the time in which a rank waits for no other: the rank with the most holds up the others." : "")
          + (time.ranks ? ` Of ${time.of_ranks} ranks, these are the ${time.ranks.length} with the most.` : "")),
      run.stragglers.map((one) => element("p", {}, `Rank ${one.rank} (${one.host}${one.gpu ? `, GPU ${one.gpu}` : ""}) holds up the others: its own time was 1.3 times the median's or more in each of the last ${one.epochs} epochs.`)),
      element("div", { class: "scroll tall" }, table(["rank", ...memory.map(() => "memory"), "step", ...own.map(() => "own"), ...heads, ""], rows, { class: "times" })));
}

// ---- the profile ---------------------------------------------------------------------------------

function profile() {
  const found = run.profile;
  if (!found) return;
  const percent = (share) => `${(100 * share).toFixed(1)}\u202f%`;
  const pairs = [["Step, mean", seconds(found.step_seconds)]];
  for (const [name, heading] of [["gradients", "Exchange of gradients"], ["statistics", "Exchange of statistics"]]) {
    const exchange = found[name];
    if (exchange) pairs.push([heading, `${seconds(exchange.seconds)}, ${percent(exchange.hidden_share)} hidden`]);
  }
  const bar = (share) => element("td", {}, percent(share), element("span", { class: "bar" }, element("i", { style: `width: ${100 * share}%` })));
  const layers = found.layers.map((layer) => [element("td", {}, element("code", {}, layer.name)), seconds(layer.forward), seconds(layer.backward),
    layer.exchange > 0 ? seconds(layer.exchange) : "", bar(layer.share)]);
  const last = found.first_step + found.steps - 1;
  section(page, nav, "profile", "Profile",
      element("p", { class: "hint" }, `Means of ${found.steps > 1 ? `steps ${found.first_step} to ${last}` : `step ${last}`} over ${found.ranks} rank${found.ranks > 1 ? "s" : ""}. `
          + "The exchange of a layer's statistics is not part of its forward and backward. ", found.trace ? ["Each operator is in ", element("code", {}, found.trace), ", which ui.perfetto.dev opens."] : ""),
      values(pairs),
      element("h3", {}, "Slowest layers"), element("div", { class: "scroll" }, table(["layer", "forward", "backward", "exchange", "share"], layers)));
}

// ---- results by class ----------------------------------------------------------------------------

function confusionMatrix({ classes, rows }) {
  const largest = Math.max(...rows.flat());
  const isPercent = largest >= 100000;
  const isLong = Math.max(...classes.map((name) => name.length)) > 4;
  const cells = (row, i) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return row.map((value, k) => {
      const title = `${classes[i]} taken for ${classes[k]}: ${count(value)} of ${count(sum)}`;
      if (value === 0) return element("td", { class: "none", title }, "0");
      const share = (0.08 + 0.52 * value / sum).toFixed(2);
      return element("td", { title, style: `--color: var(--${i === k ? "blue" : "orange"}); --share: ${share}` },
          isPercent ? (100 * value / sum).toFixed(1) : String(value));
    });
  };
  return element("div", {}, element("h3", {}, `Confusion matrix${isPercent ? ", percent of the label" : ""}`),
      element("p", { class: "muted" }, "Rows are labels, columns the network's answers."),
      element("div", { class: "scroll" }, element("table", { class: `confusion${isLong ? " long" : ""}${classes.length > 12 ? " many" : ""}` },
          element("thead", {}, element("tr", {}, element("td", {}), classes.map((name) => element("th", { scope: "col" }, name)))),
          element("tbody", {}, rows.map((row, i) => element("tr", {}, element("th", { scope: "row" }, classes[i]), cells(row, i)))))));
}

function commonestMistakes({ mistakes }) {
  const rows = mistakes.map(([label, answer, number, samples]) => [label, element("td", { class: "left" }, answer), count(number), `${(100 * number / samples).toFixed(1)}\u202f%`]);
  return element("div", {}, element("h3", {}, "Commonest mistakes"),
      element("div", { class: "scroll tall" }, table(["label", "answer", "count", "of the label"], rows)));
}

function classTable() {
  const measures = Object.keys(run.classes);
  if (measures.length === 0) return null;
  const first = run.classes[measures[0]];
  const names = Object.keys(first).sort((a, b) => (first[a] ?? 2) - (first[b] ?? 2));
  const bar = (value) => element("span", { class: "bar" }, element("i", { style: `width: ${100 * (value ?? 0)}%` }));
  const rows = names.map((name) => [name, ...measures.flatMap((measure, i) => {
    const value = run.classes[measure][name];
    const text = shown(measure, value);
    return [i === 0 ? element("td", {}, text, bar(value)) : text];
  })]);
  return element("div", {}, element("h3", {}, "By class, the worst first"),
      element("div", { class: "scroll tall" }, table(["class", ...measures.map((name) => name.replaceAll("_", " "))], rows)));
}

/** Precision over recall, for some of the thresholds. */
function precisionRecall() {
  const table = run.precision_recall;
  if (!table?.recall) return [];
  const names = ["iou_0.50", "iou_0.75", "iou_0.90"].filter((name) => table[name]?.some((value) => value !== null));
  if (names.length === 0) return [];
  return [chart(overRecall, "Precision over recall", "precision", names.map((name) => ({ label: name.replace("iou_", "IoU ≥ "), steps: table.recall, values: table[name] })), { hidesLast: true })];
}

function classes() {
  const made = precisionRecall();
  const classParts = [...made.map(({ figure }) => figure), run.confusion?.classes ? confusionMatrix(run.confusion) : null, run.confusion?.mistakes ? commonestMistakes(run.confusion) : null, classTable()];
  if (classParts.every((part) => part === null)) return [];
  section(page, nav, "classes", "Classes", element("p", { class: "hint" }, "Of the last evaluation."), element("div", { class: "beside" }, classParts));
  return made;
}

// ---- pictures ------------------------------------------------------------------------------------

const pictureTitles = { samples: "Samples", worst_samples: "Samples with the highest losses", ema_samples: "Samples of the moving average", first_batch: "First training batch, augmented" };

// What is beside each other in a row.
const sampleColumns = { segmentation: "image, label, the network's answer", detection: "label, the network's answer" };

/** A picture that changes over time, with a slider if there are several. */
function pictureOverTime(name, list) {
  const image = element("img", {});
  const note = element("span", { class: "muted" });
  const slider = element("input", { type: "range", min: "0", max: String(list.length - 1), value: String(list.length - 1), "aria-label": `${name}: step`, oninput: () => show() });
  function show() {
    const picture = list[Number(slider.value)];
    image.src = picture.address;
    image.width = picture.width;
    image.height = picture.height;
    image.style.height = "auto";
    image.className = picture.width < 360 ? "small" : "";
    const text = picture.step === 0 ? "before the first step" : noteOf(picture.step);
    note.textContent = text;
    image.alt = `${pictureTitles[name] ?? titled(name)}, ${text}`;
    slider.setAttribute("aria-valuetext", text);
  }
  show();
  const columns = name.endsWith("samples") ? sampleColumns[run.task] : undefined;
  return element("figure", {}, element("figcaption", {}, element("h3", {}, pictureTitles[name] ?? titled(name)), note,
      columns ? element("span", { class: "muted" }, columns) : null),
      list.length > 1 ? element("div", { class: "controls" }, slider) : null, image);
}

/**
 * Tiles of one picture, of which each shows its own part, with something below each.
 * @param tiles a list of {text, title, below}
 * @param shape a tile's width by its height
 */
function tilesOf(address, columns, tiles, shape = 1) {
  const rows = Math.ceil(tiles.length / columns);
  const place = (at, number) => number > 1 ? `${100 * at / (number - 1)}%` : "0";
  return element("ul", { class: "tiles", style: address ? `--sheet: url(${address})` : null }, tiles.map(({ text, title, below }, i) => {
    const style = `aspect-ratio: ${shape}; background-size: ${100 * columns}% ${100 * rows}%; ` +
        `background-position: ${place(i % columns, columns)} ${place(Math.floor(i / columns), rows)}`;
    return element("li", { title }, address ? element("div", { class: "tile", role: "img", "aria-label": text, style }) : null, below);
  }));
}

/** The first training batch, with the class below each image. */
function labelledBatch({ address, columns, labels, width, height }) {
  const shape = (width / columns) / (height / Math.ceil(labels.length / columns));
  return element("figure", { class: "wide" }, element("figcaption", {}, element("h3", {}, pictureTitles.first_batch)),
      tilesOf(address, columns, labels.map((label) => ({ text: label, title: label, below: element("p", {}, label) })), shape.toFixed(3)));
}

/** The class of each color in the pictures. */
function legend() {
  if (run.colors.length === 0) return null;
  return element("p", { class: "legend colors" }, run.colors.map(([name, color]) =>
      element("span", {}, element("span", { class: "swatch area", style: `background: ${color}` }), name)));
}

function pictures() {
  const names = Object.keys(run.pictures);
  if (names.length === 0) return;
  section(page, nav, "pictures", "Pictures", legend(), element("div", { class: "pictures" }, names.map((name) =>
      run.pictures[name][0].labels?.length > 0 ? labelledBatch(run.pictures[name][0]) : pictureOverTime(name, run.pictures[name]))));
}

// ---- mistakes ------------------------------------------------------------------------------------

/** A text that breaks anywhere but in a file's extension. */
function withWholeEnding(text) {
  const [, stem, ending] = text.match(/^(.*?)(\.\w{1,5})?$/s);
  return element("span", {}, stem, ending ? element("span", { class: "ending" }, ending) : null);
}

function mistakes() {
  if (!run.mistakes) return;
  const { columns, address, list } = run.mistakes;
  const tiles = list.map(([sample, label, answer, loss, name]) => {
    const pairs = [["label", label], ["answer", answer], ["loss", shown("loss", Number(loss))], ["sample", name?.includes("/") ? name.split("/").slice(-2).join("/") : sample]];
    return { text: `${label} taken for ${answer}`, title: name,
      below: element("dl", {}, pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, withWholeEnding(value))])) };
  });
  section(page, nav, "mistakes", "Worst mistakes",
      element("p", { class: "hint" }, "Of the last evaluation, those with the highest losses first."), tilesOf(address, columns, tiles));
}

// ---- settings and surroundings -------------------------------------------------------------------

function configuration() {
  if (!run.config) return;
  const rows = run.settings.map(([key, value, usual]) => [element("td", {}, element("code", {}, key)),
    element("td", { class: "left wrap" }, element("code", {}, value)), element("td", { class: "left wrap muted" }, usual === null ? "" : element("code", {}, usual))]);
  const settings = table(["key", "value", "default"], rows, { class: "settings" });
  for (const head of settings.querySelectorAll("thead th")) head.className = "left";
  section(page, nav, "configuration", "Configuration", element("p", { class: "hint" }, "Keys that are not at their defaults."),
      element("div", { class: "scroll" }, settings),
      element("details", {}, element("summary", {}, "All keys"), element("pre", {}, run.config)));
}

function environment() {
  const about = { folder: run.folder, "page written": dateOf(run.written) };
  section(page, nav, "environment", "Environment", element("div", { class: "environment" }, described({ ...about, ...run.environment })));
}

function result() {
  if (!run.result) return;
  const isOfClass = (key) => Object.keys(run.classes).some((measure) => key.startsWith(`${measure}_`));
  section(page, nav, "result", "Result", values(Object.entries(run.result).filter(([key]) => !isOfClass(key)).map(([key, value]) => [key, shown(key, value)])));
}

head();
const made = curves();
stepTime();
profile();
made.push(...classes());
mistakes();
pictures();
configuration();
environment();
result();
drawCharts(made);
