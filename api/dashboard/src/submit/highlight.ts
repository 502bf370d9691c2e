/** Syntax highlighting of YAML and JSON: splits a line into tokens with their kinds. */

export interface Token {
  text: string;
  kind: "key" | "text" | "number" | "word" | "comment" | "mark" | "";
}

const TOKEN =
  /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')(?=\s*:)|("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')|([A-Za-z_][\w.-]*)(?=\s*:(?:\s|$))|(?<![\w.])(-?\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?)(?![\w.])|\b(true|false|null|auto)\b|([{}[\],:]|(?<=^\s*)-(?=\s))/gi;
const KINDS: readonly Token["kind"][] = ["comment", "key", "text", "key", "number", "word", "mark"];

export function tokens(line: string): Token[] {
  const found: Token[] = [];
  let last = 0;
  for (const match of line.matchAll(TOKEN)) {
    const before = line[match.index - 1];
    if (match[1] && before !== undefined && !/\s/.test(before)) continue;
    if (match.index > last) found.push({ text: line.slice(last, match.index), kind: "" });
    found.push({ text: match[0], kind: KINDS[match.slice(1).findIndex((group) => group !== undefined)] ?? "" });
    last = match.index + match[0].length;
  }
  if (last < line.length) found.push({ text: line.slice(last), kind: "" });
  return found;
}
