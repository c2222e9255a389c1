/* One program, live: graph, waterfall, receipt, and the details of a node. */

import { cancelProgram, explainRun, followProgram, readProgram } from "./api.js";
import { announce, copyButton, h, replace, setText } from "./dom.js";
import { detailsView } from "./details.js";
import { duration, number, pathText, percent, progressSentences, promptParts, receiptSentences, STATUS_LABELS } from "../model/format.js";
import { graphView } from "./graph_view.js";
import { ProgramModel } from "../model/program_model.js";
import { oneAtATime } from "./polling.js";
import { setStatus, statusLabel } from "./status.js";
import { waterfallView } from "./waterfall.js";

const TICK_MS = 250;

/** Open the page of a program. */
export function open(id) {
  const model = new ProgramModel(id);
  const details = detailsView(model);
  const graph = graphView(model, (box) => details.show(box));
  const waterfall = waterfallView(model);
  const status = statusLabel("accepted");
  const title = h("h1", {}, id);
  const elapsed = h("span", { class: "elapsed" });
  const cancel = h("button", { type: "button", class: "danger", hidden: true, onclick: stop }, "Cancel");
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const progress = h("p", {}, "Loading.");
  const receipt = h("section", { class: "card receipt", "aria-labelledby": "receipt-heading" }, receiptHeading("Progress"), progress);
  const element = h(
    "div", { class: "page program" },
    h("div", { class: "heading" },
      h("div", {}, h("p", { class: "crumbs" }, h("a", { href: "#/programs" }, "Programs"), " / ", h("span", { class: "id" }, id), copyButton(() => id, "Copy id")), title),
      h("div", { class: "group" }, status, elapsed, cancel)),
    problem, receipt,
    h("div", { class: "columns" }, graph.element, details.element),
    waterfall.element,
  );
  let isScheduled = false;
  let isClosed = false;
  let shownReceipt = null;

  function schedule() {
    if (isScheduled || isClosed) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      if (!isClosed) render();
    });
  }

  function render() {
    const changed = model.takeChanges();
    graph.update(changed);
    details.update(changed);
    if (changed.size || model.hasEnded) waterfall.update();
    setText(title, model.name || "Unnamed program");
    if (status.dataset.status !== model.status) {
      setStatus(status, model.status);
      announce(`Program ${STATUS_LABELS[model.status] ?? model.status}`);
    }
    cancel.hidden = model.hasEnded;
    showElapsed();
    if (!model.receipt) setText(progress, progressSentences([...model.nodes.values()]).join(" "));
    else if (model.receipt !== shownReceipt) showReceipt();
    if (model.error) showProblem(`${model.error.code}: ${model.error.message ?? ""}`);
  }

  function showElapsed() {
    if (model.createdAt === null) return;
    const end = model.finishedAt ?? Date.now();
    setText(elapsed, duration(Math.max(0, (end - model.createdAt) / 1000)));
  }

  function showReceipt() {
    shownReceipt = model.receipt;
    replace(receipt, receiptContent(model.receipt, model.status));
  }

  function showProblem(message) {
    problem.hidden = false;
    setText(problem, message);
  }

  // An explanation is long, and the events of a long session append nodes many times.
  const load = oneAtATime(async () => {
    if (isClosed) return;
    try {
      // The status last: it contains the end of a program that ends meanwhile.
      const explanation = await explainRun(id);
      if (isClosed) return;
      model.loadExplanation(explanation);
      model.loadStatus(await readProgram(id));
      schedule();
    } catch (error) {
      if (model.explanation === null) model.loadExplanation({ nodes: [], edges: [] });
      showProblem(error.message);
      schedule();
    }
  });

  async function stop() {
    cancel.disabled = true;
    try {
      model.loadStatus(await cancelProgram(id));
      announce("Program cancelled");
      schedule();
    } catch (error) {
      showProblem(error.message);
    }
    cancel.disabled = false;
  }

  const unfollow = followProgram(id, {
    onEvent(type, data) {
      model.apply(type, data);
      if (type === "program.finished" || (type === "nodes.appended" && !data.node)) load();
      schedule();
    },
    onState: (isOpen) => element.classList.toggle("offline", !isOpen && !model.hasEnded),
  });
  const timer = setInterval(() => {
    if (model.hasEnded || document.hidden) return;
    waterfall.update();
    showElapsed();
  }, TICK_MS);
  load();

  function close() {
    isClosed = true;
    unfollow();
    clearInterval(timer);
    graph.close();
  }
  return { element, title: "Program", close };
}

function receiptHeading(text) {
  return h("header", {}, h("h2", { id: "receipt-heading" }, text));
}

function receiptContent(receipt, status) {
  const parts = promptParts(receipt.prompt_tokens).filter(([, , tokens]) => tokens);
  const total = receipt.prompt_tokens.logical;
  return [
    receiptHeading("Receipt"),
    h("p", {}, receiptSentences(receipt, status).join(" ")),
    total ? h("div", { class: "split", role: "img", "aria-label": parts.map(([, label, tokens]) => `${label} ${number(tokens)}`).join(", ") },
      parts.map(([name, , tokens]) => h("i", { class: name, vars: { "--size": `${(100 * tokens) / total}%` } }))) : null,
    total ? h("ul", { class: "legend" }, parts.map(([name, label, tokens]) =>
      h("li", {}, h("i", { class: name, "aria-hidden": "true" }), `${label} ${number(tokens)} (${percent(tokens, total)})`))) : null,
    receipt.critical_path.length > 1
      ? h("p", { class: "note" }, `Longest path, ${duration(receipt.critical_path_s)}: ${pathText(receipt)}`) : null,
  ];
}
