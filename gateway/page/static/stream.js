// One streamed answer: server-sent events of the OpenAI API.

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(retryAfter ? `${message} Try again in ${retryAfter} s.` : message);
    this.status = status;
  }
}

export async function listModels(headers) {
  const response = await fetch("/v1/models", { headers, cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  return new ApiError(response.status, body.error?.message ?? response.statusText, response.headers.get("retry-after"));
}

// Yields the request id first, then each event; ends with [DONE], throws an ApiError if the answer fails on the way.
export async function* stream(path, body, { headers, signal }) {
  const response = await fetch(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await failure(response);
  yield { requestId: response.headers.get("x-request-id") };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error.message);
    yield event;
  }
  throw new ApiError(response.status, "The answer ended without its last event: the gateway or the network failed.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}
