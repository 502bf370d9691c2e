/** Packs files into a zip in pieces, so that the page stays usable. The same files give the same bytes. */

import { Zip, ZipDeflate } from "fflate";
import { MAX_PACKED_BYTES, tooLarge } from "./bundle";

export interface Chosen {
  path: string;
  file: File;
}

export interface Progress {
  (done: number, of: number): void;
}

const PIECE_BYTES = 2 ** 20;
/** Pieces that are read while earlier ones are packed. */
const AHEAD = 16;
const REPORT_MS = 100;
const UNIX = 3;
const MODE = 0o100644 * 2 ** 16;

/** The files cannot be packed; the message says what to do. */
export class PackError extends Error {}

/** Passes on at most one report in `REPORT_MS`: each draws the page anew. */
export function sparing(progress: Progress): Progress {
  let next = -Infinity;
  return (done, of) => {
    if (performance.now() < next) return;
    next = performance.now() + REPORT_MS;
    progress(done, of);
  };
}

/** The package of the files. Raises PackError; AbortError if it is given up. */
export async function pack(name: string, files: readonly Chosen[], progress: Progress, signal: AbortSignal, limit = MAX_PACKED_BYTES): Promise<Blob> {
  const pieces: Uint8Array<ArrayBuffer>[] = [];
  const total = files.reduce((sum, { file }) => sum + file.size, 0);
  let packed = 0;
  let done = 0;
  const archive = new Zip((error, piece) => {
    if (error) throw error;
    pieces.push(piece as Uint8Array<ArrayBuffer>);
    packed += piece.length;
  });
  let entry: ZipDeflate | null = null;
  for await (const { path, bytes, isLast } of piecesOf(files)) {
    signal.throwIfAborted();
    if (!entry) {
      entry = new ZipDeflate(path, { level: 6, mem: isLast ? 3 : 8 }); // 8: its table of 2 MiB costs more than a small file
      Object.assign(entry, { mtime: new Date(1980, 0, 1), os: UNIX, attrs: MODE });
      archive.add(entry);
    }
    entry.push(bytes, isLast);
    if (isLast) entry = null;
    done += bytes.length;
    progress(done, total);
    if (packed > limit) {
      const sized = files.map((found) => ({ path: found.path, bytes: found.file.size }));
      throw new PackError(tooLarge({ name, files: sized }, limit, "after packing"));
    }
  }
  archive.end();
  return new Blob(pieces);
}

interface Piece {
  path: string;
  bytes: Uint8Array<ArrayBuffer>;
  /** Of its file, each of which has at least one. */
  isLast: boolean;
}

/** The pieces of all files in order, read ahead. */
async function* piecesOf(files: readonly Chosen[]): AsyncGenerator<Piece> {
  const ahead: Promise<Piece>[] = [];
  for (const { path, file } of files) {
    for (let from = 0; from === 0 || from < file.size; from += PIECE_BYTES) {
      const end = from + PIECE_BYTES;
      const reading = read(path, file.slice(from, end)).then((bytes) => ({ path, bytes, isLast: end >= file.size }));
      reading.catch(() => {}); // it is raised in its turn, if it is still awaited then
      if (ahead.push(reading) < AHEAD) continue;
      const next = ahead.shift();
      if (next) yield await next;
    }
  }
  for (const next of ahead) yield await next;
}

async function read(path: string, part: Blob): Promise<Uint8Array<ArrayBuffer>> {
  try {
    return new Uint8Array(await part.arrayBuffer());
  } catch {
    throw new PackError(`${path} cannot be read; it has changed or was removed since it was chosen: choose the files again.`);
  }
}
