/* A JSON schema as a tree that opens level by level. */

import { h } from "./dom.js";

const MAX_VALUES = 12;

/**
 * Create the fields of a schema.
 *
 * @param {object} document the OpenAPI document.
 * @param {object} schema
 */
export function schemaView(document, schema) {
  const resolved = resolve(document, schema);
  const choices = resolved.oneOf ?? resolved.anyOf;
  const fields = Object.entries(resolved.properties ?? {});
  if (!fields.length && choices) return choices.filter(isNotNull).map((choice) => branch(document, choice));
  if (!fields.length && resolved.items) return branch(document, resolved.items, "each item: ");
  if (!fields.length) return h("p", { class: "note" }, typeText(document, schema));
  const required = new Set(resolved.required ?? []);
  return h("dl", { class: "schema" }, fields.map(([name, field]) => [
    h("dt", {}, h("code", {}, name), " ", h("span", { class: "type" }, typeText(document, field)),
      required.has(name) ? h("span", { class: "required" }, "required") : null),
    h("dd", {}, [fieldNote(document, field)].filter(Boolean).map((text) => h("p", {}, withCode(text))), nested(document, field)),
  ]));
}

/** The type of a schema in words, with its bounds. */
export function typeText(document, schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  const choices = schema.oneOf ?? schema.anyOf;
  if (choices) return choices.map((choice) => typeText(document, choice)).join(" or ");
  if (schema.enum) {
    const values = schema.enum.slice(0, MAX_VALUES).map((value) => JSON.stringify(value)).join(" | ");
    return schema.enum.length > MAX_VALUES ? `${values} | …` : values;
  }
  const types = [schema.type ?? "any"].flat().join(" or ");
  if (schema.items) return `array of ${typeText(document, schema.items)}`;
  return [types, bounds(schema)].filter(Boolean).join(", ");
}

/** A text in which words in backticks are code. */
export function withCode(text) {
  return text.replaceAll("\n", " ").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

function bounds(schema) {
  const { minimum, maximum, maxLength, pattern } = schema;
  const parts = [];
  if (minimum !== undefined && maximum !== undefined) parts.push(`${minimum} to ${maximum}`);
  else if (minimum !== undefined) parts.push(`at least ${minimum}`);
  else if (maximum !== undefined) parts.push(`at most ${maximum}`);
  if (maxLength !== undefined) parts.push(`at most ${maxLength} characters`);
  if (pattern !== undefined) parts.push(`matches ${pattern}`);
  return parts.join(", ");
}

function fieldNote(document, field) {
  const resolved = field.$ref ? {} : field;
  const fallback = field.default === undefined || field.default === null || isEmpty(field.default)
    ? "" : `Default: ${JSON.stringify(field.default)}.`;
  return [resolved.description, fallback].filter(Boolean).join(" ");
}

/** The schemas that a field refers to, closed until they are opened: schemas refer to each other. */
function nested(document, field) {
  const choices = (field.oneOf ?? field.anyOf ?? [field.items ?? field]).filter(isNotNull);
  const inner = choices.map((choice) => choice.items ?? choice).filter((choice) => choice.$ref || choice.properties);
  return inner.map((choice) => branch(document, choice));
}

function branch(document, schema, label = "") {
  const name = schema.$ref ? nameOf(schema.$ref) : typeText(document, schema);
  const resolved = resolve(document, schema);
  const hasFields = resolved.properties || resolved.oneOf || resolved.anyOf || resolved.items;
  if (!hasFields) return h("p", { class: "note" }, label, name);
  const details = h("details", { ontoggle: () => {
    if (details.open && details.children.length === 1)
      details.append(...[resolved.description ? h("p", {}, withCode(resolved.description)) : [], schemaView(document, schema)].flat());
  } }, h("summary", {}, label, name));
  return details;
}

function resolve(document, schema) {
  return schema.$ref ? document.components.schemas[nameOf(schema.$ref)] ?? {} : schema;
}

const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);
const isNotNull = (schema) => schema.type !== "null";
const isEmpty = (value) => typeof value === "object" && Object.keys(value).length === 0;
