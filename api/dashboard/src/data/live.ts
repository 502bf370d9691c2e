/** The one stream of a tab: everything that changes, as it changes.
 *
 * It resumes by itself after the last message that it heard (`Last-Event-ID`), so no message is
 * missed or told twice. Where that is not possible, and where another job is watched, a stream is
 * begun anew and `begun` is told: whoever shows something reads it again.
 *
 * A tab that nobody sees has none: a browser has six connections to a server for all tabs. */

import { checked, request, url, ApiError } from "../api/client";
import { earlyStream, outdate } from "../api/early";
import type { EventView, JobRow, JobView, MetricPoint, RanksView } from "../api/types";
import { Parser, type Message } from "./sse";

export interface LiveEvents {
  hello: { server_time: number };
  row: JobRow;
  event: EventView;
  metrics: { points: MetricPoint[] };
  ranks: RanksView;
  job: JobView;
  logs: { last_line: number };
  reset: { reason: string };
  /** A stream has begun that knows nothing of what was before; the server does not send this. */
  begun: null;
}

export type LiveKind = keyof LiveEvents;
type Handler<K extends LiveKind> = (value: LiveEvents[K]) => void;

export interface LiveStatus {
  state: "connecting" | "live" | "waiting";
  /** When it is tried again, while `waiting`; milliseconds. */
  retry_at: number | null;
  /** The server's clock less this one; seconds. */
  ahead_s: number;
}

/** How long whoever wants to read waits for the stream to begin. */
const BEGINS_WITHIN_MS = 300;
const FIRST_RETRY_MS = 250;
const LAST_RETRY_MS = 15_000;
/** Twice the server's interval between signs of life, and a little. */
const SILENCE_MS = 35_000;

interface Deferred {
  promise: Promise<void>;
  done: boolean;
  resolve: () => void;
}

function deferred(): Deferred {
  const made: Deferred = { promise: Promise.resolve(), done: false, resolve: () => {} };
  made.promise = new Promise((fulfil) => {
    made.resolve = () => {
      made.done = true;
      fulfil();
    };
  });
  return made;
}

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
  /** When anything was heard last, a sign of life included; milliseconds. */
  heard_at: number | null = null;

  /** `job`: the one to begin with, so that the stream need not begin twice. */
  constructor(job: string | null = null) {
    this.job = job;
  }

  /** Once the stream knows from where on it tells. What is read from then on need not be read again
   * when it has begun; if it does not begin soon, nobody waits for it. */
  begun(): Promise<void> {
    const patience = new Promise<void>((done) => setTimeout(done, BEGINS_WITHIN_MS));
    return this.last === null ? Promise.race([this.begins.promise, patience]) : Promise.resolve();
  }

  start(): void {
    if (!this.running) void this.connect();
    addEventListener("online", this.retry);
    document.addEventListener("visibilitychange", this.restart);
  }

  stop(): void {
    removeEventListener("online", this.retry);
    document.removeEventListener("visibilitychange", this.restart);
    this.drop();
  }

  /** Hear of this job's events, metrics, ranks and logs too. */
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

  /** Try again now, if it is waiting to. */
  readonly retry = (): void => {
    if (this.now.state === "waiting") this.restart();
  };

  private readonly restart = (): void => {
    this.drop();
    void this.connect();
  };

  private drop(): void {
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
      this.show({ state: "waiting", retry_at: null });
      return;
    }
    const address = url("/live", { job: this.job });
    const early = this.last === null ? earlyStream(address) : null;
    const mine = early?.stopping ?? new AbortController();
    this.running = mine;
    this.show({ state: "connecting", retry_at: null });
    const headers: Record<string, string> = { Accept: "text/event-stream" };
    if (this.last !== null) headers["Last-Event-ID"] = this.last;
    try {
      const response = early
        ? await early.response.then(checked)
        : await request(address, { headers, signal: mine.signal, cache: "no-store" });
      this.fresh = this.last === null;
      this.heard();
      await this.read(response, mine.signal);
    } catch (error) {
      if (mine.signal.aborted && this.running !== mine) return;
      // What the server cannot resume from (or does not know) is begun anew.
      if (error instanceof ApiError && error.status < 500) this.last = null;
    }
    if (this.running === mine) this.later();
  }

  private async read(response: Response, signal: AbortSignal): Promise<void> {
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    if (!reader) return;
    const parser = new Parser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return;
      this.heard();
      for (const message of parser.push(value)) this.take(message);
    }
  }

  private take(message: Message): void {
    if (message.id !== null) this.last = message.id;
    this.attempts = 0;
    if (message.event === "event" || message.event === "reset") outdate();
    const value = JSON.parse(message.data) as LiveEvents[LiveKind];
    if (message.event === "hello") {
      this.show({ ahead_s: (value as LiveEvents["hello"]).server_time - Date.now() / 1000 });
    }
    this.tell(message.event as LiveKind, value as never);
    if (message.event === "reset" || (message.event === "hello" && this.fresh)) this.tell("begun", null);
    this.begins.resolve();
  }

  private tell<K extends LiveKind>(kind: K, value: LiveEvents[K]): void {
    for (const handler of this.handlers.get(kind) ?? []) (handler as Handler<K>)(value);
  }

  private heard(): void {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.restart(), SILENCE_MS);
    this.heard_at = Date.now();
    if (this.now.state !== "live") this.show({ state: "live", retry_at: null });
  }

  private later(): void {
    this.drop();
    this.begins.resolve();
    const wait_ms = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.attempts) * (0.75 + Math.random() / 2);
    this.attempts += 1;
    this.timer = setTimeout(() => void this.connect(), wait_ms);
    this.show({ state: "waiting", retry_at: Date.now() + wait_ms });
  }

  private show(change: Partial<LiveStatus>): void {
    this.now = { ...this.now, ...change };
    for (const watcher of this.watchers) watcher();
  }
}
