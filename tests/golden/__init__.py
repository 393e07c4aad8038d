"""`make golden`: commands that a user types still leave the very bits that they left before.

A case runs commands on made-up text and hashes what they leave. `golden.json` has the hashes of
each machine on which they were recorded: another processor or another torch may round otherwise.
Nothing of albert_ds is imported, so these files judge any commit, older ones with `--code`.
"""
