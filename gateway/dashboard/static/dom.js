// Small helpers over the DOM. Text always goes in as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const percent = (share) => `${(100 * share).toFixed(share >= 0.995 ? 0 : 1)}%`;

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
}

export const count = (number) => Number(number).toLocaleString("en");
