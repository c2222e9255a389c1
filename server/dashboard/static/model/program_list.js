/* The programs of a list that grows in front while its older pages are shown. */

/** The newest programs of a filter, and the older pages that were loaded. */
export class ProgramList {
  #first = [];
  #older = [];
  /** Cursor of the next older page; null if there is none. */
  next = null;

  /** All programs, newest first. */
  get programs() {
    return [...this.#first, ...this.#older];
  }

  /**
   * Replace the first page. The programs that no longer fit on it stay, if older pages are loaded.
   * If nothing of the list is on the new page, programs between them may be missing: the older
   * pages are dropped.
   */
  setFirst({ programs, next }) {
    const ids = new Set(programs.map((program) => program.id));
    const known = this.programs;
    const last = known.findLastIndex((program) => ids.has(program.id));
    const hasOlder = this.#older.length > 0 && last >= 0 && next !== null;
    this.#older = hasOlder ? known.slice(last + 1) : [];
    if (!hasOlder) this.next = next;
    this.#first = programs;
  }

  /** Add the page at the cursor `next`. */
  addOlder({ programs, next }) {
    this.#older.push(...programs);
    this.next = next;
  }
}
