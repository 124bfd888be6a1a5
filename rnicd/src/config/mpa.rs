//! `[mpa]`: connection start-up and framing.

use std::time::Duration;

use super::checker::Checker;
use super::error::ConfigError;
use super::field::Field;
use super::file::{self, Mulpdu};

/// `[mpa]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpa {
    /// CRC32C on every FPDU; `false` takes effect only if the peer agrees. Default true.
    pub crc: bool,
    /// Ask peers to send Markers; default off.
    pub markers: bool,
    /// Revision of the first attempt to connect, 1 or 2; default 2.
    pub revision: u8,
    /// Ask for the peer-to-peer model (RFC 6581); default on.
    pub peer_to_peer: bool,
    /// Serve revision 0 peers instead of rejecting them; default off.
    pub rdmac: bool,
    /// Maximum payload of an FPDU; by default derived from the segment size.
    pub mulpdu: Mulpdu,
    /// Time limit for the TCP handshake; default 10 s.
    pub connect_deadline: Duration,
    /// Time limit for the request of a peer that connects; default 10 s.
    pub startup_deadline: Duration,
    /// Time limit for a peer's MPA reply, including its program's decision; default 20 s.
    pub reply_deadline: Duration,
    /// Time limit for an application's decision on a request; default 60 s.
    pub decision_deadline: Duration,
    /// Time limit for the initiator's first FPDU after the reply; default 10 s.
    pub first_fpdu_deadline: Duration,
    /// Time limit for a posted receive, if a program lets messages wait and sets no time; default
    /// 10 s.
    pub rnr_timeout: Duration,
    /// Time limit for the next byte of an incomplete FPDU; default 120 s.
    pub stall_deadline: Duration,
}

impl Default for Mpa {
    fn default() -> Self {
        Mpa {
            //= MPA-1.2-2, MPA-4.4-4
            crc: true,
            markers: false,
            revision: 2,
            peer_to_peer: true,
            rdmac: false,
            mulpdu: Mulpdu::Mss,
            connect_deadline: Duration::from_secs(10),
            startup_deadline: Duration::from_secs(10),
            reply_deadline: Duration::from_secs(20),
            decision_deadline: Duration::from_secs(60),
            first_fpdu_deadline: Duration::from_secs(10),
            rnr_timeout: Duration::from_secs(10),
            stall_deadline: Duration::from_secs(120),
        }
    }
}

impl Checker<'_> {
    /// Checks `[mpa]` and applies the defaults.
    pub(super) fn mpa(&self, s: file::MpaSection) -> Result<Mpa, ConfigError> {
        let default = Mpa::default();
        let flag = |field: Field<bool>, default| field.map_or(default, toml::Spanned::into_inner);
        Ok(Mpa {
            //= MPA-4.4-2, MPA-4.4-3
            crc: flag(s.crc, default.crc),
            markers: flag(s.markers, default.markers),
            revision: self.number(s.revision, default.revision, 1..=2)?,
            peer_to_peer: flag(s.peer_to_peer, default.peer_to_peer),
            rdmac: flag(s.rdmac, default.rdmac),
            mulpdu: s.mulpdu.map_or(default.mulpdu, toml::Spanned::into_inner),
            connect_deadline: self.deadline(s.connect_deadline, default.connect_deadline)?,
            startup_deadline: self.deadline(s.startup_deadline, default.startup_deadline)?,
            reply_deadline: self.deadline(s.reply_deadline, default.reply_deadline)?,
            decision_deadline: self.deadline(s.decision_deadline, default.decision_deadline)?,
            first_fpdu_deadline: self
                .deadline(s.first_fpdu_deadline, default.first_fpdu_deadline)?,
            rnr_timeout: self.deadline(s.rnr_timeout, default.rnr_timeout)?,
            stall_deadline: self.deadline(s.stall_deadline, default.stall_deadline)?,
        })
    }
}
