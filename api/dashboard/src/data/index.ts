export { useLive, useLiveStatus, useWatchedJob } from "./context";
export type { LiveEvents, LiveKind, LiveStatus } from "./live";
export { useResource, type Resource } from "./resource";
export { useNow } from "./clock";
export { useThrottled } from "./throttle";
export * from "./job";
