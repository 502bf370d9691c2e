import { expect, test } from "vitest";
import { ApiError, Unreachable } from "../../api/client";
import { PackError } from "./pack";
import { reason } from "./upload";

const answer = (status: number, detail: string): ApiError =>
  new ApiError({ type: "", title: "", status, code: "", detail, instance: null, request_id: null, faults: null });

test.each<[string, Error, string]>([
  ["a smaller limit of the server", answer(413, "the body exceeds the limit of 1024 bytes"), "limit of 1024 bytes. Leave out what training does not need by a .holdfastignore file"],
  ["no room", answer(503, "the server keeps 1 byte of code at most: send it again later"), "The server refuses it: the server keeps 1 byte of code at most: send it again later"],
  ["no server", new Unreachable(), "upload the files again when it does"],
  ["what packing found", new PackError("train.py cannot be read: choose the files again."), "train.py cannot be read: choose the files again."],
])("an upload that fails for %s says what to do", (_, error, sentence) => {
  expect(reason(error)).toContain(sentence);
});
