//! The sandbox of `config/rnicd.service`, applied to a daemon without a service manager.
//!
//! Every directive of `[Service]` is either applied, by the tools of util-linux and by seccomp
//! filters, or listed in `ARGUED` with the reason why it is not. Any other directive or unknown
//! value fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value, json};

/// Directives that are not applied, with reasons.
const ARGUED: &[(&str, &str)] = &[
    ("Type", "the test reads the notifications"),
    ("ExecStart", "the test starts the daemon"),
    ("ExecReload", "the test reloads the daemon"),
    ("Restart", "done by the manager"),
    ("RestartPreventExitStatus", "another test covers the exit codes"),
    ("WatchdogSec", "another test covers the watchdog"),
    ("User", "replaced by an ID without an entry"),
    ("Group", "replaced by an ID without an entry"),
    ("RuntimeDirectory", "replaced by the folder of the test"),
    ("RuntimeDirectoryMode", "replaced by the folder of the test"),
    ("RuntimeDirectoryPreserve", "done by the manager after the daemon has ended"),
    ("RemoveIPC", "done by the manager after the daemon has ended"),
    ("DevicePolicy", "needs a control group; PrivateDevices leaves no device to open"),
];

/// Returns the directives of a section, in order.
pub fn directives<'t>(unit: &'t str, section: &str) -> Vec<(&'t str, &'t str)> {
    let header = format!("[{section}]");
    let lines = unit.lines().skip_while(|line| *line != header).skip(1);
    let lines = lines.take_while(|line| !line.starts_with('['));
    lines.filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('=')).collect()
}

/// The restrictions of a unit.
#[derive(Default)]
pub struct Sandbox {
    /// Shell commands that run in a mount namespace. `$0` is the directory of the test.
    mounts: String,
    /// Options of `unshare` in addition to `--mount`.
    namespaces: Vec<&'static str>,
    /// Options of `prlimit`.
    limits: Vec<(&'static str, u64)>,
    umask: String,
    /// Options of `setpriv`.
    privileges: Vec<&'static str>,
    /// Seccomp filters by name, in the order in which they are installed.
    filters: Map<String, Value>,
}

impl Sandbox {
    /// Collects every directive of `[Service]`.
    pub fn of(unit: &str) -> Sandbox {
        let mut sandbox = Sandbox { umask: "0022".to_owned(), ..Sandbox::default() };
        let mut calls: Option<BTreeSet<String>> = None;
        for (key, value) in directives(unit, "Service") {
            if ARGUED.iter().any(|(argued, _)| *argued == key) {
                continue;
            }
            match (key, value) {
                ("SystemCallFilter", list) => {
                    calls = Some(allowed(calls.take(), list));
                }
                ("SystemCallErrorNumber", "EPERM") => {}
                _ => sandbox.apply(key, value),
            }
        }
        if let Some(calls) = calls.filter(|calls| !calls.is_empty()) {
            let rules = calls.iter().map(|call| json!({ "syscall": call })).collect();
            sandbox.filter("z-calls", "allow", json!({ "errno": EPERM }), rules);
        }
        sandbox
    }

    fn apply(&mut self, key: &str, value: &str) {
        match (key, value) {
            ("UMask", mask) => self.umask = mask.to_owned(),
            ("LimitNOFILE", n) => self.limits.push(("nofile", number(key, n))),
            ("LimitCORE", n) => self.limits.push(("core", number(key, n))),
            ("CapabilityBoundingSet", "") => self.privileges.push("--bounding-set=-all"),
            ("AmbientCapabilities", "") => {
                self.privileges.extend(["--inh-caps=-all", "--ambient-caps=-all"]);
            }
            ("NoNewPrivileges", "yes") => self.privileges.push("--no-new-privs"),
            ("ProtectSystem", "strict") => {
                // Everything becomes read-only except later mounts.
                self.mount("mount --bind \"$0/run\" \"$0/run\"; mount -o remount,bind,ro /");
            }
            ("ProtectHome", "yes") => {
                self.mount("for d in /home /root; do mount -t tmpfs -o ro,mode=0 none $d; done");
            }
            ("PrivateTmp", "yes") => {
                // The new /tmp contains the test's directory, which is probably below the old /tmp.
                // The directory is read-only except for `run`.
                self.mount(
                    "mount --rbind \"$0\" /mnt; mount -t tmpfs -o mode=1777 none /tmp; \
                     mkdir -p \"$0\"; mount --rbind /mnt \"$0\"; umount -l /mnt; \
                     mount -o remount,bind,ro \"$0\"",
                );
            }
            ("PrivateDevices", "yes") => self.mount(
                // `-n`: `mount` would otherwise record the move in /run, which is read-only.
                "mount -t tmpfs -o mode=0755 none /mnt; \
                 for d in null zero full random urandom; do \
                 touch /mnt/$d; mount --bind /dev/$d /mnt/$d; done; \
                 mount -n --move /mnt /dev; mount -o remount,bind,ro /dev",
            ),
            ("ProtectKernelTunables", "yes") => self.mount(
                "for d in /proc/sys /proc/sysrq-trigger /sys; do if test -e $d; then \
                 mount --bind $d $d; mount -o remount,bind,ro $d; fi; done",
            ),
            ("ProtectControlGroups", "yes") => {
                self.mount("test ! -d /sys/fs/cgroup || mount -t tmpfs -o ro none /sys/fs/cgroup");
            }
            ("ProcSubset", "pid") => self.mount("mount -t proc -o subset=pid none /proc"),
            ("ProtectKernelModules", "yes") => {
                self.mount(
                    "test ! -d /lib/modules || mount -t tmpfs -o ro,mode=0 none /lib/modules",
                );
                self.forbid("a-modules", &["init_module", "finit_module", "delete_module"]);
            }
            ("ProtectKernelLogs", "yes") => {
                self.mount("test ! -e /proc/kmsg || mount --bind /dev/null /proc/kmsg");
                self.forbid("a-logs", &["syslog"]);
            }
            ("ProtectClock", "yes") => self
                .forbid("a-clock", &["adjtimex", "clock_adjtime", "clock_settime", "settimeofday"]),
            ("ProtectHostname", "yes") => {
                self.namespaces.push("--uts");
                self.forbid("a-hostname", &["sethostname", "setdomainname"]);
            }
            ("MemoryDenyWriteExecute", "yes") => {
                let write = 2u64;
                let execute = 4u64;
                let rules = vec![
                    call("mmap", &[bits(2, write | execute)]),
                    call("mprotect", &[bits(2, execute)]),
                    call("pkey_mprotect", &[bits(2, execute)]),
                    call("shmat", &[bits(2, 0o100_000)]),
                ];
                self.filter("a-memory", json!({ "errno": EPERM }), "allow", rules);
            }
            ("LockPersonality", "yes") => {
                let rules = vec![call("personality", &[not(0, 0), not(0, 0xFFFF_FFFF)])];
                self.filter("a-personality", json!({ "errno": EPERM }), "allow", rules);
            }
            ("RestrictRealtime", "yes") => {
                // SCHED_OTHER, SCHED_BATCH, SCHED_IDLE.
                let rules = vec![call("sched_setscheduler", &[not(1, 0), not(1, 3), not(1, 5)])];
                self.filter("a-realtime", json!({ "errno": EPERM }), "allow", rules);
            }
            ("RestrictSUIDSGID", "yes") => {
                let modes =
                    [("fchmod", 1), ("chmod", 1), ("fchmodat", 2), ("mknodat", 2), ("openat", 3)];
                let known = modes.iter().filter(|(name, _)| is_known(name));
                let both = known.flat_map(|(name, at)| {
                    [0o4000, 0o2000].map(|bit| call(name, &[bits(*at, bit)]))
                });
                let rules = both.collect();
                self.filter("a-setuid", json!({ "errno": EPERM }), "allow", rules);
            }
            ("RestrictNamespaces", "yes") => {
                self.forbid("a-namespaces", &["unshare", "setns"]);
                let rules =
                    NAMESPACES.iter().map(|flag| call("clone", &[bits(0, *flag)])).collect();
                self.filter("b-namespaces", json!({ "errno": EPERM }), "allow", rules);
                // A filter cannot read the flags of `clone3`, which are in memory. When `clone3`
                // fails with ENOSYS, libc falls back to `clone`.
                let newer = vec![json!({ "syscall": "clone3" })];
                self.filter("c-namespaces", json!({ "errno": ENOSYS }), "allow", newer);
            }
            ("RestrictAddressFamilies", families) => {
                let others =
                    families.split_whitespace().map(|family| not(0, address_family(family)));
                let rules = vec![call("socket", &others.collect::<Vec<_>>())];
                self.filter("a-families", json!({ "errno": EAFNOSUPPORT }), "allow", rules);
            }
            // seccomp already kills a process that calls through another architecture.
            ("SystemCallArchitectures", "native") => {}
            _ => panic!("{key}={value} of rnicd.service is neither applied nor listed in ARGUED"),
        }
    }

    fn mount(&mut self, script: &str) {
        self.mounts += script;
        self.mounts += "; ";
    }

    fn forbid(&mut self, name: &str, calls: &[&str]) {
        let rules = calls.iter().filter(|c| is_known(c)).map(|c| json!({ "syscall": c })).collect();
        self.filter(name, json!({ "errno": EPERM }), "allow", rules);
    }

    fn filter(
        &mut self,
        name: &str,
        matched: impl Into<Value>,
        otherwise: impl Into<Value>,
        rules: Vec<Value>,
    ) {
        let filter = json!({
            "match_action": matched.into(),
            "mismatch_action": otherwise.into(),
            "filter": rules,
        });
        assert!(self.filters.insert(name.to_owned(), filter).is_none(), "{name} twice");
    }

    /// Returns the number of filters that the sandbox adds to a process.
    pub fn filters(&self) -> usize {
        self.filters.len()
    }

    /// Returns a command that runs the program appended to it in this sandbox, as the configured
    /// user. The command passes the socket that is its standard input on to the program, as a
    /// service manager does. Omits mounts or the user if the caller lacks the privileges.
    pub fn command(&self, how: &How<'_>) -> Command {
        let filters = how.folder.join("filters.json");
        std::fs::write(&filters, Value::Object(self.filters.clone()).to_string())
            .unwrap_or_else(|e| panic!("{}: {e}", filters.display()));
        let Sandbox { mounts, umask, .. } = self;
        // The socket arrives as standard input, because moving it elsewhere needs unsafe code.
        let start = format!(
            "exec 3<&0 </dev/null; umask {umask}; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\""
        );
        let mut command;
        if how.mounts {
            command = Command::new("unshare");
            command.arg("--mount").args(&self.namespaces);
            command.args(["sh", "-c", &format!("set -e; {mounts}{start}")]).arg(how.folder);
        } else {
            command = Command::new("sh");
            command.args(["-c", &start]).arg(how.folder);
        }
        if let Some(user) = how.user {
            command.arg("prlimit");
            for (limit, value) in &self.limits {
                let value = if *limit == "nofile" { how.descriptors.min(*value) } else { *value };
                command.arg(format!("--{limit}={value}"));
            }
            command.arg("setpriv").args(&self.privileges);
            command.args([&format!("--reuid={user}"), &format!("--regid={user}")]);
            command.arg("--clear-groups");
        }
        command.arg(how.confine).arg(filters);
        command
    }
}

/// Privileges and tools of the caller of a [`Sandbox`].
pub struct How<'a> {
    /// Directory with all files of the test. Only its subdirectory `run` is writable.
    pub folder: &'a Path,
    /// Path of the program `confine`.
    pub confine: &'a Path,
    /// True if the caller may mount.
    pub mounts: bool,
    /// User ID for the daemon, if the caller can change users.
    pub user: Option<u32>,
    /// Maximum number of descriptors that the caller may allow.
    pub descriptors: u64,
}

fn number(key: &str, value: &str) -> u64 {
    value.parse().unwrap_or_else(|e| panic!("{key}={value}: {e}"))
}

/// Returns the allowed calls after another `SystemCallFilter=` is added to `before`.
fn allowed(before: Option<BTreeSet<String>>, list: &str) -> BTreeSet<String> {
    let groups = call_groups();
    let (list, taken_away) = list.strip_prefix('~').map_or((list, false), |list| (list, true));
    let mut named = BTreeSet::new();
    for name in list.split_whitespace() {
        expand(name, &groups, &mut named);
    }
    let mut all = before.unwrap_or_default();
    if groups.is_empty() {
        return BTreeSet::new();
    }
    if taken_away {
        all.retain(|call| !named.contains(call));
    } else {
        // systemd always allows these.
        expand("@default", &groups, &mut named);
        all.extend(named.into_iter().filter(|call| is_known(call)));
        // `confine` needs these after installing a filter.
        all.extend(["prctl".to_owned(), "seccomp".to_owned(), "execve".to_owned()]);
    }
    all
}

fn expand(name: &str, groups: &BTreeMap<String, Vec<String>>, all: &mut BTreeSet<String>) {
    match groups.get(name) {
        Some(members) => members.iter().for_each(|member| expand(member, groups, all)),
        None => drop(all.insert(name.to_owned())),
    }
}

/// Returns the members of `@system-service` and other groups according to the installed systemd.
/// Empty without systemd.
pub fn call_groups() -> BTreeMap<String, Vec<String>> {
    let Ok(output) = Command::new("systemd-analyze").arg("syscall-filter").output() else {
        return BTreeMap::new();
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        let word = line.trim();
        if word.is_empty() || word.starts_with('#') {
            continue;
        }
        match current.and_then(|name: String| groups.get_mut(&name).map(|group| (name, group))) {
            Some((name, group)) if line.starts_with(' ') => {
                group.push(word.to_owned());
                current = Some(name);
            }
            _ => {
                groups.insert(word.to_owned(), Vec::new());
                current = Some(word.to_owned());
            }
        }
    }
    groups
}

/// Returns true if this machine has a system call of this name.
fn is_known(call: &str) -> bool {
    let filter = json!({ "f": {
        "match_action": "allow", "mismatch_action": "trap", "filter": [{ "syscall": call }],
    }});
    let architecture = std::env::consts::ARCH.try_into();
    architecture.is_ok_and(|architecture| {
        seccompiler::compile_from_json(filter.to_string().as_bytes(), architecture).is_ok()
    })
}

fn call(name: &str, conditions: &[Value]) -> Value {
    json!({ "syscall": name, "args": conditions })
}

/// Condition: all of these bits are set in an argument.
fn bits(index: u8, bits: u64) -> Value {
    json!({ "index": index, "type": "qword", "op": { "masked_eq": bits }, "val": bits })
}

/// Condition: an `int` argument differs from `value`.
fn not(index: u8, value: u64) -> Value {
    json!({ "index": index, "type": "dword", "op": "ne", "val": value })
}

fn address_family(name: &str) -> u64 {
    match name {
        "AF_UNIX" => 1,
        "AF_INET" => 2,
        "AF_INET6" => 10,
        "AF_NETLINK" => 16,
        _ => panic!("RestrictAddressFamilies={name} is not known here"),
    }
}

/// `CLONE_NEW*` flags: time, mount, control group, UTS, IPC, user, pid, network.
const NAMESPACES: [u64; 8] =
    [0x80, 0x2_0000, 0x200_0000, 0x400_0000, 0x800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const EAFNOSUPPORT: u32 = 97;
