/* When each call waited, filled its prompt and wrote, by engine. */

import { h, replace, setAttribute, setText, setVars } from "./dom.js";
import { count, duration, number, percent } from "../model/format.js";
import { phasesOf } from "../model/program_model.js";

const MAX_ROWS = 200;
const PHASES = [["queued", "queued"], ["prefill", "prefill"], ["decode", "decode"]];
const OWN_WORK = new Set(["client", "call"]);

/** Create the waterfall of a program. */
export function waterfallView(model) {
  const rows = new Map();
  const totals = new Map();
  const labels = new Map();
  let limit = MAX_ROWS;
  let end = 0;
  const ticks = h("div", { class: "ticks", "aria-hidden": "true" });
  const bodies = h("div", { class: "scroll lanes", tabindex: "0", role: "region", "aria-label": "Waterfall" });
  const more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => { limit = Infinity; rows.clear(); update(); } });
  const element = h(
    "section", { class: "card waterfall", "aria-labelledby": "waterfall-heading" },
    h("header", {},
      h("h2", { id: "waterfall-heading" }, "Waterfall"),
      h("ul", { class: "legend" },
        [...PHASES, ["shared", "prompt shared"], ["computed", "prompt computed"]].map(([name, label]) =>
          h("li", {}, h("i", { class: name, "aria-hidden": "true" }), label)))),
    bodies, more,
  );
  const empty = h("p", { class: "note" }, "No call has started.");

  function update() {
    const now = Date.now();
    const origin = model.createdAt ?? now;
    const shown = [];
    for (const node of model.nodes.values()) {
      if (node.op !== "generate" && !OWN_WORK.has(node.op)) continue;
      const phases = phasesOf(node, origin, now);
      if (phases) shown.push([node, phases]);
    }
    const last = Math.max(0, ...shown.map(([, phases]) => phases.decode[1]));
    const grown = last > end || model.hasEnded ? axisEnd(last) : end;
    const isRescaled = grown !== end;
    end = grown;
    const isNew = arrange(shown);
    if (isRescaled || isNew) replace(ticks, axis(end));
    for (const [node, phases] of shown) rows.get(node.id)?.update(node, phases, end, isRescaled);
  }

  /** Add the rows of new calls; return whether there were any. */
  function arrange(shown) {
    shown.sort((a, b) => a[1].queued[0] - b[1].queued[0]);
    const wanted = shown.slice(0, limit);
    more.hidden = shown.length <= limit;
    setText(more, `Show ${number(shown.length - wanted.length)} more`);
    const lanes = new Map();
    for (const [node] of wanted) lanes.set(laneOf(node), [...(lanes.get(laneOf(node)) ?? []), node]);
    totals.clear();
    for (const [node] of shown) totals.set(laneOf(node), (totals.get(laneOf(node)) ?? 0) + 1);
    for (const [lane, label] of labels) setText(label, count(totals.get(lane) ?? 0, "call"));
    const order = JSON.stringify([...lanes].map(([lane, nodes]) => [lane, nodes.map((node) => node.id)]));
    if (order === arrange.order) return false;
    arrange.order = order;
    for (const [node] of wanted) if (!rows.has(node.id)) rows.set(node.id, row(node));
    const sorted = [...lanes].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    replace(bodies, sorted.length ? table(sorted) : empty);
    return true;
  }

  function table(lanes) {
    return h("table", {},
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Call"), h("th", { scope: "col", class: "axis" }, h("span", { class: "hidden" }, "Time"), ticks),
        h("th", { scope: "col", class: "number" }, "Took"), h("th", { scope: "col", class: "prompt" }, "Prompt tokens shared"))),
      lanes.map(([lane, nodes]) => h("tbody", {},
        h("tr", { class: "lane" }, h("th", { scope: "rowgroup", colspan: "4" }, lane, labelOf(lane))),
        nodes.map((node) => rows.get(node.id).element))));
  }

  /** The number of all calls of a lane, also of those without a row. */
  function labelOf(lane) {
    const label = h("span", {}, count(totals.get(lane), "call"));
    labels.set(lane, label);
    return label;
  }

  return { element, update };
}

function row(node) {
  const bars = Object.fromEntries(PHASES.map(([name]) => [name, h("i", { class: name })]));
  const line = h("div", { class: "line", role: "img" }, Object.values(bars));
  const took = h("td", { class: "number" });
  const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("i", { class: "shared" }));
  const tokens = h("span", {});
  const element = h("tr", {}, h("th", { scope: "row" }, node.id), h("td", {}, line), took, h("td", { class: "prompt" }, meter, tokens));
  let isFinal = false;

  function update(latest, phases, end, isRescaled) {
    if (isFinal && !isRescaled) return;
    isFinal = Boolean(latest.finishedAt);
    for (const [name] of PHASES) {
      const [from, to] = phases[name];
      setVars(bars[name], { "--from": `${(100 * from) / end}%`, "--size": `${(100 * (to - from)) / end}%` });
    }
    const spoken = PHASES.map(([name]) => `${name} ${duration(phases[name][1] - phases[name][0])}`).join(", ");
    setAttribute(line, "aria-label", spoken);
    line.title = spoken;
    setText(took, duration(phases.decode[1] - phases.queued[0]));
    const prompt = latest.prompt_tokens;
    meter.hidden = !prompt?.logical;
    if (!prompt?.logical) return;
    setVars(meter, { "--part": percent(prompt.shared, prompt.logical).replace("< ", "").replace(" ", "") });
    setText(tokens, `${number(prompt.shared)} of ${number(prompt.logical)}`);
  }

  return { element, update };
}

function laneOf(node) {
  return OWN_WORK.has(node.op) ? "functions and client steps" : node.engine ?? "waiting for an engine";
}

/** The end of the axis: grows in steps, so that bars keep their places for a while. */
function axisEnd(last) {
  const least = Math.max(last * 1.04, 0.01);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((each) => each * power).find((each) => each >= least);
}

function axis(end) {
  return [0, 0.25, 0.5, 0.75].map((part) =>
    h("span", { vars: { "--from": `${100 * part}%` } }, part ? duration(part * end) : "0"));
}
