// Locks versions and digests, and no address: everybody installs from the registry that theirs is.
// (npm's own omit-lockfile-registry-resolved forgets the packages of other platforms.)
import { readFileSync, writeFileSync } from "node:fs";

const path = new URL("../package-lock.json", import.meta.url);
const lock = JSON.parse(readFileSync(path, "utf8"));
for (const one of Object.values(lock.packages)) {
  delete one.resolved;
  delete one.funding;
}
writeFileSync(path, `${JSON.stringify(lock, null, 2)}\n`);
