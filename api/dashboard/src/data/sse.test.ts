import { expect, test } from "vitest";
import { Parser } from "./sse";

const STREAM = ": hello\n\nid: 7\nevent: row\ndata: {\"a\":1}\n\nevent: row\ndata: one\ndata: two\n\nid: 8\n\n";

test("messages are complete however the text is split", () => {
  const whole = new Parser().push(STREAM);
  expect(whole).toEqual([
    { id: "7", event: "row", data: '{"a":1}' },
    { id: "7", event: "row", data: "one\ntwo" },
  ]);
  for (let cut = 1; cut < STREAM.length; cut += 1) {
    const parser = new Parser();
    expect([...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut))]).toEqual(whole);
  }
});

test("an unfinished message is not delivered", () => {
  expect(new Parser().push("id: 9\nevent: row\ndata: half")).toEqual([]);
});
