//! Two network namespaces joined by a veth link that a test can cut. TCP sees them as two hosts.

use std::io;
use std::process::Command;

use crate::daemon::Daemon;
use crate::omit;
use crate::process::Process;

/// A host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 10.77.0.1 and fe80::1, on `va`.
    A,
    /// 10.77.0.2 and fe80::2, on `vb`.
    B,
}

impl Side {
    /// Returns the name of the host's link interface.
    pub fn interface(self) -> &'static str {
        match self {
            Side::A => "va",
            Side::B => "vb",
        }
    }

    /// Returns the host's IPv4 address on the link.
    pub fn ip(self) -> &'static str {
        match self {
            Side::A => "10.77.0.1",
            Side::B => "10.77.0.2",
        }
    }

    /// Returns the host's link-local IPv6 address.
    pub fn link_local(self) -> &'static str {
        match self {
            Side::A => "fe80::1",
            Side::B => "fe80::2",
        }
    }
}

/// The two namespaces. They and the link disappear when this value is dropped and all processes
/// in them have ended.
pub struct Apart {
    users: Users,
    a: Process,
    b: Process,
}

/// Users that exist on the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Users {
    /// A single user namespace, in which the user that runs the test is root.
    One,
    /// All users of this host. The test must run as root.
    All,
}

impl Apart {
    /// Creates both network namespaces in one user namespace, in which the test's user is root.
    ///
    /// # Errors
    ///
    /// The error output of `unshare` if the kernel forbids namespaces, or an I/O error if a program
    /// is missing.
    pub fn new() -> io::Result<Self> {
        Apart::with(Users::One)
    }

    /// Like [`Apart::new`]. Reports a skipped test and returns `None` if the kernel forbids
    /// namespaces.
    pub fn available() -> Option<Self> {
        match Apart::new() {
            Ok(apart) => Some(apart),
            Err(e) => {
                omit(&format!("no network namespaces here: {e}"));
                None
            }
        }
    }

    /// Like [`Apart::new`], with all users of this host. Requires root.
    ///
    /// # Errors
    ///
    /// As for [`Apart::new`].
    pub fn with_all_users() -> io::Result<Self> {
        Apart::with(Users::All)
    }

    fn with(users: Users) -> io::Result<Self> {
        let unshare = || {
            let mut command = Command::new("unshare");
            if users == Users::One {
                command.args(["--user", "--map-root-user"]);
            }
            command.arg("--net");
            command
        };
        // Only an attempt shows whether the kernel allows namespaces.
        let probe = unshare().args(["ip", "link", "add", "x", "type", "veth"]).output()?;
        if !probe.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&probe.stderr).into_owned()));
        }
        let stay = ["sh", "-c", "ip link set lo up && echo made && exec cat"];
        let mut command = unshare();
        command.args(stay);
        let mut a = Process::start(command);
        a.line_after("made");
        let mut command = inside(&a, users);
        command.args(["unshare", "--net"]).args(stay);
        let mut b = Process::start(command);
        b.line_after("made");
        let apart = Apart { users, a, b };
        let peer = apart.b.id().to_string();
        // Distinct interface indexes, so that a test cannot confuse the two ends.
        let link = ["link", "add", "name", "va", "index", "7", "type", "veth"];
        let of_peer = ["peer", "name", "vb", "netns", &peer];
        apart.ip(Side::A, &[&link[..], &of_peer[..]].concat());
        for side in [Side::A, Side::B] {
            let dev = side.interface();
            let ip = format!("{}/24", side.ip());
            apart.ip(side, &["addr", "add", &ip, "dev", dev]);
            // Assign one known link-local address instead of a generated one.
            apart.ip(side, &["link", "set", dev, "addrgenmode", "none"]);
            apart.ip(side, &["link", "set", dev, "up"]);
            let ip = format!("{}/64", side.link_local());
            // No other host is on the link, so duplicate address detection is unnecessary.
            apart.ip(side, &["addr", "add", &ip, "dev", dev, "nodad"]);
        }
        Ok(apart)
    }

    /// Starts a daemon on a host.
    pub fn daemon(&self, side: Side, config: &str) -> Daemon {
        let wrapper = self.on(side);
        let words: Vec<_> = [wrapper.get_program()]
            .into_iter()
            .chain(wrapper.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        // Both hosts must use the same `wired.port` to connect to each other.
        let port = if config.contains("[wired]") { "" } else { "\n[wired]\nport = 4791\n" };
        let on_host = format!("exec {} \"$0\" \"$@\"", words.join(" "));
        Daemon::start_limited(&format!("{config}{port}"), &on_host)
    }

    /// Returns a command prefix that runs a program on a host.
    pub fn on(&self, side: Side) -> Command {
        inside(self.of(side), self.users)
    }

    /// Like [`Apart::on`], for a caller that already runs in the user namespace of the hosts.
    pub fn from_within(&self, side: Side) -> Command {
        inside(self.of(side), Users::All)
    }

    /// Returns the interface index of a host's end of the link.
    ///
    /// # Panics
    ///
    /// If the output of `ip` contains no index.
    pub fn index(&self, side: Side) -> u32 {
        let line = self.ip(side, &["-o", "link", "show", side.interface()]);
        line.split(':').next().and_then(|n| n.trim().parse().ok()).expect("a number first")
    }

    /// Takes a host's end of the link down. The other host then cannot reach it.
    pub fn cut(&self, side: Side) {
        self.ip(side, &["link", "set", side.interface(), "down"]);
    }

    fn of(&self, side: Side) -> &Process {
        match side {
            Side::A => &self.a,
            Side::B => &self.b,
        }
    }

    /// Runs `ip` on a host and returns its standard output.
    fn ip(&self, side: Side, args: &[&str]) -> String {
        let output = self.on(side).arg("ip").args(args).output().expect("nsenter");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// Returns a command that runs the program appended to it in the namespaces of `process`.
fn inside(process: &Process, users: Users) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &process.id().to_string()]);
    if users == Users::One {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.arg("--net");
    command
}
