/* Creation of elements. Text is always a text node: there is no way here to parse markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element.
 *
 * @param {string} tag
 * @param {object} properties attributes by name; a function is a listener of the event `on...`;
 *     `vars` are custom CSS properties; null, undefined and false leave an attribute out.
 * @param {...(Node|string|number|null|Array)} children strings become text nodes.
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Create an SVG element; the parameters are those of `h`. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Replace the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...nodes(children));
}

/** Set the text of an element, unless it is already that text. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or remove an attribute, unless it already has the value. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Announce a message to screen readers. */
export function announce(message) {
  setText(document.getElementById("announcer"), message);
}

/** Create a button that copies the text that `read` returns. */
export function copyButton(read, label = "Copy") {
  const button = h("button", { class: "quiet", type: "button", onclick: copy }, label);
  async function copy() {
    try {
      await navigator.clipboard.writeText(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Press Ctrl+C";
    }
    announce(button.textContent);
    setTimeout(() => (button.textContent = label), 1500);
  }
  return button;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "vars") setVars(element, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  return element;
}

/** Set custom CSS properties; the content security policy forbids style attributes. */
export function setVars(element, vars) {
  for (const [name, value] of Object.entries(vars)) element.style.setProperty(name, value);
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}
