"""The flight recorder: a memory-mapped file of fixed-size records, its writer and its reader."""
