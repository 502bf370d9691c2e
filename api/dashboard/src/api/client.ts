/** Requests to the control plane. A failure is an ApiError (the server answered with a problem) or
 * Unreachable (the server did not answer). */

import { earlyAnswer } from "./early";
import { refused, setRefused, withKey } from "./session";
import { parsed, rfc3339 } from "./times";
import type { Problem, ProblemFault } from "./types";

export const BASE = "/api/v1";

export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  readonly faults: readonly ProblemFault[];

  constructor(problem: Problem) {
    super(problem.detail ?? problem.title);
    this.name = "ApiError";
    this.status = problem.status;
    this.code = problem.code;
    this.faults = problem.faults ?? [];
  }
}

export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
    this.name = "Unreachable";
  }
}

type Value = string | number | boolean | null | undefined;
export type Query = Record<string, Value | readonly (string | number)[]>;

/** Parameters that are times: Unix seconds here, RFC 3339 in the URL. */
const TIMES: ReadonlySet<string> = new Set(["since", "until"]);

/** The URL of `path` below /api/v1 with the non-null values of `query`; a list repeats its key. */
export function url(path: string, query: Query = {}): string {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    for (const item of Array.isArray(value) ? (value as readonly (string | number)[]) : [value as Value]) {
      params.append(key, typeof item === "number" && TIMES.has(key) ? rfc3339(item) : String(item));
    }
  }
  const text = params.toString();
  return `${BASE}${path}${text ? `?${text}` : ""}`;
}

export async function request(address: string, options: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(address, { ...options, headers: withKey(options.headers) });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable();
  }
  return checked(response);
}

/** The response if it is a success; raises ApiError otherwise. */
export async function checked(response: Response): Promise<Response> {
  if (response.ok) {
    setRefused(null);
    return response;
  }
  const error = await problem(response);
  if (error.status === 401) setRefused(refused() ?? error.message); // the first reason, of a code perhaps, says most
  throw error;
}

export async function get<T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> {
  const address = url(path, query);
  const early = await earlyAnswer<T>(address);
  if (early !== null) return early;
  const options: RequestInit = { headers: { Accept: "application/json" } };
  if (signal) options.signal = signal;
  return parsed<T>(await (await request(address, options)).text());
}

/** All items of a list, page by page. */
export async function getAll<T>(path: string, signal?: AbortSignal): Promise<T[]> {
  const items: T[] = [];
  let cursor: string | null = null;
  do {
    const page: Page<T> = await get<Page<T>>(path, { limit: 1000, cursor }, signal);
    items.push(...page.items);
    cursor = page.next_cursor ?? null;
  } while (cursor !== null);
  return items;
}

interface Page<T> {
  items: T[];
  next_cursor?: string | null;
}

export interface Body {
  text: string;
  type: "application/json" | "application/yaml";
}

export const json = (value: unknown): Body => ({ text: JSON.stringify(value), type: "application/json" });

export interface SendOptions {
  query?: Query;
  body?: Body;
  /** A request with the same key and body takes effect once, however often it is sent. */
  key?: string;
  /** Opens a session. */
  code?: string;
  signal?: AbortSignal;
}

/** The body of the response, or null if it has no content. */
export async function send<T>(
  method: "POST" | "PUT" | "DELETE",
  path: string,
  { query, body, key, code, signal }: SendOptions = {},
): Promise<T> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (code) headers["Holdfast-Code"] = code;
  if (body) headers["Content-Type"] = body.type;
  if (key) headers["Idempotency-Key"] = key;
  const options: RequestInit = { method, headers };
  if (body) options.body = body.text;
  if (signal) options.signal = signal;
  const response = await request(url(path, query), options);
  return response.status === 204 ? (null as T) : parsed<T>(await response.text());
}

/** Random; `crypto.randomUUID` is missing on plain http from another machine. */
export function idempotencyKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function problem(response: Response): Promise<ApiError> {
  try {
    const body = (await response.json()) as Problem;
    if (typeof body.code === "string") return new ApiError(body);
  } catch {
    // The answer is not from the API, but from a proxy for example.
  }
  return new ApiError({
    type: "about:blank",
    title: response.statusText || "Error",
    status: response.status,
    code: `http_${response.status}`,
    detail: `The server answered ${response.status} ${response.statusText}`.trim(),
    instance: null,
    request_id: null,
    faults: null,
  });
}
