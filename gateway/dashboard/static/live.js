// All requests that run, as their tokens come.
import { byId, element } from "./dom.js";
import { append } from "./tokens.js";

const MOST_REQUESTS = 5;
const MOST_TOKENS = 600;
const shown = new Map();

export function setNote(showsTexts) {
  byId("live-note").textContent = showsTexts
    ? "Requests of all clients, as their tokens come."
    : "Requests of all clients, one mark a token. Their text is shown only where the gateway's settings ask for it.";
}

export function show(news) {
  for (const [id, pieces] of Object.entries(news.tokens)) append(card(id).tokens, pieces, MOST_TOKENS);
  for (const id of news.ended) {
    const found = shown.get(String(id));
    if (found) {
      found.box.classList.add("ended");
      found.title.textContent = `request ${id}, ended`;
    }
  }
}

function card(id) {
  let found = shown.get(id);
  if (!found) {
    const title = element("p", { class: "muted" }, `request ${id}`);
    const tokens = element("pre", { class: "tokens" });
    const box = element("div", { class: "request" }, title, tokens);
    found = { box, title, tokens };
    shown.set(id, found);
    byId("live").prepend(box);
    if (shown.size > MOST_REQUESTS) {
      const [oldest, gone] = [...shown].find(([, one]) => one.box.classList.contains("ended")) ?? [...shown][0];
      gone.box.remove();
      shown.delete(oldest);
    }
  }
  return found;
}
