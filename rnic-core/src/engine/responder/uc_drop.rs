//! Messages that a UC QP drops, because they find no receive, do not fit it, or address memory that
//! the peer may not write (IBTA specification, volume 1, section 9.9.3, faults of class D). Neither
//! end is notified, and later messages are carried out.

use super::{MissingReceive, Responder};
use crate::engine::incoming::Incoming;
use crate::engine::reason::{PlacementError, Reason};

impl Responder {
    /// Returns true if a segment is dropped because earlier segments of its message were.
    #[inline]
    pub(in crate::engine) fn is_dropping(&self, segment: &Incoming) -> bool {
        match segment {
            Incoming::Send { kind, .. } if kind.immediate.is_some() => self.dropping.write,
            Incoming::Send { .. } => self.dropping.send,
            Incoming::Write { .. } => self.writing && self.dropping.write,
            _ => false,
        }
    }

    /// Returns true if an error of a segment only drops its message.
    pub(in crate::engine) fn only_drops(&self, error: &PlacementError) -> bool {
        let loses = matches!(self.missing, MissingReceive::Drops);
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

    /// Drops a segment, and with it the rest of its message. Returns true if it was the last one.
    pub(in crate::engine) fn drop_segment(&mut self, segment: &Incoming) -> bool {
        match *segment {
            Incoming::Send { kind, .. } if kind.immediate.is_some() => {
                self.dropping.write = false;
                self.written = 0;
                true
            }
            Incoming::Send { last, .. } => {
                self.dropping.send = !last;
                last
            }
            Incoming::Write { last, .. } => {
                self.writing = !last;
                self.dropping.write = true;
                last
            }
            _ => false,
        }
    }
}
