import { expect, test } from "vitest";
import { locate, pathAt, placeOf } from "./locate";

const TEXT = `# a comment: with a colon
name: tiny
model: {dim: 128, layers: 4,
  heads: 4}
train:
  steps: 300   # so many
  optimizer: {name: adamw, lr: 3.0e-4}
  "quoted key": 1
note: |
  steps: not a key
parallel: {dp_shard: 2, tp: 2}
list:
  - first: 1
    second: 2
  - [a, {deep: 1}]
flat:
- 1
- x: 2
`;

const at = (text: string, path: string) => {
  const place = locate(text).find((found) => found.path === path);
  return place && text.split("\n")[place.line]?.slice(place.start, place.end);
};

test.each([
  ["name", "name"],
  ["model", "model"],
  ["model.dim", "dim"],
  ["model.heads", "heads"],
  ["train.steps", "steps"],
  ["train.optimizer.lr", "lr"],
  ["train.quoted key", '"quoted key"'],
  ["parallel.tp", "tp"],
  ["list.0.second", "second"],
  ["list.1.1.deep", "deep"],
  ["flat.1.x", "x"],
])("%s is found", (path, word) => {
  expect(at(TEXT, path)).toBe(word);
});

test("text inside a block scalar or a comment is not a key", () => {
  const paths = locate(TEXT).map((place) => place.path);
  expect(paths).not.toContain("note.steps");
  expect(paths.filter((path) => path.endsWith("steps"))).toEqual(["train.steps"]);
});

test("keys in JSON are located", () => {
  const text = '{\n  "train": {"steps": 5},\n  "data": {"source": "s3://a:b/{c}"},\n  "parallel": {"tp": 2}\n}';
  expect(locate(text).map((place) => place.path)).toEqual(["train", "train.steps", "data", "data.source", "parallel", "parallel.tp"]);
});

test("a fault about a missing field is shown at its section", () => {
  const places = locate(TEXT);
  expect(placeOf(places, "train.schedule.warmup_steps")?.path).toBe("train");
  expect(placeOf(places, "nowhere.at.all")).toBeNull();
});

test("the cursor belongs to the key before it", () => {
  const places = locate(TEXT);
  expect(pathAt(places, 6, 30)).toBe("train.optimizer.lr");
  expect(pathAt(places, 6, 0)).toBe("train.optimizer");
  expect(pathAt(places, 0, 3)).toBeNull();
});

test("an unfinished text is located as far as possible", () => {
  expect(locate("train: {steps: ").map((place) => place.path)).toEqual(["train", "train.steps"]);
  expect(locate("train:\n  steps").map((place) => place.path)).toEqual(["train"]);
});
