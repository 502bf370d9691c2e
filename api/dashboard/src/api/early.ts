/** Serves the responses that public/boot.js requested before this program was loaded.
 *
 * Each part is served once, and only while the page loads; later reads go to the server. */

import { withSeconds } from "./times";
import type { GlanceView } from "./types";

interface Stream {
  address: string;
  response: Promise<Response>;
  /** Aborts the stream. */
  abort: AbortController;
}

interface Early {
  stream: Stream;
  /** null: the server refused the request; the reads of its parts then go to the server. */
  glance: Promise<GlanceView | null>;
  /** Address -> part of the glance. */
  parts: Record<string, keyof GlanceView>;
}

declare global {
  var holdfastEarly: Early | undefined;
}

/** Early responses are served until then; milliseconds since the page was requested. */
const FRESH_MS = 20_000;
const served = new Set<string>();
let outdated = false;

function firstUse(address: string): boolean {
  if (served.has(address) || performance.now() > FRESH_MS) return false;
  served.add(address);
  return true;
}

/** The stream of that address, if boot.js has opened it. */
export function earlyStream(address: string): Stream | null {
  const stream = globalThis.holdfastEarly?.stream;
  return stream?.address === address && firstUse(address) ? stream : null;
}

/** Call at an event: the parts that are not served yet may be stale, and are read anew. */
export function outdate(): void {
  outdated = true;
}

/** The early response of that address; null: request it from the server. */
export async function earlyAnswer<T>(address: string): Promise<T | null> {
  const early = globalThis.holdfastEarly;
  const part = early?.parts[address];
  if (!early || !part || outdated || !firstUse(address)) return null;
  try {
    const value = (await early.glance)?.[part] ?? null;
    return value === null ? null : withSeconds<T>(value);
  } catch {
    return null; // the server did not answer: the caller requests it again and reports a failure
  }
}
