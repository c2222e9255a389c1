/* The status of a program or node: a shape, a colour and a word. */

import { h, setAttribute, setText } from "./dom.js";
import { STATUS_LABELS } from "../model/format.js";

const SHAPES = {
  accepted: "○",
  waiting: "○",
  queued: "◔",
  running: "●",
  done: "✓",
  failed: "✕",
  deadline_exceeded: "✕",
  killed: "■",
  cancelled: "■",
  skipped: "–",
};

/** Create a label with the status; `setStatus` changes it. */
export function statusLabel(status) {
  const label = h(
    "span",
    { class: "status" },
    h("span", { class: "shape", "aria-hidden": "true" }),
    h("span", {}),
  );
  setStatus(label, status);
  return label;
}

/** Show another status on a label of `statusLabel`. */
export function setStatus(label, status) {
  setAttribute(label, "data-status", status);
  setText(label.firstChild, SHAPES[status] ?? "○");
  setText(label.lastChild, STATUS_LABELS[status] ?? status);
}

/** The shape of a status, for places without room for the word. */
export const statusShape = (status) => SHAPES[status] ?? "○";
