//! Resets, shutdowns, departures, and what follows them.
