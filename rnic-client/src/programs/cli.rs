//! Command-line manners shared by the programs: exit codes, sizes, addresses, progress bars.

use std::fmt::Display;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use rustix::net::{AddressFamily, SocketType};

/// The exit code of a program: 0, or 1 after saying on standard error what went wrong. (A wrong
/// command line is 2, and clap's business.)
pub fn exit_code<E: Display>(program: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{program}: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Parses `HOST:PORT`; a name is looked up and its first address taken.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    addresses(text).map(|all| all[0])
}

/// Parses `HOST:PORT`: an IPv4 address, an IPv6 address in brackets, or a name, which may have several
/// addresses; at least one comes out. A link-local address needs its interface, by name or number:
/// `[fe80::1%eth0]:7471`, `[fe80::1%2]:7471`.
pub fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    if let Some((ip, zone, port)) = with_zone(text) {
        let ip: Ipv6Addr =
            ip.parse().map_err(|_| format!("{text:?}: {ip:?} is no IPv6 address"))?;
        let port = port.parse().map_err(|_| format!("{text:?}: {port:?} is no port"))?;
        return Ok(vec![SocketAddrV6::new(ip, port, 0, interface(zone)?).into()]);
    }
    let all: Vec<SocketAddr> =
        text.to_socket_addrs().map_err(|e| format!("{text:?} is no HOST:PORT: {e}"))?.collect();
    match all.first() {
        None => Err(format!("{text:?} has no address")),
        Some(SocketAddr::V6(a)) if a.ip().is_unicast_link_local() && a.scope_id() == 0 => {
            Err(format!("{text:?} is link-local: say on which interface, as in [{}%eth0]", a.ip()))
        }
        Some(_) => Ok(all),
    }
}

/// The parts of `[IP%ZONE]:PORT`.
fn with_zone(text: &str) -> Option<(&str, &str, &str)> {
    let (host, port) = text.strip_prefix('[')?.rsplit_once("]:")?;
    let (ip, zone) = host.split_once('%')?;
    Some((ip, zone, port))
}

/// The number of a network interface of this process's namespace.
fn interface(zone: &str) -> Result<u32, String> {
    if let Ok(number) = zone.parse::<NonZeroU32>() {
        return Ok(number.get());
    }
    rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)
        .and_then(|socket| rustix::net::netdevice::name_to_index(socket, zone))
        .map_err(|_| format!("there is no network interface {zone:?} here"))
}

/// Parses a number of octets: `4096`, `64KiB`, `1MiB`, `2GiB`.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        _ => return Err(format!("{text:?} is no size; say 4096, 64KiB, 1MiB or 2GiB")),
    };
    let number: u64 =
        number.parse().map_err(|e| format!("{text:?} does not begin with a number: {e}"))?;
    number.checked_mul(scale).ok_or_else(|| format!("{text} is more than 2^64 octets"))
}

/// [`size`], for sizes that must fit 32 bits.
pub fn size32(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| format!("{text} is above 4GiB"))
}

/// Parses a number of seconds, which may have a fraction.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|e| format!("{text:?} is no number: {e}"))?;
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{text} seconds: {e}"))
}

/// A bar for `total` octets on standard error; nothing is drawn when that is no terminal.
pub fn byte_bar(total: u64, what: &str) -> ProgressBar {
    bar(total, what, BYTE_BAR)
}

/// A bar for `total` steps on standard error; nothing is drawn when that is no terminal.
pub fn step_bar(total: u64, what: &str) -> ProgressBar {
    bar(total, what, STEP_BAR)
}

/// A bar for 100 percent on standard error; nothing is drawn when that is no terminal.
pub fn percent_bar(what: &str) -> ProgressBar {
    bar(100, what, PERCENT_BAR)
}

/// Octets and seconds in words: `12.0 MiB in 0.01 s (1.17 GiB/s)`.
pub fn throughput(octets: u64, seconds: f64) -> String {
    let size = BinaryBytes(octets);
    if seconds > 0.0 {
        // Saturates; a rate above 2^64 octets per second is of no interest.
        let rate = BinaryBytes((octets as f64 / seconds) as u64);
        format!("{size} in {seconds:.2} s ({rate}/s)")
    } else {
        format!("{size} in no time")
    }
}

/// Text that a peer sent, without anything a terminal could take for a command.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}

fn bar(total: u64, what: &str, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(printable(what));
    // The templates are the constants below, which a test parses.
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

const BYTE_BAR: &str = "{msg:16!} {wide_bar} {binary_bytes:>10}/{binary_total_bytes} \
                        {binary_bytes_per_sec:>14} {eta:>4}";
const STEP_BAR: &str = "{msg:16!} {wide_bar} {pos}/{len} {per_sec} {eta:>4}";
const PERCENT_BAR: &str = "{msg:16!} {wide_bar} {percent:>3}%";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_bounds() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64KiB"), Ok(65536));
        assert_eq!(size("2 GiB"), Ok(2 << 30));
        assert_eq!(size("16777215TiB"), Ok(16_777_215 << 40));
        for wrong in ["", "KiB", "1kb", "-1", "16777216TiB", "1.5MiB", "99999999999999999999"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(size32("4GiB").is_err());
        assert_eq!(size32("1MiB"), Ok(1 << 20));
    }

    #[test]
    fn seconds_may_have_a_fraction_but_no_sign() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "-1", "nan", "inf", "1s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_need_a_port() {
        assert_eq!(address("127.0.0.1:80"), Ok(([127, 0, 0, 1], 80).into()));
        assert_eq!(address("[::1]:80").map(|a| a.is_ipv6()), Ok(true));
        assert!(address("127.0.0.1").is_err());
        assert!(address("127.0.0.1:99999").is_err());
    }

    #[test]
    fn link_local_addresses_have_their_interface() {
        let scoped = |scope| SocketAddrV6::new([0xFE80, 0, 0, 0, 0, 0, 0, 1].into(), 80, 0, scope);
        assert_eq!(address("[fe80::1%2]:80"), Ok(scoped(2).into()));
        // The first interface of every namespace.
        assert_eq!(address("[fe80::1%lo]:80"), Ok(scoped(1).into()));
        let e = address("[fe80::1%no-such]:80").unwrap_err();
        assert_eq!(e, "there is no network interface \"no-such\" here");
        let e = address("[fe80::1]:80").unwrap_err();
        assert!(e.contains("is link-local: say on which interface"), "{e}");
        for wrong in ["[fe80::1%2]", "[fe80::1%]:80", "[fe80::1%0]:80", "[x%2]:80", "[::1%2]:x"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn peers_cannot_talk_to_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\u{FFFD}[2Jb\u{FFFD}c");
    }

    #[test]
    fn templates_of_bars_are_valid() {
        for template in [BYTE_BAR, STEP_BAR, PERCENT_BAR] {
            assert!(ProgressStyle::with_template(template).is_ok());
        }
        assert_eq!(throughput(1 << 20, 0.5), "1.00 MiB in 0.50 s (2.00 MiB/s)");
    }
}
