//! Messages that a UC QP [drops](crate::engine::transport::Transport::drops) because of an error.

use super::Responder;
use crate::engine::incoming::Incoming;

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

    /// Drops a segment and the rest of its message. Returns true if it is the last segment.
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
