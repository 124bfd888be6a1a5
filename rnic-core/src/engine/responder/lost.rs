//! Messages that are lost at a queue pair that has no acknowledgements: what finds no receive, does
//! not fit it, or names memory that its sender may not write (IBTA specification, volume 1, section
//! 9.9.3, faults of class D). Neither end is told, and what comes behind is carried out.

use super::{MissingReceive, Responder};
use crate::engine::incoming::Incoming;
use crate::engine::reason::{PlacementError, Reason};

impl Responder {
    /// Whether a segment is lost with those before it.
    #[inline]
    pub(in crate::engine) fn is_losing(&self, segment: &Incoming) -> bool {
        match segment {
            Incoming::Send { kind, .. } if kind.immediate.is_some() => self.losing.write,
            Incoming::Send { .. } => self.losing.send,
            Incoming::Write { .. } => self.writing && self.losing.write,
            _ => false,
        }
    }

    /// Whether what is wrong with a segment is no more than its loss.
    pub(in crate::engine) fn is_loss(&self, error: &PlacementError) -> bool {
        let loses = matches!(self.missing, MissingReceive::Loses);
        loses
            && matches!(
                error,
                PlacementError::Fault(
                    _,
                    Reason::NoReceive { .. }
                        | Reason::TooLong { .. }
                        | Reason::Write { .. }
                        | Reason::StagChanged { .. }
                )
            )
    }

    /// A segment is lost, and the rest of its message will be; whether it was the last.
    pub(in crate::engine) fn lose(&mut self, segment: &Incoming) -> bool {
        match *segment {
            Incoming::Send { kind, .. } if kind.immediate.is_some() => {
                (self.losing.write, self.written) = (false, 0);
                true
            }
            Incoming::Send { last, .. } => {
                self.losing.send = !last;
                last
            }
            Incoming::Write { last, .. } => {
                (self.writing, self.losing.write) = (!last, true);
                last
            }
            _ => false,
        }
    }
}
