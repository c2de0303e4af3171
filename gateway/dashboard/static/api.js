// Talks to the gateway, with a token where it asks for one.

const KEY = "outrider-token";

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

export const useToken = (token) => sessionStorage.setItem(KEY, token);

export async function get(path, signal) {
  const response = await fetch(`api/${path}`, { headers: headers(), signal });
  if (!response.ok) throw await problem(response);
  return response.status === 204 ? null : response.json();
}

export async function post(path, body, signal) {
  const response = await fetch(`api/${path}`, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `status ${response.status}`);
  error.status = response.status;
  return error;
}

export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

// Server-sent events by fetch, as an EventSource cannot send a token: [name, data] pairs.
export async function* events(signal) {
  const response = await fetch("api/events", { headers: headers(), signal });
  if (!response.ok) throw await problem(response);
  let name = "message";
  for await (const line of lines(response)) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) yield [name, JSON.parse(line.slice(6))];
  }
}
