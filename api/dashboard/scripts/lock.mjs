// Locks versions and digests without addresses: each user installs from the configured registry.
// (npm's own omit-lockfile-registry-resolved forgets the packages of other platforms.)
import { readFileSync, writeFileSync } from "node:fs";

const path = new URL("../package-lock.json", import.meta.url);
const lock = JSON.parse(readFileSync(path, "utf8"));
for (const locked of Object.values(lock.packages)) {
  delete locked.resolved;
  delete locked.funding;
}
writeFileSync(path, `${JSON.stringify(lock, null, 2)}\n`);
