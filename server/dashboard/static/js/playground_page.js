/* Write a prompt or a program, have it explained, run it, and copy it in other languages. */

import { explainProgram, followProgram, readModels, submitProgram } from "./api.js";
import { announce, copyButton, h, replace, setText } from "./dom.js";
import { PROGRAM, PROGRAM_INPUTS, PROMPT, SOURCE } from "../model/examples.js";
import { parseJson } from "../model/exact_json.js";
import { count, number } from "../model/format.js";
import { ProgramModel, textOf } from "../model/program_model.js";
import { asCurl, asLangChain, asPython } from "../model/snippets.js";
import { setStatus, statusLabel } from "./status.js";

const KINDS = [["prompt", "Prompt"], ["program", "Program (JSON)"], ["source", "Program (text)"]];
const LANGUAGES = [["curl", asCurl], ["Python", asPython], ["LangChain", asLangChain]];
const INPUTS = JSON.stringify(PROGRAM_INPUTS, null, 2);

/** Open the page. */
export function open() {
  const editor = editorView(() => showCode());
  const result = h("section", { class: "card result", "aria-labelledby": "result-heading" });
  const code = h("pre", { class: "code", tabindex: "0", role: "region", "aria-label": "Code" });
  let language = LANGUAGES[0];
  let stop = () => {};
  let numRequests = 0;
  let isSending = false;

  // The second click of a double click is not another run.
  const ignoreRepeated = (event) => { if (event.detail > 1) event.preventDefault(); };
  const run = h("button", { type: "submit", class: "primary", onclick: ignoreRepeated }, "Run");
  const form = h(
    "form", { class: "card", onsubmit: (event) => { event.preventDefault(); submit(); } },
    editor.element,
    h("footer", {}, run,
      h("button", { type: "button", onclick: explain }, "Explain"),
      h("span", { class: "note" }, "Ctrl+Enter runs")),
  );
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (!event.repeat) submit();
  });
  const copy = h(
    "section", { class: "card", "aria-labelledby": "copy-heading" },
    h("header", {}, h("h2", { id: "copy-heading" }, "Copy as"),
      choices("language", LANGUAGES.map(([name]) => [name, name]), LANGUAGES[0][0], (name) => {
        language = LANGUAGES.find(([each]) => each === name);
        showCode();
      }),
      h("div", { class: "group" }, copyButton(() => code.textContent))),
    code,
  );
  const notice = h("p", { class: "note", role: "note", hidden: true });
  const element = h(
    "div", { class: "page" },
    h("div", { class: "heading" }, h("h1", {}, "Playground")),
    notice,
    h("div", { class: "playground" }, h("div", {}, form, copy), result),
  );

  function showCode() {
    try {
      const { body, chat } = editor.read();
      setText(code, language[1](location.origin, body, chat));
    } catch (error) {
      setText(code, `# ${error.message}`);
    }
  }

  /** Show what the server states about its default model, if the model is no general one. */
  async function showNotice() {
    try {
      const [model] = (await readModels()).data;
      if (!model?.notice) return;
      const parts = model.notice.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
      replace(notice, `Model ${model.id}: `, parts);
      notice.hidden = false;
    } catch {
      // A server that does not answer is reported by the request that the user makes.
    }
  }

  function submit() {
    if (isSending) return;
    show(submitProgram, (accepted) => {
      const view = runView(accepted.id);
      stop = view.close;
      replace(result, view.elements);
    });
  }

  function explain() {
    show(explainProgram, (explanation) => {
      replace(result, explanationView(explanation));
      announce("Explained");
    });
  }

  /** Send the submission and show the answer, unless the user sends another one or leaves. */
  async function show(request, showAnswer) {
    cancel();
    const own = numRequests;
    isSending = request === submitProgram;
    try {
      const answer = await request(editor.read().body);
      if (own === numRequests) showAnswer(answer);
    } catch (error) {
      if (own === numRequests) showError(error);
    } finally {
      if (own === numRequests) isSending = false;
    }
  }

  /** Stop following the program that is shown, and ignore the answer to an open request. */
  function cancel() {
    stop();
    stop = () => {};
    numRequests++;
  }

  function showError(error) {
    replace(result, resultHeading("Not accepted"), h("p", { class: "error", role: "alert" }, error.message),
      error.code ? h("p", { class: "note" }, error.code) : null);
  }

  replace(result, resultHeading("Result"), h("p", { class: "note" }, "Run shows the answers while they are written. Explain says what the program would do, without running it."));
  showCode();
  showNotice();
  return { element, title: "Playground", close: cancel };
}

/** The fields in which a submission is written. */
function editorView(onChange) {
  let kind = "prompt";
  const texts = { prompt: PROMPT, program: JSON.stringify(PROGRAM, null, 2), source: SOURCE };
  const area = h("textarea", { id: "editor", spellcheck: "false", rows: "16", oninput: () => { texts[kind] = area.value; onChange(); } });
  const label = h("label", { for: "editor" });
  const inputs = h("textarea", { id: "inputs", spellcheck: "false", rows: "4", oninput: onChange });
  const maxTokens = numberField("max_tokens", "Output tokens, at most", 40, 1, onChange);
  const temperature = numberField("temperature", "Temperature", 0, 0.1, onChange);
  const inputsField = h("div", {}, h("label", { for: "inputs" }, "Inputs (JSON)"), inputs);
  const sampling = h("div", { class: "fields" }, maxTokens.element, temperature.element);
  inputs.value = INPUTS;
  const element = h("div", { class: "editor" }, choices("kind", KINDS, kind, change), label, area, sampling, inputsField);

  function change(next) {
    kind = next;
    area.value = texts[kind];
    setText(label, { prompt: "Message to the model", program: "Program", source: "Program in the decoder language" }[kind]);
    sampling.hidden = kind !== "prompt";
    inputsField.hidden = kind === "prompt";
    onChange();
  }

  /** Return the body of the submission, and the chat that it is, if it is one. */
  function read() {
    if (kind === "prompt") {
      const chat = { prompt: area.value, max_tokens: maxTokens.read(), temperature: temperature.read() };
      return { body: chatBody(chat), chat };
    }
    const given = inputs.value.trim() ? parse(inputs.value, "the inputs") : {};
    if (kind === "source") return { body: { source: area.value, inputs: given } };
    const program = parse(area.value, "the program");
    const isSubmission = program && typeof program === "object" && "program" in program;
    return { body: isSubmission ? program : { program, inputs: given } };
  }

  // Fill the fields without a call of `onChange`: the page does not exist yet.
  area.value = texts[kind];
  setText(label, "Message to the model");
  inputsField.hidden = true;
  return { element, read };
}

function chatBody({ prompt, max_tokens, temperature }) {
  return {
    program: {
      name: "playground",
      nodes: [{ id: "answer_it", op: "generate", messages: [{ role: "user", content: prompt }],
        output: { variable: "answer", max_tokens, temperature } }],
      outputs: ["answer"],
    },
  };
}

function parse(text, what) {
  try {
    return parseJson(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

function numberField(id, label, value, step, onChange) {
  const field = h("input", { type: "number", id, min: step === 1 ? "1" : "0", step, oninput: onChange });
  field.value = value;
  return { element: h("div", {}, h("label", { for: id }, label), field), read: () => Number(field.value) };
}

function choices(name, options, chosen, onChange) {
  return h("fieldset", { class: "choices" }, h("legend", { class: "hidden" }, name),
    options.map(([value, label]) => h("label", {},
      h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onChange(value) }), h("span", {}, label))));
}

/** The answers of a program, while they are written. */
function runView(id) {
  const model = new ProgramModel(id);
  const status = statusLabel("accepted");
  const summary = h("p", { class: "note" });
  const answers = h("div", { class: "outputs" });
  const shown = new Map();
  let isScheduled = false;

  function render() {
    isScheduled = false;
    if (status.dataset.status !== model.status) announce(`Program ${model.status}`);
    setStatus(status, model.status);
    for (const node of model.nodes.values()) {
      const text = node.error ? `${node.error.code}: ${node.error.message}` : textOf(node);
      const isEmpty = node.status === "done" && node.texts.size > 0 && [...node.texts.values()].every((value) => value === "");
      if (!text && !isEmpty) continue;
      if (!shown.has(node.id)) {
        const value = h("pre", { class: "value", tabindex: "0", role: "region", "aria-label": node.id });
        shown.set(node.id, { value, text });
        answers.append(h("h3", {}, node.id, copyButton(() => shown.get(node.id).text)), value);
      }
      const own = shown.get(node.id);
      own.text = text;
      setText(own.value, isEmpty ? "(empty)" : own.text);
    }
    if (model.receipt) setText(summary, `${count(model.receipt.calls, "LLM call")}, ${number(model.receipt.prompt_tokens.computed)} of ${number(model.receipt.prompt_tokens.logical)} prompt tokens computed`);
  }

  const close = followProgram(id, {
    onEvent(type, data) {
      model.apply(type, data);
      if (!isScheduled) requestAnimationFrame(render);
      isScheduled = true;
    },
    onState: () => {},
  });
  return {
    elements: [
      h("header", {}, h("h2", { id: "result-heading" }, "Result"), status,
        h("div", { class: "group" }, h("a", { class: "button", href: `#/programs/${encodeURIComponent(id)}` }, "Open program"))),
      answers, summary,
    ],
    close,
  };
}

function resultHeading(text) {
  return h("header", {}, h("h2", { id: "result-heading" }, text));
}

function explanationView(explanation) {
  const worst = explanation.worst_case;
  const shared = explanation.shared ?? [];
  const advice = explanation.advice ?? [];
  return [
    resultHeading("Explanation"),
    h("p", {}, `At most ${count(worst.calls, "LLM call")}, ${number(worst.prompt_tokens)} prompt tokens and ${number(worst.output_tokens)} output tokens.`),
    h("h3", {}, "Nodes"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Nodes" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Node", "Kind", "Reads", "Writes", "Prompt", "Output up to"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, (explanation.nodes ?? []).map((node) => h("tr", {},
        h("th", { scope: "row" }, node.id), h("td", {}, node.times > 1 ? `${node.op}, up to ${number(node.times)} times` : node.op),
        h("td", {}, (node.reads ?? []).join(", ")), h("td", {}, (node.writes ?? []).join(", ")),
        h("td", {}, node.prompt ? tokensText(node.prompt) : ""), h("td", {}, node.max_output_tokens ? number(node.max_output_tokens) : "")))))),
    h("h3", {}, "Shared prompt beginnings"),
    shared.length
      ? h("ul", {}, shared.map((span) => h("li", {}, `${span.calls.join(", ")}: ${tokensText(span.prefix)}, in ${count(span.times, "prompt")}, saves ${number(span.saved_tokens)}`)))
      : h("p", { class: "note" }, "None."),
    h("h3", {}, "Advice"),
    advice.length
      ? h("ul", {}, advice.map((each) => h("li", {}, each.message, each.fix ? h("p", { class: "note" }, `Fix: ${each.fix}`) : null)))
      : h("p", { class: "note" }, "None."),
  ];
}

function tokensText(known) {
  return [`${number(known.tokens ?? 0)}`, ...(known.values ?? [])].join(" + ") + " tokens";
}
