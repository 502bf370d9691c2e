export { useLive, useLiveStatus, useLiveStream, useWatchedJob } from "./context";
export { useFurtherPage, useLast, useResource, type Resource } from "./resource";
export { useNow } from "./clock";
export { useThrottled } from "./throttle";
export { useQueuePlaces } from "./queue";
export { UNKNOWN_JOB } from "./live";
export * from "./job";
