// The page's own elements.
export const $ = (id) => document.getElementById(id);
export const pretty = (value) => JSON.stringify(value, null, 2);
export const parseLines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// A token's text with what is not seen of it; an end of the output has none.
export const visible = (text) =>
  text === "" ? "∎" : text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, attributes);
  made.append(...children);
  return made;
}

export function shape(name, attributes, text, hint) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (hint) made.append(shape("title", {}, hint));
  return made;
}

export function swatch(colour, text) {
  const box = element("span", { className: "swatch" });
  box.style.background = colour;
  return element("span", {}, box, text);
}
