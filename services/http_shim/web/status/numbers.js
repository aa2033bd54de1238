// Numbers as people read them.

const UNITS = [[86_400, "d"], [3600, "h"], [60, "min"]];

export function duration(seconds) {
  const [size, unit] = UNITS.find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

// Returns at most three significant digits, and all digits of a whole number.
export function rounded(value) {
  const digits = { maximumSignificantDigits: 3 };
  return value.toLocaleString("en", value >= 100 ? { maximumFractionDigits: 0 } : digits);
}

export function milliseconds(seconds) {
  return seconds >= 10 ? `${rounded(seconds)} s` : `${rounded(1000 * seconds)} ms`;
}

export function bytes(count) {
  return count >= 2 ** 30 ? `${rounded(count / 2 ** 30)} GiB` : `${rounded(count / 2 ** 20)} MiB`;
}
