/** The current time, updated every second, for ages and freshness: a single timer for all users. */

import { useSyncExternalStore } from "react";

class Clock {
  private readonly watchers = new Set<() => void>();
  private timer: ReturnType<typeof setInterval> | undefined;
  private now = Math.floor(Date.now() / 1000);

  readonly read = (): number => this.now;

  readonly subscribe = (watcher: () => void): (() => void) => {
    this.watchers.add(watcher);
    this.timer ??= setInterval(() => this.tick(), 1000);
    return () => {
      this.watchers.delete(watcher);
      if (this.watchers.size) return;
      clearInterval(this.timer);
      this.timer = undefined;
    };
  };

  private tick(): void {
    this.now = Math.floor(Date.now() / 1000);
    for (const watcher of this.watchers) watcher();
  }
}

const clock = new Clock();

/** Whole Unix seconds; the caller renders again each second. */
export const useNow = (): number => useSyncExternalStore(clock.subscribe, clock.read);
