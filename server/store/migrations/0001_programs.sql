-- Programs, what was appended to them, their values, their events and their ends.
--
-- Rows refer to a program by a local number, not by its id: numbers are narrow and grow, so
-- the pages that one commit touches lie together at the right edge of every tree. For the
-- same reason values and events are plain rowid tables with a narrow index beside them: in a
-- WITHOUT ROWID table the rows, kilobytes each, would be the keys of the tree.

CREATE TABLE head (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    next_seq INTEGER NOT NULL,      -- no sequence number from here on was ever handed out
    generation INTEGER NOT NULL     -- how often the journal was opened
) STRICT;

INSERT INTO head VALUES (1, 1, 0);

CREATE TABLE program (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    idempotency_key TEXT,
    body_hash BLOB NOT NULL,
    created_at REAL NOT NULL,       -- before the body: a body of megabytes is read last
    body BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX program_idempotency ON program (tenant, idempotency_key)
WHERE idempotency_key IS NOT NULL;

CREATE TABLE appended (
    position INTEGER PRIMARY KEY,
    program INTEGER NOT NULL REFERENCES program,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX appended_program ON appended (program);

CREATE TABLE value (
    program INTEGER NOT NULL REFERENCES program,
    variable TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    tokenizer_hash TEXT,
    token_ids BLOB,                 -- msgpack, one array of integers
    text TEXT,
    value BLOB NOT NULL,
    PRIMARY KEY (program, variable)
) STRICT;

CREATE TABLE event (
    seq INTEGER PRIMARY KEY,
    program INTEGER NOT NULL REFERENCES program,
    type TEXT NOT NULL,
    at REAL NOT NULL,
    data BLOB NOT NULL
) STRICT;

CREATE INDEX event_program ON event (program);     -- its entries end with seq, so it orders too

CREATE TABLE ending (
    program INTEGER NOT NULL UNIQUE REFERENCES program,    -- as a rowid, NULL would pick a number
    status TEXT NOT NULL,
    finished_at REAL NOT NULL,
    receipt BLOB NOT NULL,
    error BLOB,
    nodes BLOB NOT NULL
) STRICT;

-- What a start has to resume, found without reading the programs that have ended.
CREATE TABLE unfinished (program INTEGER PRIMARY KEY REFERENCES program) STRICT;

CREATE TRIGGER program_begins AFTER INSERT ON program
BEGIN INSERT INTO unfinished VALUES (new.number); END;

CREATE TRIGGER program_ends AFTER INSERT ON ending
BEGIN DELETE FROM unfinished WHERE program = new.program; END;
