// Writes a .gz beside every text file of the build, so that the server does no compression.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const folder = new URL("../../holdfast/dashboard/", import.meta.url).pathname;
const text = /\.(html|js|css|svg|json|txt)$/;
for (const name of readdirSync(folder, { recursive: true })) {
  if (!text.test(name)) continue;
  const path = join(folder, name);
  writeFileSync(`${path}.gz`, gzipSync(readFileSync(path), { level: 9 }));
}
