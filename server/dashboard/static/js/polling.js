/* Requests that a page repeats while it is open. */

/**
 * Return a function that calls `work` with one call open at a time. All calls of the function during
 * an open call together cause one more call of `work`.
 *
 * @param {function(): Promise} work
 */
export function oneAtATime(work) {
  let isOpen = false;
  let isWanted = false;
  return async () => {
    isWanted = true;
    if (isOpen) return;
    isOpen = true;
    try {
      while (isWanted) {
        isWanted = false;
        await work();
      }
    } finally {
      isOpen = false;
    }
  };
}

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
  let isClosed = false;
  const now = oneAtATime(async () => {
    clearTimeout(timer);
    if (isClosed) return;
    try {
      await poll();
    } finally {
      wait();
    }
  });

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
