// Verifiers and drafters, and how busy they are.
import { byId, element } from "./dom.js";

export function draw(verifiers, drafters) {
  const rows = [
    ...verifiers.map((one) => {
      const used = one.num_kv_blocks - one.num_free_kv_blocks;
      const details = [`${one.num_running} running, ${one.num_waiting} waiting`];
      if (one.num_kv_blocks) details.push(`${used} of ${one.num_kv_blocks} KV blocks`);
      return row("verifier", one, one.is_ready ? details.join(", ") : "not connected");
    }),
    ...drafters.map((one) =>
      row("drafter", one, one.is_ready ? `${one.num_sequences} sequences` : one.detail || "not ready"),
    ),
  ];
  const head = element("tr", {}, ...["", "address", "state"].map((name) => element("th", { scope: "col" }, name)));
  byId("pools").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function row(kind, one, details) {
  const dot = element("span", { class: one.is_ready ? "dot ready" : "dot", title: one.is_ready ? "ready" : "not ready" });
  return element(
    "tr",
    { class: "member" },
    element("td", {}, dot, kind),
    element("td", {}, one.address),
    element("td", {}, details),
  );
}
