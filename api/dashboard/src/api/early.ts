/** What public/boot.js began to read before this program was loaded, for whoever asks for it first.
 *
 * Each part is given away once, and only at the beginning: whoever reads again, reads anew. */

import type { GlanceView } from "./types";

interface Stream {
  address: string;
  response: Promise<Response>;
  /** Ends it. */
  stopping: AbortController;
}

interface Early {
  stream: Stream;
  /** null: it was refused; whoever asks for a part of it is told why. */
  glance: Promise<GlanceView | null>;
  /** Address -> what of it is there. */
  parts: Record<string, keyof GlanceView>;
}

declare global {
  var holdfastEarly: Early | undefined;
}

/** Older than that it is read anew; milliseconds since the page was asked for. */
const FRESH_MS = 20_000;
const given = new Set<string>();
let outdated = false;

function once(address: string): boolean {
  if (given.has(address) || performance.now() > FRESH_MS) return false;
  given.add(address);
  return true;
}

/** The stream of that address, if it was begun. */
export function earlyStream(address: string): Stream | null {
  const stream = globalThis.holdfastEarly?.stream;
  return stream?.address === address && once(address) ? stream : null;
}

/** Something has happened since; whoever did not take his part yet would not hear of it. */
export function outdate(): void {
  outdated = true;
}

/** What is at that address, if it was read; null: it has to be asked for. */
export async function earlyAnswer<T>(address: string): Promise<T | null> {
  const early = globalThis.holdfastEarly;
  const part = early?.parts[address];
  if (!early || !part || outdated || !once(address)) return null;
  try {
    return ((await early.glance)?.[part] ?? null) as T | null;
  } catch {
    return null; // the server did not answer: it is asked again, and if need be that is told
  }
}
