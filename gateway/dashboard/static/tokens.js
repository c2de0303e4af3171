// Tokens in the colour of their origin.
import { element } from "./dom.js";

export const ORIGINS = {
  accepted: "drafted, accepted by the target",
  recovered: "sampled by the target in place of a rejected draft",
  bonus: "sampled by the target after a draft accepted in full",
  plain: "decoded without a draft",
};

// `pieces` are [text, origin]; a token whose text is not shown becomes a cell.
export function append(container, pieces, most = Infinity) {
  const follows = container.scrollHeight - container.scrollTop - container.clientHeight < 40;
  const made = pieces.map(([text, origin]) =>
    text
      ? element("span", { class: `token ${origin}`, title: ORIGINS[origin] ?? origin }, text)
      : element("span", { class: `token cell ${origin}`, title: ORIGINS[origin] ?? origin }),
  );
  container.append(...made);
  while (container.childElementCount > most) container.firstElementChild.remove();
  if (follows) container.scrollTop = container.scrollHeight;
}
