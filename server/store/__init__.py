"""The journal: durable storage of programs in one SQLite file.

`records` defines the records, `database` opens the file and migrates its schema, `writer` is the
thread that commits batches, `reader` holds the queries, and `journal` is the public interface.
"""
