//! What has happened: reasons on record, notable happenings, and what objects that are gone had
//! counted.
//!
//! The counters and records of what is there stand in the objects; who may read which record says
//! [`Reader`].

mod notes;
mod past;
mod reader;
mod requests;

pub use notes::{Notes, damper};
pub use past::{Done, METRICS, Past, Terminates, USERS};
pub use reader::{Reader, Wall};
pub use requests::Asked;
