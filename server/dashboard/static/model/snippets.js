/* The same submission as a command or program in other languages. Pure functions. */

import { isLongInteger } from "./exact_json.js";

/** Return the body of a submission as a `curl` command. */
export function asCurl(origin, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `id=$(curl -sSf ${origin}/v1/programs -H 'Content-Type: application/json' -d '${json}' |`,
    `  sed 's/.*"id":"\\([^"]*\\)".*/\\1/')`,
    ...(body.source === undefined
      ? outputsOf(body).map((name) => `curl -sSf "${origin}/v1/programs/$id/variables/${inUrl(name)}?wait_s=60"`)
      : [`curl -sSfN "${origin}/v1/programs/$id/events?types=yield"`]),
    "",
  ].join("\n");
}

/** Return it as Python, for Conure's client. */
export function asPython(origin, body) {
  const client = `Client(${python(origin)})`;
  const inputs = Object.keys(body.inputs ?? {}).length ? ", inputs" : "";
  return [
    "from conure import Client",
    "",
    `program = ${programOf(body)}`,
    ...(inputs ? [`inputs = ${python(body.inputs)}`] : []),
    "",
    `with ${client} as client:`,
    `    result = client.run(program${inputs})`,
    "print(result.outputs)",
    "",
  ].join("\n");
}

/** Return it as LangChain: a chat model for a single prompt, else a step that runs the program. */
export function asLangChain(origin, body, chat = null) {
  if (chat)
    return [
      "from conure.adapters.langchain import ChatConure",
      "",
      `llm = ChatConure(base_url=${python(origin)}, temperature=${chat.temperature}, max_tokens=${chat.max_tokens})`,
      `print(llm.invoke(${python(chat.prompt)}).content)`,
      "",
    ].join("\n");
  return [
    "from conure import Client",
    "from langchain_core.runnables import RunnableLambda",
    "",
    `client = Client(${python(origin)})`,
    `program = ${programOf(body)}`,
    "step = RunnableLambda(lambda inputs: client.run(program, inputs).outputs)",
    `print(step.invoke(${python(body.inputs ?? {})}))`,
    "",
  ].join("\n");
}

function programOf(body) {
  return python(body.source ?? body.program);
}

function outputsOf(body) {
  return body.program?.outputs ?? [];
}

/** A name as part of a URL without characters that a shell reads inside of double quotes. */
const inUrl = (name) => encodeURIComponent(name).replaceAll("!", "%21");

/** A JSON value as a Python literal. */
export function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object" || isLongInteger(value)) return JSON.stringify(value);
  const inner = `${indent}    `;
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((item) => python(item, inner))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${python(item, inner)}`);
  const [first, last] = isList ? "[]" : "{}";
  const line = `${first}${parts.join(", ")}${last}`;
  if (!line.includes("\n") && indent.length + line.length < 88) return line;
  return `${first}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${last}`;
}
