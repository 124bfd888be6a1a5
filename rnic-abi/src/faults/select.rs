//! Selectors of rules: users, programs, objects and operations.

use std::net::IpAddr;

use super::error::FaultError;
use super::opcode::Opcode;
use super::verb::Verb;
use super::words::{Words, decimal_or_hex, yes};

/// Selects users, programs, objects and operations. Each key that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// Name of the device.
    pub device: Option<String>,
    /// Handle of the protection domain.
    pub pd: Option<u32>,
    /// Number of the QP.
    pub qp: Option<u32>,
    /// Handle of the send CQ or receive CQ.
    pub cq: Option<u32>,
    /// Remote key of the region or window that a message accesses.
    pub mr: Option<u32>,
    /// Address of the peer.
    pub peer: Option<IpAddr>,
    /// The user, or all users; `None` for the user that sets the rule.
    pub user: Option<UserSelector>,
    /// Process ID of the program.
    pub pid: Option<i32>,
    /// Command name of the program, as `rnicctl clients` shows it.
    pub command: Option<String>,
    /// Operation of the program.
    pub verb: Option<Verb>,
    /// Kind of request or message.
    pub opcode: Option<Opcode>,
    /// Selects only the completions of flushed requests and receives.
    pub flushed: bool,
}

/// Users to which a rule applies instead of the user that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserSelector {
    /// All users.
    Any,
    /// One user.
    Uid(u32),
}

/// Keys of selectors, in the order of the documentation.
pub(super) const KEYS: &[&str] = &[
    "device", "port", "pd", "qp", "cq", "mr", "peer", "user", "pid", "command", "verb", "opcode",
    "flushed",
];

impl Selector {
    pub(super) fn take(words: &mut Words) -> Result<Self, FaultError> {
        // Each device has one port.
        words.number("port", 1_u8, 1)?;
        Ok(Selector {
            device: words.take("device"),
            pd: words.number("pd", 0, u32::MAX)?,
            qp: words.number("qp", 0, u32::MAX)?,
            cq: words.number("cq", 0, u32::MAX)?,
            mr: words.parse("mr", rkey)?,
            peer: words.parse("peer", |value| {
                value.parse().map_err(|_| "needs an IPv4 or IPv6 address".to_owned())
            })?,
            user: words.parse("user", |value| match value {
                "any" => Ok(UserSelector::Any),
                uid => match uid.parse() {
                    Ok(uid) => Ok(UserSelector::Uid(uid)),
                    Err(_) => Err("needs a user ID or any".to_owned()),
                },
            })?,
            pid: words.number("pid", 1, i32::MAX)?,
            command: words.take("command"),
            verb: words.parse("verb", Verb::parse)?,
            opcode: words.parse("opcode", Opcode::parse)?,
            flushed: words.parse("flushed", yes)?.unwrap_or_default(),
        })
    }

    /// Returns true if the rule selects QPs by their device, PD, number or peer.
    pub fn selects_qps(&self) -> bool {
        self.device.is_some() || self.pd.is_some() || self.qp.is_some() || self.peer.is_some()
    }

    /// Returns true if the rule does not select single programs.
    pub fn selects_all_programs(&self) -> bool {
        self.pid.is_none() && self.command.is_none()
    }

    /// Returns true if the program is selected.
    pub fn selects_program(&self, pid: i32, command: &str) -> bool {
        self.pid.is_none_or(|wanted| wanted == pid)
            && self.command.as_deref().is_none_or(|wanted| wanted == command)
    }
}

fn rkey(text: &str) -> Result<u32, String> {
    decimal_or_hex(text).ok_or_else(|| "needs a remote key (rkey), decimal or with 0x".to_owned())
}
