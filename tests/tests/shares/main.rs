//! What changes, reloads, bursts and deaths of some cost the others, and where a daemon runs.

mod high_water;
mod killed;
mod reload;
mod rights;
mod surroundings;
