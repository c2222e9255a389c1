/* JSON whose integers keep all of their digits. Pure functions. */

const LONG_INTEGER = /[^\d.]\d{16}/;

/**
 * Parse JSON with values of programs. An integer beyond 2^53 becomes an object that `JSON.stringify`
 * writes with the same digits, and that nothing else can convert to a text; in a browser without
 * `JSON.rawJSON` it becomes the closest number.
 */
export function parseJson(text) {
  return JSON.rawJSON && LONG_INTEGER.test(text) ? JSON.parse(text, exactly) : JSON.parse(text);
}

function exactly(key, value, { source }) {
  const isExact = typeof value !== "number" || !Number.isInteger(value) || Number.isSafeInteger(value);
  return isExact ? value : JSON.rawJSON(source);
}

/** Whether a value is such an integer. */
export const isLongInteger = (value) => JSON.isRawJSON?.(value) ?? false;
