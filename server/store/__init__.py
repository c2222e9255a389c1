"""The journal's rooms: its records, its schema, the thread that writes it, the queries."""
