-- What the programs of a tenant have cost, by the day (UTC) they ended: every number of their
-- receipts, summed under its path (`prompt_tokens.shared.static`), and `programs`, how many.
-- A receipt is summed by the transaction that writes it: once, or not at all.

CREATE TABLE usage (
    tenant TEXT NOT NULL,
    day TEXT NOT NULL,              -- YYYY-MM-DD
    status TEXT NOT NULL,
    name TEXT NOT NULL,
    amount ANY NOT NULL,            -- INTEGER or REAL, as in the receipt
    PRIMARY KEY (tenant, day, status, name)
) STRICT, WITHOUT ROWID;

-- SQLite writes some keys of a path in quotes, and which depends on its version.
CREATE VIEW cost AS
SELECT ending.program AS program, program.tenant AS tenant,
    date(ending.finished_at, 'unixepoch') AS day, ending.status AS status,
    replace(substr(part.fullkey, 3), '"', '') AS name, part.atom AS amount
FROM ending JOIN program ON program.number = ending.program
    JOIN json_tree(iif(json_valid(CAST(ending.receipt AS TEXT)),
        CAST(ending.receipt AS TEXT), '{}')) AS part
WHERE part.type IN ('integer', 'real')
UNION ALL
SELECT ending.program, program.tenant, date(ending.finished_at, 'unixepoch'), ending.status,
    'programs', 1
FROM ending JOIN program ON program.number = ending.program;

INSERT INTO usage
SELECT tenant, day, status, name, sum(amount) FROM cost GROUP BY tenant, day, status, name;

CREATE TRIGGER program_costs AFTER INSERT ON ending
BEGIN
    INSERT INTO usage
    SELECT tenant, day, status, name, amount FROM cost WHERE program = new.program
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;
