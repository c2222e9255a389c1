/* Shows the page that the part of the address after `#` names. */

import { readModels, request } from "./api.js";
import { h, replace, setAttribute, setText } from "./dom.js";
import { repeat } from "./polling.js";

const PAGES = {
  programs: () => import("./programs_page.js"),
  program: () => import("./program_page.js"),
  engines: () => import("./engines_page.js"),
  playground: () => import("./playground_page.js"),
};
const SERVER_POLL_MS = 5000;

const main = document.getElementById("main");
let leave = () => {};
let visit = 0;

/** Return the page and its parameter: `#/programs/p_1` is program p_1. */
function route() {
  const [name = "", parameter] = location.hash.replace(/^#\/?/, "").split("/");
  if (name === "programs" && parameter) return ["program", decodeURIComponent(parameter)];
  return [name in PAGES ? name : "programs", null];
}

async function show() {
  if (location.hash === "#main") return; // the link that skips the navigation
  const mine = ++visit;
  const [name, parameter] = route();
  leave();
  leave = () => {};
  const tab = name === "program" ? "programs" : name;
  for (const link of document.querySelectorAll("header nav a"))
    setAttribute(link, "aria-current", link.getAttribute("href") === `#/${tab}` ? "page" : null);
  const page = await PAGES[name]();
  if (mine !== visit) return;
  const view = page.open(parameter);
  leave = view.close;
  document.title = `${view.title} – Conure`;
  replace(main, view.element);
  if (mine > 1) main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

async function showServer() {
  const state = document.getElementById("server");
  try {
    const [models] = await Promise.all([readModels(), request("/readyz")]);
    setAttribute(state, "data-status", "done");
    setText(state, `${models.data[0]?.id ?? "no model"} · ready`);
  } catch (error) {
    setAttribute(state, "data-status", "failed");
    setText(state, error.message);
  }
}

window.addEventListener("hashchange", show);
window.addEventListener("unhandledrejection", (event) => {
  replace(main, h("p", { class: "error", role: "alert" }, `${event.reason?.message ?? event.reason}`));
});
show();
repeat(showServer, SERVER_POLL_MS);
