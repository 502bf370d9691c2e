/** This browser's session with the server: the link that `holdfast serve` prints opens it by a code in
 * the fragment. The cookie of a session goes to every port of the host; its key stays with the origin,
 * and each request carries it. A server without authentication needs neither. */

const STORED_AT = "holdfast.page-key"; // public/boot.js reads it, too
const CODE = "#code=";

let key = stored();
let refusal: string | null = null;
const watchers = new Set<() => void>();

/** The headers of a request, with the key of the session. */
export function withKey(headers?: HeadersInit): Headers {
  const all = new Headers(headers);
  const now = stored() ?? key; // another tab may have opened a session
  if (now) all.set("Holdfast-Page-Key", now);
  return all;
}

/** Whether the address has a code. */
export const hasCode = (): boolean => location.hash.startsWith(CODE);

/** Open a session with the code of the address, if it has one, and remove it from the address. */
export async function openSession(send: (code: string) => Promise<{ page_key: string }>): Promise<void> {
  if (!hasCode()) return;
  const code = decodeURIComponent(location.hash.slice(CODE.length));
  history.replaceState(history.state, "", location.pathname + location.search);
  key = (await send(code)).page_key;
  try {
    localStorage.setItem(STORED_AT, key);
  } catch {
    // Storage is disabled: the session is this tab's alone.
  }
}

/** Why the server refused the last request of this page for want of a session; null: it did not. */
export const refused = (): string | null => refusal;

export function setRefused(why: string | null): void {
  if (why === refusal) return;
  refusal = why;
  for (const watcher of watchers) watcher();
}

export function onRefused(watcher: () => void): () => void {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function stored(): string | null {
  try {
    return localStorage.getItem(STORED_AT);
  } catch {
    return null;
  }
}
