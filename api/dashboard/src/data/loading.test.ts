import { environmentManager, QueryObserver } from "@tanstack/react-query";
import { afterEach, expect, test, vi } from "vitest";
import type { Live } from "./live";
import { afterBegin, loadAgain, newClient, POLL_MS, type Load } from "./loading";

interface Shown<T> {
  value: () => T | undefined;
  client: ReturnType<typeof newClient>;
}

/** A value that a view shows, with the stream's `begun`; the view closes when the test ends. */
function shown<T>(load: Load<T>, begun: () => Promise<void> = () => Promise.resolve(), poll = false): Shown<T> {
  const client = newClient();
  const observer = new QueryObserver<T>(client, {
    queryKey: ["value"],
    queryFn: afterBegin({ begun } as Live, load),
    refetchInterval: poll ? POLL_MS : false,
  });
  closing.push(observer.subscribe(() => {}), () => client.clear());
  return { value: () => client.getQueryData<T>(["value"]), client };
}

environmentManager.setIsServer(() => false);
const closing: (() => void)[] = [];
afterEach(() => {
  closing.splice(0).forEach((close) => close());
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

test("a value that waits for the stream is requested once, after the stream has begun", async () => {
  let begin = () => {};
  const begins = new Promise<void>((done) => (begin = done));
  const load = vi.fn(() => Promise.resolve(1));
  const { value, client } = shown(load, () => begins);
  await Promise.resolve();
  expect(load).not.toHaveBeenCalled();
  const again = loadAgain(client); // as at the message `begun`, which precedes the end of the wait
  begin();
  await again;
  expect([load.mock.calls.length, value()]).toEqual([1, 1]);
});

test("a value that was requested before the stream began is requested again", async () => {
  const answers: ((value: string) => void)[] = [];
  const signals: AbortSignal[] = [];
  const { value, client } = shown<string>((signal) => {
    signals.push(signal);
    return new Promise((answer) => answers.push(answer));
  });
  await vi.waitFor(() => expect(answers.length).toBe(1));
  const again = loadAgain(client);
  await vi.waitFor(() => expect(answers.length).toBe(2));
  answers[0]!("from before");
  answers[1]!("new");
  await again;
  expect([signals[0]!.aborted, value()]).toEqual([true, "new"]);
});

test("a load sees what the stream has added meanwhile", async () => {
  let answer = (_: number[]) => {};
  const { value, client } = shown<number[]>(async (_, held) => {
    const page = await new Promise<number[]>((done) => (answer = done));
    return [...(held() ?? []), ...page];
  });
  await Promise.resolve();
  client.setQueryData(["value"], [1]);
  await Promise.resolve();
  answer([2]);
  await vi.waitFor(() => expect(value()).toEqual([1, 2]));
});

test("a hidden tab requests nothing", async () => {
  vi.useFakeTimers();
  const page = { visibilityState: "visible" };
  vi.stubGlobal("document", page);
  const load = vi.fn(() => Promise.resolve(1));
  shown(load, undefined, true);
  await vi.advanceTimersByTimeAsync(POLL_MS * 1.5);
  expect(load).toHaveBeenCalledTimes(2);
  page.visibilityState = "hidden";
  await vi.advanceTimersByTimeAsync(POLL_MS * 3);
  expect(load).toHaveBeenCalledTimes(2);
  page.visibilityState = "visible";
  await vi.advanceTimersByTimeAsync(POLL_MS);
  expect(load).toHaveBeenCalledTimes(3);
});

test("a failure keeps the value and is not repeated at once", async () => {
  const load = vi.fn().mockResolvedValueOnce("known").mockRejectedValue(new Error("gone"));
  const { value, client } = shown<string>(load);
  await vi.waitFor(() => expect(value()).toBe("known"));
  await loadAgain(client);
  expect(client.getQueryState(["value"])?.error?.message).toBe("gone");
  expect([value(), load.mock.calls.length]).toEqual(["known", 2]);
});
