/** Verification tells how far it is, a line of JSON each. */

import { request, url } from "../api/client";
import type { VerificationView } from "../api/types";

export async function verify(job: string, step: number, heard: (word: VerificationView) => void): Promise<VerificationView | null> {
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
      heard(last);
    }
  }
}
