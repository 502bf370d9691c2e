import { expect, test } from "vitest";
import { withoutDefaults, withoutTokenSets, hintOf, type Document } from "./schema";

const document: Document = {
  components: {
    schemas: {
      JobSpec: {
        properties: {
          name: { type: "string" },
          labels: { type: "object" },
          train: { $ref: "#/components/schemas/Train", default: { steps: 300 } },
          sources: { type: "array", default: [], description: "the files", items: { $ref: "#/components/schemas/Source" } },
          init_from: { anyOf: [{ type: "string" }, { type: "null" }], default: null },
        },
      },
      Source: { description: "Files.", properties: { path: { type: "string" }, text: { type: "string", default: "text" } } },
      Train: { properties: { steps: { type: "integer", minimum: 1, default: 300, description: "how many" } } },
    },
  },
};

test("fields with default values are left out", () => {
  expect(withoutDefaults(document, { name: "a", labels: {}, train: { steps: 300 }, init_from: null })).toEqual({ name: "a" });
  expect(withoutDefaults(document, { name: "a", train: { steps: 5 }, init_from: "x" })).toEqual({ name: "a", train: { steps: 5 }, init_from: "x" });
});

test("fields with default values are left out of each section of a list", () => {
  const sources = [{ path: "/a", text: "text" }, { path: "/b", text: "content" }];
  expect(withoutDefaults(document, { name: "a", sources })).toEqual({ name: "a", sources: [{ path: "/a" }, { path: "/b", text: "content" }] });
});

test("a copy prepares its sources itself", () => {
  expect(withoutTokenSets({ name: "a", data: { sources: [{ path: "/a" }], prepared: [{ uri: "/b" }] } })).toEqual({ name: "a", data: { sources: [{ path: "/a" }] } });
  expect(withoutTokenSets({ name: "a" })).toEqual({ name: "a" });
});

test("a hint describes the sections of a list", () => {
  expect(hintOf(document, "sources")).toEqual({ path: "sources", description: "the files", type: "array", default: null, keys: ["path", "text"] });
  expect(hintOf(document, "sources.1")).toMatchObject({ description: "Files.", type: "section", keys: ["path", "text"] });
  expect(hintOf(document, "sources.1.text")).toMatchObject({ path: "sources.1.text", type: "string", default: "text" });
  expect(hintOf(document, "sources.path")).toBeNull();
});

test("a hint describes a field", () => {
  expect(hintOf(document, "train.steps")).toEqual({ path: "train.steps", description: "how many", type: "integer ≥ 1", default: "300", keys: [] });
  expect(hintOf(document, "train")?.keys).toEqual(["steps"]);
  expect(hintOf(document, "train.nope")).toBeNull();
});
