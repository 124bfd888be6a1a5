//! The configuration: TOML in, a validated [`Config`] out.
//!
//! `keys` declares all keys of sections, `kind` all limits, and `rules` the rules. Everything else
//! follows from these declarations: reading a file, errors with line, key and range, defaults, the
//! text of `rnicd check-config` ([`explain()`]) and the differences to a new configuration
//! ([`changes()`]). In a [`Config`] every value is in range and every default applied. This module
//! does not depend on sockets, the engine or the system's users. The binaries, the control thread
//! and the tests call this module.

mod addresses;
mod changes;
mod error;
mod explain;
mod guid;
mod in_force;
mod keys;
mod kind;
mod limits;
mod log;
mod ports;
mod profile;
mod profile_rules;
mod roce_devices;
mod rules;
mod section;
mod subjects;
#[cfg(test)]
pub(crate) mod tests;
mod text;
mod values;
mod warnings;
mod worst_case;

use std::path::Path;

use rnic_abi::abi::control::{self, DeviceKind};
use serde::Deserialize;

pub use addresses::{Network, Ports};
pub use changes::{Change, changes};
pub use error::ConfigError;
use error::Wrong;
pub use explain::explain;
pub use guid::Guid;
pub use in_force::InForce;
pub use keys::{Control, Device, Engine, Log, MappedPorts, Metrics, Mpa, Tcp, Wired};
pub use kind::{Kind, Scope};
pub use limits::{Limits, UNLIMITED, Values};
pub use log::log_filter;
pub use ports::PortMap;
pub use profile::{CqOverrun, GidLayout, Maximum, Profile};
pub use profile_rules::ProfileRules;
pub use rnic_abi::units::{Size, Span, SpanOrOff};
pub use roce_devices::{GidSource, MAX_ROCE_DEVICES, RoceDevices, check_device, device_name};
pub use rules::{AddressRule, NamedPd, Override};
use rules::{ConnectTable, ListenTable, PdTable};
use section::{Row, Section};
pub use subjects::{Id, Subjects};
pub use values::{Loopback, Mulpdu, Seccomp, TreeAt};
pub use warnings::warnings;

/// A locally administered OUI, which no vendor has. Test suites require a nonzero vendor ID, and no
/// program has special handling for this one.
const VENDOR_ID: u32 = 0x02_524e;

/// `config/rnicd.toml`: every key with its default and cost.
pub const ANNOTATED_DEFAULT: &str = include_str!("../../../config/rnicd.toml");

/// A validated configuration, with defaults for keys that the file does not set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Config {
    /// Identity of the device.
    pub device: Device,
    /// `[wired]`: the RoCE devices.
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
    pub ports: MappedPorts,
    /// `[limits]` and its subsections.
    pub limits: Limits,
    /// `[[user]]`: different limits and rights for users.
    pub users: Vec<Override>,
    /// `[[group]]`: different limits and rights for members of groups, in the order of the file.
    pub groups: Vec<Override>,
    /// `[[pd]]`: protection domains that sessions may share.
    pub pds: Vec<NamedPd>,
    /// `[[listen]]`: addresses that users may listen on. Without rules, every user may listen on
    /// `device.addresses`.
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
        parsed.check().map_err(|Wrong { at, why }| ConfigError::at(file, text, at, why))
    }

    /// Returns the limit of the device: the configured one, or that of the profile if it is lower.
    pub fn device_limit(&self, kind: Kind) -> u64 {
        let of_profile = self.wired.profile.limit(kind).map_or(UNLIMITED, |most| most.limit);
        self.limits.device.of(kind).min(of_profile)
    }

    /// Returns [`device_limit`](Self::device_limit) for a kind that counts objects.
    pub fn device_count(&self, kind: Kind) -> u32 {
        u32::try_from(self.device_limit(kind)).unwrap_or(u32::MAX)
    }

    /// Returns the maximum IRD and ORD of one QP.
    pub fn reads_of_qp(&self) -> (u16, u16) {
        // Fits u16: both are 14-bit fields.
        let most = |kind| u16::try_from(self.device_limit(kind)).unwrap_or(u16::MAX);
        (most(Kind::Ird), most(Kind::Ord))
    }

    /// Returns the vendor ID of the devices of a kind.
    pub fn vendor_id(&self, kind: DeviceKind) -> u32 {
        let of_section = match kind {
            DeviceKind::Iwarp => self.device.vendor_id,
            DeviceKind::Roce => self.wired.vendor_id,
        };
        of_section.or(self.keys_of(kind).and_then(|keys| keys.vendor_id)).unwrap_or(VENDOR_ID)
    }

    /// Returns the part ID of the devices of a kind.
    pub fn vendor_part_id(&self, kind: DeviceKind) -> u32 {
        let of_section = match kind {
            DeviceKind::Iwarp => self.device.vendor_part_id,
            DeviceKind::Roce => self.wired.vendor_part_id,
        };
        of_section.or(self.keys_of(kind).and_then(|keys| keys.vendor_part_id)).unwrap_or(0)
    }

    /// Returns the hardware version of all devices.
    pub fn hw_ver(&self) -> u32 {
        self.device.hw_ver.or(self.wired.profile.keys.hw_ver).unwrap_or(0)
    }

    /// Returns the values of the profile that the devices of a kind show: those of rnicd if the
    /// profile describes the others.
    pub fn shown_profile(&self, kind: DeviceKind) -> control::Profile {
        match self.keys_of(kind) {
            Some(_) => self.wired.profile.shown(&self.limits),
            None => control::Profile::default(),
        }
    }

    /// Returns the keys of the profile if it describes the devices of this kind.
    fn keys_of(&self, kind: DeviceKind) -> Option<&profile::Keys> {
        let keys = &self.wired.profile.keys;
        (keys.transport == kind).then_some(keys)
    }

    /// Keeps the running values that a reload does not change.
    pub fn keep_at_start(&mut self, running: &Config) {
        self.device.keep(&running.device);
        self.wired.keep(&running.wired);
        self.control.keep(&running.control);
        self.engine.keep(&running.engine);
        self.mpa.keep(&running.mpa);
        self.tcp.keep(&running.tcp);
        self.ports.keep(&running.ports);
        self.limits.keep(&running.limits);
        self.metrics.keep(&running.metrics);
        self.log.keep(&running.log);
    }

    /// Returns all keys except those of rules.
    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        self.device.rows(&mut rows);
        self.wired.rows(&mut rows);
        self.control.rows(&mut rows);
        self.engine.rows(&mut rows);
        self.mpa.rows(&mut rows);
        self.tcp.rows(&mut rows);
        self.ports.rows(&mut rows);
        self.limits.rows(&mut rows);
        self.metrics.rows(&mut rows);
        self.log.rows(&mut rows);
        rows
    }

    /// Returns sentences that explain the rules, each with a key that identifies the rule.
    fn rule_sentences(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for (kind, rules) in [("user", &self.users), ("group", &self.groups)] {
            for rule in rules {
                let key = format!("{kind}.{}", rule.who());
                let sentences = rule.sentences(kind, &self.limits);
                all.extend(sentences.into_iter().map(|s| (key.clone(), s)));
            }
        }
        all.extend(self.pds.iter().map(|pd| (format!("pd.{}", pd.name), pd.sentence())));
        for (kind, verb, rules) in
            [("listen", "listen on", &self.listen), ("connect", "connect to", &self.connect)]
        {
            let each = rules.iter().enumerate();
            all.extend(each.map(|(n, rule)| (format!("{kind}.{n}"), rule.sentence(verb))));
            if !rules.is_empty() {
                let others = format!("No other user may {verb} any address.");
                all.push((format!("{kind}.else"), others));
            }
        }
        all
    }
}

/// A whole file. Each value is valid, but not yet together with the others.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    device: Device,
    wired: Wired,
    control: Control,
    engine: Engine,
    mpa: Mpa,
    tcp: Tcp,
    ports: MappedPorts,
    #[serde(deserialize_with = "limits::written")]
    limits: Vec<limits::Written>,
    metrics: Metrics,
    log: Log,
    user: Vec<Override>,
    group: Vec<Override>,
    pd: Vec<PdTable>,
    listen: Vec<ListenTable>,
    connect: Vec<ConnectTable>,
}

impl File {
    fn check(self) -> Result<Config, Wrong> {
        rules::check_overrides(&self.user)?;
        rules::check_overrides(&self.group)?;
        self.wired.roce_devices().check_against(&self.device.name)?;
        Ok(Config {
            device: self.device,
            wired: self.wired,
            control: self.control,
            engine: self.engine,
            mpa: self.mpa,
            tcp: self.tcp,
            ports: self.ports,
            limits: Limits::new(&self.limits)?,
            users: self.user,
            groups: self.group,
            pds: rules::named_pds(self.pd)?,
            listen: self.listen.into_iter().map(AddressRule::from).collect(),
            connect: self.connect.into_iter().map(AddressRule::from).collect(),
            metrics: self.metrics,
            log: self.log,
        })
    }
}
