/** Verifies a checkpoint; the server reports the progress as JSON lines. */

import { request, url } from "../api/client";
import type { VerificationView } from "../api/types";

export async function verify(job: string, step: number, onProgress: (progress: VerificationView) => void): Promise<VerificationView | null> {
  const response = await request(url(`/jobs/${encodeURIComponent(job)}/checkpoints/${step}/verify`), { method: "POST" });
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  if (!reader) return null;
  let rest = "";
  let last: VerificationView | null = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return last;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines.filter(Boolean)) {
      last = JSON.parse(line) as VerificationView;
      onProgress(last);
    }
  }
}
