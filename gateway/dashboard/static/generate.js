// The box that generates: a request like any other, its tokens shown as they come.
import { lines, post } from "./api.js";
import { byId, duration, element } from "./dom.js";
import { append } from "./tokens.js";

const PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without their ends."""\n    with open(path';
let running = null;

// `onFinished` hears of the id of each request that came to its end.
export function setUp(onFinished) {
  byId("prompt").value = PROMPT;
  byId("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate(onFinished);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("generate-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

async function generate(onFinished) {
  const output = byId("output");
  const prompt = byId("prompt").value;
  running = new AbortController();
  byId("go").disabled = true;
  byId("stop").hidden = false;
  byId("result").textContent = "generating";
  output.replaceChildren(element("span", { class: "prompt-text" }, prompt));
  try {
    const body = {
      prompt,
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      speculation: byId("speculation").checked,
    };
    let requestId = "";
    for await (const line of lines(await post("generate", body, running.signal))) {
      const event = JSON.parse(line);
      if (event.started) requestId = event.started.request_id;
      if (event.tokens) append(output, event.tokens);
      if (event.error) throw new Error(event.error);
      if (event.finished) {
        byId("result").textContent = summary(event.finished);
        onFinished(requestId);
      }
    }
  } catch (error) {
    byId("result").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    running = null;
    byId("go").disabled = false;
    byId("stop").hidden = true;
  }
}

function summary(finished) {
  const parts = [`${finished.num_output_tokens} tokens in ${finished.num_steps} target steps`];
  if (finished.num_draft_tokens) {
    const share = Math.round((100 * finished.num_accepted_tokens) / finished.num_draft_tokens);
    parts.push(`${finished.num_accepted_tokens} of ${finished.num_draft_tokens} draft tokens accepted (${share}%, ${finished.verification} verification)`);
  }
  parts.push(`first token after ${duration(finished.time_to_first_token_seconds)}`);
  parts.push(`${(finished.num_output_tokens / finished.total_seconds).toFixed(1)} tokens/s`);
  if (finished.fallbacks.length) parts.push(`fell back: ${finished.fallbacks.join(", ")}`);
  return parts.join(" · ");
}
