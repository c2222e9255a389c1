/* Numbers, times and receipts as text. Pure functions. */

const NUMBER = new Intl.NumberFormat("en-US");

/** `1,234` */
export const number = (value) => NUMBER.format(value ?? 0);

/** `1 call`, `2 calls` */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** `12 ms`, `1.72 s`, `2 min 5 s`, `3 h 10 min` */
export function duration(seconds) {
  if (!(seconds >= 0)) return "";
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** How long ago a time was: `just now`, `5 min ago`, or its date. */
export function ago(iso, now = Date.now()) {
  const seconds = (now - Date.parse(iso)) / 1000;
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(iso).toLocaleString();
}

/** `62 %`; `0 %` of nothing. */
export function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "< 1 %" : `${Math.round(share)} %`;
}

/** The seconds between two times. */
export const between = (start, end) => (Date.parse(end) - Date.parse(start)) / 1000;

/** A value as text: strings as they are, everything else as JSON. */
export const valueText = (value) =>
  typeof value === "string" ? value : JSON.stringify(value, null, 2);

export const STATUS_LABELS = {
  accepted: "accepted",
  waiting: "waiting",
  queued: "queued",
  running: "running",
  done: "done",
  failed: "failed",
  killed: "killed",
  skipped: "skipped",
  cancelled: "cancelled",
  deadline_exceeded: "deadline exceeded",
};

export const ENDED = new Set([
  "done", "failed", "killed", "skipped", "cancelled", "deadline_exceeded",
]);

/** Prompt tokens by origin, for a bar with a legend: [class, label, tokens]. */
export function promptParts(tokens) {
  return [
    ["computed", "computed", tokens.computed],
    ["static", "shared: program text", tokens.shared.static],
    ["dynamic", "shared: values", tokens.shared.dynamic],
    ["generated", "shared: generated text", tokens.shared.generated],
    ["cache", "shared: earlier programs", tokens.shared.cache],
  ];
}

/** The account of an ended program as sentences. */
export function receiptSentences(receipt, status) {
  const prompt = receipt.prompt_tokens;
  const shared = prompt.logical - prompt.computed;
  const verb = { done: "Done", cancelled: "Cancelled", failed: "Failed" }[status] ?? "Ended";
  const sentences = [`${verb} after ${duration(receipt.wall_s)} and ${count(receipt.calls, "LLM call")}.`];
  if (prompt.logical)
    sentences.push(
      `The prompts have ${count(prompt.logical, "token")}: ${number(prompt.computed)} were computed, ` +
        `${number(shared)} were shared (${percent(shared, prompt.logical)}).`,
    );
  const output = receipt.output_tokens;
  if (output.decoded || output.forced) {
    const forced = output.forced ? `, and grammars forced ${number(output.forced)}` : "";
    const discarded = output.discarded ? ` ${number(output.discarded)} of them were discarded.` : "";
    sentences.push(`The model decoded ${count(output.decoded, "output token")}${forced}.${discarded}`);
  }
  if (receipt.round_trips_saved && receipt.as_single_requests.estimated_s)
    sentences.push(...singleRequestSentences(receipt, shared));
  if (prompt.recomputed)
    sentences.push(`${count(prompt.recomputed, "token")} had to be computed again.`);
  if (receipt.truncated.length)
    sentences.push(`Cut off by max_tokens: ${listed(receipt.truncated)}.`);
  return sentences;
}

/** What the same calls would take as single requests, without network and other programs. */
function singleRequestSentences(receipt, shared) {
  const estimated_s = receipt.as_single_requests.estimated_s;
  const trips = count(receipt.round_trips_saved, "more round trip");
  const sentences = [`As single requests to an idle engine without a network, the calls would take about ${duration(estimated_s)} and ${trips}.`];
  if (estimated_s <= receipt.wall_s)
    sentences.push(
      shared
        ? "What this program shares is too little to save time."
        : "The prompts of this program share nothing: only the round trips are saved.",
    );
  return sentences;
}

/** What a program that runs has done so far, as sentences. */
export function progressSentences(nodes) {
  const calls = nodes.filter((node) => node.op === "generate");
  const num = (status) => calls.filter((node) => node.status === status).length;
  const decoded = calls.reduce((sum, node) => sum + (node.output_tokens?.decoded ?? 0), 0);
  const parts = [["done", "done"], ["running", "running"], ["queued", "queued"], ["waiting", "waiting for inputs"]]
    .map(([status, label]) => [num(status), label])
    .filter(([value]) => value)
    .map(([value, label]) => `${number(value)} ${label}`);
  const sentences = [`${count(calls.length, "LLM call")} so far${parts.length ? `: ${parts.join(", ")}` : ""}.`];
  if (decoded) sentences.push(`The calls that ended decoded ${count(decoded, "output token")}.`);
  return sentences;
}

/** The longest path of a receipt, as text. */
export const pathText = (receipt) => listed(receipt.critical_path, " → ", 8);

function listed(names, separator = ", ", most = 4) {
  const more = names.length - most;
  return names.slice(0, most).join(separator) + (more > 0 ? ` and ${number(more)} more` : "");
}
