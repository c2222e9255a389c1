/* The engines: their memory, who holds it, what is shared, and the calls that wait. */

import { readActivity, readEngines } from "./api.js";
import { h, replace, setAttribute, setText, setVars, svg } from "./dom.js";
import { count, number, percent } from "../model/format.js";
import { repeat } from "./polling.js";

const POLL_MS = 1000;
const NUM_SAMPLES = 90;

/** Open the page. */
export function open() {
  const cards = new Map();
  const list = h("div", { class: "engines" });
  const note = h("p", { class: "note", role: "status" });
  const queue = queueView();
  const element = h("div", { class: "page" }, h("div", { class: "heading" }, h("h1", {}, "Engines"), note), list, queue.element);
  let isClosed = false;

  async function poll() {
    try {
      const [{ engines }, activity] = await Promise.all([readEngines(), readActivity()]);
      if (isClosed) return;
      const held = new Map(activity.engines.map((engine) => [engine.id, engine]));
      const shown = engines
        .filter((engine) => held.has(engine.id))
        .sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
      for (const engine of shown) {
        if (!cards.has(engine.id)) cards.set(engine.id, engineCard(engine.id));
        cards.get(engine.id).update(engine, held.get(engine.id));
      }
      const wanted = shown.map((engine) => cards.get(engine.id).element);
      if (wanted.length !== list.children.length || wanted.some((card, i) => card !== list.children[i])) replace(list, wanted);
      queue.update(activity);
      setText(note, `${count(activity.num_programs, "open program")}, ${count(activity.num_waiting, "waiting call")}`);
    } catch (error) {
      setText(note, error.message);
    }
  }

  const polling = repeat(poll, POLL_MS);
  return { element, title: "Engines", close: () => { isClosed = true; polling.close(); } };
}

function engineCard(id) {
  const memory = splitBar(["held", "cached", "free"]);
  const prompts = splitBar(["computed", "shared", "cache", "recomputed"]);
  const rate = sparkline();
  const holders = h("div", {});
  const tree = h("div", { class: "kv", role: "group", "aria-labelledby": `tree-${id}` });
  const facts = h("p", { class: "note" });
  const forecast = h("p", {});
  const eviction = h("p", {});
  const calls = h("span", { class: "status" });
  const element = h(
    "section", { class: "card engine", "aria-labelledby": `engine-${id}` },
    h("header", {}, h("h2", { id: `engine-${id}` }, id), facts, h("div", { class: "group" }, calls)),
    h("div", { class: "halves" },
      h("div", {}, h("h3", {}, "KV memory"), memory.element, forecast, eviction),
      h("div", {}, h("h3", {}, "Prompt tokens since the start"), prompts.element,
        h("h3", {}, "Output tokens per second"), rate.element)),
    h("h3", { id: `tree-${id}` }, "Running calls and what they share"), tree,
    h("h3", {}, "Held by"), holders,
  );
  let before = null;
  let shownHolders = "";
  let shownTree = "";

  function update(engine, activity) {
    const { counters } = engine;
    setText(facts, `${engine.model} · ${number(counters.num_blocks)} blocks of ${activity.block_size} tokens · ${number(activity.context_len)} tokens of context`);
    setText(calls, `${number(activity.calls)} of ${count(activity.max_sequences, "call")}`);
    setAttribute(calls, "data-status", activity.calls ? "running" : "waiting");
    memory.update([counters.num_held, counters.num_cached, counters.num_free], "blocks");
    prompts.update([counters.num_computed_tokens, counters.num_shared_tokens, counters.num_cached_tokens, counters.num_recomputed_tokens], "tokens");
    showMemory(activity);
    const now = performance.now();
    if (before && before.epoch === engine.epoch)
      rate.add((1000 * (counters.num_decoded_tokens - before.decoded)) / (now - before.at));
    before = { at: now, decoded: counters.num_decoded_tokens, epoch: engine.epoch };
    const branches = JSON.stringify(activity.tree);
    if (branches !== shownTree) replace(tree, treeOf(activity));
    shownTree = branches;
    const key = JSON.stringify(activity.programs);
    if (key === shownHolders) return;
    shownHolders = key;
    replace(holders, holdersTable(activity));
  }

  function showMemory(activity) {
    const shared = activity.saved_tokens
      ? ` ${count(activity.shared_tokens, "prompt token")} are held once for several calls, which saves ${number(activity.saved_tokens)}.` : "";
    setText(forecast, activity.calls
      ? `Its calls will hold at most ${number(activity.peak_tokens)} tokens together.${shared}` : "No call runs.");
    const next = activity.evicted_next.slice(0, 4).map(number).join(", ");
    const more = activity.num_cached_prefixes - 4;
    setText(eviction, activity.num_cached_prefixes
      ? `If memory is short, cached prefixes of ${next} tokens are evicted next${more > 0 ? `, then ${number(more)} more` : ""}.` : "");
  }

  return { element, update };
}

/** The branches of the running calls as nested lists; a branch is held once for all its calls. */
function treeOf({ tree: branches, peak_tokens: peak }) {
  if (!branches.length) return h("p", { class: "note" }, "No call runs.");
  const first = Math.min(...branches.slice(1).map(endsIn), ...branches.flatMap((branch) => branch.calls.map(endsIn)));
  const lists = [];
  branches.forEach((branch) => {
    const unnamed = branch.num_calls - branch.calls.length - childrenOf(branches, branch).reduce((sum, child) => sum + child.num_calls, 0);
    const list = h("ul", {},
      branch.calls.map((call) => h("li", {}, bar("held", call.tokens, peak),
        h("a", { href: `#/programs/${encodeURIComponent(call.program)}` }, call.node), `: ${count(call.tokens, "token")} of its own`, freeing(call, first))),
      unnamed > 0 ? h("li", { class: "note" }, `${count(unnamed, "call")} not listed`) : null);
    lists.length = branch.depth;
    if (branch.depth)
      lists[branch.depth - 1].append(h("li", {}, bar("shared", branch.tokens, peak),
        `${count(branch.tokens, "token")} held once for ${count(branch.num_calls, "call")}`, freeing(branch, first), list));
    lists.push(list);
  });
  return lists[0];
}

function childrenOf(branches, branch) {
  const rest = branches.slice(branches.indexOf(branch) + 1);
  const end = rest.findIndex((other) => other.depth <= branch.depth);
  return (end < 0 ? rest : rest.slice(0, end)).filter((other) => other.depth === branch.depth + 1);
}

function endsIn(part) {
  return part.steps_left ?? Infinity;
}

function freeing(part, first) {
  if (part.steps_left === null) return null;
  const isFirst = part.steps_left === first;
  return h("span", { class: isFirst ? "frees next" : "frees" }, `${isFirst ? "frees next, " : ""}after at most ${count(part.steps_left, "step")}`);
}

function bar(kind, tokens, all) {
  const part = h("i", { class: kind });
  setVars(part, { "--part": `${all ? Math.min(100, (100 * tokens) / all) : 0}%` });
  return h("span", { class: "meter", "aria-hidden": "true" }, part);
}

function holdersTable(activity) {
  if (!activity.programs.length) return h("p", { class: "note" }, activity.num_programs ? "Programs that this page may not name." : "No program.");
  const left = activity.num_programs - activity.programs.length;
  return [
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Programs on ${activity.id}` },
      h("table", {},
        h("thead", {}, h("tr", {},
          h("th", { scope: "col" }, "Program"), h("th", { scope: "col" }, "Running"),
          h("th", { scope: "col", class: "number" }, "Contexts"), h("th", { scope: "col" }, "Kept for calls that have not started"))),
        h("tbody", {}, activity.programs.map((holding) => h("tr", {},
          h("th", { scope: "row" }, programLink(holding.program, holding.name)),
          h("td", {}, listed(holding.running, holding.num_running)),
          h("td", { class: "number" }, number(holding.contexts)),
          h("td", {}, holding.retained.map((prefix) => h("p", {}, retainedText(prefix))))))))),
    left > 0 ? h("p", { class: "note" }, `${count(left, "more program")} not listed.`) : null,
  ];
}

function retainedText(prefix) {
  const written = prefix.generated_tokens ? `, ${number(prefix.generated_tokens)} of them generated` : "";
  return `${count(prefix.tokens, "token")}${written}, for ${listed(prefix.readers, prefix.num_readers)}`;
}

function listed(names, total) {
  const shown = names.slice(0, 6);
  const left = total - shown.length;
  return shown.join(", ") + (left > 0 ? ` and ${number(left)} more` : "");
}

function programLink(id, name) {
  return [h("a", { href: `#/programs/${encodeURIComponent(id)}` }, name || "Unnamed"), h("span", { class: "id" }, id)];
}

function queueView() {
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Waiting calls", hidden: true }, h("table", {},
    h("thead", {}, h("tr", {},
      h("th", { scope: "col", class: "number" }, "Place"), h("th", { scope: "col" }, "Call"), h("th", { scope: "col" }, "Program"),
      h("th", { scope: "col", class: "number" }, "Prompt"), h("th", { scope: "col", class: "number" }, "Output up to"), h("th", { scope: "col" }, "Why"))),
    body));
  const element = h("section", { class: "card", "aria-labelledby": "queue-heading" },
    h("header", {}, h("h2", { id: "queue-heading" }, "Queue"), note), table);
  let shown = "";

  function update({ waiting, num_waiting: total }) {
    setText(note, total ? `${count(total, "call")}, in the order in which they start` : "No call waits for an engine.");
    table.hidden = !waiting.length;
    const key = JSON.stringify(waiting);
    if (key === shown) return;
    shown = key;
    replace(body, waiting.map((call, place) => h("tr", {},
      h("td", { class: "number" }, number(place + 1)), h("th", { scope: "row" }, call.node),
      h("td", {}, programLink(call.program, call.program)[0]),
      h("td", { class: "number" }, number(call.prompt_tokens)), h("td", { class: "number" }, number(call.output_tokens)),
      h("td", { class: "why" }, call.why))));
  }
  return { element, update };
}

/** A bar with parts and a legend. */
function splitBar(names) {
  const bars = names.map((name) => h("i", { class: name }));
  const labels = names.map(() => h("span", {}));
  const bar = h("div", { class: "split", role: "img" }, bars);
  const element = h("div", {}, bar, h("ul", { class: "legend" }, names.map((name, i) => h("li", {}, h("i", { class: name, "aria-hidden": "true" }), labels[i]))));

  function update(values, unit) {
    const total = values.reduce((sum, value) => sum + value, 0);
    values.forEach((value, i) => {
      setVars(bars[i], { "--size": `${total ? (100 * value) / total : 0}%` });
      setText(labels[i], `${names[i]} ${number(value)} (${percent(value, total)})`);
    });
    setAttribute(bar, "aria-label", `${labels.map((label) => label.textContent).join(", ")} ${unit}`);
  }
  return { element, update };
}

/** The last minutes of a rate. */
function sparkline() {
  const samples = [];
  const line = svg("polyline", {});
  const label = h("span", { class: "rate" }, "0");
  const chart = svg("svg", { class: "spark", viewBox: `0 0 ${NUM_SAMPLES - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  function add(value) {
    samples.push(value);
    if (samples.length > NUM_SAMPLES) samples.shift();
    const top = Math.max(...samples, 1);
    const left = NUM_SAMPLES - samples.length;
    setAttribute(line, "points", samples.map((sample, i) => `${left + i},${29 - (27 * sample) / top}`).join(" "));
    setText(label, `${number(Math.round(value))} now, ${number(Math.round(Math.max(...samples)))} at most`);
  }
  return { element: h("div", { class: "sparkline" }, chart, label), add };
}
