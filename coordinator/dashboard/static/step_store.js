// Recent steps, in microseconds of the coordinator's monotonic clock.
const KEPT_US = 20e6;

export class StepStore {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.epochs = [];
    this.inFlight = [];
    this.loads = [];
    this.slowest = null;
    this.lastNumber = 0;
    this.uptime = 0;
    this.offsets = [];
    this.unixOffset = 0;
    this.lagUs = 1.3e6;
  }

  // `heardMs`: performance.now() at the response.
  take(activity, heardMs) {
    if (activity.uptime < this.uptime) this.clear();
    this.uptime = activity.uptime;
    const fresh = activity.steps.filter((step) => step.number > this.lastNumber);
    this.steps.push(...fresh);
    if (fresh.length) this.lastNumber = fresh.at(-1).number;
    const oldest = activity.now_us - KEPT_US;
    const kept = this.steps.findIndex((step) => step.answered_us >= oldest);
    this.steps = kept < 0 ? [] : this.steps.slice(kept);
    this.epochs = activity.epochs;
    this.inFlight = activity.in_flight;
    this.loads = activity.stages;
    this.slowest = activity.slowest_stage;
    // The response with the shortest transfer gives the best offset.
    this.offsets = [...this.offsets, activity.now_us - heardMs * 1000].slice(-10);
    this.unixOffset = Date.parse(activity.now) / 1000 - activity.now_us / 1e6;
    this.#learnLag(fresh, activity.now_us);
  }

  nowUs(atMs = performance.now()) {
    return this.offsets.length ? Math.max(...this.offsets) + atMs * 1000 : 0;
  }

  get numStages() {
    return Math.max(this.loads.length, ...this.steps.slice(-1).map((step) => step.computed_us.length / 2));
  }

  // Draw with a delay: steps are known after their result and the next poll.
  #learnLag(fresh, nowUs) {
    const longest = Math.max(0, ...fresh.map((step) => step.answered_us - step.sent_us));
    const waiting = Math.max(0, ...this.inFlight.map((step) => nowUs - step.sent_us));
    const wanted = 1.25e6 + Math.min(4e6, Math.max(longest, Math.min(waiting, 2e6)));
    this.lagUs += (wanted - this.lagUs) * (wanted > this.lagUs ? 0.5 : 0.1);
  }
}
