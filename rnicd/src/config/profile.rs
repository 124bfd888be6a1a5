//! Profiles: adapters and drivers that the devices resemble.
//!
//! A profile is a TOML file whose keys have the names of `ibv_query_device(3)` and
//! `ibv_query_port(3)`. A key that the file does not set has the value of rnicd. A maximum lowers
//! the limit of the daemon, and never raises it: programs can use what they are shown.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use rnic_abi::abi::control::{self, DeviceKind};
use rustix::io::Errno;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::error::ConfigError;
use super::kind::Kind;
use super::limits::Limits;
use super::profile_rules::ProfileRules;
use super::roce_devices::check_device;
use super::section::{Key, Row, Section, in_range, optional, read, section, word};
use super::text;

section! {
    /// The keys of a profile.
    "profile" Keys

    transport: DeviceKind = word(DeviceKind::Roce, TRANSPORTS, transport_name),
        "the devices that the profile describes";
    device: Option<String> = optional("-", |name: &String| check_device(name), String::clone),
        "default name of the RoCE device";
    gid_layout: GidLayout = word(GidLayout::Addresses, GidLayout::ALL, GidLayout::name),
        "entries of the GID table and their order";
    fw_ver: Option<String> = optional("-", |text: &String| check_fw_ver(text), String::clone),
        "firmware version";
    vendor_id: Option<u32> = most(0..=(1 << 24) - 1), "vendor ID (OUI)";
    vendor_part_id: Option<u32> = most(0..=u32::MAX), "part ID of the vendor";
    hw_ver: Option<u32> = most(0..=u32::MAX), "hardware version";
    max_mr_size: Option<u64> = wide(), "bytes of a memory region";
    page_size_cap: Option<u64> = wide(), "page sizes, as a mask";
    device_cap_flags: Option<u32> = most(0..=u32::MAX), "capabilities, as a mask";
    atomic_cap: AtomicCap = word(AtomicCap::Hca, AtomicCap::ALL, AtomicCap::name),
        "atomics";
    max_qp: Option<u32> = most(0..=u32::MAX), "queue pairs";
    max_qp_wr: Option<u32> = most(1..=u32::MAX), "requests of a queue of a QP";
    max_sge: Option<u32> = most(1..=u32::MAX), "SGEs of a request of a QP";
    max_sge_rd: Option<u32> = most(1..=u32::MAX), "SGEs of a Read";
    max_inline_data: Option<u32> = most(0..=u32::MAX), "bytes of inline data of a request";
    max_cq: Option<u32> = most(0..=u32::MAX), "completion queues";
    max_cqe: Option<u32> = most(1..=u32::MAX), "entries of a CQ";
    max_mr: Option<u32> = most(0..=u32::MAX), "memory regions";
    max_pd: Option<u32> = most(0..=u32::MAX), "protection domains";
    max_mw: Option<u32> = most(0..=u32::MAX), "memory windows";
    max_ah: Option<u32> = most(0..=u32::MAX), "address handles of a process";
    max_srq: Option<u32> = most(0..=u32::MAX), "shared receive queues";
    max_srq_wr: Option<u32> = most(1..=u32::MAX), "receives of an SRQ";
    max_srq_sge: Option<u32> = most(1..=u32::MAX), "SGEs of a receive of an SRQ";
    max_qp_rd_atom: Option<u32> = most(0..=u32::MAX), "outstanding Reads and atomics of the peer";
    max_qp_init_rd_atom: Option<u32> = most(0..=u32::MAX), "outstanding Reads and atomics";
    max_res_rd_atom: Option<u32> = most(0..=u32::MAX),
        "outstanding Reads and atomics of all peers";
    local_ca_ack_delay: Option<u8> = most(0..=31), "delay of acknowledgements, as an exponent";
    max_mtu: Option<u32> = optional("-", check_mtu, u32::to_string), "largest path MTU in bytes";
    active_mtu: Option<u32> = optional("-", check_mtu, u32::to_string),
        "largest active path MTU in bytes";
    max_msg_sz: Option<u32> = most(0..=u32::MAX), "bytes of a message";
    gid_tbl_len: Option<u32> = most(1..=4096), "least entries of the GID table";
    active_width: Option<u8> = most(0..=u8::MAX), "link width, as in ibv_query_port(3)";
    active_speed: Option<u8> = most(0..=u8::MAX), "link speed, as in ibv_query_port(3)";
    cq_overrun: CqOverrun = word(CqOverrun::Wait, CqOverrun::ALL, CqOverrun::name),
        "a send completion that finds its CQ full";
    rules: ProfileRules =
        Key::new(ProfileRules::default(), ProfileRules::new, ProfileRules::to_string),
        "fault rules of all programs, for the styles of completions and events";
    errno: Errnos = Key::new(Errnos::default(), Errnos::new, Errnos::to_string),
        "error numbers of requests above a maximum";
}

/// A profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    name: String,
    /// The keys of the file.
    pub keys: Keys,
}

/// A maximum of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maximum {
    /// Its key.
    pub key: &'static str,
    /// Its value.
    pub limit: u64,
    /// Error number of a request above it.
    pub errno: u16,
}

impl Default for Profile {
    fn default() -> Self {
        Profile { name: "rnicd".to_owned(), keys: Keys::default() }
    }
}

impl Profile {
    /// The built-in profiles, each with its text, in the order in which `rnicctl` lists them.
    pub const BUILT_IN: &[(&str, &str)] = &[
        ("rnicd", include_str!("../../../config/profiles/rnicd.toml")),
        ("rxe", include_str!("../../../config/profiles/rxe.toml")),
        ("siw", include_str!("../../../config/profiles/siw.toml")),
        ("mlx5", include_str!("../../../config/profiles/mlx5.toml")),
        ("mlx4", include_str!("../../../config/profiles/mlx4.toml")),
        ("irdma", include_str!("../../../config/profiles/irdma.toml")),
    ];

    /// Returns the text of a profile: of the built-in one of this name, or of the file if `name`
    /// contains a slash.
    ///
    /// # Errors
    ///
    /// The reason: there is no such profile, or the file cannot be read.
    pub fn text(name: &str) -> Result<String, String> {
        if name.contains('/') {
            return text::read(Path::new(name)).map_err(|error| error.to_string());
        }
        let built_in = Profile::BUILT_IN.iter().find(|(known, _)| *known == name);
        built_in.map(|(_, text)| (*text).to_owned()).ok_or_else(|| {
            let known: Vec<&str> = Profile::BUILT_IN.iter().map(|(name, _)| *name).collect();
            let known = known.join(", ");
            format!("no profile {name:?}; known are {known}, and files by an absolute path")
        })
    }

    /// Returns the built-in profile of this name, or reads the file if `name` is an absolute path.
    ///
    /// # Errors
    ///
    /// The reason, with file, line and key if the file is invalid.
    pub fn load(name: &str) -> Result<Self, String> {
        if name.contains('/') && !Path::new(name).is_absolute() {
            return Err("must be the name of a profile, or the absolute path of a file".to_owned());
        }
        if name.len() > LONGEST_NAME {
            return Err(format!("the path is too long (at most {LONGEST_NAME} bytes)"));
        }
        let text = Profile::text(name)?;
        Profile::parse(name, &text).map_err(|error| error.to_string())
    }

    /// Validates the text of the file `name`.
    pub fn parse(name: &str, text: &str) -> Result<Self, ConfigError> {
        let keys = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            ConfigError::at(Path::new(name), text, at, error.message())
        })?;
        Ok(Profile { name: name.to_owned(), keys })
    }

    /// Returns the name, which is a path for the profile of a file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the maximum of a kind of objects, or of one object, if the profile has one.
    pub fn limit(&self, kind: Kind) -> Option<Maximum> {
        let keys = &self.keys;
        let (key, value) = match kind {
            Kind::Qps => ("max_qp", keys.max_qp),
            Kind::Cqs => ("max_cq", keys.max_cq),
            Kind::Mrs => ("max_mr", keys.max_mr),
            Kind::Pds => ("max_pd", keys.max_pd),
            Kind::Windows => ("max_mw", keys.max_mw),
            Kind::Srqs => ("max_srq", keys.max_srq),
            Kind::QueueDepth => ("max_qp_wr", keys.max_qp_wr),
            Kind::Sges => ("max_sge", keys.max_sge),
            Kind::InlineBytes => ("max_inline_data", keys.max_inline_data),
            Kind::EntriesOfCq => ("max_cqe", keys.max_cqe),
            Kind::Ird => ("max_qp_rd_atom", keys.max_qp_rd_atom),
            Kind::Ord => ("max_qp_init_rd_atom", keys.max_qp_init_rd_atom),
            _ => return None,
        };
        self.maximum(key, value.map(u64::from), kind.row().counted)
    }

    /// Returns the maximum receives of an SRQ.
    pub fn srq_wr(&self) -> Option<Maximum> {
        self.maximum("max_srq_wr", self.keys.max_srq_wr.map(u64::from), false)
    }

    /// Returns the maximum SGEs of a receive of an SRQ.
    pub fn srq_sge(&self) -> Option<Maximum> {
        self.maximum("max_srq_sge", self.keys.max_srq_sge.map(u64::from), false)
    }

    /// Returns the maximum length of a region.
    pub fn mr_size(&self) -> Option<Maximum> {
        self.maximum("max_mr_size", self.keys.max_mr_size, false)
    }

    fn maximum(&self, key: &'static str, limit: Option<u64>, counts: bool) -> Option<Maximum> {
        let errno = self.keys.errno.of(key, counts);
        limit.map(|limit| Maximum { key, limit, errno })
    }

    /// Returns the values for the library, with the limits of the daemon where those are lower.
    pub fn shown(&self, limits: &Limits) -> control::Profile {
        let keys = &self.keys;
        let own = control::Profile::default();
        let byte = |value: Option<u32>, own: u8| {
            value.map_or(own, |value| u8::try_from(value).unwrap_or(u8::MAX).min(own))
        };
        let sges = u8::try_from(limits.device.of(Kind::Sges)).unwrap_or(u8::MAX);
        control::Profile {
            name: self.name.clone(),
            kind: keys.transport,
            fw_ver: keys.fw_ver.clone().unwrap_or_default(),
            max_mr_size: keys.max_mr_size.unwrap_or(own.max_mr_size),
            page_size_cap: keys.page_size_cap.unwrap_or(own.page_size_cap),
            device_cap_flags: keys.device_cap_flags.unwrap_or(own.device_cap_flags),
            atomics: keys.atomic_cap == AtomicCap::Hca,
            max_sge_rd: byte(keys.max_sge_rd, own.max_sge_rd),
            max_srq_sge: byte(keys.max_srq_sge, sges),
            max_res_rd_atom: keys.max_res_rd_atom.unwrap_or(own.max_res_rd_atom),
            max_ah: keys.max_ah.unwrap_or(own.max_ah).min(own.max_ah),
            max_ah_errno: keys.errno.of("max_ah", true),
            local_ca_ack_delay: keys.local_ca_ack_delay.unwrap_or(own.local_ca_ack_delay),
            max_mtu: keys.max_mtu.unwrap_or(own.max_mtu),
            active_mtu: keys.active_mtu.or(keys.max_mtu).unwrap_or(own.active_mtu),
            max_msg_sz: keys.max_msg_sz.unwrap_or(own.max_msg_sz).min(own.max_msg_sz),
            gid_tbl_len: keys.gid_tbl_len.unwrap_or(own.gid_tbl_len),
            gid_v1: keys.gid_layout == GidLayout::KernelWithV1,
            active_width: keys.active_width.unwrap_or(own.active_width),
            active_speed: keys.active_speed.unwrap_or(own.active_speed),
            sends_overrun_cqs: keys.cq_overrun == CqOverrun::Error,
        }
    }
}

/// Entries of the GID tables and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidLayout {
    /// The addresses of the host: IPv4, then IPv6, loopback last.
    Addresses,
    /// As in the kernel: by interface, link-local first, loopback last.
    Kernel,
    /// Like `Kernel`, each GID as RoCE v1 and as RoCE v2.
    KernelWithV1,
}

impl GidLayout {
    const ALL: &[Self] = &[GidLayout::Addresses, GidLayout::Kernel, GidLayout::KernelWithV1];

    fn name(self) -> &'static str {
        match self {
            GidLayout::Addresses => "addresses",
            GidLayout::Kernel => "kernel",
            GidLayout::KernelWithV1 => "kernel-v1",
        }
    }
}

/// `atomic_cap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicCap {
    /// QPs do not support atomics.
    None,
    /// Atomic among the QPs of the device.
    Hca,
}

impl AtomicCap {
    const ALL: &[Self] = &[AtomicCap::None, AtomicCap::Hca];

    fn name(self) -> &'static str {
        match self {
            AtomicCap::None => "none",
            AtomicCap::Hca => "hca",
        }
    }
}

/// Handling of a send completion that finds its CQ full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqOverrun {
    /// The send queue waits for a free entry.
    Wait,
    /// The CQ fails, and its QPs move to ERR.
    Error,
}

impl CqOverrun {
    const ALL: &[Self] = &[CqOverrun::Wait, CqOverrun::Error];

    fn name(self) -> &'static str {
        match self {
            CqOverrun::Wait => "wait",
            CqOverrun::Error => "error",
        }
    }
}

const TRANSPORTS: &[DeviceKind] = &[DeviceKind::Roce, DeviceKind::Iwarp];

fn transport_name(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Roce => "roce",
        DeviceKind::Iwarp => "iwarp",
    }
}

/// Error numbers by the key of the maximum.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Errnos(BTreeMap<String, &'static str>);

impl Errnos {
    fn new(written: BTreeMap<String, String>) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for (key, name) in written {
            if !key.starts_with("max_") || !Keys::KEYS.contains(&key.as_str()) {
                return Err(format!("{key} is not the key of a maximum"));
            }
            let known = ERRNOS.iter().find(|(known, _)| *known == name);
            let (name, _) = known.ok_or_else(|| {
                let known: Vec<&str> = ERRNOS.iter().map(|(name, _)| *name).collect();
                format!("{key} = {name:?} is not one of {}", known.join(", "))
            })?;
            all.insert(key, *name);
        }
        Ok(Errnos(all))
    }

    /// Returns the number for a key. The default is `ENOMEM` for a number of objects, and `EINVAL`
    /// for a size.
    fn of(&self, key: &str, counts: bool) -> u16 {
        let default = if counts { "ENOMEM" } else { "EINVAL" };
        let name = self.0.get(key).copied().unwrap_or(default);
        let known = ERRNOS.iter().find(|(known, _)| *known == name);
        let number = known.map_or(Errno::INVAL, |(_, errno)| *errno).raw_os_error();
        // Errno values are below 4096.
        u16::try_from(number).unwrap_or(u16::MAX)
    }
}

impl std::fmt::Display for Errnos {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<String> = self.0.iter().map(|(key, name)| format!("{key} = {name}")).collect();
        f.write_str(&all.join(", "))
    }
}

const ERRNOS: &[(&str, Errno)] = &[
    ("EAGAIN", Errno::AGAIN),
    ("EBUSY", Errno::BUSY),
    ("EINVAL", Errno::INVAL),
    ("ENOMEM", Errno::NOMEM),
    ("ENOSPC", Errno::NOSPC),
    ("EOPNOTSUPP", Errno::OPNOTSUPP),
    ("EOVERFLOW", Errno::OVERFLOW),
];

/// Declares a number without a default.
fn most<T: PartialOrd + std::fmt::Display + 'static>(
    range: RangeInclusive<T>,
) -> Key<Option<T>, T> {
    optional("-", move |n: &T| in_range(n, &range), T::to_string)
}

/// Declares a 64-bit number without a default.
fn wide() -> Key<Option<u64>, Wide> {
    Key::new(None, |Wide(n)| Ok(Some(n)), |n| n.map_or("-".to_owned(), |n| format!("{n:#x}")))
}

/// A 64-bit number. TOML has only signed ones, so those from 2^63 are texts in hexadecimal.
struct Wide(u64);

impl<'de> Deserialize<'de> for Wide {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct NumberOrHex;
        impl Visitor<'_> for NumberOrHex {
            type Value = Wide;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number from 0, or one in hexadecimal such as \"0xfffffffffffff000\"")
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Wide, E> {
                let unexpected = serde::de::Unexpected::Signed(n);
                u64::try_from(n).map(Wide).map_err(|_| E::invalid_value(unexpected, &self))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Wide, E> {
                let digits = text.strip_prefix("0x").filter(|digits| !digits.starts_with('+'));
                let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
                let unexpected = serde::de::Unexpected::Str(text);
                number.map(Wide).ok_or_else(|| E::invalid_value(unexpected, &self))
            }
        }
        d.deserialize_any(NumberOrHex)
    }
}

fn check_mtu(bytes: &u32) -> Result<(), String> {
    match bytes {
        256 | 512 | 1024 | 2048 | 4096 => Ok(()),
        _ => Err("must be 256, 512, 1024, 2048 or 4096".to_owned()),
    }
}

/// Checks a text for `ibv_device_attr::fw_ver`, of 64 bytes with a terminating zero.
fn check_fw_ver(text: &str) -> Result<(), String> {
    if (1..64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic()) {
        Ok(())
    } else {
        Err("must be 1 to 63 ASCII characters without spaces".to_owned())
    }
}

/// Maximum length of a name or path in bytes. The description of the devices must fit one control
/// message.
const LONGEST_NAME: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let parsed = Profile::parse("/p.toml", text);
        parsed.map_or_else(|error| error.to_string(), |profile| panic!("{profile:?}"))
    }

    #[test]
    fn built_in_profiles_are_valid() {
        for (name, text) in Profile::BUILT_IN {
            let profile = Profile::load(name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(profile.name(), *name);
            assert!(text.starts_with("# "), "{name}: the sources of the values");
        }
        assert_eq!(Profile::load("rnicd").ok(), Some(Profile::default()));
    }

    #[test]
    fn unset_keys_have_the_values_of_rnicd() {
        let own = control::Profile::default();
        let sges = 16;
        let shown = Profile::default().shown(&Limits::default());
        assert_eq!(shown, control::Profile { max_srq_sge: sges, ..own });
    }

    #[test]
    fn profile_never_raises_a_limit() {
        let text = "max_sge = 32\nmax_srq_sge = 31\nmax_ah = 2147483647\nmax_msg_sz = 2147483648\n";
        let profile = Profile::parse("/p.toml", text).unwrap_or_else(|e| panic!("{e}"));
        let shown = profile.shown(&Limits::default());
        assert_eq!((shown.max_srq_sge, shown.max_ah, shown.max_msg_sz), (16, 65_535, 1 << 30));
    }

    #[test]
    fn maxima_have_keys_and_error_numbers() {
        let text = "max_qp = 8\nmax_cqe = 9\nmax_mr = 10\nerrno = { max_mr = \"EOVERFLOW\" }\n";
        let profile = Profile::parse("/p.toml", text).unwrap_or_else(|e| panic!("{e}"));
        let of = |kind| profile.limit(kind).map(|m| (m.key, m.limit, i32::from(m.errno)));
        assert_eq!(of(Kind::Qps), Some(("max_qp", 8, Errno::NOMEM.raw_os_error())));
        assert_eq!(of(Kind::EntriesOfCq), Some(("max_cqe", 9, Errno::INVAL.raw_os_error())));
        assert_eq!(of(Kind::Mrs), Some(("max_mr", 10, Errno::OVERFLOW.raw_os_error())));
        assert_eq!((of(Kind::Cqs), of(Kind::Sessions), profile.srq_wr()), (None, None, None));
    }

    #[test]
    fn wide_numbers_may_be_hexadecimal_text() {
        let text = "max_mr_size = 4096\npage_size_cap = \"0xfffffffffffff000\"\n";
        let keys = Profile::parse("/p.toml", text).unwrap_or_else(|e| panic!("{e}")).keys;
        assert_eq!((keys.max_mr_size, keys.page_size_cap), (Some(4096), Some(!0xfff)));
    }

    #[test]
    fn wrong_profiles_are_refused_with_position() {
        for (text, why) in [
            ("max_qps = 1\n", "/p.toml:1:1: max_qps = 1: unknown field `max_qps`, expected one of"),
            ("\nmax_sge = 0\n", "/p.toml:2:11: max_sge = 0: must be from 1 to 4294967295"),
            ("max_qp = -1\n", "/p.toml:1:10: max_qp = -1: "),
            ("max_qp = \"8\"\n", "/p.toml:1:10: max_qp = \"8\": "),
            ("active_mtu = 1500\n", "/p.toml:1:14: active_mtu = 1500: must be 256, 512, 1024"),
            ("page_size_cap = \"4k\"\n", "/p.toml:1:17: page_size_cap = \"4k\": invalid value"),
            ("transport = \"ib\"\n", "/p.toml:1:13: transport = \"ib\": unknown variant `ib`"),
            ("device = \"a b\"\n", "/p.toml:1:10: device = \"a b\": must be 1 to 63 letters"),
            ("fw_ver = \"\"\n", "/p.toml:1:10: fw_ver = \"\": must be 1 to 63"),
            ("errno = { max_q = \"EIO\" }\n", "max_q is not the key of a maximum"),
            ("errno = { max_qp = \"EIO\" }\n", "max_qp = \"EIO\" is not one of EAGAIN, EBUSY"),
            ("max_qp = 1\nmax_qp = 2\n", "/p.toml:2:1: "),
        ] {
            let said = refused(text);
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    #[test]
    fn unknown_and_missing_profiles_are_named() {
        let said = |name: &str| Profile::load(name).err().unwrap_or_default();
        assert!(said("mlx9").starts_with("no profile \"mlx9\"; known are rnicd, rxe, siw, mlx5"));
        assert!(said("./p.toml").contains("absolute path"), "{}", said("./p.toml"));
        assert!(said("/nonexistent/p.toml").contains("/nonexistent/p.toml: No such file"));
        assert!(said(&format!("/{}", "x".repeat(255))).contains("too long"));
    }
}
