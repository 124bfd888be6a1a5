//! Giving up what the daemon was started with and has no need of.
//!
//! Identities and capabilities belong to threads on Linux: all of this happens while the process
//! has one thread, which every later one inherits from. What was asked for is read back, because a
//! drop that did not happen must not go unnoticed.

use std::io;

use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::account::Account;
use super::own_user;

/// Why privileges could not be given up.
#[derive(Debug, thiserror::Error)]
pub enum RenounceError {
    /// There is no such user.
    #[error("control.user = {name:?}: no such user")]
    NoSuchUser {
        /// The user as configured.
        name: String,
    },
    /// Only root can become somebody else.
    #[error("control.user = {name:?}: only root can become another user, and this is user {own}")]
    NotRoot {
        /// The user as configured.
        name: String,
        /// User id of this process.
        own: u32,
    },
    /// A thread was started before.
    #[error("cannot give up privileges: {0} threads run already")]
    Threads(String),
    /// Something was not given up although no call said so.
    #[error("cannot give up privileges: {field} is {value} afterwards")]
    Kept {
        /// A line of `/proc/self/status`.
        field: &'static str,
        /// Value of the line, after privileges were given up.
        value: String,
    },
    /// The operating system refused.
    #[error("cannot give up privileges: {what}: {error}")]
    System {
        /// The call that failed, in words.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// The account that a daemon started by this user is to become, if it is to become another.
pub fn account_to_become(user: Option<&str>) -> Result<Option<Account>, RenounceError> {
    let Some(name) = user else { return Ok(None) };
    let found = Account::find(name);
    let account = found.ok_or_else(|| RenounceError::NoSuchUser { name: name.to_owned() })?;
    match own_user() {
        0 => Ok(Some(account)),
        own if own == account.uid => Ok(None),
        own => Err(RenounceError::NotRoot { name: name.to_owned(), own }),
    }
}

/// Becomes `account`, which only root can, and gives up every capability for good.
pub fn become_account(account: &Account) -> Result<(), RenounceError> {
    alone()?;
    let groups: Vec<Gid> = account.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    // While there is still the capability for it.
    empty_bounding_set().map_err(system("capability bounding set"))?;
    set_thread_groups(&groups).map_err(system("groups"))?;
    set_thread_res_gid(gid, gid, gid).map_err(system("group"))?;
    set_thread_res_uid(uid, uid, uid).map_err(system("user"))?;
    // The daemon maps the memory of all its clients: other processes of its user have no business
    // there, nor has a core file.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(system("dumpable"))?;
    renounce()?;
    let status = Status::read()?;
    let thrice = |id: u32| format!("{id}\t{id}\t{id}\t{id}");
    status.says("Uid:", &thrice(account.uid))?;
    status.says("Gid:", &thrice(account.gid))?;
    status.says("CapBnd:", NO_CAPABILITIES)
}

/// Gives up every capability, and the way to new ones through programs that are set-uid. The
/// user stays, and so does the bounding set, which only a privileged process can change.
pub fn renounce() -> Result<(), RenounceError> {
    alone()?;
    let none = CapabilitySet::empty();
    let empty = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // Not if there is nothing to give up: a service manager's filter may forbid the call.
    if capabilities(None).map_err(system("capabilities"))? != empty {
        clear_ambient_capability_set().map_err(system("ambient capabilities"))?;
        set_capabilities(None, empty).map_err(system("capabilities"))?;
    }
    set_no_new_privs(true).map_err(system("no_new_privs"))?;
    let status = Status::read()?;
    for field in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        status.says(field, NO_CAPABILITIES)?;
    }
    status.says("NoNewPrivs:", "1")
}

/// Whether this is the only thread of the process.
fn alone() -> Result<(), RenounceError> {
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
            // The first number that the kernel does not know.
            Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `/proc/self/status`.
struct Status(String);

impl Status {
    fn read() -> Result<Self, RenounceError> {
        let text = std::fs::read_to_string("/proc/self/status");
        let what = "/proc/self/status, by which it is verified (is /proc mounted?)";
        Ok(Status(text.map_err(|error| RenounceError::System { what, error })?))
    }

    /// The value of a line, empty if there is no such line.
    fn field(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    }

    fn says(&self, field: &'static str, expected: &str) -> Result<(), RenounceError> {
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

    /// What one thread gives up, others keep.
    #[test]
    fn nothing_is_given_up_beside_other_threads() {
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        // On a thread of its own, should it lose something after all.
        let tried = std::thread::spawn(renounce).join();
        assert!(matches!(tried, Ok(Err(RenounceError::Threads(_)))), "{tried:?}");
        drop(go_on);
        assert!(other.join().is_ok());
    }

    #[test]
    fn what_is_kept_after_all_is_an_error() {
        let status = Status(format!("CapInh:\t{NO_CAPABILITIES}\nCapEff:\t0000000000000400\n"));
        assert!(status.says("CapInh:", NO_CAPABILITIES).is_ok());
        for (field, kept) in [("CapEff:", "0000000000000400"), ("CapBnd:", "")] {
            let said = status.says(field, NO_CAPABILITIES);
            let is_kept =
                |e: &RenounceError| matches!(e, RenounceError::Kept { value, .. } if value == kept);
            assert!(said.as_ref().is_err_and(is_kept), "{field} {said:?}");
        }
    }
}
