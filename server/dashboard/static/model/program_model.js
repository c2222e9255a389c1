/* What is known of one program: the sum of its status, explanation and events. No elements here. */

import { ENDED } from "./format.js";

const NODE_ENDS = {
  "node.finished": "done",
  "node.failed": "failed",
  "node.killed": "killed",
  "node.skipped": "skipped",
};

/** The nodes, variables and times of one program. */
export class ProgramModel {
  constructor(id) {
    this.id = id;
    this.name = "";
    this.status = "accepted";
    this.createdAt = null;
    this.finishedAt = null;
    this.receipt = null;
    this.error = null;
    this.outputs = [];
    this.explanation = null;
    /** By id. */
    this.nodes = new Map();
    /** By name: status, value, the text so far, and the node that writes it. */
    this.variables = new Map();
    /** Ids of nodes that changed since `takeChanges`. */
    this.changed = new Set();
    this.hasNewNodes = true;
  }

  get hasEnded() {
    return ENDED.has(this.status);
  }

  /** Return a node; add it if it is new. */
  node(id) {
    let node = this.nodes.get(id);
    if (!node) {
      const op = this.explainedNode(id)?.op ?? "";
      node = { id, op, status: "waiting", engine: null, why: "", attempt: 0, queuedAt: null,
        startedAt: null, textAt: null, finishedAt: null, texts: new Map(), usage: null, error: null };
      this.nodes.set(id, node);
      this.hasNewNodes = true;
    }
    return node;
  }

  /** Return the part of the explanation about a node. `digest.3` is an instance of `digest`. */
  explainedNode(id) {
    return this.explained?.get(id) ?? this.explained?.get(baseOf(id));
  }

  /** Add the explanation of the program. */
  loadExplanation(explanation) {
    this.explanation = explanation;
    this.explained = new Map((explanation.nodes ?? []).map((node) => [node.id, node]));
    for (const node of this.nodes.values()) node.op ||= this.explainedNode(node.id)?.op ?? "";
    this.hasNewNodes = true;
  }

  /** Take over a status. What events reported already stays. */
  loadStatus(status) {
    this.name = status.name ?? "";
    this.createdAt = Date.parse(status.created_at);
    this.finishedAt = status.finished_at ? Date.parse(status.finished_at) : null;
    this.outputs = status.outputs ?? [];
    this.error = status.error ?? null;
    this.receipt = status.receipt ?? this.receipt;
    if (!this.hasEnded) this.status = status.status;
    for (const [id, told] of Object.entries(status.nodes ?? {})) {
      const node = this.node(id);
      node.op ||= told.op;
      if (!ENDED.has(node.status)) node.status = told.status;
      for (const name of ["engine", "why", "attempt", "error", "prompt_tokens", "output_tokens"])
        if (told[name] !== undefined) node[name] = told[name];
      for (const name of ["queued_s", "prefill_s", "decode_s"]) node[name] = told[name] ?? 0;
      this.changed.add(id);
    }
    for (const [name, variable] of Object.entries(status.variables ?? {}))
      this.variables.set(name, { ...this.variables.get(name), ...variable });
  }

  /** Apply an event. */
  apply(type, data) {
    const at = data.at ? Date.parse(data.at) : Date.now();
    if (type.startsWith("program.")) this.#program(type, data, at);
    else if (type.startsWith("variable.")) this.#variable(type, data);
    else if (type === "nodes.appended") for (const id of data.nodes) this.node(id);
    else if (data.node) this.#node(type, data, at);
  }

  /** Return and forget the ids of changed nodes. */
  takeChanges() {
    const changed = this.changed;
    this.changed = new Set();
    return changed;
  }

  #program(type, data, at) {
    if (type === "program.accepted") {
      this.createdAt ??= at;
      this.outputs = data.outputs;
      this.status = "running";
      return;
    }
    this.status = data.status;
    this.finishedAt = at;
    this.receipt = data.receipt ?? this.receipt;
    for (const node of this.nodes.values())
      if (!ENDED.has(node.status)) {
        node.status = "cancelled";
        node.finishedAt ??= node.startedAt && at;
        this.changed.add(node.id);
      }
  }

  #variable(type, data) {
    const known = this.variables.get(data.variable) ?? { name: data.variable };
    const isDone = type === "variable.committed";
    const problem = isDone ? {} : { error: { code: data.code, message: data.message } };
    this.variables.set(data.variable, {
      ...known, ...problem, status: isDone ? "done" : "failed", value: data.value,
      truncated: data.truncated ?? false,
    });
    if (data.node) {
      const node = this.node(data.node);
      node.texts.set(data.variable, data.value === undefined ? "" : data.value);
      this.changed.add(data.node);
    }
  }

  #node(type, data, at) {
    const node = this.node(data.node);
    this.changed.add(node.id);
    node.attempt = data.attempt ?? node.attempt;
    if (type === "node.delta") {
      const text = node.texts.get(data.variable) ?? "";
      node.texts.set(data.variable, text.slice(0, data.offset) + data.text);
      node.textAt ??= at;
      if (!ENDED.has(node.status)) node.status = "running";
    } else if (type === "node.queued") {
      node.status = "queued";
      node.queuedAt ??= at;
    } else if (type === "node.started" || type === "client.requested") {
      node.status = "running";
      node.startedAt ??= at;
      node.engine = data.engine ?? node.engine;
      node.why = data.why ?? node.why;
    } else if (type === "node.restarted") {
      node.status = "queued";
      node.texts.clear();
      node.startedAt = node.textAt = null;
      node.why = data.why ?? node.why;
    } else if (type in NODE_ENDS) {
      this.#nodeEnd(node, NODE_ENDS[type], data, at);
    }
  }

  #nodeEnd(node, status, data, at) {
    node.status = status;
    node.finishedAt = at;
    node.engine = data.engine ?? node.engine;
    if (data.code) node.error = { code: data.code, message: data.message ?? "", cause: data.cause };
    const usage = data.usage;
    if (!usage) {
      if (data.started_at) node.startedAt ??= data.started_at * 1000;
      return;
    }
    for (const name of ["queued_s", "prefill_s", "decode_s"]) node[name] = usage[name] ?? 0;
    const computed = Math.min(usage.computed ?? 0, usage.logical ?? 0);
    node.prompt_tokens = {
      logical: usage.logical ?? 0, computed, shared: (usage.logical ?? 0) - computed,
    };
    node.output_tokens = {
      decoded: usage.decoded ?? 0, forced: usage.forced ?? 0, discarded: usage.discarded ?? 0,
    };
  }
}

/** The node of the program that an instance comes from: `digest` for `digest.3`. */
export function baseOf(id) {
  const dot = id.indexOf(".");
  return dot < 0 ? id : id.slice(0, dot);
}

/** The text that a node has written so far. */
export function textOf(node) {
  const texts = [...node.texts.values()];
  return texts.map((value) => (typeof value === "string" ? value : JSON.stringify(value))).join("\n");
}

/**
 * The phases of a call in seconds since `origin` (ms): queued, prefill and decode, each
 * [start, end]; null if the node has not started waiting.
 */
export function phasesOf(node, origin, now) {
  const started = node.startedAt ?? null;
  if (started === null && node.queuedAt === null) return null;
  const second = (time) => Math.max(0, (time - origin) / 1000);
  const end = second(node.finishedAt ?? now);
  const begin = second(node.queuedAt ?? started);
  const start = started === null ? end : second(started);
  const prefilled = node.finishedAt
    ? start + (node.prefill_s ?? 0)
    : node.textAt ? second(node.textAt) : end;
  const middle = Math.min(Math.max(prefilled, start), end);
  return { queued: [begin, start], prefill: [start, middle], decode: [middle, end] };
}
