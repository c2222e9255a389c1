/* Requests to the server that this page came from. */

import { parseJson } from "../model/exact_json.js";

/** An error response of the server, or a server that does not answer. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * Send a request and return its JSON.
 *
 * @param {string} path
 * @param {{method?: string, body?: object|string, text?: boolean}} options `body` is sent as JSON.
 */
export async function request(path, { method = "GET", body, text = false } = {}) {
  const init = { method, headers: {} };
  if (body !== undefined) {
    init.body = typeof body === "string" ? body : JSON.stringify(body);
    init.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, init);
  } catch {
    throw new ApiError(0, "client.unreachable", "the server does not answer");
  }
  if (!response.ok) throw await errorOf(response);
  return text ? response.text() : response.json();
}

export const listPrograms = ({ status, search, cursor, limit }) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries({ status, search, cursor, limit }))
    if (value) query.set(name, value);
  return request(`/v1/programs?${query}`);
};

export const readProgram = (id) => requestStatus(id, "GET");
export const explainRun = (id) => request(`${programPath(id)}/explain`);
export const cancelProgram = (id) => requestStatus(id, "DELETE");
export const submitProgram = (body) => request("/v1/programs", { method: "POST", body });
export const explainProgram = (body) =>
  request("/v1/programs/explain", { method: "POST", body });
export const readEngines = () => request("/v1/engines");
export const readActivity = () => request("/v1/activity");
export const readModels = () => request("/v1/models");

const EVENTS = [
  "program.accepted", "program.finished", "node.queued", "node.started", "node.finished",
  "node.restarted", "node.delta", "node.failed", "node.killed", "node.skipped",
  "variable.committed", "variable.failed", "client.requested", "nodes.appended", "yield",
  "server.draining",
];

/**
 * Follow the events of a program from the first one. The browser reconnects after an interruption
 * and continues after the last event.
 *
 * @param {string} id
 * @param {{onEvent: function(string, object), onState: function(boolean)}} listener `onState` gets
 *     whether the stream is open.
 * @returns {function()} ends the stream.
 */
export function followProgram(id, { onEvent, onState }) {
  const source = new EventSource(`${programPath(id)}/events`);
  source.onopen = () => onState(true);
  source.onerror = () => onState(false);
  for (const type of EVENTS)
    source.addEventListener(type, (message) => {
      onEvent(type, parseJson(message.data));
      if (type === "program.finished") source.close();
    });
  return () => source.close();
}

/** Send a request about a program and return its status, with exact values of its variables. */
async function requestStatus(id, method) {
  return parseJson(await request(programPath(id), { method, text: true }));
}

function programPath(id) {
  return `/v1/programs/${encodeURIComponent(id)}`;
}

async function errorOf(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // The body is no JSON: the status line must do.
  }
  const path = problem.path ? ` (at ${problem.path})` : "";
  const message = problem.detail || `the server answered ${response.status}`;
  return new ApiError(response.status, problem.code || "client.http", message + path);
}
