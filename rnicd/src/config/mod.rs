//! The configuration: TOML in, a validated [`Config`] out.
//!
//! `file` is the file format. The other modules, one per section, are the validated form that the
//! rest of the daemon uses: every value in range, every default applied. This module knows no
//! sockets, no engine and no users of the system. [`explain()`] prints a configuration for `rnicd
//! check-config`, and [`changes()`] lists the differences to a new one. The binaries, the control
//! thread and the tests call this module.

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

/// `config/rnicd.toml`: every key with its default and cost.
pub const ANNOTATED_DEFAULT: &str = include_str!("../../../config/rnicd.toml");

/// A validated configuration, with defaults for keys that the file does not set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Config {
    /// Identity of the device.
    pub device: Device,
    /// `[wired]`: the RoCE device.
    pub wired: Wired,
    /// `[control]`: the control socket and its users.
    pub control: Control,
    /// `[engine]`: worker threads, the loopback path and deadlines.
    pub engine: Engine,
    /// `[mpa]`: connection start-up and framing.
    pub mpa: Mpa,
    /// `[tcp]`: keepalive and timeouts.
    pub tcp: Tcp,
    /// `[ports]`: RDMA ports that use a different TCP port.
    pub ports: PortMap,
    /// `[limits]` and its subsections.
    pub limits: Limits,
    /// `[[user]]`: different limits and rights for users.
    pub users: Vec<Override>,
    /// `[[group]]`: different limits and rights for members of groups, in the order of the file.
    pub groups: Vec<Override>,
    /// `[[pd]]`: protection domains that sessions may share.
    pub pds: Vec<NamedPd>,
    /// `[[listen]]`: addresses that users may listen on. Without rules, every user may listen on
    /// every address.
    pub listen: Vec<AddressRule>,
    /// `[[connect]]`: addresses that users may connect to. Without rules, every user may connect to
    /// every address.
    pub connect: Vec<AddressRule>,
    /// `[metrics]`: metrics in a file.
    pub metrics: Metrics,
    /// `[log]`: the log filter.
    pub log: Log,
}

impl Config {
    /// Reads and validates a regular file of at most 1 MiB.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Config::parse(path, &text::read(path)?)
    }

    /// Loads the configuration of `path`, or returns the default without a path.
    pub fn load_or_default(path: Option<&Path>) -> Result<Self, ConfigError> {
        path.map_or_else(|| Ok(Config::default()), Config::load)
    }

    /// Returns the validated text of `path`, a file or a pipe, or an empty text without a path. The
    /// text is passed to a child process.
    pub fn read_or_default(path: Option<&Path>) -> Result<String, ConfigError> {
        let Some(path) = path else { return Ok(String::new()) };
        let text = text::read_or_wait(path)?;
        Config::parse(path, &text)?;
        Ok(text)
    }

    /// Validates `text`, which was read from `file`.
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
