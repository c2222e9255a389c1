/* The API reference: the OpenAPI document of this server, for people. */

import { request } from "./api.js";
import { copyButton, h, replace, setText } from "./dom.js";
import { schemaView, typeText, withCode } from "./schema_view.js";

const TAGS = [
  ["programs", "Programs"], ["procedures", "Stored procedures"], ["server", "Server"],
  ["openai", "OpenAI-compatible"], ["parrot", "Parrot's client"], ["paper", "Parrot's paper"],
];
const METHODS = ["get", "post", "put", "delete", "patch"];

/** Build the page. */
export async function start() {
  const main = document.getElementById("main");
  try {
    const api = await request("/schema/openapi.json");
    replace(main, page(api));
    const target = document.getElementById(location.hash.slice(1));
    if (target) target.scrollIntoView();
  } catch (error) {
    replace(main, h("p", { class: "error", role: "alert" }, error.message));
  }
}

function page(api) {
  const operations = operationsOf(api);
  const found = h("p", { class: "note", role: "status" });
  const search = h("input", { type: "search", id: "find", placeholder: "Path or word", autocomplete: "off", oninput: filter });
  const groups = TAGS.map(([tag, title]) => {
    const views = operations.filter((operation) => operation.tag === tag).map((operation) => operationView(api, operation));
    return {
      views,
      section: h("section", { "aria-labelledby": `tag-${tag}` }, h("h2", { id: `tag-${tag}` }, title), views.map((view) => view.element)),
      entry: h("li", {}, h("h2", {}, title), h("ul", {}, views.map((view) => view.link))),
    };
  }).filter((group) => group.views.length);

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let num = 0;
    for (const { views, section, entry } of groups) {
      for (const view of views) {
        const isShown = words.every((word) => view.text.includes(word));
        view.element.hidden = view.link.hidden = !isShown;
        num += isShown;
      }
      section.hidden = entry.hidden = views.every((view) => view.element.hidden);
    }
    setText(found, words.length ? `${num} of ${operations.length} operations` : `${operations.length} operations`);
  }

  filter();
  return [
    h("nav", { class: "contents", "aria-label": "Operations" },
      h("label", { for: "find", class: "hidden" }, "Search operations"), search, found,
      h("ul", {}, groups.map((group) => group.entry))),
    h("div", { class: "operations" },
      h("h1", {}, `${api.info.title} ${api.info.version}`),
      h("p", {}, api.info.summary ?? "", " The document that this page shows: ", h("a", { href: "/schema/openapi.json" }, "OpenAPI as JSON"), ", ", h("a", { href: "/schema/openapi.yaml" }, "as YAML"), "."),
      groups.map((group) => group.section)),
  ];
}

function operationsOf(api) {
  const operations = [];
  for (const [path, item] of Object.entries(api.paths))
    for (const method of METHODS)
      if (item[method]) operations.push({ path, method, tag: item[method].tags?.[0] ?? "server", ...item[method] });
  return operations.sort((a, b) => a.path.localeCompare(b.path) || METHODS.indexOf(a.method) - METHODS.indexOf(b.method));
}

function operationView(api, operation) {
  const id = operation.operationId;
  const title = [h("span", { class: `method ${operation.method}` }, operation.method.toUpperCase()), h("code", {}, operation.path)];
  const [first, ...rest] = (operation.description ?? "").split("\n\n");
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const element = h(
    "article", { class: "card", id, "aria-labelledby": `${id}-title` },
    h("h3", { id: `${id}-title` }, title),
    [first, ...rest].filter(Boolean).map((text) => h("p", {}, withCode(text))),
    parameters(api, operation.parameters ?? []),
    body ? [h("h4", {}, "Body"), schemaView(api, body.$ref ? { oneOf: [body] } : body)] : null,
    responses(api, operation.responses ?? {}),
    example(operation),
  );
  const link = h("li", {}, h("a", { href: `#${id}` }, title.map((part) => part.cloneNode(true))));
  return { element, link, text: `${operation.method} ${operation.path} ${operation.description ?? ""}`.toLowerCase() };
}

function parameters(api, list) {
  if (!list.length) return null;
  return [
    h("h4", {}, "Parameters"),
    h("dl", { class: "schema" }, list.map((parameter) => [
      h("dt", {}, h("code", {}, parameter.name), " ", h("span", { class: "type" }, `${parameter.in}, ${typeText(api, parameter.schema ?? {})}`),
        parameter.required ? h("span", { class: "required" }, "required") : null),
      h("dd", {}, parameter.description ? h("p", {}, withCode(parameter.description)) : null),
    ])),
  ];
}

function responses(api, byStatus) {
  return [
    h("h4", {}, "Responses"),
    h("ul", { class: "responses" }, Object.entries(byStatus).sort().map(([status, response]) => {
      const schema = Object.values(response.content ?? {})[0]?.schema;
      const line = [h("code", { class: status < "400" ? "good" : "bad" }, status), " ", withCode(response.description ?? "")];
      if (!schema?.$ref || status >= "400") return h("li", {}, line);
      return h("li", {}, line, schemaView(api, { oneOf: [schema] }));
    })),
  ];
}

function example(operation) {
  const path = operation.path.replaceAll(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const parts = ["curl -sS"];
  if (operation.method !== "get") parts.push(`-X ${operation.method.toUpperCase()}`);
  parts.push(`${location.origin}${path}`);
  if (operation.requestBody) parts.push("-H 'Content-Type: application/json' -d @body.json");
  const command = parts.join(" ");
  return h("div", { class: "example" }, h("pre", { class: "code", tabindex: "0", role: "region", "aria-label": "Command" }, command), copyButton(() => command));
}

start();
