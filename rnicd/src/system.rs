//! Refusals for system errors, with the name of the exhausted limit.
//!
//! Callers that use system resources for a client convert failures here, so that the client can
//! distinguish a daemon without descriptors or memory from an invalid request.

use std::io;

use rnic_abi::abi::control::Refusal;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

/// Returns the refusal for an `error` of the operation `what`.
pub fn refusal(what: &str, error: &io::Error) -> Refusal {
    let key = match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "RLIMIT_NOFILE of the daemon",
        Some(Errno::NFILE) => "fs.file-max",
        Some(Errno::NOMEM) => "memory or vm.max_map_count",
        _ => return system(what, error, error.to_string()),
    };
    if key.starts_with("RLIMIT_NOFILE")
        && let Some(limit) = getrlimit(Resource::Nofile).current
    {
        return Refusal::Limit { key: key.to_owned(), limit, used: limit, wanted: 1 };
    }
    system(what, error, format!("{key} exhausted ({error})"))
}

fn system(what: &str, error: &io::Error, words: String) -> Refusal {
    Refusal::System { what: what.to_owned(), error: words, errno: number(error) }
}

/// Returns a random number from the kernel's generator, which no process can predict.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // The kernel returns up to 256 bytes at once or not at all.
    rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Returns the errno of an error, or `EIO` for an error that is not the system's.
pub fn number(error: &io::Error) -> u16 {
    let errno = Errno::from_io_error(error).unwrap_or(Errno::IO).raw_os_error();
    // Errno values are below 4096.
    u16::try_from(errno).unwrap_or(u16::MAX)
}

/// Returns the first port that every user may bind, in the network namespace of this thread. If the
/// setting is not readable, as under some service managers, returns the kernel's default.
pub fn first_unprivileged_port() -> u16 {
    let setting = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    setting.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(PROT_SOCK)
}

/// `PROT_SOCK` of the kernel.
const PROT_SOCK: u16 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_descriptors_show_the_limit() {
        let error = io::Error::from(Errno::MFILE);
        let Refusal::Limit { key, limit, .. } = refusal("cannot do it", &error) else {
            panic!("not a limit");
        };
        assert_eq!(key, "RLIMIT_NOFILE of the daemon");
        assert_eq!(Some(limit), getrlimit(Resource::Nofile).current);
    }

    #[test]
    fn other_errors_name_the_operation() {
        let text = |errno: Errno| refusal("cannot do it", &errno.into()).to_string();
        assert!(
            text(Errno::NOMEM).starts_with("cannot do it: memory or vm.max_map_count exhausted")
        );
        assert!(text(Errno::ADDRINUSE).starts_with("cannot do it: Address already in use"));
    }
}
