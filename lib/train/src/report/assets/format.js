"use strict";

/** An element with attributes and children: texts, elements, or null for nothing. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null) made.append(child);
  return made;
}

const shareNames = /({{shares}})($|_)/;  // kShareWords of records/log_record.h

/** Whether values of this name are shares in [0, 1], shown in percent. */
function isShare(name) { return shareNames.test(name) && !/seconds|bytes/.test(name); }

function trimmed(value, digits) { return String(Number(value.toPrecision(digits))); }

function ofUnits(value, step, units, digits = 3) {
  let place = 0;
  while (Math.abs(value) >= step && place + 1 < units.length) { value /= step; ++place; }
  return `${trimmed(value, digits)}\u202f${units[place]}`;
}

function bytes(value, digits) { return ofUnits(value, 1000, ["B", "kB", "MB", "GB", "TB"], digits); }

function seconds(value, digits = 3) {
  if (value >= 3600) return `${Math.floor(value / 3600)}\u202fh ${Math.round(value % 3600 / 60)}\u202fmin`;
  if (value >= 60) return `${Math.floor(value / 60)}\u202fmin ${Math.round(value % 60)}\u202fs`;
  return value >= 1 || value === 0 ? `${trimmed(value, digits)}\u202fs` : ofUnits(value * 1e6, 1000, ["µs", "ms"], digits);
}

function count(value) { return value.toLocaleString("en").replaceAll(",", "\u202f"); }

/** A value of a log or a result, for people. */
function shown(name, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (/bytes/.test(name)) return bytes(value);
  if (isShare(name)) return `${(100 * value).toFixed(2)}\u202f%`;
  if (/seconds/.test(name) && !/per_second/.test(name)) return seconds(value);
  if (Number.isInteger(value)) return count(value);
  if (/per_second/.test(name)) return count(Number(value.toPrecision(4)));
  if (Math.abs(value) >= 1000) return count(Math.round(value));
  return Math.abs(value) >= 1e-3 ? String(Number(value.toFixed(4))) : value.toExponential(2);
}

const titles = {
  lr: "Learning rate", images_per_second: "Images per second", data_wait_seconds: "Wait for data, per step",
  data_wait_share: "Wait for data, share of time", memory_bytes: "Memory", gpu_memory_bytes: "GPU memory", gpu_utilization: "GPU utilization",
};

/** A key as a heading. */
function titled(name) {
  if (name in titles) return titles[name];
  const text = name.replace(/_(bytes|seconds)$/, "").replaceAll("_", " ").replace(/\btop(\d)/, "top-$1");
  const heading = text.charAt(0).toUpperCase() + text.slice(1);
  return heading.replace(/\b(miou|iou|map|ap|gpu|ema)\b/gi, (word) => word.toLowerCase() === "miou" ? "mIoU" : word.toLowerCase() === "iou" ? "IoU" : word.toLowerCase() === "map" ? "mAP" : word.toUpperCase());
}

function table(head, rows, attributes = {}) {
  return element("table", attributes,
      element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, ...[text].flat())))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) =>
          cell instanceof Element && cell.tagName === "TD" ? cell : element("td", {}, cell))))));
}

/** A section of the page with a heading, and its entry in `nav`. */
function section(page, nav, id, heading, ...children) {
  page.append(element("section", { id, "aria-labelledby": `${id}-heading` }, element("h2", { id: `${id}-heading` }, heading), ...children));
  nav.append(element("a", { href: `#${id}` }, heading));
}

/** Pairs of names and values: "values" in columns, or "figures". */
function values(pairs, kind = "values") {
  return element("dl", { class: kind }, pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function isPlain(value) { return value === null || typeof value !== "object" || (Array.isArray(value) && !value.some((item) => item !== null && typeof item === "object")); }

/** A key in words; names of variables stay as they are. */
function words(name) { return name === name.toUpperCase() ? name : name.replaceAll("_", " "); }

function plainText(name, value) {
  if (Array.isArray(value)) return value.join(" ");
  return typeof value === "number" && !/bytes|seconds/.test(name) ? String(value) : shown(name, value);
}

/** Names and values of any object, one below the other; objects in it get headings, lists of objects are tables. */
function described(object, heading = null) {
  const entries = Object.entries(object ?? {});
  const plain = entries.filter(([, value]) => isPlain(value));
  const parts = heading === null ? [] : [element("h3", {}, heading)];
  if (plain.length > 0) {
    parts.push(element("dl", { class: "listing" }, plain.flatMap(([name, value]) =>
        [element("dt", {}, words(name)), element("dd", {}, plainText(name, value) || "–")])));
  }
  const made = parts.length > (heading === null ? 0 : 1) ? [element("div", {}, parts)] : [];
  for (const [name, value] of entries) {
    if (isPlain(value)) continue;
    const title = (heading === null ? "" : `${heading}: `) + words(name);
    made.push(...(Array.isArray(value) ? describedList(value, title) : described(value, title)));
  }
  return made;
}

/** A table of objects, and one of the objects that lists in them have, with the first column of their owner. */
function describedList(list, heading) {
  const columns = [...new Set(list.flatMap((item) => Object.keys(item ?? {}).filter((name) => isPlain(item[name]))))];
  const rows = list.map((item) => columns.map((name) => plainText(name, item?.[name] ?? null)));
  const made = [element("div", {}, element("h3", {}, heading), element("div", { class: "scroll tall" }, table(columns.map((name) => words(name)), rows)))];
  const lists = [...new Set(list.flatMap((item) => Object.keys(item ?? {}).filter((name) => Array.isArray(item[name]) && !isPlain(item[name]))))];
  for (const name of lists) {
    const inner = list.flatMap((item) => (item[name] ?? []).map((one) => columns.length > 0 ? { [columns[0]]: item[columns[0]], ...one } : one));
    made.push(...describedList(inner, `${heading}: ${words(name)}`));
  }
  return made;
}

function dateOf(unixSeconds) {
  return new Date(unixSeconds * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC";
}
