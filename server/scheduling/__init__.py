"""Which call runs next, and on which engine: records, policies, books and the queue."""
