import { expect, test } from "vitest";
import { withoutDefaults, hintOf, type Document } from "./schema";

const document: Document = {
  components: {
    schemas: {
      JobSpec: {
        properties: {
          name: { type: "string" },
          labels: { type: "object" },
          train: { $ref: "#/components/schemas/Train", default: { steps: 300 } },
          init_from: { anyOf: [{ type: "string" }, { type: "null" }], default: null },
        },
      },
      Train: { properties: { steps: { type: "integer", minimum: 1, default: 300, description: "how many" } } },
    },
  },
};

test("fields with default values are left out", () => {
  expect(withoutDefaults(document, { name: "a", labels: {}, train: { steps: 300 }, init_from: null })).toEqual({ name: "a" });
  expect(withoutDefaults(document, { name: "a", train: { steps: 5 }, init_from: "x" })).toEqual({ name: "a", train: { steps: 5 }, init_from: "x" });
});

test("a hint describes a field", () => {
  expect(hintOf(document, "train.steps")).toEqual({ path: "train.steps", description: "how many", type: "integer ≥ 1", default: "300", keys: [] });
  expect(hintOf(document, "train")?.keys).toEqual(["steps"]);
  expect(hintOf(document, "train.nope")).toBeNull();
});
