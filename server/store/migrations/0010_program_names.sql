-- A list of programs shows their names and filters by status, without reading their bodies.

ALTER TABLE program ADD COLUMN name TEXT NOT NULL DEFAULT '';

UPDATE program SET name = coalesce(json_extract(CAST(body AS TEXT), '$.program.name'), '')
WHERE json_valid(CAST(body AS TEXT));

CREATE INDEX ending_status ON ending (status, program);
