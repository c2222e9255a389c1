-- Commits that deleted programs. A later commit may delete the row that proves an earlier one; this
-- number proves a deletion.
ALTER TABLE head ADD COLUMN num_deletions INTEGER NOT NULL DEFAULT 0;
