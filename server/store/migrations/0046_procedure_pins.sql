-- Versions of procedures whose constant prefixes stay in the KV of engines until a time.

CREATE TABLE procedure_pin (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    expires_at REAL NOT NULL,       -- Unix time; 0: removed
    PRIMARY KEY (tenant, name, version),
    FOREIGN KEY (tenant, name, version) REFERENCES procedure
) STRICT, WITHOUT ROWID;
