// What the coordinator is asked, and the token of whoever may change something.
const TOKEN_KEY = "stageline-token";
const TIMEOUT_MS = 8000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error ?? response.statusText);
  return body;
}

const post = (path, token) => call(path, { method: "POST", headers: { Authorization: `Bearer ${token}` } });

export const getStatus = () => call("/api/status");
export const getActivity = (after, since) => call(`/api/activity?after=${after}&since=${since}`);
export const getTrace = (id) => call(`/api/traces/${encodeURIComponent(id)}`);

export const token = () => sessionStorage.getItem(TOKEN_KEY);

export function forgetToken() {
  sessionStorage.removeItem(TOKEN_KEY);
}

export async function useToken(text) {
  await post("/api/token", text);
  sessionStorage.setItem(TOKEN_KEY, text);
}

async function act(path) {
  try {
    return await post(path, token());
  } catch (error) {
    if (error.status === 401) forgetToken();
    throw error;
  }
}

export const cancelRequest = (id) => act(`/api/requests/${encodeURIComponent(id)}/cancel`);
export const drainWorker = (name) => act(`/api/workers/${encodeURIComponent(name)}/drain`);
