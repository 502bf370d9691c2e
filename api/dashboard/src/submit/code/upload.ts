/** Sends a package with its progress, which `fetch` does not report. */

import { ApiError, checked, Unreachable, url } from "../../api/client";
import { withKey } from "../../api/session";
import type { CodeView } from "../../api/types";
import { bytes } from "../../format";

/** Time without a byte sent, and then without an answer, after which an upload is given up. */
const SILENCE_MS = 60_000;

/** The upload was cut off; the message says what to do. */
export class UploadError extends Error {}

/** Raises ApiError, Unreachable, UploadError; AbortError if it is given up. */
export function upload(content: Blob, progress: (done: number, of: number) => void, signal: AbortSignal): Promise<CodeView> {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const call = new XMLHttpRequest();
    let sent = 0;
    let timer = 0;
    const watch = () => {
      clearTimeout(timer);
      timer = setTimeout(() => call.abort(), SILENCE_MS);
    };
    call.open("POST", url("/code"));
    withKey({ "Content-Type": "application/zip", Accept: "application/json" }).forEach((value, name) => call.setRequestHeader(name, value));
    call.upload.onprogress = ({ loaded }) => {
      sent = loaded;
      progress(loaded, content.size);
      watch();
    };
    call.onload = () => {
      const type = call.getResponseHeader("content-type") ?? "";
      const answer = new Response(call.responseText, { status: call.status, statusText: call.statusText, headers: { "content-type": type } });
      checked(answer).then((good) => good.json()).then(resolve, reject);
    };
    call.onerror = () => reject(sent === 0 ? new Unreachable() : new UploadError(cutOff(sent, content.size)));
    call.onabort = () => reject(signal.aborted ? signal.reason : new UploadError(`The server took nothing for ${SILENCE_MS / 1000} s: upload the files again.`));
    call.onloadend = () => clearTimeout(timer);
    signal.addEventListener("abort", () => call.abort(), { once: true });
    watch();
    call.send(content);
  });
}

/** What to say about an upload that failed, and what to do. */
export function reason(error: unknown): string {
  if (error instanceof ApiError && error.status === 413) {
    return `The server refuses it: ${error.message}. Leave out what training does not need by a .holdfastignore file, do not send data as code, and choose the files again.`;
  }
  if (error instanceof ApiError) return `The server refuses it: ${error.message}`;
  if (error instanceof Unreachable) return "The server does not answer: upload the files again when it does.";
  return error instanceof Error ? error.message : String(error);
}

const cutOff = (sent: number, of: number): string =>
  `The connection ended after ${bytes(sent)} of ${bytes(of)}: upload the files again. If it ends again, the server may allow less (HOLDFAST_MAX_CODE_BYTES).`;
