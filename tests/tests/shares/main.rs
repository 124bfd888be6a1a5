//! Effects of changes, reloads, bursts and deaths on other users, and environments of the daemon.

mod high_water;
mod killed;
mod reload;
mod rights;
mod surroundings;
