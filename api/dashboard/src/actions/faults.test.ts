import { expect, test } from "vitest";
import { FAULTS, faultDocument, keptValues } from "./faults";

test("a word that the chosen kind does not have is dropped, a rank is kept", () => {
  const words = (kind: "bit_flip" | "nan") => FAULTS[kind].parameters.find(({ name }) => name === "where")!.words;
  const word = words("bit_flip").find((each) => !words("nan").includes(each))!;
  const values = keptValues("nan", { rank: "3", where: word });
  expect(faultDocument("nan", values)).toEqual({ kind: "nan", rank: 3 });
  expect(keptValues("bit_flip", { where: word })).toEqual({ where: word });
});
