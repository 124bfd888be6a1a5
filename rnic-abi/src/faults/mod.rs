//! Fault rules. A rule consists of an action, the objects that it affects, and a trigger.
//!
//! A rule is one line of words `KEY=VALUE`: `do=ACTION` with the arguments of the action,
//! selectors, and a trigger. `;` or a line break separates rules. The same keys are used in a TOML
//! file, in the environment variable `RNIC_FAULTS` and by `rnicctl fault add`. `docs/faults.md`
//! describes them.

mod action;
pub mod change;
mod cm_event;
mod error;
mod event;
pub mod link;
mod message;
mod name;
mod names;
mod object;
mod opcode;
pub mod order;
mod reject;
mod rule;
mod scope;
mod select;
#[cfg(test)]
mod tests;
mod trigger;
mod verb;
mod words;

pub use action::{Action, Point, RefusedAs};
pub use cm_event::{CmEventEffect, CmEventKind};
pub use error::FaultError;
pub use event::{AsyncEvent, Element};
pub use message::{MessageEffect, MessageKind};
pub use name::FaultName;
pub use object::Object;
pub use opcode::Opcode;
pub use rule::FaultRule;
pub use select::{Selector, UserSelector};
pub use trigger::{Counter, Trigger};
pub use verb::Verb;

/// Environment variable with rules for the program's own sessions.
pub const VARIABLE: &str = "RNIC_FAULTS";
/// Maximum length of the text of one rule in bytes.
pub const MAX_RULE_LEN: usize = 1024;
