/** The fields of the spec from the server's schema: for hints beside the text, and to remove the
 * defaults from a resolved spec. */

export interface Schema {
  $ref?: string;
  type?: string;
  const?: unknown;
  enum?: unknown[];
  description?: string;
  default?: unknown;
  minimum?: number;
  exclusiveMinimum?: number;
  maximum?: number;
  exclusiveMaximum?: number;
  anyOf?: Schema[];
  properties?: Record<string, Schema>;
  items?: Schema;
}

export interface Document {
  components: { schemas: Record<string, Schema> };
}

export interface Hint {
  path: string;
  description: string;
  type: string;
  default: string | null;
  /** The names of the keys of a section, or of each section of a list. */
  keys: readonly string[];
}

export function hintOf(document: Document, path: string): Hint | null {
  const field = fieldAt(document, path);
  if (!field) return null;
  const { properties } = section(document, field);
  const target = field.$ref ? follow(document, field) : field;
  return {
    path,
    description: field.description ?? target.description ?? "",
    type: properties ? "section" : typeOf(document, field),
    default: field.default === undefined || typeof field.default === "object" && field.default !== null ? null : String(field.default),
    keys: Object.keys(properties ?? section(document, section(document, field).items ?? {}).properties ?? {}),
  };
}

/** `spec` without the fields that have their default values. */
export function withoutDefaults(document: Document, spec: Record<string, unknown>, at: Schema = { $ref: "#/components/schemas/JobSpec" }): Record<string, unknown> {
  const { properties = {} } = section(document, at);
  const kept: [string, unknown][] = [];
  for (const [key, value] of Object.entries(spec)) {
    const field = properties[key];
    if (!field || field.default === undefined) {
      if (!isMapping(value) || Object.keys(value).length > 0) kept.push([key, value]);
    } else if (isMapping(value) && section(document, field).properties) {
      const inside = withoutDefaults(document, value, field);
      if (Object.keys(inside).length > 0) kept.push([key, inside]);
    } else if (!same(value, field.default)) {
      const { items } = section(document, field);
      kept.push([key, items && Array.isArray(value) ? value.map((item) => (isMapping(item) ? withoutDefaults(document, item, items) : item)) : value]);
    }
  }
  return Object.fromEntries(kept);
}

/** `spec` without its token sets: those of a copy are of the sources that its author may have edited. */
export function withoutTokenSets(spec: Record<string, unknown>): Record<string, unknown> {
  if (!isMapping(spec["data"])) return spec;
  const { prepared: _, ...data } = spec["data"];
  return { ...spec, data };
}

function fieldAt(document: Document, path: string): Schema | null {
  let at: Schema = { $ref: "#/components/schemas/JobSpec" };
  for (const key of path.split(".")) {
    const { properties, items } = section(document, at);
    const next = properties?.[key] ?? (/^\d+$/.test(key) ? items : undefined);
    if (!next) return null;
    at = next;
  }
  return at;
}

/** Resolves a reference; of several alternatives, the alternative with keys. */
function section(document: Document, schema: Schema): Schema {
  const found = follow(document, schema);
  if (found.properties) return found;
  for (const alternative of found.anyOf ?? []) {
    const inside = section(document, alternative);
    if (inside.properties) return inside;
  }
  return found;
}

const follow = (document: Document, schema: Schema): Schema =>
  schema.$ref ? (document.components.schemas[schema.$ref.split("/").at(-1) ?? ""] ?? {}) : schema;

function typeOf(document: Document, schema: Schema): string {
  const target = follow(document, schema);
  if (target.anyOf) return target.anyOf.map((alternative) => typeOf(document, alternative)).join(" or ");
  if (target.const !== undefined) return String(target.const);
  if (target.enum) return target.enum.map(String).join(" | ");
  const limits = [
    target.minimum !== undefined ? `≥ ${target.minimum}` : "", target.exclusiveMinimum !== undefined ? `> ${target.exclusiveMinimum}` : "",
    target.maximum !== undefined ? `≤ ${target.maximum}` : "", target.exclusiveMaximum !== undefined ? `< ${target.exclusiveMaximum}` : "",
  ].filter(Boolean);
  return [target.type ?? "any", ...limits].join(" ");
}

export const isMapping = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);
const same = (left: unknown, right: unknown): boolean => JSON.stringify(left) === JSON.stringify(right);
