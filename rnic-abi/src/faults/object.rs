//! Kinds of objects that rules select.

use super::opcode::Opcode;

/// Kind of object of an occasion or of an effect. Rules select the objects by its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// No object, or whole sessions.
    None,
    /// A protection domain.
    Pd,
    /// A CQ.
    Cq,
    /// The address of a peer.
    Peer,
    /// A device with its port, as a whole.
    Device,
    /// A QP.
    Qp,
    /// A send request of a QP.
    Request,
    /// A message of the peer.
    Message,
    /// A message of the peer that needs a receive.
    Receive,
    /// A completion.
    Completion,
}

impl Object {
    /// Returns the keys that select objects of this kind.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Object::None => &[],
            Object::Pd => &["pd"],
            Object::Cq => &["cq"],
            Object::Peer => &["peer"],
            Object::Device => &["device", "port"],
            Object::Qp => &["device", "port", "pd", "qp", "cq", "peer"],
            Object::Request | Object::Receive => {
                &["device", "port", "pd", "qp", "cq", "peer", "opcode"]
            }
            Object::Message => &["device", "port", "pd", "qp", "cq", "peer", "opcode", "mr"],
            Object::Completion => {
                &["device", "port", "pd", "qp", "cq", "peer", "opcode", "flushed"]
            }
        }
    }

    /// Returns the values of `opcode` that can select an object of this kind. With `mr`, only those
    /// of messages that access memory with a remote key.
    pub(super) fn opcodes(self, mr: bool) -> &'static [Opcode] {
        use Opcode::*;
        match self {
            Object::Message if mr => &[Write, Read, Atomic],
            Object::Message => &[Send, Write, Read, Atomic],
            Object::Receive => &[Send],
            Object::Request => &[Send, Write, Read, Atomic, BindMw, LocalInv],
            _ => &[Send, Write, Read, Atomic, BindMw, LocalInv, Recv],
        }
    }
}
