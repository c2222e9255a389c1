-- Checksums of records, the watch over programs that were running when the server died, and the
-- clock by which the durations of unfinished programs continue after a restart.

-- CRC-32 of a record's content (`checksums.py`). NULL: written before checksums existed.
ALTER TABLE program ADD COLUMN crc INTEGER;
ALTER TABLE appended ADD COLUMN crc INTEGER;
ALTER TABLE value ADD COLUMN crc INTEGER;
ALTER TABLE event ADD COLUMN crc INTEGER;
ALTER TABLE ending ADD COLUMN crc INTEGER;

-- Retention deletes by the time of the end.
CREATE INDEX ending_finished ON ending (finished_at);

-- 1 from the start of a server to its orderly stop.
ALTER TABLE head ADD COLUMN is_running INTEGER NOT NULL DEFAULT 0;
-- Wall clock and seconds since boot at the last start, and the boot.
ALTER TABLE head ADD COLUMN wall_s REAL NOT NULL DEFAULT 0;
ALTER TABLE head ADD COLUMN uptime_s REAL NOT NULL DEFAULT 0;
ALTER TABLE head ADD COLUMN boot_id TEXT NOT NULL DEFAULT '';

CREATE TABLE watched (
    program INTEGER PRIMARY KEY REFERENCES program,
    num_deaths INTEGER NOT NULL,    -- of servers during a turn of the program without new values
    num_values INTEGER NOT NULL,    -- values of the program at the last of them
    problem TEXT                    -- why the next start ends the program; NULL: it is resumed
) STRICT;

CREATE TRIGGER program_unwatched AFTER INSERT ON ending
BEGIN DELETE FROM watched WHERE program = new.program; END;
