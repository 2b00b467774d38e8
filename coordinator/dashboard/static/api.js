// Requests to the coordinator: with the cookie of a login, or with the operator token where no login is needed.
const TOKEN_KEY = "stageline-token";
const TIMEOUT_MS = 8000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// In protobuf's JSON, enums are names with their type in front, 64-bit integers are strings, durations end in "s".
const ENUM = /^(CLUSTER_STATE|WORKER_STATE|HEALTH|DTYPE|STAGE_ROLE|STEP_KIND|REQUEST_PHASE|EPOCH_END_CAUSE|HOP_TRANSPORT)_(?=[A-Z0-9_]+$)/;
const ENUM_KEYS = new Set(["cause", "dtype", "end_cause", "health", "hop_transport", "kind", "phase", "role", "state", "wire_dtype"]);
const NUMBER_KEY = /_bytes$|_us$|_tokens$|^(num_.*|epoch|number|step_id|finished|cancelled|failed|preemptions|orphaned|count|bytes_per_second|operations_per_second)$/;
const DURATION_KEYS = new Set(["busy_time", "compute_time", "duration", "heartbeat_age", "p50", "p99", "round_trip", "time_in_queue", "time_to_first_token", "uptime"]);

export function decoded(key, value) {
  if (typeof value !== "string") return value;
  if (ENUM_KEYS.has(key)) return value.replace(ENUM, "").toLowerCase().replaceAll("_", " ");
  if (NUMBER_KEY.test(key)) return Number(value);
  if (DURATION_KEYS.has(key)) return parseFloat(value);
  return value;
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  const body = await response.text().then((text) => JSON.parse(text, decoded)).catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error ?? response.statusText);
  return body;
}

// Without a token, a 401 means that the session has ended.
async function callAsUser(path, options) {
  try {
    return await call(path, options);
  } catch (error) {
    if (error.status === 401) location.replace(`/login${location.hash}`);
    throw error;
  }
}

const bearer = (token) => (token ? { Authorization: `Bearer ${token}` } : {});
const post = (path, token) => call(path, { method: "POST", headers: bearer(token) });

export const getStatus = () => callAsUser("/api/status");
export const getActivity = (after, since) => callAsUser(`/api/activity?after=${after}&since=${since}`);
export const getTrace = (id) => callAsUser(`/api/traces/${encodeURIComponent(id)}`);

export const logIn = (key) =>
  call("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ key }) });

export async function logOut() {
  await callAsUser("/logout", { method: "POST" });
  location.replace("/login");
}

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
