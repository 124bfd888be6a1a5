//! The configuration: TOML in, a validated [`Config`] out.
//!
//! `file` is what may be written; here is what the rest of the daemon sees, a file per section:
//! every value in range, every default filled in. It refuses to know sockets, the engine and who
//! users are; [`explain()`] puts it in words for `rnicd check-config`, [`changes()`] what a new one
//! changes. The binaries, the control thread and the tests call it.

mod address_rules;
mod addresses;
mod changes;
mod checker;
mod control;
mod device;
mod engine;
mod error;
mod explain;
mod field;
mod file;
mod file_limits;
mod file_rules;
mod guid;
mod in_force;
mod kind;
mod limits;
mod log;
mod metrics;
mod mpa;
mod named_pds;
mod overrides;
mod ports;
mod rule_text;
mod subjects;
mod tcp;
#[cfg(test)]
pub(crate) mod tests;
mod text;
mod units;
mod warnings;
mod wired;
mod worst_case;

use std::path::Path;

pub use address_rules::AddressRule;
pub use addresses::{Network, Ports};
pub use changes::{Change, changes};
use checker::Checker;
pub use control::Control;
pub use device::{Device, TreeAt};
pub use engine::Engine;
pub use error::ConfigError;
pub use explain::explain;
use file::File;
pub use file::{Loopback, Mulpdu, Seccomp};
pub use guid::Guid;
pub use in_force::InForce;
pub use kind::{Kind, Scope};
pub use limits::{Limits, UNLIMITED, Values};
pub use log::{Log, log_filter};
pub use metrics::Metrics;
pub use mpa::Mpa;
pub use named_pds::NamedPd;
pub use overrides::Override;
pub use ports::PortMap;
pub use subjects::{Id, Subjects};
pub use tcp::Tcp;
pub use units::{Size, Span, SpanOrOff};
pub use warnings::warnings;
pub use wired::Wired;

/// `config/rnicd.toml`: every key, its default and what it costs.
pub const ANNOTATED_DEFAULT: &str = include_str!("../../../config/rnicd.toml");

/// A validated configuration, with the defaults of what the file does not say.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Config {
    /// Identity of the device.
    pub device: Device,
    /// `[wired]`: the device whose queue pairs are wired by hand.
    pub wired: Wired,
    /// `[control]`: the control socket and who may use it.
    pub control: Control,
    /// `[engine]`: worker threads, the loopback path and deadlines.
    pub engine: Engine,
    /// Connection start-up and framing.
    pub mpa: Mpa,
    /// How soon a peer that is gone is noticed.
    pub tcp: Tcp,
    /// `[ports]`: RDMA ports that are other ports of TCP.
    pub ports: PortMap,
    /// `[limits]` and its subsections.
    pub limits: Limits,
    /// `[[user]]`: other limits and trust for some users.
    pub users: Vec<Override>,
    /// `[[group]]`: the same for members of some groups, in the order of the file.
    pub groups: Vec<Override>,
    /// `[[pd]]`: protection domains that sessions may share.
    pub pds: Vec<NamedPd>,
    /// `[[listen]]`: who may listen where; without any everybody may anywhere.
    pub listen: Vec<AddressRule>,
    /// `[[connect]]`: who may connect where; without any everybody may anywhere.
    pub connect: Vec<AddressRule>,
    /// Figures in a file.
    pub metrics: Metrics,
    /// `[log]`: what is logged.
    pub log: Log,
}

impl Config {
    /// Reads and validates a file: a regular one of at most 1 MiB.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Config::parse(path, &text::read(path)?)
    }

    /// The configuration of `path` if there is one, else the built-in default.
    pub fn load_or_default(path: Option<&Path>) -> Result<Self, ConfigError> {
        path.map_or_else(|| Ok(Config::default()), Config::load)
    }

    /// Returns the validated text of `path`, a file or a pipe, or an empty text without a path: for
    /// a process that is started with it.
    pub fn read_or_default(path: Option<&Path>) -> Result<String, ConfigError> {
        let Some(path) = path else { return Ok(String::new()) };
        let text = text::read_or_wait(path)?;
        Config::parse(path, &text)?;
        Ok(text)
    }

    /// Validates `text`, which came from `file`.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let parsed: File = toml::from_str(text).map_err(|error| {
            ConfigError::at(file, text, error.span().map_or(0, |s| s.start), error.message())
        })?;
        let check = Checker { file, text };
        Ok(Config {
            device: check.device(parsed.device)?,
            wired: check.wired(parsed.wired)?,
            control: check.control(parsed.control)?,
            engine: check.engine(parsed.engine)?,
            mpa: check.mpa(parsed.mpa)?,
            tcp: check.tcp(parsed.tcp)?,
            ports: check.ports(parsed.ports)?,
            limits: check.limits(&parsed.limits)?,
            users: check.overrides(parsed.user)?,
            groups: check.overrides(parsed.group)?,
            pds: check.named_pds(parsed.pd)?,
            listen: parsed.listen.into_iter().map(AddressRule::from).collect(),
            connect: parsed.connect.into_iter().map(AddressRule::from).collect(),
            metrics: check.metrics(parsed.metrics)?,
            log: check.log(parsed.log)?,
        })
    }
}
