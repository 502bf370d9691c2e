import { unzipSync } from "fflate";
import { expect, test, vi } from "vitest";
import { pack, PackError, sparing } from "./pack";

const LARGE = new Uint8Array(2.5 * 2 ** 20).map((_, at) => (at * at) >> 3);
const FILES = [
  { path: "a/large.bin", file: new File([LARGE], "large.bin") },
  { path: "empty.py", file: new File([], "empty.py") },
  { path: "größe.py", file: new File(["print('ö')\n"], "größe.py") },
];
const isSame = (left: Uint8Array | undefined, right: Uint8Array): boolean =>
  left?.length === right.length && left.every((byte, at) => byte === right[at]); // a thousand times as fast as toEqual
const open = (): AbortSignal => new AbortController().signal;

test("a package has the files' bytes, and the same files give the same package", async () => {
  const seen: number[] = [];
  const first = new Uint8Array(await (await pack("folder", FILES, (done) => seen.push(done), open())).arrayBuffer());
  const found = unzipSync(first);
  expect(Object.keys(found)).toEqual(["a/large.bin", "empty.py", "größe.py"]);
  expect(isSame(found["a/large.bin"], LARGE)).toBe(true);
  expect(new TextDecoder().decode(found["größe.py"])).toBe("print('ö')\n");
  expect(seen.at(-1)).toBe(LARGE.length + 12);
  const renewed = FILES.map(({ path, file }) => ({ path, file: new File([file], file.name, { lastModified: 5 }) }));
  const second = new Uint8Array(await (await pack("folder", renewed, () => {}, open())).arrayBuffer());
  expect(isSame(second, first)).toBe(true);
});

test("a package that becomes too large is refused with the largest files", async () => {
  await expect(pack("folder", FILES, () => {}, open(), 1000)).rejects.toThrow(/folder is larger than 1000 B after packing.*a\/large.bin \(2.5 MiB\)/);
});

test("a file that is gone is named", async () => {
  const gone = { size: 3, slice: () => ({ arrayBuffer: () => Promise.reject(new DOMException("", "NotReadableError")) }) } as unknown as File;
  await expect(pack("folder", [{ path: "train.py", file: gone }], () => {}, open())).rejects.toThrow(PackError);
});

test("packing is given up", async () => {
  const given = new AbortController();
  const packing = pack("folder", FILES, () => given.abort(), given.signal);
  await expect(packing).rejects.toThrow(/abort/i);
});

test("several files are read ahead, and each is packed in its order", async () => {
  const begun: number[] = [];
  const files = Array.from({ length: 20 }, (_, at) => {
    const file = new File([`${at}`], `${at}.py`);
    return { path: file.name, file: Object.assign(file, { slice: (...range: number[]) => (begun.push(at), File.prototype.slice.apply(file, range as [number])) }) };
  });
  let atFirst = 0;
  const packed = await pack("folder", files, () => (atFirst ||= begun.length), open());
  expect(atFirst).toBeGreaterThan(1);
  const found = unzipSync(new Uint8Array(await packed.arrayBuffer()));
  expect(Object.entries(found).map(([path, text]) => path === `${new TextDecoder().decode(text)}.py`)).toEqual(files.map(() => true));
});

test("progress is reported at most every 100 ms", () => {
  vi.useFakeTimers({ toFake: ["performance"] });
  const seen: number[] = [];
  const report = sparing((done) => seen.push(done));
  for (let done = 0; done < 1000; done += 1) {
    report(done, 1000);
    vi.advanceTimersByTime(1);
  }
  vi.useRealTimers();
  expect(seen).toEqual([0, 100, 200, 300, 400, 500, 600, 700, 800, 900]);
});
