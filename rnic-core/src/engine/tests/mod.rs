//! The engine, run: two of them back to back under virtual time, one with both ends of a direct
//! connection, or one against a scripted peer.
//!
//! `world` is the machine around the engines (clients with their rings, workers, sockets), `link` a
//! TCP connection that can cut, delay, block and reset, `raw` a peer made of bytes, `requests` the
//! words in which tests post. `captures` replays what another implementation was recorded saying.
//! The other files are scenarios, one subject each; they read as transcripts of what was posted and
//! what came of it.

mod administration;
mod agreed;
mod atomics;
mod attached;
mod captures;
mod datagrams;
mod ddp_limits;
mod delivery;
mod differential;
mod endings;
mod explanation;
mod fairness;
mod framing;
mod killed;
mod limits;
mod link;
mod messages;
mod missing;
mod model;
mod opcodes;
mod operations;
mod ordering;
mod pairs;
mod partial;
mod placement;
mod queues;
mod raw;
mod refusal_order;
mod refusals;
mod requests;
mod revocation;
mod rnr;
mod runs;
mod segmentation;
mod short_writes;
mod siw;
mod srq;
mod terminate_table;
mod terminates;
mod unreliable;
mod unsent;
mod windows;
mod wired;
mod world;
mod zero_copy;
