/* The list of programs, with search and a filter by status. It follows the server. */

import { listPrograms } from "./api.js";
import { h, replace, setText } from "./dom.js";
import { ago, between, duration, ENDED, number } from "../model/format.js";
import { ProgramList } from "../model/program_list.js";
import { repeat } from "./polling.js";
import { setStatus, statusLabel } from "./status.js";

const PAGE_SIZE = 50;
const POLL_MS = 1500;
const TYPING_MS = 200;
const FILTERS = [
  ["", "All"], ["running", "Running"], ["done", "Done"], ["failed", "Failed"],
  ["cancelled", "Cancelled"], ["deadline_exceeded", "Deadline exceeded"],
];

/** Open the page. */
export function open() {
  const filter = { status: "", search: "" };
  const rows = new Map();
  let list = new ProgramList();
  let wantsOlder = false;
  let version = 0;
  let typing = null;

  const body = h("tbody");
  const note = h("p", { class: "note", role: "status" });
  const more = h("button", { type: "button", onclick: loadOlder, hidden: true }, "Load older programs");
  const search = h("input", {
    type: "search", id: "search", placeholder: "Name or id", autocomplete: "off",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => change({ search: search.value.trim() }), TYPING_MS);
    },
  });
  const choices = h(
    "fieldset", { class: "choices" },
    h("legend", { class: "hidden" }, "Status"),
    FILTERS.map(([value, label]) =>
      h("label", {},
        h("input", { type: "radio", name: "status", value, checked: value === "",
          onchange: () => change({ status: value }) }),
        h("span", {}, label))),
  );
  const element = h(
    "div", { class: "page" },
    h("div", { class: "heading" }, h("h1", {}, "Programs"), h("a", { class: "button primary", href: "#/playground" }, "New program")),
    h("div", { class: "tools" },
      h("label", { for: "search", class: "hidden" }, "Search programs"), search, choices),
    h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Programs" },
      h("table", { class: "programs" },
        h("thead", {}, h("tr", {},
          ["Program", "Status", "Accepted", "Took", "LLM calls"].map((name, column) =>
            h("th", { scope: "col", class: column > 2 ? "number" : null }, name)))),
        body)),
    note, more,
  );

  function change(part) {
    Object.assign(filter, part);
    list = new ProgramList();
    wantsOlder = false;
    version++;
    polling.now();
  }

  async function poll() {
    const mine = version;
    try {
      const page = await listPrograms({ ...filter, limit: PAGE_SIZE });
      if (mine !== version) return;
      list.setFirst(page);
      if (wantsOlder && list.next !== null) {
        const older = await listPrograms({ ...filter, cursor: list.next, limit: PAGE_SIZE });
        if (mine !== version) return;
        list.addOlder(older);
      }
      wantsOlder = false;
      show(list.programs);
    } catch (error) {
      setText(note, error.message);
    }
  }

  function loadOlder() {
    wantsOlder = true;
    polling.now();
  }

  function show(programs) {
    const wanted = programs.map((program) => {
      const row = rows.get(program.id) ?? addRow(program);
      row.update(program);
      return row.element;
    });
    const same = wanted.length === body.children.length && wanted.every((row, i) => row === body.children[i]);
    if (!same) replace(body, wanted);
    const kept = new Set(programs.map((program) => program.id));
    for (const id of rows.keys()) if (!kept.has(id)) rows.delete(id);
    more.hidden = list.next === null;
    const shown = `${number(programs.length)} program${programs.length === 1 ? "" : "s"} shown`;
    const none = filter.search || filter.status ? "No program matches." : "No programs yet.";
    setText(note, programs.length ? shown : none);
  }

  function addRow(program) {
    const row = programRow(program);
    rows.set(program.id, row);
    return row;
  }

  const polling = repeat(poll, POLL_MS);
  return { element, title: "Programs", close: () => { polling.close(); clearTimeout(typing); version++; } };
}

function programRow(program) {
  const status = statusLabel(program.status);
  const accepted = h("time", { datetime: program.created_at, title: program.created_at });
  const took = h("td", { class: "number" });
  const calls = h("td", { class: "number" });
  const element = h(
    "tr", {},
    h("th", { scope: "row" },
      h("a", { href: `#/programs/${encodeURIComponent(program.id)}` }, program.name || "Unnamed"),
      h("span", { class: "id" }, program.id)),
    h("td", {}, status), h("td", {}, accepted), took, calls,
  );
  function update(latest) {
    setStatus(status, latest.status);
    setText(accepted, ago(latest.created_at));
    const end = latest.finished_at ?? new Date().toISOString();
    const isKnown = latest.finished_at || !ENDED.has(latest.status);
    setText(took, isKnown ? duration(Math.max(0, between(latest.created_at, end))) : "");
    setText(calls, latest.calls === undefined || latest.calls === null ? "–" : number(latest.calls));
  }
  return { element, update };
}
