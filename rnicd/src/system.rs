//! What the operating system refuses, in words that name its limit.
//!
//! Whoever asks the system for something on behalf of a client turns the failure into a refusal
//! here, so that a daemon without descriptors or memory is told apart from a wrong request.

use std::io;

use rnic_core::abi::control::Refusal;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

/// The refusal for `error`, which came of trying `what`.
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
    system(what, error, format!("{key} is used up ({error})"))
}

fn system(what: &str, error: &io::Error, words: String) -> Refusal {
    Refusal::System { what: what.to_owned(), error: words, errno: number(error) }
}

/// Returns a random number from the kernel's generator, which no process can predict.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // So few bytes are returned at once or not at all.
    rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The system's number of an error; `EIO` for one that is not the system's.
pub fn number(error: &io::Error) -> u16 {
    let errno = Errno::from_io_error(error).unwrap_or(Errno::IO).raw_os_error();
    // Below 4096, as the kernel has them.
    u16::try_from(errno).unwrap_or(u16::MAX)
}

/// The first port that the kernel lets any user bind, in the network namespace of this thread.
/// Where a service manager hides the setting, the kernel's default counts.
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
    fn used_up_descriptors_are_a_limit_with_its_value() {
        let error = io::Error::from(Errno::MFILE);
        let Refusal::Limit { key, limit, .. } = refusal("cannot do it", &error) else {
            panic!("not a limit");
        };
        assert_eq!(key, "RLIMIT_NOFILE of the daemon");
        assert_eq!(Some(limit), getrlimit(Resource::Nofile).current);
    }

    #[test]
    fn other_failures_are_named_after_what_was_tried() {
        let text = |errno: Errno| refusal("cannot do it", &errno.into()).to_string();
        assert!(
            text(Errno::NOMEM).starts_with("cannot do it: memory or vm.max_map_count is used up")
        );
        assert!(text(Errno::ADDRINUSE).starts_with("cannot do it: Address already in use"));
    }
}
