import { expect, test } from "vitest";
import { ofDrop, ofInput, type Selection } from "./choose";

/** A file's text, or a folder. */
interface Tree {
  [name: string]: string | Tree | Error;
}

const PART = 50_000;

/** What a browser gives for a file or folder; an Error: it cannot be read. `asked`: the paths that were read. */
function entryOf(name: string, content: string | Tree | Error, asked: string[] = [], folder = ""): FileSystemEntry {
  const path = folder + name;
  const refuse = content instanceof Error ? content : null;
  if (refuse || typeof content === "string") {
    const file = (done: (file: File) => void, fail: (error: Error) => void) => {
      asked.push(path);
      return refuse ? fail(refuse) : done(new File([content as string], name));
    };
    return { name, isDirectory: false, file } as unknown as FileSystemEntry;
  }
  const createReader = () => {
    asked.push(`${path}/`);
    const rest = Object.entries(content as Tree).map(([name, below]) => entryOf(name, below, asked, `${path}/`));
    return { readEntries: (done: (entries: FileSystemEntry[]) => void) => done(rest.splice(0, PART)) };
  };
  return { name, isDirectory: true, createReader } as unknown as FileSystemEntry;
}

const open = (): AbortSignal => new AbortController().signal;
const transferOf = (entries: FileSystemEntry[]): DataTransfer =>
  ({ items: entries.map((entry) => ({ webkitGetAsEntry: () => entry })), files: [] }) as unknown as DataTransfer;
const dropped = async (tree: Tree, asked: string[] = [], signal = open()): Promise<Selection> => {
  const found = await ofDrop(transferOf(Object.entries(tree).map(([name, content]) => entryOf(name, content, asked))))?.(signal);
  if (!found) throw new Error("nothing was dropped");
  return found;
};
const sent = ({ chosen }: Selection): string[] => chosen.map(({ path }) => path);
const leftOut = ({ bundle }: Selection): Record<string, string | null> => Object.fromEntries(bundle.leftOut.map(({ path, by }) => [path, by]));

const MIXED: Tree = {
  "train.py": "def main(): ...\n", ".gitignore": "secrets.env\n", "secrets.env": "KEY=1",
  lib: { ".gitignore": "*.key", "a.key": "1", "a.py": "" },
};
const SENT = [".gitignore", "lib/.gitignore", "lib/a.py", "train.py"];
const LEFT = { "lib/a.key": "lib/.gitignore", "secrets.env": ".gitignore" };

test("the ignore files of what is dropped together leave out secrets", async () => {
  const found = await dropped(MIXED);
  expect(sent(found)).toEqual(SENT);
  expect(leftOut(found)).toEqual(LEFT);
  expect(found.bundle).toMatchObject({ name: "4 files and folders", isFolder: false, unreadable: [] });
  expect(found.bundle.functions.get("train.py")).toEqual(["main"]);
});

test("a folder that is dropped or chosen gives the same", async () => {
  const paths = ["train.py", ".gitignore", "secrets.env", "lib/.gitignore", "lib/a.key", "lib/a.py"];
  const files = paths.map((path) => {
    const content = path.split("/").reduce<string | Tree | Error>((at, name) => (at as Tree)[name] ?? "", MIXED);
    return Object.assign(new File([content as string], path.split("/").at(-1) ?? ""), { webkitRelativePath: `mine/${path}` });
  });
  const chosen = await ofInput({ files, value: "" } as unknown as HTMLInputElement)?.(open());
  for (const found of [await dropped({ mine: MIXED }), chosen as Selection]) {
    expect(sent(found)).toEqual(SENT);
    expect(leftOut(found)).toEqual(LEFT);
    expect(found.bundle).toMatchObject({ name: "mine", isFolder: true });
  }
});

test("the ignore files among single files that are chosen apply", async () => {
  const file = (name: string, text: string) => Object.assign(new File([text], name), { webkitRelativePath: "" });
  const read = ofInput({ files: [file("train.py", ""), file(".gitignore", "*.env"), file("a.env", "")], value: "" } as unknown as HTMLInputElement);
  expect(sent((await read?.(open())) as Selection)).toEqual([".gitignore", "train.py"]);
});

test("version control, caches and environments are left out at any depth, and not looked into", async () => {
  const asked: string[] = [];
  const found = await dropped({ mine: { "train.py": "", "venv.py": "", "old.pyc": "", ".git": { config: "" }, deep: { __pycache__: { "a.pyc": "" } }, data: { corpus: "" }, ".gitignore": "/data/" } }, asked);
  expect(sent(found)).toEqual([".gitignore", "train.py", "venv.py"]);
  expect(leftOut(found)).toEqual({ ".git/": null, "data/": ".gitignore", "deep/__pycache__/": null, "old.pyc": null });
  expect(asked.sort()).toEqual(["mine/", "mine/.gitignore", "mine/.gitignore", "mine/deep/", "mine/train.py", "mine/venv.py"]);
});

test.each<[string, Tree, string[]]>([
  ["a rule takes back another of its file", { ".gitignore": "*.log\n!keep.log", "keep.log": "", "drop.log": "", sub: { "keep.log": "" } }, ["keep.log", "sub/keep.log"]],
  ["and of the other file of its folder", { ".gitignore": "*.bin", ".holdfastignore": "!weights.bin", "weights.bin": "", "a.bin": "" }, ["weights.bin"]],
  ["in the order of the command line", { ".holdfastignore": "!a.bin\n", ".gitignore": "*.bin\r\n", "a.bin": "" }, ["a.bin"]],
  ["and none of a folder above", { ".gitignore": "*.log", sub: { ".gitignore": "!keep.log", "keep.log": "" } }, []],
  ["a rule applies below its folder", { lib: { ".holdfastignore": "*.txt\r\n", "out.txt": "" }, "out.txt": "", "notes.TXT": "" }, ["notes.TXT", "out.txt"]],
  ["nothing in a folder that is left out is taken back", { ".gitignore": "data/\n!data/keep.py", data: { "keep.py": "" } }, []],
  ["a folder's content but for one file", { ".gitignore": "data/*\n!data/keep.py", data: { "keep.py": "", "a.bin": "" } }, ["data/keep.py"]],
])("%s", async (_, tree, kept) => {
  expect(sent(await dropped({ mine: tree })).filter((path) => !path.endsWith("ignore"))).toEqual(kept);
});

test("a large folder is read", async () => {
  const tree = Object.fromEntries(Array.from({ length: 150_000 }, (_, at) => [`${at}.txt`, "x"]));
  expect((await dropped({ mine: { data: tree } })).chosen.length).toBe(150_000);
}, 60_000);

test("reading is given up", async () => {
  const given = new AbortController();
  const asked: string[] = [];
  const entry = entryOf("mine", { "a.txt": "", "b.txt": "", c: { "d.txt": "" } }, asked);
  const push = asked.push.bind(asked);
  asked.push = (path) => {
    if (path === "mine/a.txt") given.abort();
    return push(path);
  };
  await expect(ofDrop(transferOf([entry]))?.(given.signal)).rejects.toThrow(/abort/i);
  expect([...asked]).toEqual(["mine/", "mine/a.txt"]);
});

test("what cannot be read is named, and the rest is sent; what is left out is not read", async () => {
  const gone = new DOMException("A requested file could not be found", "NotFoundError");
  const found = await dropped({ mine: { "train.py": "", "link.py": gone, "old.pyc": gone, lib: { "b.bin": gone, "a.py": "" } } });
  expect(sent(found)).toEqual(["lib/a.py", "train.py"]);
  expect(found.bundle.unreadable).toEqual(["link.py", "lib/b.bin"]);
});

test("an ignore file that cannot be read refuses the folder by its name", async () => {
  const gone = new DOMException("", "NotReadableError");
  await expect(dropped({ mine: { "train.py": "", lib: { ".gitignore": gone } } })).rejects.toThrow(/^lib\/.gitignore cannot be read/);
});
