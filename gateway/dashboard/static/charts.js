// Bars: tokens by origin, acceptance by position, counts by reason, tokens per second.
import { byId, count, element, percent, svg } from "./dom.js";
import { ORIGINS } from "./tokens.js";

const names = Object.keys(ORIGINS);
const history = [];
const SECONDS = 60;

export function drawOrigins(tokens) {
  const total = names.reduce((sum, name) => sum + (tokens[name] ?? 0), 0);
  const segments = names.map((name) => {
    const segment = element("span", { class: name, title: `${name}: ${count(tokens[name] ?? 0)}` });
    segment.style.flexGrow = tokens[name] ?? 0;
    return segment;
  });
  byId("origin-bar").replaceChildren(...segments);
  byId("origins").replaceChildren(
    ...names.map((name) => {
      const number = tokens[name] ?? 0;
      const share = total ? ` ${percent(number / total)}` : "";
      return element("li", { class: name, title: ORIGINS[name] }, `${name} `, element("b", {}, count(number)), share);
    }),
  );
}

export function drawAcceptance(drafted, accepted) {
  const bars = drafted.map((number, place) => {
    const share = number ? accepted[place] / number : 0;
    return bar(String(place + 1), share, [element("b", {}, percent(share)), ` of ${count(number)}`]);
  });
  byId("acceptance").replaceChildren(...(bars.length ? bars : [nothing("no draft token was verified yet")]));
}

export function drawCounts(id, counts, empty) {
  const entries = Object.entries(counts).sort((one, other) => other[1] - one[1]);
  const most = Math.max(1, ...entries.map(([, number]) => number));
  const bars = entries.map(([name, number]) => bar(name, number / most, [element("b", {}, count(number))]));
  byId(id).classList.add("named");
  byId(id).replaceChildren(...(bars.length ? bars : [nothing(empty)]));
}

export function drawRate(rates) {
  history.push(rates);
  if (history.length > SECONDS) history.shift();
  const sum = (second) => names.reduce((total, name) => total + second[name], 0);
  const most = Math.max(1, ...history.map(sum));
  const width = 240 / SECONDS;
  const bars = [];
  history.forEach((second, index) => {
    let top = 56;
    for (const name of names) {
      const height = (second[name] / most) * 54;
      top -= height;
      const x = (SECONDS - history.length + index) * width;
      if (height) bars.push(svg("rect", { class: name, x, y: top, width: width * 0.8, height }));
    }
  });
  byId("rate").replaceChildren(...bars);
  return sum(rates);
}

function bar(name, share, value) {
  const fill = element("span", { class: "fill" });
  fill.style.width = percent(share);
  return element(
    "div",
    { class: "bar", role: "listitem" },
    element("span", {}, name),
    element("span", { class: "track" }, fill),
    element("span", { class: "value" }, ...value),
  );
}

const nothing = (text) => element("p", { class: "muted" }, text);
