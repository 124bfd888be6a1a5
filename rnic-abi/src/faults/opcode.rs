//! Opcodes of requests, as rules select them.

use super::names::{Names, listed};
use crate::abi::queue::SendOpcode;
use crate::types::CompletionOpcode;

/// Kind of request or message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// A Send of any kind.
    Send,
    /// An RDMA Write, with or without immediate data.
    Write,
    /// An RDMA Read.
    Read,
    /// Compare and swap, or fetch and add.
    Atomic,
    /// The bind of a memory window.
    BindMw,
    /// The invalidation of a local key.
    LocalInv,
    /// A receive; only completions have this opcode.
    Recv,
}

const NAMES: Names<Opcode> = &[
    ("send", Opcode::Send),
    ("write", Opcode::Write),
    ("read", Opcode::Read),
    ("atomic", Opcode::Atomic),
    ("bind-mw", Opcode::BindMw),
    ("local-inv", Opcode::LocalInv),
    ("recv", Opcode::Recv),
];

impl Opcode {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        listed(NAMES, text, "")
    }

    /// Returns the name.
    pub(super) fn name(self) -> &'static str {
        NAMES.iter().find(|(_, opcode)| *opcode == self).map_or("", |(name, _)| name)
    }

    /// Returns the kind of a request.
    pub fn of(opcode: SendOpcode) -> Self {
        match opcode {
            SendOpcode::Write | SendOpcode::WriteImmediate => Opcode::Write,
            SendOpcode::Send | SendOpcode::SendImmediate | SendOpcode::SendInvalidate => {
                Opcode::Send
            }
            SendOpcode::Read | SendOpcode::ReadInvalidate => Opcode::Read,
            SendOpcode::CompareSwap | SendOpcode::FetchAdd => Opcode::Atomic,
            SendOpcode::LocalInvalidate => Opcode::LocalInv,
            SendOpcode::BindWindow => Opcode::BindMw,
        }
    }

    /// Returns the kind of a completion.
    pub fn of_completion(opcode: CompletionOpcode) -> Self {
        match opcode {
            CompletionOpcode::Send => Opcode::Send,
            CompletionOpcode::RdmaWrite => Opcode::Write,
            CompletionOpcode::RdmaRead => Opcode::Read,
            CompletionOpcode::CompareSwap | CompletionOpcode::FetchAdd => Opcode::Atomic,
            CompletionOpcode::BindMw => Opcode::BindMw,
            CompletionOpcode::LocalInvalidate => Opcode::LocalInv,
            CompletionOpcode::Receive => Opcode::Recv,
        }
    }
}
