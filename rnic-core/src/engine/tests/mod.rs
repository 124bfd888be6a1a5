//! Tests of the engine: two engines connected under virtual time, one engine with both ends of a
//! direct connection, or one against a scripted peer.
//!
//! `world` simulates the machine around the engines (clients with their rings, workers, sockets),
//! `link` a TCP connection that can cut, delay, block and reset, `raw` a scripted peer, and
//! `requests` builds work requests. `captures` replays recorded traffic of another implementation.
//! The other files contain scenarios, each about one subject, written as transcripts of requests
//! and their results.

mod administration;
mod agreed;
mod atomics;
mod attached;
mod captures;
mod datagrams;
mod ddp_limits;
mod delivery;
mod differential;
mod emulation;
mod endings;
mod explanation;
mod fairness;
mod faults;
mod framing;
mod killed;
mod limits;
mod link;
mod messages;
mod missing;
mod model;
mod opcodes;
mod operations;
mod order_barriers;
mod order_litmus;
mod ordering;
mod pairs;
mod partial;
mod placement;
mod queues;
mod raw;
mod rc;
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
mod to_error;
mod unreliable;
mod unsent;
mod windows;
mod world;
mod zero_copy;
