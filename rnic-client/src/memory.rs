//! Checks the available memory before a shared buffer is populated.
//!
//! A kernel that overcommits memory rarely refuses an allocation. When memory runs out, it kills a
//! process, which may be a different one. So the available memory is checked before a shared buffer
//! is populated, and again after every [`POPULATE_STEP`] bytes, because other processes allocate at
//! the same time. The check is an estimate, as the kernel's own is. Without `/proc` it never fails.

use std::path::Path;

use rnic_abi::shm::POPULATE_STEP;

use crate::error::Error;

/// Fails if fewer than `wanted` bytes plus [`POPULATE_STEP`] are available.
pub(crate) fn check(wanted: u64) -> Result<(), Error> {
    verdict(wanted, available())
}

fn verdict(wanted: u64, available: Option<u64>) -> Result<(), Error> {
    match available {
        Some(available) if wanted.saturating_add(POPULATE_STEP as u64) > available => {
            Err(Error::NotEnoughMemory { wanted, available })
        }
        _ => Ok(()),
    }
}

/// Returns the bytes that this process may still allocate: the machine's available memory with
/// swap, or less if a control group limits it.
fn available() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let machine = of_machine(&read(Path::new("/proc/meminfo"))?);
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    machine.into_iter().chain(of_groups(&groups, read)).min()
}

/// Parses lines `Name:   12345 kB` of `/proc/meminfo`.
fn of_machine(meminfo: &str) -> Option<u64> {
    let of = |name: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    Some(of("MemAvailable:")?.saturating_add(of("SwapFree:").unwrap_or(0)).saturating_mul(1024))
}

/// Returns the least memory available in the process's cgroup (v2) and its ancestors, in bytes.
/// `groups` is the process's `/proc/self/cgroup`.
fn of_groups(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = Path::new("/sys/fs/cgroup").join(own);
    let around = own.ancestors().take_while(|group| group.starts_with("/sys/fs/cgroup"));
    let left = |group: &Path| {
        let number = |name| read(&group.join(name))?.trim().parse::<u64>().ok();
        // No limit if the value is "max", which does not parse.
        let limit = number("memory.max")?;
        let used =
            number("memory.current")?.saturating_sub(cached(&read(&group.join("memory.stat"))?));
        Some(limit.saturating_sub(used))
    };
    around.filter_map(left).min()
}

/// Returns the bytes of page cache in `memory.stat`, which the kernel reclaims before it kills a
/// process.
fn cached(stat: &str) -> u64 {
    let of = |name: &str| {
        stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    of("inactive_file ").unwrap_or(0).saturating_add(of("active_file ").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_memory_is_refused() {
        let step = POPULATE_STEP as u64;
        assert!(verdict(1000, Some(1000 + step)).is_ok());
        assert!(verdict(u64::MAX, None).is_ok());
        let refused = verdict(1001, Some(1000 + step));
        let Err(Error::NotEnoughMemory { wanted: 1001, available }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(available, 1000 + step);
        assert!(verdict(u64::MAX, Some(u64::MAX - 1)).is_err());
        assert!(available_here() > 0);
    }

    fn available_here() -> u64 {
        available().expect("this is Linux, with /proc")
    }

    #[test]
    fn the_machine_counts_its_swap() {
        let meminfo =
            "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:   2000 kB\nSwapFree: 30 kB\n";
        assert_eq!(of_machine(meminfo), Some(2030 * 1024));
        assert_eq!(of_machine("MemAvailable: 7 kB\n"), Some(7 * 1024));
        assert_eq!(of_machine("MemFree: 7 kB\n"), None);
    }

    #[test]
    fn tightest_cgroup_limits_memory() {
        let files = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/a/b/memory.max" => "max\n",
                "/sys/fs/cgroup/a/memory.max" => "1000\n",
                "/sys/fs/cgroup/a/memory.current" => "700\n",
                "/sys/fs/cgroup/a/memory.stat" => "anon 1\ninactive_file 50\nactive_file 5\n",
                "/sys/fs/cgroup/memory.max" => "5000",
                "/sys/fs/cgroup/memory.current" => "4999",
                "/sys/fs/cgroup/memory.stat" => "inactive_file 900\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(of_groups("1:cpu:/x\n0::/a/b\n", files), Some(355));
        assert_eq!(of_groups("0::/\n", files), Some(901));
        assert_eq!(of_groups("0::/a/b\n", |_| None), None);
        assert_eq!(of_groups("3:memory:/x\n", files), None);
    }
}
