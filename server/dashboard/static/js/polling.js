/* Requests that a page repeats while it is open. */

/**
 * Call `poll` now, and again `pauseMs` after each answer while the page is visible. Only one call is
 * open at a time.
 *
 * @param {function(): Promise} poll
 * @param {number} pauseMs
 * @returns {{now: function(), close: function()}} `now` calls `poll` at once, or after the open call.
 */
export function repeat(poll, pauseMs) {
  let timer = null;
  let isOpen = false;
  let isWanted = false;
  let isClosed = false;

  async function now() {
    isWanted = true;
    if (isOpen) return;
    clearTimeout(timer);
    isOpen = true;
    try {
      while (isWanted && !isClosed) {
        isWanted = false;
        await poll();
      }
    } finally {
      isOpen = false;
      wait();
    }
  }

  function wait() {
    if (!isClosed) timer = setTimeout(() => (document.hidden ? wait() : now()), pauseMs);
  }

  function close() {
    isClosed = true;
    clearTimeout(timer);
  }

  now();
  return { now, close };
}
