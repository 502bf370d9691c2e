/** Keeps the caret at its place when the page changes the text. Pure. */

/** Where a position of a text is after one part of the text was replaced. */
export function shifted(at: number, before: string, after: string): number {
  const most = Math.min(before.length, after.length);
  let head = 0;
  while (head < most && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < most && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail += 1;
  const isInTail = at >= before.length - tail;
  // Where the text can be divided in several ways, the start of a line stays with its line.
  if (at <= head && !(isInTail && before[at - 1] === "\n")) return at;
  return isInTail ? at + after.length - before.length : after.length - tail;
}
