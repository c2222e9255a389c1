-- Stored procedures: versions, which never change, and the aliases that name one of them.

CREATE TABLE procedure (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    version TEXT NOT NULL,          -- a hash of the program
    created_at REAL NOT NULL,
    program BLOB NOT NULL,          -- JSON, with the calls of other procedures expanded
    PRIMARY KEY (tenant, name, version)
) STRICT;

CREATE TABLE procedure_alias (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    alias TEXT NOT NULL,
    version TEXT NOT NULL,
    PRIMARY KEY (tenant, name, alias),
    FOREIGN KEY (tenant, name, version) REFERENCES procedure
) STRICT, WITHOUT ROWID;
