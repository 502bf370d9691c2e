/** The live stream of a tab: all changes, as they happen.
 *
 * It resumes by itself after the last received message (`Last-Event-ID`), so no message is missed or
 * delivered twice. If a stream cannot be resumed, or another job is watched, a new stream starts and
 * emits `begun`; the views then load their data again.
 *
 * A hidden tab has no stream: a browser limits the connections of all tabs to a server to six. */

import { checked, request, url, ApiError } from "../api/client";
import { earlyStream, outdate } from "../api/early";
import { parsed } from "../api/times";
import type { EventView, JobRow, JobView, MetricPoint, RanksView } from "../api/types";
import { Parser, type Message } from "./sse";

export interface LiveEvents {
  hello: { server_time: number };
  row: JobRow;
  removed: { id: string };
  event: EventView;
  metrics: { points: MetricPoint[] };
  ranks: RanksView;
  job: JobView;
  logs: { last_line: number };
  reset: { reason: string };
  /** A new stream has begun that does not resume an earlier one; emitted here, not by the server. */
  begun: null;
}

export type LiveKind = keyof LiveEvents;
type Handler<K extends LiveKind> = (value: LiveEvents[K]) => void;

export interface LiveStatus {
  state: "connecting" | "live" | "waiting";
  /** The time of the next attempt to connect, while `waiting`; milliseconds. */
  retry_at: number | null;
  /** The server's clock minus the browser's clock; seconds. */
  ahead_s: number;
}

/** Reads wait this long for the stream to begin. */
const BEGIN_WAIT_MS = 300;
const FIRST_RETRY_MS = 250;
const LAST_RETRY_MS = 15_000;
/** Twice the server's keep-alive interval, plus a margin. */
const SILENCE_MS = 35_000;

interface Deferred {
  promise: Promise<void>;
  done: boolean;
  resolve: () => void;
}

function deferred(): Deferred {
  const created: Deferred = { promise: Promise.resolve(), done: false, resolve: () => {} };
  created.promise = new Promise((fulfil) => {
    created.resolve = () => {
      created.done = true;
      fulfil();
    };
  });
  return created;
}

/** The API's own code; a proxy may answer 404, too. */
export const UNKNOWN_JOB = "job_not_found";

export class Live {
  private job: string | null;
  private last: string | null = null;
  private attempts = 0;
  private fresh = true;
  private running: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private silence: ReturnType<typeof setTimeout> | undefined;
  private readonly handlers = new Map<LiveKind, Set<Handler<never>>>();
  private readonly watchers = new Set<() => void>();
  private now: LiveStatus = { state: "connecting", retry_at: null, ahead_s: 0 };
  private begins = deferred();
  /** The time of the last received data, keep-alives included; milliseconds. */
  received_at: number | null = null;

  /** `job`: watched from the start, so that the stream need not begin twice. */
  constructor(job: string | null = null) {
    this.job = job;
  }

  /** Resolves once the stream has a position: data loaded after that needs no reload when the stream
   * begins. Resolves after a short time even if the stream has not begun. */
  begun(): Promise<void> {
    const timeout = new Promise<void>((done) => setTimeout(done, BEGIN_WAIT_MS));
    return this.last === null ? Promise.race([this.begins.promise, timeout]) : Promise.resolve();
  }

  start(): void {
    if (!this.running) void this.connect();
    addEventListener("online", this.retry);
    document.addEventListener("visibilitychange", this.restart);
  }

  stop(): void {
    removeEventListener("online", this.retry);
    document.removeEventListener("visibilitychange", this.restart);
    this.disconnect();
  }

  /** Receive this job's events, metrics, ranks and logs, too. */
  watch(job: string | null): void {
    if (job === this.job) return;
    this.job = job;
    this.last = null;
    if (this.running || this.timer) this.restart();
  }

  on<K extends LiveKind>(kind: K, handler: Handler<K>): () => void {
    const all = this.handlers.get(kind) ?? new Set();
    this.handlers.set(kind, all);
    all.add(handler as Handler<never>);
    return () => all.delete(handler as Handler<never>);
  }

  readonly status = (): LiveStatus => this.now;

  readonly onStatus = (watcher: () => void): (() => void) => {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  };

  /** Connect now, if the stream waits to reconnect. */
  readonly retry = (): void => {
    if (this.now.state === "waiting") this.restart();
  };

  private readonly restart = (): void => {
    this.disconnect();
    void this.connect();
  };

  private disconnect(): void {
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    this.timer = undefined;
    this.running?.abort();
    this.running = null;
  }

  private async connect(): Promise<void> {
    if (this.begins.done) this.begins = deferred();
    if (document.hidden) {
      this.begins.resolve();
      this.setStatus({ state: "waiting", retry_at: null });
      return;
    }
    const address = url("/live", { job: this.job });
    const early = this.last === null ? earlyStream(address) : null;
    const abort = early?.abort ?? new AbortController();
    this.running = abort;
    this.setStatus({ state: "connecting", retry_at: null });
    this.restartAfterSilence(); // a connection may be kept whose other end is gone
    const headers: Record<string, string> = { Accept: "text/event-stream" };
    if (this.last !== null) headers["Last-Event-ID"] = this.last;
    try {
      const response = early
        ? await early.response.then(checked)
        : await request(address, { headers, signal: abort.signal, cache: "no-store" });
      this.fresh = this.last === null;
      this.received();
      await this.read(response, abort.signal);
    } catch (error) {
      if (abort.signal.aborted && this.running !== abort) return;
      // The server cannot resume from that position: the next stream starts anew.
      if (error instanceof ApiError && error.status < 500) this.last = null;
      if (error instanceof ApiError && error.code === UNKNOWN_JOB) this.job = null; // the page says so
    }
    if (this.running === abort) this.reconnectLater();
  }

  private async read(response: Response, signal: AbortSignal): Promise<void> {
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    if (!reader) return;
    const parser = new Parser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return;
      this.received();
      for (const message of parser.push(value)) this.dispatch(message);
    }
  }

  private dispatch(message: Message): void {
    if (message.id !== null) this.last = message.id;
    this.attempts = 0;
    if (message.event === "event" || message.event === "reset") outdate();
    const value = parsed<LiveEvents[LiveKind]>(message.data);
    if (message.event === "hello") {
      this.setStatus({ ahead_s: (value as LiveEvents["hello"]).server_time - Date.now() / 1000 });
    }
    this.emit(message.event as LiveKind, value as never);
    if (message.event === "reset" || (message.event === "hello" && this.fresh)) this.emit("begun", null);
    this.begins.resolve();
  }

  private emit<K extends LiveKind>(kind: K, value: LiveEvents[K]): void {
    for (const handler of this.handlers.get(kind) ?? []) (handler as Handler<K>)(value);
  }

  private restartAfterSilence(): void {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.restart(), SILENCE_MS);
  }

  private received(): void {
    this.restartAfterSilence();
    this.received_at = Date.now();
    if (this.now.state !== "live") this.setStatus({ state: "live", retry_at: null });
  }

  private reconnectLater(): void {
    this.disconnect();
    this.begins.resolve();
    const wait_ms = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.attempts) * (0.75 + Math.random() / 2);
    this.attempts += 1;
    this.timer = setTimeout(() => void this.connect(), wait_ms);
    this.setStatus({ state: "waiting", retry_at: Date.now() + wait_ms });
  }

  private setStatus(change: Partial<LiveStatus>): void {
    this.now = { ...this.now, ...change };
    for (const watcher of this.watchers) watcher();
  }
}
