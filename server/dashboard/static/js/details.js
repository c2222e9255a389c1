/* What is known of the node, or the stack of nodes, that the user chose. */

import { copyButton, h, replace } from "./dom.js";
import { duration, number, valueText } from "../model/format.js";
import { textOf } from "../model/program_model.js";
import { setStatus, statusLabel } from "./status.js";

const MAX_MEMBERS = 300;

/** Create the panel with the details of a box. */
export function detailsView(model) {
  const element = h("section", { class: "card details", "aria-labelledby": "details-heading" });
  let spec = null;
  let member = null;
  let parts = null;

  function show(box) {
    spec = box;
    member = box.members.length === 1 ? box.members[0] : null;
    build();
  }

  function build() {
    if (spec === null) parts = outputs(model);
    else parts = member === null ? members() : oneNode();
    replace(element, parts.elements);
    parts.update();
  }

  function back() {
    if (spec === null) return null;
    const isInStack = member !== null && spec.members.length > 1;
    const label = isInStack ? `All of ${spec.label}` : "Outputs";
    return h("button", { type: "button", class: "quiet", onclick: () => {
      if (isInStack) member = null;
      else spec = null;
      build();
      element.querySelector("h2").focus();
    } }, label);
  }

  function oneNode() {
    const node = model.node(member);
    const status = statusLabel(node.status);
    const facts = h("dl", { class: "facts" });
    const text = h("pre", { class: "value", tabindex: "0", role: "region", "aria-label": "Text" });
    return {
      elements: [
        h("header", {}, heading(member), status, h("div", { class: "group" }, copyButton(() => textOf(node)), back())),
        facts, h("h3", {}, "Text"), text,
      ],
      update() {
        setStatus(status, node.status);
        replace(facts, nodeFacts(model, node).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
        const written = textOf(node);
        if (text.textContent !== written) text.textContent = written;
      },
    };
  }

  function members() {
    const shown = spec.members.slice(0, MAX_MEMBERS);
    const rows = shown.map((id) => {
      const status = statusLabel("waiting");
      const text = h("td", { class: "excerpt" });
      const open = h("button", { type: "button", class: "link", onclick: () => { member = id; build(); element.querySelector("h2").focus(); } }, id);
      return { id, status, text, element: h("tr", {}, h("th", { scope: "row" }, open), h("td", {}, status), text) };
    });
    const left = spec.members.length - shown.length;
    return {
      elements: [
        h("header", {}, heading(spec.label), h("div", { class: "group" }, back())),
        h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Nodes" }, h("table", {},
          h("thead", { class: "hidden" }, h("tr", {}, ["Node", "Status", "Text"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, rows.map((row) => row.element)))),
        left > 0 ? h("p", { class: "note" }, `${number(left)} more nodes are not listed.`) : null,
      ],
      update(changed) {
        for (const row of rows) {
          if (changed && !changed.has(row.id)) continue;
          const node = model.nodes.get(row.id);
          if (!node) continue;
          setStatus(row.status, node.status);
          row.text.textContent = textOf(node).slice(0, 80);
        }
      },
    };
  }

  build();
  return { element, show, update: (changed) => parts.update(changed) };
}

function heading(text) {
  return h("h2", { id: "details-heading", tabindex: "-1" }, text);
}

/** The outputs of the program. */
function outputs(model) {
  const body = h("div", { class: "outputs" });
  let last = null;
  return {
    elements: [h("header", {}, heading("Outputs")), body],
    update() {
      const shown = model.outputs.map((name) => {
        const variable = model.variables.get(name);
        if (variable?.status === "done") return [name, valueText(variable.value), variable.truncated ? "cut off by max_tokens" : ""];
        if (variable?.error) return [name, null, variable.error.message || variable.error.code];
        return [name, partialText(model, name) || null, ""];
      });
      const key = JSON.stringify(shown);
      if (key === last) return;
      last = key;
      replace(body, shown.map(([name, text, note]) => [
        h("h3", {}, name, text ? copyButton(() => text) : null),
        note ? h("p", { class: "note" }, note) : null,
        text
          ? h("pre", { class: "value", tabindex: "0", role: "region", "aria-label": name }, text)
          : h("p", { class: "note" }, text === "" ? "The value is an empty text." : note ? "" : "No value yet."),
      ]));
    },
  };
}

function partialText(model, variable) {
  for (const node of model.nodes.values()) {
    const text = node.texts.get(variable);
    if (text !== undefined) return valueText(text);
  }
  return "";
}

function nodeFacts(model, node) {
  const explained = model.explainedNode(node.id);
  const facts = [["Kind", node.op]];
  if (node.error) facts.push(["Error", `${node.error.code}: ${node.error.message}`]);
  if (node.engine) facts.push(["Engine", node.engine]);
  if (node.why) facts.push(["Why", node.why]);
  if (node.attempt > 1) facts.push(["Attempt", number(node.attempt)]);
  if (explained?.reads?.length) facts.push(["Reads", explained.reads.join(", ")]);
  if (explained?.writes?.length) facts.push(["Writes", explained.writes.join(", ")]);
  if (explained?.objective) facts.push(["Objective", explained.group ? `${explained.objective}, group ${explained.group}` : explained.objective]);
  if (node.finishedAt && node.op === "generate")
    facts.push(["Times", `queued ${duration(node.queued_s ?? 0)}, prefill ${duration(node.prefill_s ?? 0)}, decode ${duration(node.decode_s ?? 0)}`]);
  const { prompt_tokens: prompt, output_tokens: output } = node;
  if (prompt?.logical) facts.push(["Prompt", `${number(prompt.logical)} tokens: ${number(prompt.computed)} computed, ${number(prompt.shared)} shared`]);
  if (output?.decoded) facts.push(["Output", `${number(output.decoded)} tokens${output.forced ? `, ${number(output.forced)} forced by a grammar` : ""}`]);
  return facts;
}
