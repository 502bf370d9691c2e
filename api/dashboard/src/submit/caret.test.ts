import { expect, test } from "vitest";
import { shifted } from "./caret";

test.each([
  ["a line above", "script: a\nx: 1|", "script: a\ncode: b\nx: 1|"],
  ["a line above that begins in the same way", "script: a\n|codec: 1", "script: a\ncode: b\n|codec: 1"],
  ["a line below that ends in the same way", "script: a|\nx: 1", "script: a|\ncode: a\nx: 1"],
  ["a line at the end", "script: a|\n", "script: a|\ncode: b\n"],
  ["a longer word before", "script: a.py --l|r 1", "script: train.py --l|r 1"],
  ["a shorter word after", "na|me: x\nscript: train.py", "na|me: x\nscript: a.py"],
  ["the word at the caret", "script: ol|d.x\ny: 1", "script: train|.x\ny: 1"],
  ["nothing", "a|b", "a|b"],
  ["the whole text", "|x", "|yy"],
])("%s is changed: the caret stays with its text", (_, before, after) => {
  expect(shifted(before.indexOf("|"), before.replace("|", ""), after.replace("|", ""))).toBe(after.indexOf("|"));
});
