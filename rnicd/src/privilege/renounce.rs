//! Drops the privileges that the daemon does not need.
//!
//! On Linux, ids and capabilities belong to threads, so all of this happens while the process has
//! one thread, from which later threads inherit. The result is read back and checked, because a
//! failed drop must not go unnoticed.

use std::io;

use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::account::Account;
use super::own_user;

/// Reason why privileges cannot be dropped.
#[derive(Debug, thiserror::Error)]
pub enum RenounceError {
    /// No such user exists.
    #[error("control.user = {name:?}: no such user")]
    NoSuchUser {
        /// The user as configured.
        name: String,
    },
    /// Only root can switch to another user.
    #[error(
        "control.user = {name:?}: only root can switch to another user, and this is user {own}"
    )]
    NotRoot {
        /// The user as configured.
        name: String,
        /// User id of this process.
        own: u32,
    },
    /// Another thread is running already.
    #[error("cannot drop privileges: {0} threads are already running")]
    Threads(String),
    /// A privilege remains although no system call failed.
    #[error("cannot drop privileges: {field} is {value} afterwards")]
    Kept {
        /// A line of `/proc/self/status`.
        field: &'static str,
        /// Value of the line, after privileges were dropped.
        value: String,
    },
    /// A system call failed.
    #[error("cannot drop privileges: {what}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// Returns the account that the daemon must switch to, or `None` if it keeps its user.
pub fn account_to_switch_to(user: Option<&str>) -> Result<Option<Account>, RenounceError> {
    let Some(name) = user else { return Ok(None) };
    let found = Account::find(name);
    let account = found.ok_or_else(|| RenounceError::NoSuchUser { name: name.to_owned() })?;
    match own_user() {
        0 => Ok(Some(account)),
        own if own == account.uid => Ok(None),
        own => Err(RenounceError::NotRoot { name: name.to_owned(), own }),
    }
}

/// Switches to `account`, which only root can do, and drops every capability for good.
pub fn switch_to_account(account: &Account) -> Result<(), RenounceError> {
    require_single_thread()?;
    let groups: Vec<Gid> = account.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let uid = Uid::from_raw(account.uid);
    let gid = Gid::from_raw(account.gid);
    // This needs a capability, so it comes before the change of user.
    empty_bounding_set().map_err(system("capability bounding set"))?;
    set_thread_groups(&groups).map_err(system("groups"))?;
    set_thread_res_gid(gid, gid, gid).map_err(system("group"))?;
    set_thread_res_uid(uid, uid, uid).map_err(system("user"))?;
    // The daemon maps the memory of all its clients, which other processes of its user and core
    // files must not expose.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(system("dumpable"))?;
    renounce()?;
    let status = Status::read()?;
    let all_ids = |id: u32| format!("{id}\t{id}\t{id}\t{id}");
    status.check_line("Uid:", &all_ids(account.uid))?;
    status.check_line("Gid:", &all_ids(account.gid))?;
    status.check_line("CapBnd:", NO_CAPABILITIES)
}

/// Drops every capability, and prevents set-uid programs from granting new ones. Keeps the user,
/// and the bounding set, which only a privileged process can change.
pub fn renounce() -> Result<(), RenounceError> {
    require_single_thread()?;
    let none = CapabilitySet::empty();
    let empty = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // Skip this if there is nothing to drop: a service manager's filter may forbid the call.
    if capabilities(None).map_err(system("capabilities"))? != empty {
        clear_ambient_capability_set().map_err(system("ambient capabilities"))?;
        set_capabilities(None, empty).map_err(system("capabilities"))?;
    }
    set_no_new_privs(true).map_err(system("no_new_privs"))?;
    let status = Status::read()?;
    for field in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        status.check_line(field, NO_CAPABILITIES)?;
    }
    status.check_line("NoNewPrivs:", "1")
}

/// Returns an error unless this is the only thread of the process.
fn require_single_thread() -> Result<(), RenounceError> {
    match Status::read()?.field("Threads:") {
        "1" => Ok(()),
        threads => Err(RenounceError::Threads(threads.to_owned())),
    }
}

fn empty_bounding_set() -> rustix::io::Result<()> {
    for capability in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << capability))
        {
            Ok(()) => {}
            // The first number that the kernel does not support.
            Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Content of `/proc/self/status`.
struct Status(String);

impl Status {
    fn read() -> Result<Self, RenounceError> {
        let text = std::fs::read_to_string("/proc/self/status");
        let what = "/proc/self/status, needed to verify the result (is /proc mounted?)";
        Ok(Status(text.map_err(|error| RenounceError::System { what, error })?))
    }

    /// Returns the value of a line, or an empty string if there is no such line.
    fn field(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    }

    fn check_line(&self, field: &'static str, expected: &str) -> Result<(), RenounceError> {
        match self.field(field) {
            value if value == expected => Ok(()),
            value => Err(RenounceError::Kept { field, value: value.to_owned() }),
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> RenounceError {
    move |error| RenounceError::System { what, error: error.into() }
}

const NO_CAPABILITIES: &str = "0000000000000000";

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread can only drop its own privileges.
    #[test]
    fn renounce_fails_with_other_threads() {
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        // In a separate thread, in case it drops something after all.
        let tried = std::thread::spawn(renounce).join();
        assert!(matches!(tried, Ok(Err(RenounceError::Threads(_)))), "{tried:?}");
        drop(go_on);
        assert!(other.join().is_ok());
    }

    #[test]
    fn kept_privilege_is_an_error() {
        let status = Status(format!("CapInh:\t{NO_CAPABILITIES}\nCapEff:\t0000000000000400\n"));
        assert!(status.check_line("CapInh:", NO_CAPABILITIES).is_ok());
        for (field, kept) in [("CapEff:", "0000000000000400"), ("CapBnd:", "")] {
            let said = status.check_line(field, NO_CAPABILITIES);
            let is_kept =
                |e: &RenounceError| matches!(e, RenounceError::Kept { value, .. } if value == kept);
            assert!(said.as_ref().is_err_and(is_kept), "{field} {said:?}");
        }
    }
}
