/** Line drawings, 16 by 16. They are decorative: a text or a label accompanies each. */

const PATHS = {
  jobs: "M2.5 4h11M2.5 8h11M2.5 12h7",
  cluster: "M2.5 3.5h11v4h-11zM2.5 8.5h11v4h-11zM5 5.5h.01M5 10.5h.01",
  submit: "M8 3v10M3 8h10",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.5 10.5l3 3",
  sun: "M8 10.8a2.8 2.8 0 1 0 0-5.6 2.8 2.8 0 0 0 0 5.6zM8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3M3.4 3.4l.9.9M11.7 11.7l.9.9M12.6 3.4l-.9.9M4.3 11.7l-.9.9",
  moon: "M13.2 9.6A5.6 5.6 0 0 1 6.4 2.8a5.6 5.6 0 1 0 6.8 6.8z",
  keyboard: "M2 4.5h12v7H2zM4.5 7h.01M7 7h.01M9.5 7h.01M12 7h.01M5 9.5h6",
  close: "M4 4l8 8M12 4l-8 8",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  play: "M5 3.2l7.5 4.8L5 12.8z",
  stop: "M4 4h8v8H4z",
  bolt: "M8.8 1.8L3.6 9h3.6l-.8 5.2L11.9 7H8.2z",
  resize: "M9.5 2.5h4v4M6.5 13.5h-4v-4M13.2 2.8L9 7M2.8 13.2L7 9",
  pin: "M6 2.5h4l-.6 4 2.1 2H4.5l2.1-2zM8 8.5v5",
  check: "M3.2 8.4l3.2 3.2 6.4-7",
  shield: "M8 1.8l5 1.9v3.9c0 3-2 5.4-5 6.6-3-1.2-5-3.6-5-6.6V3.7zM5.6 8l1.7 1.7 3.1-3.4",
  download: "M8 2.5v7.5M4.8 7.2L8 10.4l3.2-3.2M3 13.2h10",
  restart: "M3.2 8a4.8 4.8 0 1 0 1.5-3.5M3 2.4v2.8h2.8",
  trash: "M3 4.5h10M6.2 4.3V2.6h3.6v1.7M4.4 4.8l.6 8.6h6l.6-8.6",
  warning: "M8 2.4l6 10.8H2zM8 6.4v3.2M8 11.4h.01",
  chevron: "M6 3.5L10.5 8 6 12.5",
  copy: "M5.5 5.5h7.5v7.5H5.5zM3 10.5V3h7.5",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor" strokeWidth="1.5"
      strokeLinecap="round" strokeLinejoin="round" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
