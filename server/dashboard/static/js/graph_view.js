/* The graph of a program: boxes that fill with text, and the edges between them. */

import { announce, h, replace, setAttribute, setText, setVars, svg } from "./dom.js";
import { count, duration, ENDED, number } from "../model/format.js";
import { graphOf } from "../model/graph_model.js";
import { textOf } from "../model/program_model.js";
import { setStatus, statusLabel, statusShape } from "./status.js";

const WIDTH = 236;
const HEIGHTS = { call: 104, plain: 46, stack: 132 };
/** Cells that fit into a box: 6 rows of 26. */
const MAX_CELLS = 156;
/** Characters of a text that is being written: two lines of a box. */
const TAIL = 48;
const ZOOMS = [0.02, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1, 1.25, 1.5];
const FAR = 0.35;
const READABLE = 0.5;
const NEAR = 0.8;
const SCROLL_KEYS = /^(Arrow|Page|Home|End)/;
const WORKER = "/dashboard/js/layout_worker.js";

/**
 * Create the graph of a program.
 *
 * @param {ProgramModel} model
 * @param {function(object)} onSelect gets the box that the user chose.
 */
export function graphView(model, onSelect) {
  const boxes = new Map();
  const boxesOfNode = new Map();
  const paths = [];
  let selected = null;
  let job = 0;
  let zoom = 1;
  let extent = { width: 0, height: 0 };
  /** "auto" shows the whole graph, or follows a long one; "whole"; "manual" is the user's choice. */
  let mode = "auto";
  let followed = null;

  const edgeLayer = svg("svg", { class: "edges", "aria-hidden": "true" });
  const boxLayer = h("ol", { class: "boxes" });
  const canvas = h("div", { class: "canvas" }, edgeLayer, boxLayer);
  const space = h("div", { class: "space" }, h("div", { class: "shown" }, canvas));
  const viewport = h("div", { class: "viewport", tabindex: "0", role: "region", "aria-label": "Graph" }, space);
  const level = h("output", { class: "zoom", "aria-label": "Zoom" });
  const note = h("p", { class: "note" });
  const element = h(
    "section", { class: "card graph", "aria-labelledby": "graph-heading" },
    h("header", {},
      h("h2", { id: "graph-heading" }, "Graph"), note,
      h("div", { class: "group" },
        h("button", { type: "button", class: "quiet", "aria-label": "Zoom out", onclick: () => step(-1) }, "−"),
        level,
        h("button", { type: "button", class: "quiet", "aria-label": "Zoom in", onclick: () => step(1) }, "+"),
        h("button", { type: "button", class: "quiet", onclick: fitWhole }, "Fit"))),
    viewport,
  );
  const worker = new Worker(trusted(WORKER), { type: "module" });
  worker.onmessage = ({ data }) => data.job === job && place(data);
  worker.onerror = () => setText(note, "The graph could not be laid out.");
  const observer = new ResizeObserver(() => fit());
  observer.observe(viewport);
  for (const type of ["wheel", "pointerdown", "keydown"]) {
    viewport.addEventListener(type, (event) => {
      if (!event.key || SCROLL_KEYS.test(event.key)) mode = "manual";
    }, { passive: true });
  }

  /** Rebuild boxes and edges after nodes were added. */
  function rebuild() {
    const graph = graphOf(model);
    const kept = new Set();
    boxesOfNode.clear();
    for (const spec of graph.boxes) {
      const known = boxes.get(spec.key);
      const isSame = known && known.spec.op === spec.op && known.spec.members.length === spec.members.length;
      const box = isSame ? known : boxView(spec, model, select);
      boxes.set(spec.key, box);
      kept.add(spec.key);
      for (const member of spec.members) boxesOfNode.set(member, box);
    }
    for (const key of boxes.keys()) if (!kept.has(key)) boxes.delete(key);
    replace(boxLayer, graph.boxes.map(({ key }) => boxes.get(key).element));
    setText(note, graph.boxes.length > 1 ? `${count(model.nodes.size, "node")}` : "");
    const sizes = graph.boxes.map(({ key }) => ({ key, width: WIDTH, height: boxes.get(key).height }));
    canvas.classList.toggle("pending", job === 0);
    job++;
    if (sizes.length) worker.postMessage({ job, boxes: sizes, edges: graph.edges });
  }

  function place({ width, height, boxes: positions, edges }) {
    extent = { width, height };
    setVars(canvas, { "--width": `${width}px`, "--height": `${height}px` });
    canvas.classList.remove("pending");
    for (const [key, x, y] of positions) {
      const box = boxes.get(key);
      box.x = x;
      setVars(box.element, { "--x": `${x - WIDTH / 2}px`, "--y": `${y - box.height / 2}px` });
    }
    setAttribute(edgeLayer, "viewBox", `0 0 ${width} ${height}`);
    paths.length = 0;
    const places = new Map(positions.map(([key, x, y]) => [key, { x, y }]));
    replace(edgeLayer, edges.map(([from, to, bends]) => {
      const { x: right, y: top } = places.get(from);
      const { x: left, y: bottom } = places.get(to);
      // An edge between neighbouring columns needs no bend around other boxes.
      const inner = bends.length > 1 ? bends : [];
      const points = [{ x: right + WIDTH / 2, y: top }, ...inner, { x: left - WIDTH / 2, y: bottom }];
      const path = svg("path", { d: curve(points) });
      paths.push([path, boxes.get(from), boxes.get(to)]);
      return path;
    }));
    fit();
    colourEdges();
  }

  function colourEdges() {
    for (const [path, from, to] of paths) {
      const state = to.status === "running" ? "running" : from.status === "done" ? "done" : "waiting";
      setAttribute(path, "data-status", state);
    }
  }

  /** Show what changed. */
  function update(changed) {
    if (model.hasNewNodes) {
      model.hasNewNodes = false;
      rebuild();
      for (const box of boxes.values()) box.update();
    }
    const touched = new Set([...changed].map((id) => boxesOfNode.get(id)));
    touched.delete(undefined);
    for (const box of touched) box.update();
    if (touched.size) colourEdges();
    const running = [...touched].findLast((box) => box.status === "running");
    if (running) follow(running);
  }

  function select(box) {
    if (selected) setAttribute(selected.element.firstChild, "aria-pressed", "false");
    selected = box;
    setAttribute(box.element.firstChild, "aria-pressed", "true");
    onSelect(box.spec);
    if (zoom < FAR) approach(box);
  }

  function fitWhole() {
    mode = "whole";
    fit();
  }

  /** Choose the zoom, unless the user did. A graph that is only too long stays readable. */
  function fit() {
    if (mode === "manual" || !extent.width) return;
    const [wide, high] = [viewport.clientWidth / extent.width, viewport.clientHeight / extent.height];
    const whole = Math.max(Math.min(wide, high, 1), ZOOMS[0]);
    setZoom(isTooLong() ? Math.min(high, NEAR) : whole);
    if (followed) follow(followed);
  }

  function isTooLong() {
    // The outer size does not change when a scroll bar appears.
    return mode === "auto" && viewport.offsetWidth / extent.width < READABLE
      && viewport.offsetHeight / extent.height >= READABLE;
  }

  /** Keep a box in view while a long graph runs. */
  function follow(box) {
    followed = box;
    if (!extent.width || !isTooLong()) return;
    viewport.scrollLeft = zoom * (box.x ?? 0) - viewport.clientWidth / 2;
  }

  /** Zoom to a box that was too small to read. */
  function approach(box) {
    mode = "manual";
    setZoom(NEAR);
    box.element.scrollIntoView({ block: "center", inline: "center" });
  }

  function step(direction) {
    mode = "manual";
    const next = direction > 0
      ? ZOOMS.find((each) => each > zoom + 0.01) ?? ZOOMS.at(-1)
      : ZOOMS.findLast((each) => each < zoom - 0.01) ?? ZOOMS[0];
    setZoom(next);
    announce(level.textContent);
  }

  function setZoom(scale) {
    zoom = scale;
    setText(level, `${Math.round(100 * scale)} %`);
    canvas.classList.toggle("far", scale < FAR);
    setVars(space, {
      "--zoom": scale, "--shown-width": `${extent.width * scale}px`,
      "--shown-height": `${extent.height * scale}px`,
    });
  }

  function close() {
    worker.terminate();
    observer.disconnect();
  }

  return { element, update, close };
}

/** One box: a node, or a stack of nodes. */
function boxView(spec, model, onSelect) {
  const isStack = spec.members.length > 1;
  const isCall = spec.op === "generate" || spec.op === "client";
  const kind = isStack ? "stack" : isCall ? "call" : "plain";
  const status = statusLabel("waiting");
  const text = h("span", { class: "text" });
  const foot = h("span", { class: "foot" });
  const cells = isStack ? spec.members.slice(0, MAX_CELLS).map(() => h("i")) : [];
  const button = h(
    "button", { type: "button", class: `box ${kind}`, "aria-pressed": "false", onclick: () => onSelect(box) },
    h("span", { class: "head" }, h("span", { class: "name" }, spec.label), h("span", { class: "op" }, isStack ? `${spec.op} × ${number(spec.members.length)}` : spec.op)),
    kind === "plain" ? null : isStack ? h("span", { class: "cells", "aria-hidden": "true" }, cells) : null,
    kind === "plain" ? null : text,
    h("span", { class: "tail" }, status, foot),
  );
  const element = h("li", {}, button);
  const box = { element, spec, height: HEIGHTS[kind], status: "waiting", update };

  function update() {
    const nodes = spec.members.map((id) => model.nodes.get(id)).filter(Boolean);
    box.status = statusOf(nodes);
    setAttribute(button, "data-status", box.status);
    setStatus(status, box.status);
    if (isStack) updateStack(nodes);
    else if (nodes[0]) updateNode(nodes[0]);
  }

  function updateNode(node) {
    const written = textOf(node);
    const isOver = ENDED.has(node.status);
    setText(text, node.error?.message || (isOver ? written.slice(0, 5 * TAIL) : tailOf(written, TAIL)));
    const tokens = node.output_tokens?.decoded;
    const seconds = node.finishedAt && node.startedAt ? (node.finishedAt - node.startedAt) / 1000 : null;
    setText(foot, [
      isOver && tokens ? `${number(tokens)} tok` : "",
      seconds !== null && isCall ? duration(seconds) : "",
    ].filter(Boolean).join(" · "));
  }

  function updateStack(nodes) {
    cells.forEach((cell, i) => {
      const state = model.nodes.get(spec.members[i])?.status ?? "waiting";
      setAttribute(cell, "data-status", state);
      cell.title = `${spec.members[i]} ${statusShape(state)}`;
    });
    const writing = nodes.findLast((node) => node.status === "running") ?? nodes.at(-1);
    setText(text, writing ? tailOf(textOf(writing), TAIL / 2) : "");
    const ended = nodes.filter((node) => ENDED.has(node.status)).length;
    setText(foot, `${number(ended)} of ${number(spec.members.length)}`);
  }

  return box;
}

/** The end of a text, with a mark if it has an earlier part. */
const tailOf = (text, size) => (text.length > size ? `…${text.slice(-size)}` : text);

function statusOf(nodes) {
  const all = new Set(nodes.map((node) => node.status));
  for (const status of ["failed", "running", "queued"]) if (all.has(status)) return status;
  if (all.size === 1) return [...all][0];
  return all.has("waiting") ? (all.has("done") ? "running" : "waiting") : all.has("done") ? "done" : "skipped";
}

function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length; i++) {
    const a = i ? rest[i - 1] : first;
    const b = rest[i];
    const middle = (a.x + b.x) / 2;
    path += `C${middle},${a.y} ${middle},${b.y} ${b.x},${b.y}`;
  }
  return path;
}

/** Browsers with trusted types load a worker only from an address that a policy made. */
function trusted(url) {
  if (!window.trustedTypes) return url;
  policy ??= window.trustedTypes.createPolicy("conure-worker", {
    createScriptURL: (address) => {
      if (address !== WORKER) throw new TypeError(`no worker at ${address}`);
      return address;
    },
  });
  return policy.createScriptURL(url);
}
let policy = null;
